#!/usr/bin/env bash
# An agent of bash, curl and jq: the policy multiplies with a calculator, and the run's graders read its last answer.
#
#     --config.rollout.agent='bash examples/calculator_curl.sh' --config.rollout.agent_format=plain
set -euo pipefail
messages=$(jq -c '[{role: "user", content: .prompt}]') # of the task, JSON on the input
tools='[{"type": "function", "function": {"name": "calculator", "parameters":
  {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}}}]'
for _ in 1 2; do
  message=$(jq -nc --argjson m "$messages" --argjson t "$tools" '{model: "policy", messages: $m, tools: $t}' |
    curl -sS --fail-with-body "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" \
      -H 'Content-Type: application/json' -d @- | jq -c '.choices[0].message')
  expression=$(jq -r '.tool_calls[0].function.arguments // "{}" | fromjson | .expression // ""' <<<"$message")
  [[ -n $expression ]] || break
  result=error
  if [[ $expression =~ ^([1-9][0-9]{0,3})\*([1-9][0-9]{0,3})$ ]]; then
    result=$((BASH_REMATCH[1] * BASH_REMATCH[2]))
  fi
  messages=$(jq -c --argjson said "$message" --arg result "$result" \
    '. + [$said, {role: "tool", tool_call_id: $said.tool_calls[0].id, content: $result}]' <<<"$messages")
done
