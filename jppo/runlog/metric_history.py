"""The metrics of a run's steps that `diagnosis.py` reads: the first and the last ones, and values derived from them."""

import collections
import math
import statistics
from collections.abc import Mapping

from jppo.runlog.timers import STAGES

FIRST_STEPS = 5  # baseline that later steps are compared with
LAST_STEPS = 5  # window of the current median or sum
KEPT_STEPS = 50  # longest history of a rule

# Values derived from a step's metrics.
SCORE_SPREAD = "largest minus smallest score"
ADVANTAGE_SPREAD = "largest minus smallest advantage"
SPREADS = {
    SCORE_SPREAD: ("critic/score/max", "critic/score/min"),
    ADVANTAGE_SPREAD: ("critic/advantages/max", "critic/advantages/min"),
}
ERRORS, RESPONSES = "reward/errors", "responses"
SUSPICIOUS = "reward/code/suspicious"
MEMORY = "perf/cpu_memory_used_gb"
TIMED = tuple(f"timing_s/{stage}" for stage in STAGES if stage not in ("start", "step"))
READ = (
    *(name for pair in SPREADS.values() for name in pair),
    "critic/score/mean",
    ERRORS,
    SUSPICIOUS,
    "perf/total_num_tokens",
    "prompt_length/mean",
    "response_length/mean",
    "response_length/clip_ratio",
    "training/filter_groups/without_metric",
    "actor/ppo_kl",
    "actor/ratio_mean",
    "actor/entropy",
    "critic/vf_loss",
    "critic/vf_explained_var",
    "rollout/logp_gap_mean",
    MEMORY,
    *TIMED,
)


class Past:
    """The history that rules read, the newest step included; non-finite values are left out."""

    def __init__(self) -> None:
        self.now: Mapping[str, float] = {}
        self._first: dict[str, list[float]] = collections.defaultdict(list)
        self._last: dict[str, collections.deque[float]] = collections.defaultdict(
            lambda: collections.deque(maxlen=KEPT_STEPS)
        )
        self._count: collections.Counter[str] = collections.Counter()

    def add(self, metrics: Mapping[str, float | None]) -> None:
        """Appends a step."""
        self.now = observed(metrics)
        for name, value in self.now.items():
            self._count[name] += 1
            self._last[name].append(value)
            if len(self._first[name]) < FIRST_STEPS:
                self._first[name].append(value)

    def count(self, name: str) -> int:
        """Returns the number of steps that had the metric."""
        return self._count[name]

    def first(self, name: str) -> float:
        """Returns the median of the first FIRST_STEPS steps that had the metric."""
        return statistics.median(self._first[name])

    def last(self, name: str, n: int = LAST_STEPS) -> list[float]:
        """Returns at most the last n values."""
        return list(self._last[name])[-n:]

    def recent(self, name: str) -> float | None:
        """Returns the median of the last LAST_STEPS values; None if there are fewer or this step lacks the metric."""
        values = self.last(name)
        return statistics.median(values) if len(values) == LAST_STEPS and name in self.now else None


def observed(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """Returns the finite metrics in READ, and the values derived from them."""
    out = {name: value for name in READ if (value := metrics.get(name)) is not None and math.isfinite(value)}
    for spread, (most, least) in SPREADS.items():
        if most in out and least in out:
            out[spread] = out[most] - out[least]
    tokens = out.get("prompt_length/mean", 0.0) + out.get("response_length/mean", 0.0)
    if tokens > 0 and "perf/total_num_tokens" in out:
        out[RESPONSES] = out["perf/total_num_tokens"] / tokens
    return out
