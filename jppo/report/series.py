"""Metrics of a run for the report: curves in buckets with extremes, seconds by stage. Pure."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jppo.runlog.timers import STAGES

Lines = Sequence[Mapping[str, Any]]  # of metrics.jsonl, each with its step, increasing

POINTS = 800  # maximum points of a curve; charts are narrower
BARS = 100
OUTSIDE = ("start", "testing", "save")  # not included in timing_s/step
ODD = 50  # maximum number of listed steps with a non-finite metric


def curves(lines: Lines, points: int = POINTS) -> dict[str, Any]:
    """Returns every metric over the steps; above `points` values, mean, minimum and maximum of even buckets.

    `axes` are the steps, shared by metrics with equal steps: the first of each bucket, and its width.
    """
    axes: list[dict[str, Any]] = []
    series, odd = {}, {}
    for name, (steps, values) in _columns(lines).items():
        finite = np.isfinite(values)
        if not finite.all():
            gaps = steps[~finite]
            odd[name] = {"count": len(gaps), "steps": gaps[:ODD].tolist()}
        width = -(-int(steps[-1] - steps[0] + 1) // points) if len(steps) > points else 1
        starts = _starts(steps, width)
        axis = {"steps": (steps[0] + (steps[starts] - steps[0]) // width * width).tolist(), "width": width}
        if axis not in axes:
            axes.append(axis)
        one: dict[str, Any] = {"axis": axes.index(axis)}
        count = np.add.reduceat(finite, starts, dtype=np.int64)
        mean = np.add.reduceat(np.where(finite, values, 0.0), starts) / np.maximum(count, 1)
        one["mean"] = rounded(np.where(count, mean, np.nan))
        if width > 1:
            whole = np.where(finite, values, np.nan)
            one["low"], one["high"] = (rounded(f.reduceat(whole, starts)) for f in (np.fmin, np.fmax))
        series[name] = one
    return {"axes": axes, "series": dict(sorted(series.items())), "odd": odd}


def stage_times(lines: Lines, bars: int = BARS) -> dict[str, Any]:
    """Returns seconds of each stage: the total, and the mean per step for at most `bars` buckets of steps.

    `other` is the rest of a step. `start` is only in the totals: it would dwarf every bar.
    """
    found = {name.removeprefix("timing_s/") for line in lines for name in line if name.startswith("timing_s/")}
    known = [stage for stage in STAGES if stage in found and stage != "step"]
    inside = [s for s in known if s not in OUTSIDE] + sorted(found - {*STAGES})
    names = [s for s in known if s == "start"] + inside + [s for s in known if s in ("testing", "save")]
    seconds = {s: _seconds(lines, s) for s in [*names, "step"]}
    if "step" in found:
        rest = seconds["step"] - sum((seconds[s] for s in inside), np.zeros(len(lines)))
        names = [*names, "other"]
        seconds["other"] = np.maximum(rest, 0.0)
    totals = {s: round(float(seconds[s].sum()), 3) for s in names}
    steps = np.array([line["step"] for line in lines if line["step"] > 0], dtype=np.int64)
    if not names or not len(steps):
        return {"names": names, "totals": totals, "steps": [], "width": 1, "bars": {}}
    taken = np.array([line["step"] > 0 for line in lines])
    width = -(-int(steps[-1] - steps[0] + 1) // bars)
    starts = _starts(steps, width)
    count = np.diff([*starts, len(steps)])
    drawn = {s: np.add.reduceat(seconds[s][taken], starts) / count for s in names if s != "start"}
    firsts = steps[0] + (steps[starts] - steps[0]) // width * width
    return {
        "names": names,
        "totals": totals,
        "steps": firsts.tolist(),
        "width": width,
        "bars": {s: rounded(values) for s, values in drawn.items()},
    }


def total(lines: Lines, name: str) -> float:
    """Returns the sum of a metric over its steps."""
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


def _columns(lines: Lines) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    found: dict[str, tuple[list[int], list[float]]] = {}
    for line in lines:
        step = line["step"]
        for name, value in line.items():
            if not isinstance(value, float):
                if name == "step" or isinstance(value, bool) or not (value is None or isinstance(value, int)):
                    continue
                value = number(value)
                value = math.nan if value is None else value
            if name not in found:
                found[name] = ([], [])
            found[name][0].append(step)
            found[name][1].append(value)
    return {name: (np.array(s, dtype=np.int64), np.array(v)) for name, (s, v) in found.items()}


def _starts(steps: np.ndarray, width: int) -> np.ndarray:
    """Returns the start of each non-empty bucket."""
    bucket = (steps - steps[0]) // width
    return np.flatnonzero(np.diff(bucket, prepend=-1))


def _seconds(lines: Lines, stage: str) -> np.ndarray:
    return np.array([number(line.get(f"timing_s/{stage}")) or 0.0 for line in lines])
