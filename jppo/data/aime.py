"""AIME as a test: `python -m jppo.data.aime --from downloads/aime --out data/aime_2024`

downloads/aime holds BytedTsinghua-SIA/AIME-2024 (rows of verl's layout, each question 32 times). Or it has
rows with `problem` and `answer` in any letter case: HuggingFaceH4/aime_2024, Maxwell-Jia/AIME_2024, math-ai/aime25.
These get DAPO's prompt and the data source `aime`. The command writes test.parquet with each question once:
rollout.val_kwargs.n asks it several times.
"""

import pathlib
from typing import Any

from jppo.data import prepare
from jppo.data.rows import Row, brief, text_column
from jppo.errors import UserError


def _example(row: Row, index: int) -> dict[str, Any]:
    """Makes a row in verl's layout, from one or from a problem with its answer."""
    if "prompt" in row.columns:
        return prepare.checked_verl_row(row, "test")
    lower_case = Row(row.source, row.number, {name.lower(): value for name, value in row.columns.items()}, row.unit)
    problem, answer = text_column(lower_case, "problem"), str(lower_case.columns.get("answer"))
    if not answer.strip().isdecimal() or not 0 <= int(answer) <= 999:
        raise UserError(
            f"{row.place}: answer is {brief(lower_case.columns.get('answer'))}; AIME's are integers from 0 to 999"
        )
    return prepare.verl_row(
        prepare.DAPO_PROMPT.format(problem), str(int(answer)), source="aime", split="test", index=index
    )


def _make(source: pathlib.Path) -> prepare.RowSets:
    """Returns the rows of the test set, each question once."""
    return {"test": prepare.deduplicate(_example(row, i) for i, row in enumerate(prepare.rows_of(source)))}


main = prepare.command("jppo.data.aime", __doc__, _make)

if __name__ == "__main__":
    main()
