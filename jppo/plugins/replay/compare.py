"""Compares a recorded step with a recomputed one: the first number of each stage that differs, and by how much.

Numbers of a stage that a step computes later come later; the first difference of a step is in the order of computing.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jppo.learner.views import COLUMN, PART, STATISTIC
from jppo.plugins.replay.bundle import CHECKSUM_OF_FROZEN, Computed

# The stages of a step, in order, with the arrays of the batch that belong to each.
STAGES: dict[str, tuple[str, ...]] = {
    "model": (),
    "tokens": ("tokens", "first", "length", "checksum", "rollout_logprob"),
    "rewards": ("score", "group", "greedy", "given", "episode", "earned"),
    "log-probs": ("old_logprob", "entropy", "routing_differs"),
    "reference": ("ref_logprob", "exact_kl"),
    "values": ("value",),
    "advantages": ("mask", "weight", "reward", "returns", "advantage", "positive", "value_norm"),
    "loss": (),
    "gradient norm": (),
    "update": (),
    "metrics": (),
}
PREFIXES = {PART: "rewards", COLUMN: "rewards", STATISTIC: "log-probs"}
OF_UPDATES = {"loss": "loss", "grad_norm": "gradient norm"}  # other numbers of an optimizer step: the update
AXES = ("sample", "token")
OF_SUMS = ("loss", "metrics")  # means of terms of about 1 that cancel: relative to 1 at least
CHECKSUM = "checksum of the weights"


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first number of an array that differs."""

    stage: str
    place: str  # the number's name, with the indices of sample and token
    recorded: str
    recomputed: str


@dataclasses.dataclass(frozen=True)
class StageResult:
    """The comparison of a stage."""

    count: int  # of numbers; 0: the step has no such stage
    first: Difference | None  # None: all are equal within the tolerance
    largest: float  # difference, relative to the largest number of its array; infinite for texts and integers


def compare_configs(recorded: Mapping[str, str], current: Mapping[str, str]) -> Difference | None:
    """Returns the first field of the models' configs that differs, with which no weights may fit."""
    for name, old in recorded.items():
        if name in current and current[name] != old and not name.endswith(CHECKSUM_OF_FROZEN):
            return Difference("model", name, old, current[name])
    return None


def compare(
    recorded: Computed, recomputed: Computed, tolerance: float
) -> tuple[dict[str, StageResult], list[Difference]]:
    """Compares two steps; returns the result of each stage, and the differences in the order of computing.

    `tolerance` is relative to the largest number of an array; with 0, floats must be equal, and checksums of the
    weights, too. Integers and texts must be equal.
    """
    counts, largest = dict.fromkeys(STAGES, 0), dict.fromkeys(STAGES, 0.0)
    differences = list[Difference]()
    for stage, name, old, new in _list_pairs(recorded, recomputed):
        if tolerance and name.startswith(CHECKSUM):
            continue
        counts[stage] += 1 if old is None or new is None else np.size(old)
        size, found = _compare_values(stage, name, old, new, tolerance)
        largest[stage] = max(largest[stage], size)
        differences += [found] if found is not None else []
    firsts = {stage: next((d for d in differences if d.stage == stage), None) for stage in STAGES}
    return {stage: StageResult(counts[stage], firsts[stage], largest[stage]) for stage in STAGES}, differences


def _list_pairs(a: Computed, b: Computed) -> Iterator[tuple[str, str, Any, Any]]:
    """Yields (stage, name, recorded, recomputed) in the order of computing; None for what a step lacks."""
    for name in a.models:  # a model that only one step has is missing in a later stage
        if name in b.models:
            yield "model", name, a.models[name], b.models[name]
    batch = {name: (old, new) for name, old, new in _join(a.batch, b.batch)}
    stage_of = {name: stage for stage, names in STAGES.items() for name in names}
    ordered = [*(name for name in stage_of if name in batch), *(name for name in batch if name not in stage_of)]
    for name in ordered[len(batch.keys() & stage_of.keys()) :]:
        stage_of[name] = next((stage for prefix, stage in PREFIXES.items() if name.startswith(prefix)), "advantages")
    for stage in STAGES:
        if stage == "rewards":
            yield from ((stage, *pair) for pair in _join(a.rewards, b.rewards))
        yield from ((stage, name, *batch[name]) for name in ordered if stage_of[name] == stage)
    yield from _list_updates(a.updates, b.updates)
    for name, old, new in _join(a.weights, b.weights):
        if old is None or new is None:
            yield "update", name, old, new
            continue
        yield "update", f"an entry of {name}", np.float32(old[1:]), np.float32(new[1:])
        yield "update", f"{CHECKSUM} {name}", str(old[0]), str(new[0])
    yield from (("metrics", *pair) for pair in _join(a.metrics, b.metrics))


def _list_updates(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> Iterator[tuple[str, str, Any, Any]]:
    """Yields the numbers of the optimizer steps, of each model from its first."""
    numbers = dict[str, int]()
    for old, new in zip(a, b, strict=False):
        model = old["model"]
        numbers[model] = numbers.get(model, 0) + 1
        for name, x, y in _join(old, new):
            yield OF_UPDATES.get(name, "update"), f"{name} of {model} in optimizer step {numbers[model]}", x, y
    if len(a) != len(b):
        yield "update", "number of optimizer steps", len(a), len(b)


def _join(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yields (name, value of a, value of b); None for a missing one."""
    yield from ((name, a.get(name), b.get(name)) for name in {**a, **b})


def _compare_values(stage: str, name: str, old: Any, new: Any, tolerance: float) -> tuple[float, Difference | None]:
    """Returns the largest difference of numbers, arrays or texts, and the first that is above the tolerance."""
    if old is None or new is None or isinstance(old, str):
        texts = ["none" if x is None else str(x) if isinstance(x, str | int | float) else "some" for x in (old, new)]
        return (0.0, None) if texts[0] == texts[1] else (math.inf, Difference(stage, name, *texts))
    old, new = np.asarray(old), np.asarray(new)
    if old.shape != new.shape:
        return math.inf, Difference(stage, f"shape of {name}", str(old.shape), str(new.shape))
    sizes = _relative_differences(stage, old, new)
    above = np.flatnonzero(sizes > tolerance)
    if not above.size:
        return float(sizes.max(initial=0.0)), None
    index = np.unravel_index(int(above[0]), old.shape)
    place = ", ".join(f"{axis} {i}" for axis, i in zip(AXES, index, strict=False)) if stage != "update" else ""
    texts = [f"{x[index].astype(np.float64):.9g}" for x in (old, new)]
    return float(sizes.max()), Difference(stage, f"{name}{' of ' * bool(place)}{place}", *texts)


def _relative_differences(stage: str, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Returns |recomputed - recorded| over the largest number of the array; infinite for integers and NaN."""
    wide, other = old.astype(np.float64), new.astype(np.float64)
    same = (wide == other) | (np.isnan(wide) & np.isnan(other))
    finite = np.abs(np.concatenate([x[np.isfinite(x)].reshape(-1) for x in (wide, other)]))
    scale = finite.max(initial=1.0 if stage in OF_SUMS else 0.0)
    if np.issubdtype(old.dtype, np.floating) and scale:
        gap = np.abs(np.subtract(wide, other, where=~same, out=np.zeros_like(wide))) / scale
        return np.where(np.isnan(gap), math.inf, gap)
    return np.where(same, 0.0, math.inf)
