"""What a healthy step looks like: the ranges of its metrics, and whether a series rises. Pure; the one place of both.

The console colours by it, `diagnosis.py` warns by it.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal

Verdict = Literal["good", "weak", "bad"]  # bad: the policy moves too far, or the wrong way; weak: it hardly moves


@dataclasses.dataclass(frozen=True)
class Range:
    """Where a metric is good, and what it is outside."""

    low: float
    high: float
    below: Verdict
    above: Verdict


RANGES: Mapping[str, Range] = {
    "actor/ppo_kl": Range(0.001, 0.1, below="weak", above="bad"),
    "actor/pg_clipfrac": Range(0.1, 0.3, below="weak", above="bad"),
    "actor/ratio_mean": Range(0.9, 1.1, below="bad", above="bad"),  # 1 in expectation, however far the policy moves
}
REWARD = "critic/score/mean"
TREND_STEPS = 10  # over which the reward should rise
FEWEST_STEPS = 4  # of which a trend can be told
SURE = 2.0  # standard errors that a slope must be from 0


def verdict(name: str, value: float) -> Verdict | None:
    """What the value is, by its range; None where the metric has none. What is no finite number is bad.

    Its size counts: the estimate of a KL may be negative.
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
    """Where the straight line of least squares through the values goes; None where that may be noise.

    slope = Σ (t - t̄)(v - v̄) / Σ (t - t̄)², beside its standard error √(Σ residual² / (n - 2) / Σ (t - t̄)²).
    """
    n = len(values)
    if n < FEWEST_STEPS or not all(map(math.isfinite, values)):
        return None
    middle, mean = (n - 1) / 2, math.fsum(values) / n
    spread = math.fsum((t - middle) ** 2 for t in range(n))
    slope = math.fsum((t - middle) * (v - mean) for t, v in enumerate(values)) / spread
    residual = math.fsum((v - mean - slope * (t - middle)) ** 2 for t, v in enumerate(values))
    if abs(slope) <= SURE * math.sqrt(residual / (n - 2) / spread) or abs(slope) <= 1e-9 * abs(mean):
        return None
    return "rising" if slope > 0 else "falling"


def verdicts(metrics: Mapping[str, float], rewards: Sequence[float]) -> dict[str, Verdict]:
    """What can be said of a step's metrics; `rewards` are those of the last steps, this one included.

    A reward that neither rises nor falls for sure gets no verdict: so is noise, and so is a task that is learned.
    """
    found = {name: v for name, value in metrics.items() if (v := verdict(name, value)) is not None}
    way = trend(rewards[-TREND_STEPS:])
    if way is not None and REWARD in metrics:
        found[REWARD] = "good" if way == "rising" else "bad"
    return found
