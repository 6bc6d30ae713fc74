"""DAPO-Math-17k as prompts: `python -m jppo.data.dapo_math --from downloads/dapo --out data/dapo_math`

downloads/dapo holds BytedTsinghua-SIA/DAPO-Math-17k (data/dapo-math-17k.parquet), whose rows already have verl's
layout. The command writes train.parquet with each question once; the publisher repeats each of the 17,000 about a
hundred times.
"""

import pathlib
from collections.abc import Sequence
from typing import Any

from jppo.data import prepare
from jppo.data.prompts import ground_truth
from jppo.data.rows import Row, checked_messages, text_column
from jppo.settings import exit_on_user_error

# DAPO's published prompt; the rule `math_dapo` reads the line of the answer.
PROMPT = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer:"
    " $Answer (without quotes) where $Answer is the answer to the problem.\n\n{}\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)


def example(row: Row, split: str) -> dict[str, Any]:
    """Checks a row that already has verl's layout."""
    messages = checked_messages(row, "prompt", row.columns.get("prompt"))
    extra = {"split": split} | (row.columns.get("extra_info") or {})
    return prepare.example(messages, ground_truth(row), source=text_column(row, "data_source"), **extra)


def make(source: pathlib.Path) -> prepare.Made:
    """Keeps each question once."""
    return {"train": prepare.different(example(row, "train") for row in prepare.rows_of(source))}


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    prepare.command("jppo.data.dapo_math", __doc__, make, argv)


if __name__ == "__main__":
    main()
