"""Rewards of the tasks `chain` and `bisection` of learning.py: a function for steps, an environment for turns.

Standard library only, because the reward's worker processes import this file.
"""

import math

STEPS = 20  # of a chain, each worth 1 / STEPS
NUMBERS = "0123456789abcdefghijklmnopqrstuv"  # 0 to 31, one character each
GUESSES = 5  # enough for halving 32 numbers


def chain(data_source, solution_str, ground_truth, extra_info=None):
    """Rewards each number that is the number before it, as written, plus the addend; `ground_truth` is START+ADDEND."""
    before, addend = map(int, ground_truth.split("+"))
    amounts = []
    for number in (piece for piece in solution_str.split(",") if piece.strip()):
        right = number == f"{(before + addend) % 100:02d}" and len(amounts) < STEPS
        amounts.append(float(right) / STEPS)
        before = int(number) if len(number) == 2 and number.isdecimal() and number.isascii() else before
    return {"score": sum(amounts), "steps": amounts, "delimiter": ","}


class Bisection:
    """A game of guessing a number from 0 to 31. A turn earns the bits of information that its guess gains, over 5."""

    def __init__(self):
        self.number, self.low, self.high, self.guesses = 0, 0, len(NUMBERS) - 1, 0

    async def reset(self, prompt):
        """Sets the row's number; there is no opening message."""
        self.number = int(prompt.ground_truth)
        return ""

    async def step(self, text):
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
