"""What goes wrong in a run while it runs: named faults, each told once, each with what to do.

Fed with every step's metrics, host floats. A fault is seen over several steps, because one step is one batch: its
sampling noise alone moves every mean. How many, and how far is too far, are the constants below; medians are
taken where a single odd step must not count, and what differs from model to model is compared with the run's own
beginning. Only a stage that stalls is told at its first step: the stall is the event.
"""

import collections
import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Mapping

from jppo.io.health import RANGES
from jppo.io.timers import STAGES

FIRST_STEPS = 5  # the run's beginning, that later steps are compared with
LAST_STEPS = 5  # whose median, or sum, says how things are
IN_A_ROW = 3  # steps for what no healthy batch does even once
KEPT_STEPS = 50  # the longest memory of a rule

ERROR_SHARE = 0.01  # of the responses of the last steps, above what a judge's time-outs come to
ENTROPY_LEFT = 0.1  # share of the first steps' entropy
VALUE_STEPS = 20  # a critic's time to learn something; half of them are compared with the beginning
TRUNCATED_SHARE = 0.95  # of responses; the odd one ends by chance
GAP_GROWTH = 5.0  # times the first steps' gap
GAP_FLOOR = 1e-3  # nats a token, the default of rollout.logp_tolerance: below is rounding
WARM_UP_STEPS = 10  # in which caches and buffers grow as they should
MEMORY_STEPS = 33  # whose thirds must each lie above the one before: a jump to a new plateau is no leak
MEMORY_GROWTH_GB = 1.0
MEMORY_GROWTH_SHARE = 0.1
SLOW_TIMES = 10.0  # times the stage's median
SLOW_SECONDS = 1.0  # and that long at least: a stage of milliseconds waits ten times as long for a busy core
SLOW_AFTER = 5  # times that the stage was seen before

# Of a step, from its metrics.
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


@dataclasses.dataclass(frozen=True)
class Finding:
    """A fault that the run shows."""

    step: int
    name: str
    found: str
    remedy: str


class Past:
    """What the rules can ask of the steps so far, the newest included; what is no finite number was never there."""

    def __init__(self) -> None:
        self.now: Mapping[str, float] = {}
        self._first: dict[str, list[float]] = collections.defaultdict(list)
        self._last: dict[str, collections.deque[float]] = collections.defaultdict(
            lambda: collections.deque(maxlen=KEPT_STEPS)
        )
        self._count: collections.Counter[str] = collections.Counter()

    def add(self, metrics: Mapping[str, float | None]) -> None:
        """The next step."""
        self.now = _observed(metrics)
        for name, value in self.now.items():
            self._count[name] += 1
            self._last[name].append(value)
            if len(self._first[name]) < FIRST_STEPS:
                self._first[name].append(value)

    def count(self, name: str) -> int:
        """Steps that had it."""
        return self._count[name]

    def first(self, name: str) -> float:
        """The median of the first steps that had it."""
        return statistics.median(self._first[name])

    def last(self, name: str, n: int = LAST_STEPS) -> list[float]:
        """Its last n values, or fewer."""
        return list(self._last[name])[-n:]

    def recent(self, name: str) -> float | None:
        """The median of its last steps; None where there are too few of them, or this step has none."""
        values = self.last(name)
        return statistics.median(values) if len(values) == LAST_STEPS and name in self.now else None


def _observed(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """The numbers of a step that rules read, and those that follow from them."""
    out = {name: value for name in READ if (value := metrics.get(name)) is not None and math.isfinite(value)}
    for spread, (most, least) in SPREADS.items():
        if most in out and least in out:
            out[spread] = out[most] - out[least]
    tokens = out.get("prompt_length/mean", 0.0) + out.get("response_length/mean", 0.0)
    if tokens > 0 and "perf/total_num_tokens" in out:
        out[RESPONSES] = out["perf/total_num_tokens"] / tokens
    return out


READ = (
    *(name for pair in SPREADS.values() for name in pair),
    "critic/score/mean",
    ERRORS,
    SUSPICIOUS,
    "perf/total_num_tokens",
    "prompt_length/mean",
    "response_length/mean",
    "response_length/clip_ratio",
    "actor/ppo_kl",
    "actor/ratio_mean",
    "actor/entropy",
    "critic/vf_loss",
    "critic/vf_explained_var",
    "rollout/logp_gap_mean",
    MEMORY,
    *TIMED,
)


def equal_rewards(past: Past) -> str | None:
    """Every score of a step the same, or every advantage, as where the samples of each prompt score alike."""
    for name, what in ((SCORE_SPREAD, "score"), (ADVANTAGE_SPREAD, "advantage")):
        values = past.last(name, IN_A_ROW)
        if name in past.now and len(values) == IN_A_ROW and max(values) <= 1e-6:
            mean = f", {past.now['critic/score/mean']:g}" if what == "score" and "critic/score/mean" in past.now else ""
            return f"all responses of {IN_A_ROW} steps in a row have the same {what}{mean}: there is no gradient"
    return None


def reward_errors(past: Past) -> str | None:
    """Responses that could not be graded: too many of the last steps', or some in each of them."""
    failed, asked = past.last(ERRORS), past.last(RESPONSES)
    if not past.now.get(ERRORS) or not asked:
        return None
    always = len(failed) == LAST_STEPS and min(failed) > 0
    if not always and sum(failed) < ERROR_SHARE * sum(asked):
        return None
    return f"{sum(failed):.0f} of the {sum(asked):.0f} responses of the last {len(failed)} step(s) could not be graded"


def suspicious_programs(past: Past) -> str | None:
    """Graded programs that reach into the interpreter that they run in."""
    count = past.now.get(SUSPICIOUS)
    return f"{count:.0f} programs of this step reach into their interpreter" if count else None


def kl_out_of_range(past: Past) -> str | None:
    """The policy moves too far in a step. That it hardly moves is no fault: so it does at the end of a schedule."""
    kl, high = past.recent("actor/ppo_kl"), RANGES["actor/ppo_kl"].high
    if kl is None or abs(kl) <= high:
        return None
    return f"actor/ppo_kl was {kl:.2g} (median of {LAST_STEPS} steps), {high:g} is much"


def ratio_out_of_range(past: Past) -> str | None:
    """The mean ratio of new to old probability is 1 in expectation, unless the samples are not the old policy's."""
    ratio, allowed = past.recent("actor/ratio_mean"), RANGES["actor/ratio_mean"]
    if ratio is None or allowed.low <= ratio <= allowed.high:
        return None
    return (
        f"actor/ratio_mean was {ratio:.3g} (median of {LAST_STEPS} steps); it should lie between {allowed.low:g} and"
        f" {allowed.high:g}"
    )


def entropy_collapse(past: Past) -> str | None:
    """The policy has become sure of every token, so that its samples no longer differ."""
    entropy = past.recent("actor/entropy")
    if entropy is None or entropy >= ENTROPY_LEFT * past.first("actor/entropy"):
        return None
    return f"actor/entropy fell from {past.first('actor/entropy'):.3g} to {entropy:.3g}"


def value_loss_not_falling(past: Past) -> str | None:
    """The critic is no better than at the beginning, and explains nothing.

    The loss alone does not say so: it rises with the spread of the rewards, also where the critic follows them.
    """
    name, fit = "critic/vf_loss", "critic/vf_explained_var"
    if name not in past.now or past.count(name) < VALUE_STEPS:
        return None
    loss, explained = (statistics.median(past.last(n, VALUE_STEPS // 2) or [math.inf]) for n in (name, fit))
    if loss < past.first(name) or explained > 0:
        return None
    return (
        f"critic/vf_loss is {loss:.3g} after {past.count(name)} steps, {past.first(name):.3g} at the beginning, and"
        f" critic/vf_explained_var {explained:.2g}"
    )


def all_truncated(past: Past) -> str | None:
    """No response comes to its end."""
    shares = past.last("response_length/clip_ratio", IN_A_ROW)
    if len(shares) < IN_A_ROW or min(shares) < TRUNCATED_SHARE:
        return None
    return f"{min(shares):.0%} or more of the responses of {IN_A_ROW} steps in a row were cut by their length"


def sampler_gap_growing(past: Past) -> str | None:
    """Sampler and trainer drift apart, on the same weights: no longer rounding alone."""
    name = "rollout/logp_gap_mean"
    gap = past.recent(name)
    if gap is None or gap < GAP_FLOOR or gap < GAP_GROWTH * past.first(name):
        return None
    return f"rollout/logp_gap_mean grew from {past.first(name):.2g} to {gap:.2g}"


def host_memory_growing(past: Past) -> str | None:
    """Memory that grows on and on, after the warm-up."""
    if past.count(MEMORY) < FIRST_STEPS + MEMORY_STEPS or MEMORY not in past.now:
        return None
    values, third = past.last(MEMORY, MEMORY_STEPS), MEMORY_STEPS // 3
    a, b, c = (statistics.median(values[i : i + third]) for i in range(0, MEMORY_STEPS, third))
    grown = c - past.first(MEMORY)
    steady = min(b - a, c - b) > 0.25 * (c - a) > 0
    if not steady or grown < max(MEMORY_GROWTH_GB, MEMORY_GROWTH_SHARE * past.first(MEMORY)):
        return None
    return f"the host's memory grew from {past.first(MEMORY):.1f} to {c:.1f} GB since the warm-up, and still does"


def slow_stage(past: Past) -> str | None:
    """A stage that takes many times its median."""
    for name in TIMED:
        before = past.last(name, KEPT_STEPS)[:-1]
        if name not in past.now or len(before) < SLOW_AFTER:
            continue
        usual, seconds = statistics.median(before), past.now[name]
        if seconds >= max(SLOW_SECONDS, SLOW_TIMES * usual):
            return f"{name} was {seconds:.1f} s, {usual:.2g} s as a rule"
    return None


# The rules, by the names of what they find, each with what to do.
RULES: Mapping[str, tuple[Callable[[Past], str | None], str]] = {
    "equal_rewards": (
        equal_rewards,
        "if all are right in samples/ the task is learned, else try python -m jppo.rewards.check, or raise rollout.n or"
        " rollout.temperature",
    ),
    "reward_errors": (
        reward_errors,
        "mend what the field error in samples/ says, or raise reward.timeout_s, reward.memory_bytes or"
        " reward.judge.retries",
    ),
    "suspicious_programs": (
        suspicious_programs,
        "read them in samples/; write asserts as calls compared with values (docs/security.md), or switch the rule off"
        " by reward.weights",
    ),
    "kl_out_of_range": (
        kl_out_of_range,
        "lower actor.lr, actor.ppo_epochs or actor.clip_ratio, or raise actor.ppo_mini_batch_size",
    ),
    "ratio_out_of_range": (
        ratio_out_of_range,
        "lower actor.lr or actor.ppo_epochs; in place of algorithm.old_logprob=bypass take correction",
    ),
    "entropy_collapse": (
        entropy_collapse,
        "raise actor.entropy_coeff or rollout.temperature, lower actor.lr, or set actor.use_kl_loss=True",
    ),
    "value_loss_not_falling": (
        value_loss_not_falling,
        "raise critic.lr, critic.ppo_epochs or critic.cliprange_value, or set trainer.critic_warmup",
    ),
    "all_truncated": (
        all_truncated,
        "raise data.max_response_length; if answers in samples/ end and go on, teach the model its end token"
        " (jppo.sft)",
    ),
    "sampler_gap_growing": (
        sampler_gap_growing,
        "set rollout.dtype and model.compute_dtype alike, or algorithm.old_logprob=correction",
    ),
    "host_memory_growing": (
        host_memory_growing,
        "see what reward.function or a grader keeps; with trainer.save_freq a run that is ended goes on by the same"
        " command",
    ),
    "slow_stage": (
        slow_stage,
        "see what else ran on the machine; for gen see server-0.log, for reward reward.timeout_s, for save the disk",
    ),
}


class Diagnosis:
    """Looks at each step with every rule; a name that was told is not told again."""

    def __init__(self, told: Iterable[str] = ()) -> None:
        """`told`: names that this run was warned of before it was resumed."""
        self._told = set(told)
        self._past = Past()
        self._steps = 0

    def once(self, finding: Finding) -> list[Finding]:
        """What somebody else has found, unless it was told before."""
        if finding.name in self._told:
            return []
        self._told.add(finding.name)
        return [finding]

    def recall(self, metrics: Mapping[str, float | None]) -> None:
        """A step from before the resume: remembered, nothing is said. Memory was another process's."""
        self._past.add({name: value for name, value in metrics.items() if name != MEMORY})

    def feed(self, step: int, metrics: Mapping[str, float | None]) -> list[Finding]:
        """What this step shows that was not told before."""
        self._steps += 1
        warm = self._steps > WARM_UP_STEPS
        self._past.add({name: value for name, value in metrics.items() if warm or name != MEMORY})
        out = []
        for name, (rule, remedy) in RULES.items():
            if name not in self._told and (found := rule(self._past)) is not None:
                out += self.once(Finding(step, name, found, remedy))
        return out
