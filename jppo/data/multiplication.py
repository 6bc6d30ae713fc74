"""A task that needs its tool, made from nothing: `python -m jppo.data.multiplication --out data/product --seed 1`.

The task is to multiply two numbers of four digits, none of them zero: 43 million problems such as `1234*5678=`,
which a small model can't work out. It has a calculator, which it calls in the plain format of `jppo/agent/calls.py`:

    1234*5678= <<1234*5678>> [[7006652]] 7006652      (without the spaces; the calculator says what is in [[]])

The starting model learns from a sloppy teacher. Where the second number ends in 7, 8 or 9 he mostly takes the
calculator, elsewhere he mostly estimates, 1000*6000, which is never right; and now and then he mistypes a digit. So the
model's most likely answer is right on about a third of the problems. PPO, which is paid for right answers only, finds
that calling pays.

Written are train.jsonl and test.jsonl (prompts), sft.jsonl (the teacher's demonstrations of the training problems) and
model/ (the starting model's config and character tokenizer; its weights come from the fine-tuning).
"""

import pathlib
from typing import Any

import numpy as np

from jppo.config import Parser, UserError, exit_on_user_error, natural
from jppo.data import arithmetic

DIGITS = 4
CHARACTERS = "0123456789*=<>[]ero"  # the last three spell what is left of an error
CALLS, CALLS_ELSEWHERE, MISTYPES = 0.75, 0.2, 0.08  # how often the teacher does so


def estimate(a: int, b: int) -> int:
    """The product of both numbers rounded to their first digit."""
    ten = 10 ** (DIGITS - 1)
    return round(a / ten) * ten * round(b / ten) * ten


def hard(b: int) -> bool:
    """Whether the teacher finds it hard to multiply by this number."""
    return b % 10 >= 7


def demonstration(a: int, b: int, *, calls: bool, mistyped: int | None) -> str | list[dict[str, Any]]:
    """A response of the teacher; `mistyped` is the digit of `a` that he gets wrong."""
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
    """The rows of train, test and sft: a function of the arguments alone."""
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
    """Write the starting model's config, generation config and tokenizer; no weights."""
    arithmetic.write_model(directory, CHARACTERS)


@exit_on_user_error
def main() -> None:
    """The command line."""
    parser = Parser("jppo.data.multiplication", __doc__)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="directory to write to")
    parser.add_argument("--seed", type=natural, default=1, help="of all that is drawn")
    parser.add_argument("--train", type=int, default=40_000, help="problems to train on")
    parser.add_argument("--test", type=int, default=500, help="problems to hold out")
    args = parser.parse_args()
    made = make(seed=args.seed, train=args.train, test=args.test)
    arithmetic.write(args.out, made, CHARACTERS)


def _row(a: int, b: int) -> dict[str, str]:
    return {"prompt": f"{a}*{b}=", "ground_truth": str(a * b), "data_source": "multiplication"}


if __name__ == "__main__":
    main()
