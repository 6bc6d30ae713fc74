"""An agent with Anthropic's client: the policy multiplies with a calculator, and the agent's exit code is the reward.

    --config.rollout.agent=examples/calculator_anthropic.py:multiply --config.rollout.agent_reward=exit

Add --config.rollout.agent_format=plain for the model of `examples/multiplication.py`, which has no chat template.
"""

import sys
from typing import Any

import anthropic

from jppo.plugins.agents.built_in_tools import evaluate, format_number

TURNS = 2
SCHEMA = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
TOOL: Any = {"name": "calculator", "description": "Computes an expression.", "input_schema": SCHEMA}


def multiply(task: dict[str, Any]) -> None:
    """Runs one episode; exits with 1 if the last answer is wrong."""
    prompt, text = task["prompt"], ""
    messages: list[Any] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    client = anthropic.Anthropic()
    for _ in range(TURNS):
        reply = client.messages.create(model="policy", max_tokens=64, messages=messages, tools=[TOOL])
        messages.append({"role": "assistant", "content": reply.content})
        text = "".join(block.text for block in reply.content if block.type == "text")
        calls = [block for block in reply.content if block.type == "tool_use"]
        if not calls:
            break
        results = [{"type": "tool_result", "tool_use_id": c.id, "content": calculate(c.input)} for c in calls]
        messages.append({"role": "user", "content": results})
    if text.strip() != task["ground_truth"]:
        sys.exit(1)


def calculate(arguments: Any) -> str:
    """Returns the calculator's answer to a call."""
    try:
        return format_number(evaluate(arguments["expression"]))
    except (ValueError, KeyError, TypeError):
        return "error"
