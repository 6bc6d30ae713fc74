"""Means over seeds and their differences, with 95% intervals."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import scipy.stats


class Interval(NamedTuple):
    """A mean with the half width of its 95% interval."""

    mean: float
    half: float

    def __str__(self) -> str:
        return f"{self.mean:.3f}" + ("" if math.isnan(self.half) else f" ± {self.half:.3f}")


def interval(values: Sequence[float]) -> Interval:
    """The mean over seeds with Student's interval; NaN with fewer than two."""
    x = np.asarray(values, np.float64)
    if len(x) < 2:
        return Interval(float(x.mean()) if len(x) else math.nan, math.nan)
    half = scipy.stats.t.ppf(0.975, len(x) - 1) * x.std(ddof=1) / math.sqrt(len(x))
    return Interval(float(x.mean()), float(half))


def difference(a: Sequence[float], b: Sequence[float]) -> Interval:
    """The difference of two means with Welch's interval: variances may differ, and seeds are not paired."""
    gap = float(np.mean(a) - np.mean(b))
    if min(len(a), len(b)) < 2:
        return Interval(gap, math.nan)
    va, vb = np.var(a, ddof=1) / len(a), np.var(b, ddof=1) / len(b)
    if va + vb == 0:
        return Interval(gap, 0.0)
    freedom = (va + vb) ** 2 / (va**2 / (len(a) - 1) + vb**2 / (len(b) - 1))
    return Interval(gap, float(scipy.stats.t.ppf(0.975, freedom) * math.sqrt(va + vb)))
