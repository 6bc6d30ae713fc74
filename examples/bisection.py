"""A task of several turns: the policy guesses a number from 0 to 31, which `<` or `>` answers.

The starting model learns from a teacher who guesses at random, every other time among the numbers that are still
possible. `Bisection` is the environment, by `rollout.multi_turn.environment`: a guess earns the bits that it gains.
"""

import math
from typing import Any

import numpy as np

from jppo.types import Prompt

NUMBERS = "0123456789abcdefghijklmnopqrstuv"  # 0 to 31, one character each
GUESSES = 5  # enough for halving 32 numbers
CHARACTERS = f"{NUMBERS}<>?"


class Bisection:
    """A game of guessing a number from 0 to 31. A turn earns the bits of information that its guess gains, over 5."""

    def __init__(self) -> None:
        self.number, self.low, self.high, self.guesses = 0, 0, len(NUMBERS) - 1, 0

    async def reset(self, prompt: Prompt) -> str:
        """Sets the row's number; there is no opening message."""
        self.number = int(prompt.ground_truth)
        return ""

    async def step(self, text: str) -> tuple[str, float, bool]:
        """Answers `<` if the number is smaller than the guess, `>` if larger, `?` if the text is no guess."""
        self.guesses += 1
        before, reply = self.high - self.low + 1, "?"
        guess = NUMBERS.find(text) if len(text) == 1 else -1
        if guess >= 0:
            reply = "<" if self.number < guess else ">"
            if guess == self.number:
                self.low = self.high = guess
            elif self.number < guess:
                self.high = min(self.high, guess - 1)
            else:
                self.low = max(self.low, guess + 1)
        gained = math.log2(before / (self.high - self.low + 1)) / math.log2(len(NUMBERS))
        return reply, gained, guess == self.number or self.guesses == GUESSES


def make(*, seed: int, test: int) -> dict[str, list[dict[str, Any]]]:
    """Returns the rows of train, test and sft, as a function of the arguments only."""
    rng = np.random.default_rng(seed)
    rows = [{"prompt": "?", "ground_truth": str(x), "data_source": "bisection"} for x in rng.integers(0, 32, 4096)]
    demonstrations = []
    for number in rng.integers(0, 32, 8192):
        low, high, turns = 0, 31, list[dict[str, Any]]()
        for i in range(GUESSES):
            possible = (low, high) if rng.random() < 0.5 else (0, 31)
            guess = int(rng.integers(possible[0], possible[1] + 1))
            turns.append({"text": NUMBERS[guess], "learn": True})
            if guess == number or i == GUESSES - 1:
                break
            turns.append({"text": "<" if number < guess else ">", "learn": False})
            low, high = (low, min(high, guess - 1)) if number < guess else (max(low, guess + 1), high)
        demonstrations.append({"prompt": "?", "response": turns})
    return {"train": rows[test:], "test": rows[:test], "sft": demonstrations}
