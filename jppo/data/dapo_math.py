"""DAPO-Math-17k as prompts: `python -m jppo.data.dapo_math --from downloads/dapo --out data/dapo_math`

downloads/dapo holds BytedTsinghua-SIA/DAPO-Math-17k (data/dapo-math-17k.parquet), whose rows already have verl's
layout. The command writes train.parquet with each question once; the publisher repeats each of the 17,000 about a
hundred times.
"""

import pathlib
from collections.abc import Sequence

from jppo.data import prepare
from jppo.settings import exit_on_user_error


def _make(source: pathlib.Path) -> prepare.RowSets:
    """Returns the rows of the training set, each question once."""
    return {"train": prepare.deduplicate(prepare.checked_verl_row(row, "train") for row in prepare.rows_of(source))}


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> None:
    """Writes DAPO-Math-17k's questions as train.parquet."""
    prepare.command("jppo.data.dapo_math", __doc__, _make, argv)


if __name__ == "__main__":
    main()
