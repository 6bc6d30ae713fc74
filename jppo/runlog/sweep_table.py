"""A table of several runs by one metric, as markdown and CSV, the best run first."""

import csv
import dataclasses
import io
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from jppo.runlog import atomic_file
from jppo.runlog.logger import read_metrics


@dataclasses.dataclass(frozen=True)
class SweepRow:
    """The table's row of one run; None for missing numbers."""

    name: str
    settings: Mapping[str, Any]  # in which the runs differ
    status: str
    step: int | None  # the last one
    last: float | None  # last value of the metric
    best: float | None  # largest value
    best_step: int | None
    seconds: float


def make_row(
    folder: pathlib.Path, metric: str, *, settings: Mapping[str, Any], status: str, seconds: float
) -> SweepRow:
    """Returns the row of the run in `folder`, from its metrics so far."""
    lines = read_metrics(folder)
    found = [(line[metric], line["step"]) for line in lines if line.get(metric) is not None]
    best, best_step = max(found, key=lambda pair: (pair[0], -pair[1]), default=(None, None))
    step = lines[-1]["step"] if lines else None
    last = found[-1][0] if found else None
    return SweepRow(folder.name, dict(settings), status, step, last, best, best_step, seconds)


def metric_names(folders: Sequence[pathlib.Path]) -> list[str]:
    """Returns the metrics that any of the runs has."""
    return sorted(
        {name for folder in folders for line in read_metrics(folder) for name in line} - {"step", "nonfinite"}
    )


def ranked(rows: Sequence[SweepRow]) -> list[SweepRow]:
    """Sorts by the last value, largest first; runs without one last, ties in order."""
    return sorted(rows, key=lambda row: (row.last is None, -(row.last or 0.0)))


def cells(rows: Sequence[SweepRow], metric: str) -> list[list[str]]:
    """Returns heading and rows as text; numbers in full."""
    names = list(dict.fromkeys(name for row in rows for name in row.settings))
    heading = ["run", *names, metric, f"best {metric}", "at step", "steps", "seconds", "status"]
    return [heading] + [
        [
            row.name,
            *("" if name not in row.settings else str(row.settings[name]) for name in names),
            *("" if value is None else repr(value) for value in (row.last, row.best, row.best_step, row.step)),
            f"{row.seconds:.0f}",
            row.status,
        ]
        for row in rows
    ]


def markdown(rows: Sequence[SweepRow], metric: str) -> str:
    """Returns a markdown table; the metric with four digits."""
    short = [dataclasses.replace(row, last=_rounded(row.last), best=_rounded(row.best)) for row in rows]
    heading, *body = [[cell.replace("|", "\\|") for cell in line] for line in cells(short, metric)]
    rule = ["---", *["---:"] * (len(heading) - 2), "---"]
    return "\n".join(f"| {' | '.join(line)} |" for line in (heading, rule, *body)) + "\n"


def write_table(folder: pathlib.Path, rows: Sequence[SweepRow], metric: str) -> None:
    """Writes FOLDER/sweep.md and FOLDER/sweep.csv."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(cells(rows, metric))
    for name, content in (("sweep.md", markdown(rows, metric)), ("sweep.csv", text.getvalue())):
        atomic_file.write_text(folder / name, content)


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")
