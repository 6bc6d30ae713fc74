"""Means over seeds and their differences, with 95% intervals."""

import math
from collections.abc import Sequence

import numpy as np
import scipy.stats

from jppo.plugins.prove.verdict import Interval, interval

__all__ = ["Interval", "difference", "interval"]


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
