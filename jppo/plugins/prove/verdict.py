"""The verdict on an algorithm: paired differences over seeds with Student's 95% intervals, by a rule fixed beforehand.

A task's unit is the gain of its better reference: the final score, less the score of the first step's samples. A
difference is a tie if its interval is within MARGIN units of 0, otherwise better or worse if its interval excludes 0,
otherwise undecided. An algorithm learns a task if the interval of its gain is above MARGIN units.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import scipy.stats

from jppo.errors import UserError
from jppo.statistics import mean_se

MARGIN = 0.15  # units
LAST = 5  # the final score is the mean over the last 1 / LAST of the steps
PHRASES = {"tie": "ties with", "better": "better than", "worse": "worse than", "undecided": "undecided against"}


class Interval(NamedTuple):
    """A mean with the half width of its 95% interval."""

    mean: float
    half: float

    def __str__(self) -> str:
        return f"{self.mean:.3f}" + ("" if math.isnan(self.half) else f" ± {self.half:.3f}")


def interval(values: Sequence[float] | np.ndarray) -> Interval:
    """Returns the mean over seeds with Student's interval; NaN with fewer than two."""
    mean, se, count = mean_se(list(values))
    return Interval(mean, float(scipy.stats.t.ppf(0.975, count - 1)) * se if count > 1 else math.nan)


def compare(differences: np.ndarray) -> str:
    """Returns the word for differences in units, one of each seed."""
    mean, half = interval(differences)
    if mean - half > -MARGIN and mean + half < MARGIN:
        return "tie"
    return "better" if mean - half > 0 else "worse" if mean + half < 0 else "undecided"


def learns(gain: np.ndarray) -> bool:
    """Whether a gain in units, one of each seed, shows that an algorithm learns."""
    mean, half = interval(gain)
    return mean - half > MARGIN


class TaskScores(NamedTuple):
    """The scores of one task; arrays have an entry of each seed, [S]."""

    start: np.ndarray  # of the first reference's first step, whose samples are the starting model's
    finals: dict[str, np.ndarray]  # by algorithm
    gain: np.ndarray  # of the algorithm on trial, in units
    differences: dict[str, np.ndarray]  # of the algorithm on trial from each reference, in units


def summarise(task: str, curves: Mapping[str, np.ndarray]) -> TaskScores:
    """Returns a task's scores from the curves [S, T] of the references and then of the algorithm on trial."""
    first = next(iter(curves.values()))
    start, last = first[:, 0], max(1, first.shape[1] // LAST)
    finals = {name: curve[:, -last:].mean(axis=1) for name, curve in curves.items()}
    *references, tried = finals
    unit = max(float((finals[name] - start).mean()) for name in references)
    if unit <= 0:
        problem = f"{task}: no reference learns it in {first.shape[1]} steps, so nothing compares"
        raise UserError(f"{problem}; use more --steps")
    differences = {name: (finals[tried] - finals[name]) / unit for name in references}
    return TaskScores(start, finals, (finals[tried] - start) / unit, differences)


class Verdict(NamedTuple):
    """The verdict over all tasks."""

    passes: bool
    words: str


def judge(scores: Mapping[str, TaskScores]) -> Verdict:
    """Returns the verdict: it passes if it learns every task, and is not worse than each of the references."""
    if unlearned := [task for task, found in scores.items() if not learns(found.gain)]:
        return Verdict(False, f"does not learn {', '.join(unlearned)}")
    words = {name: compare(values) for name, values in mean_differences(scores).items()}
    passes = any(word != "worse" for word in words.values())
    return Verdict(passes, ", ".join(f"{PHRASES[word]} {name}" for name, word in words.items()))


def mean_differences(scores: Mapping[str, TaskScores]) -> dict[str, np.ndarray]:
    """Returns the differences from each reference as means over the tasks, in units, [S]."""
    names = next(iter(scores.values())).differences
    return {name: np.mean([found.differences[name] for found in scores.values()], axis=0) for name in names}
