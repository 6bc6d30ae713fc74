"""Warnings about a running training: named rules over the metrics, each reported once with a remedy; healthy ranges.

The input is every step's metrics as host floats. Most rules need several steps, because sampling noise alone moves
the means of one batch. The constants below are the thresholds. Rules take medians where one outlier must not count,
and compare with the run's own first steps where values depend on the model. A stalled stage is reported at once.
"""

import collections
import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import numpy as np

from jppo.runlog.timers import STAGES

FIRST_STEPS = 5  # baseline that later steps are compared with
LAST_STEPS = 5  # window of the current median or sum
KEPT_STEPS = 50  # longest history of a rule
IN_A_ROW = 3  # steps, for conditions that no healthy batch meets even once

ERROR_SHARE = 0.01  # of the responses of the last steps; above the usual time-outs of a judge
ENTROPY_LEFT = 0.1  # share of the first steps' entropy
EXPLAINED = 0.01  # a critic whose values are all equal explains 0, plus rounding
VALUE_STEPS = 20  # until a critic must have learned something; the last half is compared with the baseline
TRUNCATED_SHARE = 0.95  # of responses; a few end by chance
GAP_GROWTH = 5.0  # factor over the first steps' mismatch
GAP_FLOOR = 1e-3  # nats per token; below it is rounding, in float32
WARM_UP_STEPS = 10  # caches and buffers may grow until then
MEMORY_STEPS = 33  # each third must be above the one before: a jump to a new plateau is no leak
MEMORY_GROWTH_GB = 1.0
MEMORY_GROWTH_SHARE = 0.1
SLOW_TIMES = 10.0  # factor over the stage's median
SLOW_SECONDS = 1.0  # minimum: a stage of milliseconds may take ten times as long on a busy core
SLOW_AFTER = 5  # earlier measurements of the stage

# Values derived from a step's metrics.
SCORE_SPREAD = "largest minus smallest score"
ADVANTAGE_SPREAD = "largest minus smallest advantage"
SPREADS = {
    SCORE_SPREAD: ("critic/score/max", "critic/score/min"),
    ADVANTAGE_SPREAD: ("critic/advantages/max", "critic/advantages/min"),
}
STALENESS = "rollout/staleness_mean"
ERRORS, FAULTS, RESPONSES = "reward/errors", "agent/faults", "responses"
SUSPICIOUS = "reward/code/suspicious"
MEMORY = "perf/cpu_memory_used_gb"
TIMED = tuple(f"timing_s/{stage}" for stage in STAGES if stage not in ("start", "step"))


@dataclasses.dataclass(frozen=True)
class Alert:
    """One warning."""

    step: int
    name: str
    found: str
    remedy: str


class History:
    """The history that rules read, the newest step included; non-finite values are left out."""

    def __init__(self) -> None:
        self.now: Mapping[str, float] = {}
        self._first: dict[str, list[float]] = collections.defaultdict(list)
        self._last: dict[str, collections.deque[float]] = collections.defaultdict(
            lambda: collections.deque(maxlen=KEPT_STEPS)
        )
        self._count: collections.Counter[str] = collections.Counter()

    def add(self, metrics: Mapping[str, float | None]) -> None:
        """Appends a step's metrics."""
        self.now = observed(metrics)
        for name, value in self.now.items():
            self._count[name] += 1
            self._last[name].append(value)
            if len(self._first[name]) < FIRST_STEPS:
                self._first[name].append(value)

    def count(self, name: str) -> int:
        return self._count[name]

    def first(self, name: str) -> float:
        """Returns the median of the first FIRST_STEPS steps that had the metric."""
        return statistics.median(self._first[name])

    def last(self, name: str, n: int = LAST_STEPS) -> list[float]:
        return list(self._last[name])[-n:]

    def recent(self, name: str) -> float | None:
        """Returns the median of the last LAST_STEPS values; None if there are fewer or this step lacks the metric."""
        values = self.last(name)
        return statistics.median(values) if len(values) == LAST_STEPS and name in self.now else None


def observed(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """Returns the finite metrics of a step, and the values that rules derive from them."""
    values = {name: value for name, value in metrics.items() if value is not None and math.isfinite(value)}
    for spread, (high, low) in SPREADS.items():
        if high in values and low in values:
            values[spread] = values[high] - values[low]
    if SCORE_SPREAD in values and (mean := values.get("given/score/mean")) is not None:  # compared with the samples
        values[SCORE_SPREAD] = max(values["critic/score/max"], mean) - min(values["critic/score/min"], mean)
    tokens = values.get("prompt_length/mean", 0.0) + values.get("response_length/mean", 0.0)
    if tokens > 0 and "perf/total_num_tokens" in values:
        values[RESPONSES] = values["perf/total_num_tokens"] / tokens
    return values


Rule = Callable[[History], str | None]  # returns what is wrong, or None
RULES: dict[str, tuple[Rule, str]] = {}  # by the names of their warnings, each with its remedy


def _rule(remedy: str) -> Callable[[Rule], Rule]:
    """Makes the decorator that registers a function as the rule of the warning of its name."""

    def register(rule: Rule) -> Rule:
        RULES[rule.__name__] = rule, remedy
        return rule

    return register


@_rule(
    "if all are right in samples/, the task is learned; otherwise run python -m jppo.rewards.check, or raise"
    " rollout.n or rollout.temperature"
)
def equal_rewards(history: History) -> str | None:
    """Finds steps in which all scores or all advantages are equal, as when the samples of each prompt score alike."""
    for name, kind in ((SCORE_SPREAD, "score"), (ADVANTAGE_SPREAD, "advantage")):
        values = history.last(name, IN_A_ROW)
        if name in history.now and len(values) == IN_A_ROW and max(values) <= 1e-6:
            now = history.now
            mean = f", {now['critic/score/mean']:g}" if kind == "score" and "critic/score/mean" in now else ""
            return f"all responses of {IN_A_ROW} steps in a row have the same {kind}{mean}: there is no gradient"
    return None


@_rule(
    "fix the errors listed in samples/ (jppo.rewards.check tries a few), or raise reward.timeout_s, reward.memory_bytes"
    " or reward.judge.retries"
)
def reward_errors(history: History) -> str | None:
    """Finds responses that could not be graded: too many in the last steps, or some in each of them."""
    errors, graded = history.last(ERRORS), history.last(RESPONSES)
    if not history.now.get(ERRORS) or not graded:
        return None
    in_every_step = len(errors) == LAST_STEPS and min(errors) > 0
    if not in_every_step and sum(errors) < ERROR_SHARE * sum(graded):
        return None
    last = f"the last {len(errors)} step(s) could not be graded"
    if faults := sum(history.last(FAULTS)):  # `graded` counts few of them: they end early
        return f"{sum(errors):.0f} responses of {last}, {faults:.0f} by faults of agents, users or environments"
    return f"{sum(errors):.0f} of the {sum(graded):.0f} responses of {last}"


@_rule("read them in samples/: no verdict depends on such names; reward.weights can leave the rule out")
def suspicious_programs(history: History) -> str | None:
    """Finds graded programs with names that reach into their interpreter."""
    count = history.now.get(SUSPICIOUS)
    return f"{count:.0f} programs of this step reach into their interpreter" if count else None


@_rule("lower actor.lr, actor.ppo_epochs or actor.clip_ratio, or raise actor.ppo_mini_batch_size")
def kl_out_of_range(history: History) -> str | None:
    """Finds a policy that moves too far in a step. A small KL is no problem: schedules end with one."""
    kl, high = history.recent("actor/ppo_kl"), RANGES["actor/ppo_kl"].high
    if kl is None or abs(kl) <= high:
        return None
    return f"actor/ppo_kl was {kl:.2g} (median of {LAST_STEPS} steps); the healthy maximum is {high:g}"


@_rule("lower actor.lr or actor.ppo_epochs; use algorithm.old_logprob=correction instead of bypass")
def ratio_out_of_range(history: History) -> str | None:
    """Finds a mean ratio of new to old probability far from 1, its expectation if the old policy has sampled."""
    ratio, allowed = history.recent("actor/ratio_mean"), RANGES["actor/ratio_mean"]
    if ratio is None or allowed.low <= ratio <= allowed.high:
        return None
    return (
        f"actor/ratio_mean was {ratio:.3g} (median of {LAST_STEPS} steps); it should be between {allowed.low:g} and"
        f" {allowed.high:g}"
    )


@_rule("raise actor.entropy_coeff or rollout.temperature, lower actor.lr, or set actor.use_kl_loss=True")
def entropy_collapse(history: History) -> str | None:
    """Finds a policy that is nearly deterministic, so that its samples no longer differ."""
    entropy = history.recent("actor/entropy")
    if entropy is None or entropy >= ENTROPY_LEFT * history.first("actor/entropy"):
        return None
    return f"actor/entropy fell from {history.first('actor/entropy'):.3g} to {entropy:.3g}"


@_rule("raise critic.lr, critic.ppo_epochs or critic.cliprange_value, or set trainer.critic_warmup")
def value_loss_not_falling(history: History) -> str | None:
    """Finds a critic that has not improved since the first steps and explains no variance.

    The loss alone is not enough: it grows with the variance of the rewards, even if the critic follows them.
    """
    name, fit_name = "critic/vf_loss", "critic/vf_explained_var"
    if name not in history.now or history.count(name) < VALUE_STEPS:
        return None
    loss, explained = (statistics.median(history.last(n, VALUE_STEPS // 2) or [math.inf]) for n in (name, fit_name))
    if loss < history.first(name) or explained > EXPLAINED:
        return None
    return (
        f"critic/vf_loss is {loss:.3g} after {history.count(name)} steps, {history.first(name):.3g} at the beginning,"
        f" and critic/vf_explained_var {explained:.2g}"
    )


@_rule(
    "raise data.max_response_length; if answers in samples/ continue after their end, fine-tune on the end token"
    " (jppo.sft)"
)
def all_truncated(history: History) -> str | None:
    """Finds steps in which nearly all responses reach the length limit."""
    shares = history.last("response_length/clip_ratio", IN_A_ROW)
    if len(shares) < IN_A_ROW or min(shares) < TRUNCATED_SHARE:
        return None
    share = "all" if min(shares) == 1.0 else f"{min(shares):.0%} or more"
    return f"{share} of the responses of {IN_A_ROW} steps in a row were truncated"


@_rule("set rollout.dtype and model.compute_dtype alike, or algorithm.old_logprob=correction")
def sampler_gap_growing(history: History) -> str | None:
    """Finds a log-prob mismatch of trainer and rollout, with equal weights, that grows beyond rounding."""
    name = "rollout/logp_gap_mean"
    gap = history.recent(name)
    if gap is None or gap < GAP_FLOOR or gap < GAP_GROWTH * history.first(name) or history.now.get(STALENESS):
        return None
    return f"rollout/logp_gap_mean grew from {history.first(name):.2g} to {gap:.2g}"


@_rule(
    "check what reward.function or a grader keeps; with trainer.save_freq a stopped run resumes with the same command"
)
def host_memory_growing(history: History) -> str | None:
    """Finds host memory that grows steadily after the warm-up."""
    if history.count(MEMORY) < FIRST_STEPS + MEMORY_STEPS or MEMORY not in history.now:
        return None
    values, third = history.last(MEMORY, MEMORY_STEPS), MEMORY_STEPS // 3
    a, b, c = (statistics.median(values[i : i + third]) for i in range(0, MEMORY_STEPS, third))
    growth_gb = c - history.first(MEMORY)
    is_steady = min(b - a, c - b) > 0.25 * (c - a) > 0
    if not is_steady or growth_gb < max(MEMORY_GROWTH_GB, MEMORY_GROWTH_SHARE * history.first(MEMORY)):
        return None
    return f"the host's memory grew from {history.first(MEMORY):.1f} to {c:.1f} GB since the warm-up, and still grows"


@_rule("correct algorithm.filter_groups_metric, whose names are in samples/, or leave it at score")
def filter_metric_missing(history: History) -> str | None:
    """Finds dynamic sampling whose samples all lack its metric."""
    values = history.last("training/filter_groups/without_metric", IN_A_ROW)
    if len(values) == IN_A_ROW and min(values) == 1.0:
        return f"no sample of {IN_A_ROW} steps has algorithm.filter_groups_metric: prompts are kept by their scores"
    return None


@_rule("check other load on the machine; for gen see server-0.log, for reward reward.timeout_s, for save the disk")
def slow_stage(history: History) -> str | None:
    """Finds a stage that takes many times its median."""
    for name in TIMED:
        earlier = history.last(name, KEPT_STEPS)[:-1]
        if name not in history.now or len(earlier) < SLOW_AFTER:
            continue
        median_s, seconds = statistics.median(earlier), history.now[name]
        if seconds >= max(SLOW_SECONDS, SLOW_TIMES * median_s):
            return f"{name} was {seconds:.1f} s; its median is {median_s:.2g} s"
    return None


# Rules that a healthy distillation breaks: scores are metrics only, and the entropy falls to the teacher's.
NOT_OF_DISTILLATION = ("equal_rewards", "entropy_collapse")


class Diagnosis:
    """Applies every rule to each step; each warning is reported once."""

    def __init__(self, reported: Iterable[str] = ()) -> None:
        """`reported` are the names of warnings that a resumed run has reported before."""
        self._reported = set(reported)
        self._history = History()
        self._steps = 0

    def once(self, alert: Alert) -> list[Alert]:
        """Returns the warning, found outside of the rules, as a list; [] if it was reported before."""
        if alert.name in self._reported:
            return []
        self._reported.add(alert.name)
        return [alert]

    def recall(self, metrics: Mapping[str, float | None]) -> None:
        """Adds a step from before a resume without warnings; its memory belonged to another process."""
        self._history.add({name: value for name, value in metrics.items() if name != MEMORY})

    def feed(self, step: int, metrics: Mapping[str, float | None]) -> list[Alert]:
        """Adds a step and returns its new warnings."""
        self._steps += 1
        warmed_up = self._steps > WARM_UP_STEPS
        self._history.add({name: value for name, value in metrics.items() if warmed_up or name != MEMORY})
        alerts = []
        for name, (rule, remedy) in RULES.items():
            if name not in self._reported and (finding := rule(self._history)) is not None:
                alerts += self.once(Alert(step, name, finding, remedy))
        return alerts


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
    """Compares a metric's size with its healthy range; None without a range. Non-finite values are bad.

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
    """Returns the verdicts on a step's metrics by name; `rewards` are those of recent steps, this one's last.

    A reward without a clear trend gets no verdict: it may be noise or a learned task.
    """
    verdict_of = {name: v for name, value in metrics.items() if (v := verdict(name, value)) is not None}
    direction = trend(rewards[-TREND_STEPS:])
    if direction is not None and REWARD in metrics:
        verdict_of[REWARD] = "good" if direction == "rising" else "bad"
    return verdict_of
