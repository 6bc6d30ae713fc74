"""An agent with OpenAI's client: the policy multiplies with a calculator, and the agent reports the reward.

    --config.rollout.agent=examples/calculator_openai.py:multiply --config.rollout.agent_reward=reported

Add --config.rollout.agent_format=plain for the model of `examples/multiplication.py`, which has no chat template.
"""

import json
from typing import Any

import openai

from jppo.plugins.agents.built_in_tools import evaluate, format_number

TURNS = 2
PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
FUNCTION = {"name": "calculator", "description": "Computes an expression.", "parameters": PARAMETERS}


async def multiply(task: dict[str, Any]) -> dict[str, float]:
    """Runs one episode; the address and the key of the policy are in the environment."""
    prompt = task["prompt"]
    messages: list[Any] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    async with openai.AsyncOpenAI() as client:
        for _ in range(TURNS):
            reply = await client.chat.completions.create(
                model="policy", messages=messages, tools=[{"type": "function", "function": FUNCTION}]
            )
            message = reply.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                result = calculate(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return {"reward": float((message.content or "").strip() == task["ground_truth"])}


def calculate(arguments: str) -> str:
    """Returns the calculator's answer to a call."""
    try:
        return format_number(evaluate(json.loads(arguments)["expression"]))
    except (ValueError, KeyError, TypeError):
        return "error"
