"""A task with rewards inside long responses: 20 numbers, each the one before plus an addend, as in `47+8=55,63,71`.

The starting model learns from a teacher who forgets most carries, and writes any number once in ten times. `chain` is
the reward, by `reward.function`: 1/20 at the end of each right number.
"""

from typing import Any

import numpy as np

STEPS = 20  # of a chain, each worth 1 / STEPS
CHARACTERS = "0123456789+=,"


def chain(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Rewards each number that is the number before it, as written, plus the addend; `ground_truth` is START+ADDEND."""
    before, addend = map(int, ground_truth.split("+"))
    amounts = list[float]()
    for number in (piece for piece in solution_str.split(",") if piece.strip()):
        right = number == f"{(before + addend) % 100:02d}" and len(amounts) < STEPS
        amounts.append(float(right) / STEPS)
        before = int(number) if len(number) == 2 and number.isdecimal() and number.isascii() else before
    return {"score": sum(amounts), "steps": amounts, "delimiter": ","}


def make(*, seed: int, test: int) -> dict[str, list[dict[str, Any]]]:
    """Returns the rows of train, test and sft, as a function of the arguments only."""
    rng = np.random.default_rng(seed)
    starts = rng.permutation([(start, addend) for start in range(100) for addend in range(1, 10)])
    rows = [
        {"prompt": f"{start:02d}+{addend}=", "ground_truth": f"{start}+{addend}", "data_source": "chain"}
        for start, addend in starts
    ]
    demonstrations = []
    for start, addend in np.tile(starts[test:], (40, 1)):
        numbers = [int(start)]
        for forgets, slips in rng.random((STEPS, 2)) < (0.65, 0.1):
            carries = numbers[-1] % 10 + addend >= 10
            number = numbers[-1] + addend - 10 * (forgets and carries)
            numbers.append(int(rng.integers(100)) if slips else number % 100)
        response = ",".join(f"{number:02d}" for number in numbers[1:])
        demonstrations.append({"prompt": f"{start:02d}+{addend}=", "response": response})
    return {"train": rows[test:], "test": rows[:test], "sft": demonstrations}
