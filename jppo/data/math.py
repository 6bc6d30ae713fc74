r"""MATH as prompts: `python -m jppo.data.math --from downloads/math --out data/math`

downloads/math holds DigitalLearningGmbH/MATH-lighteval as its publisher lays it out (data/train-*.parquet, ...), or the
first MATH (train/algebra/1.json, ...): rows with `problem` and `solution`. The command writes train.parquet and
test.parquet with verl's prompt; the ground truth is the last \boxed{} of the solution.
"""

import pathlib
from typing import Any

from jppo.data import prepare
from jppo.data.rows import Row, text_column
from jppo.errors import UserError
from jppo.rewards.rules import last_box

_SOURCE = "DigitalLearningGmbH/MATH-lighteval"
_SUFFIX = r"Let's think step by step and output the final answer within \boxed{}."


def _example(row: Row, split: str, index: int) -> dict[str, Any]:
    """Makes a row in verl's layout from a problem and its solution."""
    problem, solution = text_column(row, "problem"), text_column(row, "solution")
    truth = last_box(solution)
    if not truth:
        raise UserError(f"{row.place}: solution must hold \\boxed{{ANSWER}}; it ends with {solution[-40:]!r}")
    labels = {name: str(row.columns[name]) for name in ("level", "type") if row.columns.get(name) is not None}
    extra: dict[str, Any] = dict(split=split, index=index, solution=solution, **labels)
    return prepare.verl_row(f"{problem} {_SUFFIX}", truth, source=_SOURCE, **extra)


def _make(source: pathlib.Path) -> prepare.RowSets:
    """Makes the rows of both splits, by output file."""
    splits = ("train", "test")
    return {s: [_example(row, s, i) for i, row in enumerate(prepare.rows_of(source, s))] for s in splits}


main = prepare.command("jppo.data.math", __doc__, _make)

if __name__ == "__main__":
    main()
