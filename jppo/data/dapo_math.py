"""DAPO-Math-17k as prompts: `python -m jppo.data.dapo_math --from downloads/dapo --out data/dapo_math`

downloads/dapo holds BytedTsinghua-SIA/DAPO-Math-17k (data/dapo-math-17k.parquet), whose rows already have verl's
layout. The command writes train.parquet with each question once; the publisher repeats each of the 17,000 about a
hundred times.
"""

import pathlib

from jppo.data import prepare


def _make(source: pathlib.Path) -> prepare.RowSets:
    """Returns the rows of the training set, each question once."""
    return {"train": prepare.deduplicate(prepare.checked_verl_row(row, "train") for row in prepare.rows_of(source))}


main = prepare.command("jppo.data.dapo_math", __doc__, _make)

if __name__ == "__main__":
    main()
