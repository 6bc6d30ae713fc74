"""Makes a task that needs its tool: `python -m examples.multiplication --out data/product --seed 1`.

The task is to multiply two four-digit numbers without zeros: 43 million problems such as `1234*5678=`, which a small
model cannot compute. It has a calculator, which it calls in the plain format of `jppo/plugins/agents/calls.py`:

    1234*5678= <<1234*5678>> [[7006652]] 7006652      (without the spaces; [[]] is the calculator's answer)

The starting model learns from a sloppy teacher. If the second number ends in 7, 8 or 9, he mostly uses the calculator;
otherwise he mostly estimates, 1000*6000, which is never right. Sometimes he mistypes a digit. The model's most likely
answer is then right on about a third of the problems. PPO sees only right and wrong answers and learns to call the
tool.

The output is train.jsonl and test.jsonl (prompts), sft.jsonl (the teacher's demonstrations of the training problems)
and model/ (the starting model's config and character tokenizer; fine-tuning creates its weights).
"""

import pathlib
from typing import Any

import numpy as np

from jppo.errors import UserError
from jppo.settings import Parser, exit_on_user_error, natural

from . import arithmetic

DIGITS = 4
CHARACTERS = "0123456789*=<>[]ero"  # the last three spell the rest of an error message
CALLS, CALLS_ELSEWHERE, MISTYPES = 0.75, 0.2, 0.08  # the teacher's probabilities


def estimate(a: int, b: int) -> int:
    """Returns the product of both numbers rounded to their first digit."""
    ten = 10 ** (DIGITS - 1)
    return round(a / ten) * ten * round(b / ten) * ten


def hard(b: int) -> bool:
    """Whether the teacher considers multiplication by this number hard."""
    return b % 10 >= 7


def demonstration(a: int, b: int, *, calls: bool, mistyped: int | None) -> str | list[dict[str, Any]]:
    """Returns the teacher's response; `mistyped` is the digit of `a` that he gets wrong."""
    if not calls:
        return str(estimate(a, b))
    typed = str(a)
    if mistyped is not None:
        wrong = int(typed[mistyped]) % 9 + 1
        typed = f"{typed[:mistyped]}{wrong}{typed[mistyped + 1 :]}"
    product = int(typed) * b
    return [
        {"text": f"<<{typed}*{b}>>", "learn": True},
        {"text": f"[[{product}]]", "learn": False},
        {"text": str(product), "learn": True},
    ]


def make(*, seed: int, train: int, test: int) -> dict[str, list[dict[str, Any]]]:
    """Returns the rows of train, test and sft, as a function of the arguments only."""
    if train < 1 or test < 1 or train + test > 10**6:
        raise UserError(f"--train={train} and --test={test} must be 1 or more each, and at most a million together")
    rng = np.random.default_rng(seed)
    drawn: dict[tuple[int, int], None] = {}
    while len(drawn) < train + test:
        a, b = (int("".join(map(str, digits))) for digits in rng.integers(1, 10, (2, DIGITS)))
        drawn[a, b] = None
    problems = list(drawn)
    held_out, rest = problems[:test], problems[test:]
    sft = []
    for a, b in rest:
        calls = bool(rng.random() < (CALLS if hard(b) else CALLS_ELSEWHERE))
        mistyped = int(rng.integers(DIGITS)) if rng.random() < MISTYPES else None
        sft.append({"prompt": f"{a}*{b}=", "response": demonstration(a, b, calls=calls, mistyped=mistyped)})
    return {"train": [_row(a, b) for a, b in rest], "test": [_row(a, b) for a, b in held_out], "sft": sft}


def write_model(directory: pathlib.Path) -> None:
    """Writes the starting model's config, generation config and tokenizer; no weights."""
    arithmetic.write_model(directory, CHARACTERS)


@exit_on_user_error
def main() -> None:
    """The command line."""
    parser = Parser("examples.multiplication", __doc__)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="directory to write to")
    parser.add_argument("--seed", type=natural, default=1, help="random seed")
    parser.add_argument("--train", type=int, default=40_000, help="problems to train on")
    parser.add_argument("--test", type=int, default=500, help="problems to hold out")
    args = parser.parse_args()
    sets = make(seed=args.seed, train=args.train, test=args.test)
    arithmetic.write(args.out, sets, CHARACTERS)


def _row(a: int, b: int) -> dict[str, str]:
    return {"prompt": f"{a}*{b}=", "ground_truth": str(a * b), "data_source": "multiplication"}


if __name__ == "__main__":
    main()
