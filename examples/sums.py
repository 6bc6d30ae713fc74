"""Makes sums in words and digits for a chat model: `python -m examples.sums --out runs/smollm2/data/sums`

Each prompt asks for the sum of two numbers from 1 to 59: "What is 12 plus 45? Reply with the number only." Four
prompts in six have digits ("digits"), one has one number in words ("mixed"), one has two ("words"): the model adds few
numbers in words, and needs some success to learn from. The 1,770 pairs are split before prompts are made of them, and
12 + 45 and 45 + 12 are the same pair, so no sum of test.jsonl is trained on.

`compute_score` is the reward, by `reward.function`: 1 if the last number of the response is the sum, otherwise 0.
"""

import itertools
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from jppo.data.rows import write_sets
from jppo.errors import UserError
from jppo.settings import Parser, exit_on_user_error, natural

LARGEST = 59
ONES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
ONES += ("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen")
TENS = ("", "", "twenty", "thirty", "forty", "fifty")
QUESTIONS = (
    "What is {a} plus {b}?",
    "Add {a} to {b}.",
    "What is the sum of {a} and {b}?",
    "Calculate {a} + {b}.",
)
REPLY = "Reply with the number only."
STYLES = ("digits", "digits", "digits", "digits", "mixed", "words")  # equally likely
_NUMBER = re.compile(r"(?<![\d.])-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?!\d)")


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Returns 1 if the last number of the response, in digits, is the true one; `pred` is that number."""
    numbers = _NUMBER.findall(solution_str)
    last = numbers[-1].replace(",", "") if numbers else ""
    return {"score": float(bool(last) and float(last) == float(ground_truth)), "pred": last}


def in_words(number: int) -> str:
    """Returns a number from 0 to 59 in English words."""
    if number < len(ONES):
        return ONES[number]
    tens, ones = divmod(number, 10)
    return TENS[tens] + (f"-{ONES[ones]}" if ones else "")


def make(*, seed: int, test: int, copies: int) -> dict[str, list[dict[str, Any]]]:
    """Returns the rows of train and test, as a function of the arguments only."""
    pairs = list(itertools.combinations_with_replacement(range(1, LARGEST + 1), 2))
    if not 1 <= test < len(pairs):
        raise UserError(f"--test={test} must be from 1 to {len(pairs) - 1}, so that both sets have pairs")
    if copies < 1:
        raise UserError(f"--copies={copies} must be 1 or more prompts for each training pair")
    rng = np.random.default_rng(seed)
    shuffled = [pairs[i] for i in rng.permutation(len(pairs))]
    train = [_row(rng, *pair) for pair in shuffled[test:] for _ in range(copies)]
    return {"train": train, "test": [_row(rng, *pair) for pair in shuffled[:test]]}


def _row(rng: np.random.Generator, a: int, b: int) -> dict[str, Any]:
    """Returns a prompt for the pair, with random order, phrasing and style."""
    style = STYLES[rng.integers(len(STYLES))]
    question = QUESTIONS[rng.integers(len(QUESTIONS))]
    a, b = (a, b) if rng.random() < 0.5 else (b, a)
    spelled = {"digits": (False, False), "words": (True, True)}.get(style, (True, False))
    spelled = spelled if rng.random() < 0.5 else spelled[::-1]
    shown = [in_words(n) if in_letters else str(n) for n, in_letters in zip((a, b), spelled, strict=True)]
    asked = f"{question.format(a=shown[0], b=shown[1])} {REPLY}"
    prompt = [{"role": "user", "content": asked}]
    return {"prompt": prompt, "ground_truth": str(a + b), "data_source": f"sums_{style}"}


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = Parser("examples.sums", __doc__)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="directory to write to")
    parser.add_argument("--seed", type=natural, default=1, help="random seed")
    parser.add_argument("--test", type=int, default=400, help="pairs to hold out, one prompt each")
    parser.add_argument("--copies", type=int, default=4, help="prompts per training pair")
    args = parser.parse_args(argv)
    sets = make(seed=args.seed, test=args.test, copies=args.copies)
    write_sets(args.out, sets)


if __name__ == "__main__":
    main()
