"""An example of a simulated user: rejects a wrong answer and lets the policy try again.

    --config.rollout.multi_turn.enable=True --config.rollout.multi_turn.interaction=examples/second_try.py:SecondTry

An answer is right if its last number is the row's `ground_truth`: 1 for the first try, 0.5 for the second.
"""

import re
from typing import Any

WORTH = (1.0, 0.5)  # of a right answer, by tries


class SecondTry:
    """The user, one for the whole run; the state of a conversation is in its context."""

    async def respond(self, messages: list[dict[str, str]], context: Any) -> tuple[str, bool, float | None]:
        """Returns the reply to the last turn, whether the conversation ends, and the turn's score."""
        tries = sum(message["role"] == "assistant" for message in messages)
        numbers = re.findall(r"-?\d+(?:\.\d+)?", messages[-1]["content"].replace(",", ""))
        if numbers and numbers[-1] == context.prompt.ground_truth.strip():
            return "That is right.", True, WORTH[tries - 1]
        return "That is wrong. Look at it again.", tries == len(WORTH), None
