"""Healthy ranges of metrics and the trend of the reward, for the console's colours and `diagnosis.py`. Pure."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

Verdict = Literal["good", "weak", "bad"]  # bad: moves too far or in the wrong direction; weak: hardly moves


@dataclasses.dataclass(frozen=True)
class Range:
    """The healthy range of a metric and the verdicts outside of it."""

    low: float
    high: float
    below: Verdict
    above: Verdict


RANGES: Mapping[str, Range] = {
    "actor/ppo_kl": Range(0.001, 0.1, below="weak", above="bad"),
    "actor/pg_clipfrac": Range(0.1, 0.3, below="weak", above="bad"),
    "actor/ratio_mean": Range(0.9, 1.1, below="bad", above="bad"),  # 1 in expectation for any policy
}
REWARD = "critic/score/mean"
TREND_STEPS = 10  # over which the reward should rise
FEWEST_STEPS = 4  # for a trend
SURE = 2.0  # standard errors that a slope must be from 0


def verdict(name: str, value: float) -> Verdict | None:
    """Compares a value's size with the metric's range; None without a range. Non-finite values are bad.

    The absolute value counts, because an estimated KL may be negative.
    """
    if name not in RANGES:
        return None
    allowed, size = RANGES[name], abs(value)
    if not math.isfinite(value):
        return "bad"
    if size < allowed.low:
        return allowed.below
    return "good" if size <= allowed.high else allowed.above


def trend(values: Sequence[float]) -> Literal["rising", "falling"] | None:
    """Returns the direction of the least-squares line through the values; None if it may be noise.

    slope = Σ (t - t̄)(v - v̄) / Σ (t - t̄)², with the standard error √(Σ residual² / (n - 2) / Σ (t - t̄)²).
    """
    n = len(values)
    if n < FEWEST_STEPS or not all(map(math.isfinite, values)):
        return None
    (slope, _), covariance = np.polyfit(range(n), values, 1, cov=True)
    if abs(slope) <= max(SURE * math.sqrt(covariance[0, 0]), 1e-9 * abs(np.mean(values))):
        return None
    return "rising" if slope > 0 else "falling"


def verdicts(metrics: Mapping[str, float], rewards: Sequence[float]) -> dict[str, Verdict]:
    """Returns the verdicts of a step's metrics; `rewards` has one value per recent step, the last for this step.

    A reward without a clear trend gets no verdict: it may be noise or a learned task.
    """
    found = {name: v for name, value in metrics.items() if (v := verdict(name, value)) is not None}
    way = trend(rewards[-TREND_STEPS:])
    if way is not None and REWARD in metrics:
        found[REWARD] = "good" if way == "rising" else "bad"
    return found
