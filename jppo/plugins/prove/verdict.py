"""The verdict on an algorithm: paired differences over seeds with Student's intervals, by the rule `RULE`."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import scipy.stats

from jppo.errors import UserError
from jppo.statistics import mean_se

MARGIN = 0.15  # units
LAST = 5  # the final score is the mean over the last 1 / LAST of the steps
RULE = f"""The score of a step is the mean of its samples, a final score the mean of the last fifth of the steps.
Intervals are 95%, by Student's t over seeds; differences are paired by seed. A unit is the gain of the task's better
reference over the first step. An interval within ±{MARGIN} units is a tie, another one better or worse if it excludes
0. An algorithm learns a task if the interval of its gain is above {MARGIN} units, and does not if its mean is not. It
passes if it learns every task and is not worse than both references."""
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


def learning(gain: np.ndarray) -> str:
    """Returns the words for gains in units, one of each seed."""
    mean, half = interval(gain)
    return "learns" if mean - half > MARGIN else "undecided" if mean > MARGIN else "does not learn"


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

    result: str  # passes, fails or undecided
    words: str


def judge(scores: Mapping[str, TaskScores]) -> Verdict:
    """Returns the verdict: it passes if it learns every task, and is not worse than each of the references."""
    learned = {task: learning(found.gain) for task, found in scores.items()}
    for word, result in (("does not learn", "fails"), ("undecided", "undecided")):
        if tasks := [task for task in learned if learned[task] == word]:
            return Verdict(result, f"{word} {', '.join(tasks)}" + "; use more --seeds" * (result == "undecided"))
    words = {name: compare(values) for name, values in mean_differences(scores).items()}
    result = "fails" if set(words.values()) == {"worse"} else "passes"
    return Verdict(result, ", ".join(f"{PHRASES[word]} {name}" for name, word in words.items()))


def mean_differences(scores: Mapping[str, TaskScores]) -> dict[str, np.ndarray]:
    """Returns the differences from each reference as means over the tasks, in units, [S]."""
    names = next(iter(scores.values())).differences
    return {name: np.mean([found.differences[name] for found in scores.values()], axis=0) for name in names}
