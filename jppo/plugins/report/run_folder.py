"""What a report reads of a run folder, with notes on missing files; and its metrics as curves.

A kill may have truncated any file. Curves are in buckets with extremes; seconds are by stage.
"""

import dataclasses
import math
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jppo.errors import UserError, expanded
from jppo.runlog import durable_files, logger
from jppo.runlog.durable_files import read_jsonl
from jppo.runlog.timers import STAGES

SERVER_HEAD = 65_536  # bytes of a server's log that contain its version


@dataclasses.dataclass(frozen=True)
class SampleFile:
    """One file of samples/: of a training step, of the test after it, or the step's token records."""

    kind: str  # 'step', 'test' or 'tokens'
    step: int
    path: pathlib.Path


@dataclasses.dataclass(frozen=True)
class Folder:
    """The contents of a run folder, without samples."""

    path: pathlib.Path
    settings: dict[str, Any] | None  # None: no readable config.json
    lines: list[dict[str, Any]]  # of metrics.jsonl, by step
    warnings: list[dict[str, Any]]
    samples: list[SampleFile]  # by kind and step
    tokens: list[SampleFile]  # token records of training steps, by step
    exported: bool  # hf/ is written last
    written: float | None  # time of the last metrics line, in seconds since 1970
    versions: dict[str, str]
    notes: list[str]  # missing or unreadable files


def read_folder(path: pathlib.Path) -> Folder:
    """Reads a run's metrics, warnings, settings and lists of files; UserError if the path is no run."""
    if not path.is_dir():
        raise UserError(f"{path}: no such folder; use the folder of a run, its trainer.run_dir")
    if not any((path / name).exists() for name in ("config.json", logger.FILE, "samples")):
        raise UserError(f"{path} is not a run: it has none of config.json, {logger.FILE} and samples/")
    notes: list[str] = []
    rows = read_jsonl(path / logger.FILE, notes, "no curves and no times")
    lines = {row["step"]: row for row in rows if _is_step(row.get("step"))}  # the last line of a repeated step
    if len(lines) < len(rows):
        notes.append(f"{logger.FILE}: {len(rows) - len(lines)} lines have no step or a repeated one and are skipped")
    file, settings = path / logger.FILE, _read_settings(path / "config.json", notes)
    files = _sample_files(path / "samples", notes)
    return Folder(
        path=path,
        settings=settings,
        lines=[lines[step] for step in sorted(lines)],
        warnings=read_jsonl(path / "warnings.jsonl", notes, None),
        samples=[f for f in files if f.kind != "tokens"],
        tokens=[f for f in files if f.kind == "tokens"],
        exported=(path / "hf").is_dir(),
        written=file.stat().st_mtime if file.is_file() else None,
        versions=_read_versions(path),
        notes=notes,
    )


def distinct_names(paths: Sequence[pathlib.Path]) -> list[str]:
    """Returns the last part of each path, with as many parents as make it unique."""
    parts = [expanded(path).resolve().parts for path in paths]
    depth = [1] * len(parts)
    while True:
        names = ["/".join(path_parts[-count:]) for path_parts, count in zip(parts, depth, strict=True)]
        ambiguous = [i for i, name in enumerate(names) if names.count(name) > 1 and depth[i] < len(parts[i])]
        if not ambiguous:
            return names
        depth = [count + (i in ambiguous) for i, count in enumerate(depth)]


def _is_step(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value < 2**53  # larger numbers are not exact in a page


def _read_settings(path: pathlib.Path, notes: list[str]) -> dict[str, Any] | None:
    """Returns the settings in config.json; None, with a note, if it is missing or unreadable."""
    if not path.is_file():
        notes.append("no config.json: no settings, and no planned number of steps")
        return None
    if not (config := durable_files.read_json(path)):
        notes.append("config.json cannot be read: no settings, and no planned number of steps")
    return config or None


def _sample_files(folder: pathlib.Path, notes: list[str]) -> list[SampleFile]:
    """Lists the files of samples and token records by kind and step; notes if there are none."""
    files = []
    for path in folder.glob("*.jsonl"):
        match = re.fullmatch(r"(step|test|tokens)_(\d+)\.jsonl", path.name)
        if match:
            files.append(SampleFile(match[1], int(match[2]), path))
    if not files:
        notes.append("no samples/step_N.jsonl or test_N.jsonl: no samples and no distribution of scores")
    return sorted(files, key=lambda f: (f.kind, f.step))


def _read_versions(run: pathlib.Path) -> dict[str, str]:
    """Returns the version of vLLM that the first server's log names; {} without one."""
    log = run / "server-0.log"
    if not log.is_file():
        return {}
    with log.open("rb") as file:
        start = file.read(SERVER_HEAD).decode("utf-8", errors="replace")
    match = re.search(r"\bversion v?(\d+\.\d[\w.+-]*)", start)
    return {"vLLM": match[1]} if match else {}


Lines = Sequence[Mapping[str, Any]]  # of metrics.jsonl, each with its step, increasing

POINTS = 800  # maximum points of a curve; charts are narrower
BARS = 100
OUTSIDE = ("start", "testing", "save")  # not included in timing_s/step
MAX_NONFINITE = 50  # maximum number of listed steps with a non-finite metric


def curves(lines: Lines, points: int = POINTS) -> dict[str, Any]:
    """Returns every metric as a curve; above `points` values as mean, minimum and maximum of even buckets.

    `axes` are the steps, shared by metrics with equal steps: the first of each bucket, and its width.
    """
    axes: list[dict[str, Any]] = []
    series, nonfinite = {}, {}
    for name, (steps, values) in _metric_columns(lines).items():
        finite = np.isfinite(values)
        if not finite.all():
            gaps = steps[~finite]
            nonfinite[name] = {"count": len(gaps), "steps": gaps[:MAX_NONFINITE].tolist()}
        width = -(-int(steps[-1] - steps[0] + 1) // points) if len(steps) > points else 1
        starts, firsts = _buckets(steps, width)
        axis = {"steps": firsts, "width": width}
        if axis not in axes:
            axes.append(axis)
        curve: dict[str, Any] = {"axis": axes.index(axis)}
        count = np.add.reduceat(finite, starts, dtype=np.int64)
        mean = np.add.reduceat(np.where(finite, values, 0.0), starts) / np.maximum(count, 1)
        curve["mean"] = rounded(np.where(count, mean, np.nan))
        if width > 1:
            gapped = np.where(finite, values, np.nan)
            curve["low"], curve["high"] = (rounded(f.reduceat(gapped, starts)) for f in (np.fmin, np.fmax))
        series[name] = curve
    return {"axes": axes, "series": dict(sorted(series.items())), "odd": nonfinite}


def stage_times(lines: Lines, bars: int = BARS) -> dict[str, Any]:
    """Returns seconds of each stage: the total, and the mean per step for at most `bars` buckets of steps.

    `other` is the rest of a step. `start` is only in the totals: it would dwarf every bar.
    """
    stages = {name.removeprefix("timing_s/") for line in lines for name in line if name.startswith("timing_s/")}
    known = [stage for stage in STAGES if stage in stages and stage != "step"]
    parts = [s for s in known if s not in OUTSIDE] + sorted(stages - {*STAGES})
    names = [s for s in known if s == "start"] + parts + [s for s in known if s in ("testing", "save")]
    seconds = {
        stage: np.array([number(line.get(f"timing_s/{stage}")) or 0.0 for line in lines]) for stage in [*names, "step"]
    }
    if "step" in stages:
        remainder = seconds["step"] - sum((seconds[s] for s in parts), np.zeros(len(lines)))
        names = [*names, "other"]
        seconds["other"] = np.maximum(remainder, 0.0)
    totals = {s: round(float(seconds[s].sum()), 3) for s in names}
    steps = np.array([line["step"] for line in lines if line["step"] > 0], dtype=np.int64)
    if not names or not len(steps):
        return {"names": names, "totals": totals, "steps": [], "width": 1, "bars": {}}
    counted = np.array([line["step"] > 0 for line in lines])
    width = -(-int(steps[-1] - steps[0] + 1) // bars)
    starts, firsts = _buckets(steps, width)
    count = np.diff([*starts, len(steps)])
    means = {s: np.add.reduceat(seconds[s][counted], starts) / count for s in names if s != "start"}
    return {
        "names": names,
        "totals": totals,
        "steps": firsts,
        "width": width,
        "bars": {s: rounded(values) for s, values in means.items()},
    }


def total(lines: Lines, name: str) -> float:
    return sum(value for _, value in points_of(lines, name))


def points_of(lines: Lines, name: str) -> list[tuple[int, float]]:
    """Returns a metric's finite values with their steps."""
    return [(line["step"], value) for line in lines if (value := number(line.get(name))) is not None]


def number(value: Any) -> float | None:
    """Returns the value if it is a finite number, else None; booleans are none."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer of hundreds of digits
        return None


def rounded(values: np.ndarray) -> list[float | None]:
    """Rounds to five digits, enough for a chart; None if non-finite."""
    return [float(f"{v:.5g}") if math.isfinite(v) else None for v in values.tolist()]


def _metric_columns(lines: Lines) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns the steps and values of each metric, NaN for a non-finite one."""
    columns: dict[str, tuple[list[int], list[float]]] = {}
    for line in lines:
        step = line["step"]
        for name, value in line.items():
            if not isinstance(value, float):
                if name == "step" or isinstance(value, bool) or not (value is None or isinstance(value, int)):
                    continue
                value = number(value)
                value = math.nan if value is None else value
            if name not in columns:
                columns[name] = ([], [])
            columns[name][0].append(step)
            columns[name][1].append(value)
    return {name: (np.array(steps, dtype=np.int64), np.array(values)) for name, (steps, values) in columns.items()}


def _buckets(steps: np.ndarray, width: int) -> tuple[np.ndarray, list[int]]:
    """Returns the index of the first step in each bucket of `width` steps that is not empty, and the buckets' steps."""
    bucket = (steps - steps[0]) // width
    starts = np.flatnonzero(np.diff(bucket, prepend=-1))
    return starts, (steps[0] + bucket[starts] * width).tolist()
