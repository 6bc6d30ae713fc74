"""An example environment: the policy guesses a number and is told whether it is larger or smaller.

    --config.rollout.multi_turn.enable=True --config.rollout.multi_turn.environment=examples/guessing.py:Guessing

A row's `ground_truth` is the number. A guess is the last number of a turn. A right guess is worth 1, minus a tenth for
every earlier guess; the game ends after the tenth.
"""

import re

from jppo.types import Prompt

GUESSES = 10


class Guessing:
    """One game."""

    def __init__(self) -> None:
        self.number, self.guesses = 0, 0

    async def reset(self, prompt: Prompt) -> str:
        """Sets the row's number."""
        self.number = int(prompt.ground_truth)
        return "I think of a number. Guess it."

    async def step(self, text: str) -> tuple[str, float, bool]:
        """Returns the answer to a guess, its reward, and whether the game is over."""
        self.guesses += 1
        numbers = re.findall(r"\d+", text)
        if numbers and int(numbers[-1][:20]) == self.number:
            return "That is it.", 1.0 - (self.guesses - 1) / GUESSES, True
        over = self.guesses == GUESSES
        if not numbers:
            return "I see no number.", 0.0, over
        return "larger" if self.number > int(numbers[-1][:20]) else "smaller", 0.0, over
