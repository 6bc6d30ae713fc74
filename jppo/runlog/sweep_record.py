"""A sweep's runs: their states in OUT/sweep.json, which a resumed sweep reads, and the table of their results."""

import contextlib
import csv
import dataclasses
import io
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jppo.runlog import durable_files
from jppo.runlog.lock import own
from jppo.runlog.logger import read_metrics
from jppo.settings import UserError

FILE = "sweep.json"


@dataclasses.dataclass(frozen=True)
class State:
    """The state of one run."""

    status: str = "waiting"  # then running; finished, failed or interrupted
    seconds: float = 0.0  # summed over all starts
    code: int | None = None  # the last exit code
    arguments: tuple[str, ...] = ()  # of the last finished start


@contextlib.contextmanager
def opened(out: pathlib.Path, runs: Mapping[str, tuple[str, ...]], *, resume: bool) -> Iterator[dict[str, State]]:
    """Yields the states of runs by name, given with their arguments; locks the folder."""
    if out.exists() and not out.is_dir():
        raise UserError(f"--out={out} is a file; choose a folder")
    if not resume and out.is_dir() and any(out.iterdir()):
        raise UserError(f"--out={out} is not empty; use --resume to continue, or another folder")
    with own(out, "--out"):
        known = _read(out)
        yield {name: _now(known.get(name, State()), out / name, arguments) for name, arguments in runs.items()}


def write_states(out: pathlib.Path, states: Mapping[str, State]) -> None:
    """Writes the current record."""
    runs = {name: dataclasses.asdict(state) for name, state in states.items()}
    durable_files.write_text(out / FILE, json.dumps({"runs": runs}, indent=1) + "\n")


def _now(state: State, folder: pathlib.Path, arguments: tuple[str, ...]) -> State:
    """Returns the state at a new start: a finished run stays finished if its folder and settings are the same."""
    if state.status == "finished" and not (folder.is_dir() and state.arguments == arguments):
        return dataclasses.replace(state, status="waiting")
    return dataclasses.replace(state, status="interrupted") if state.status == "running" else state


def _read(out: pathlib.Path) -> dict[str, State]:
    path = out / FILE
    try:
        found: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["runs"]
        return {name: State(**known | {"arguments": tuple(known["arguments"])}) for name, known in found.items()}
    except FileNotFoundError:
        return {}
    except (AttributeError, KeyError, TypeError, ValueError) as e:
        said = f"{path} is damaged ({type(e).__name__}: {e})"
        raise UserError(f"{said}; remove it: finished runs will detect that themselves") from e


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
        durable_files.write_text(folder / name, content)


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")
