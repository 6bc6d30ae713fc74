"""Checks that rollout engine and trainer have the same policy, by the log-probs of the same tokens."""

import dataclasses
import functools
import heapq
import math
from collections.abc import Sequence

import numpy as np

from jppo import settings
from jppo.distributed.hosts import ALONE, Hosts
from jppo.learner import batch, ppo
from jppo.learner.ppo import StepLearner
from jppo.models import placing
from jppo.rollout.inprocess import InprocessSampler, PolicySampler
from jppo.rollout.protocol import RolloutError, Sampler
from jppo.run.inputs import Inputs
from jppo.runlog import trajectories
from jppo.runlog.checkpoint import NonFinite
from jppo.runlog.diagnosis import Alert
from jppo.samples.make import step_sampling
from jppo.settings import Loop, Settings
from jppo.types import Array, Batch, Prompt, Reward, Sampling, TrainState, Trajectory

KL = "rollout_corr/kl"
PROBES = 16  # responses of a server that check a publish, to as many prompts
# In the first round, where a row is for samples of one prompt: half as many prompts, this many responses each.
COPIES = 4
# Tokens of each response, part of the bounds; the second round is where the first fails.
PROBE_ROUNDS = ((4, 0.5), (64, 1.0))

# Nats per token by dtype, of the quantile HIGH; MEAN of it bounds the mean. Right engines had at most 45% of both: in
# float32 1.3e-4 of any token (docs/rollout.md, families), in bfloat16 0.117 of the quantile (huggingface/trl#6789) and
# 0.044 of the mean (docs/rollout.md, routing replay). tests/agreements.py has what wrong weights have. Quantised
# ones had 0.58 and 0.16 (docs/rollout.md, the check). SmolLM2 at temperature 1 had more: 30% of both in float16, and
# 67% of the mean with an engine in bfloat16 and a trainer in float32 (docs/rollout.md, dtypes).
TOLERANCE = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.6, "quantized": 1.5}
HIGH, MEAN = 0.95, 0.25
CAP = 10.0  # mean bounds that a token counts for in the mean: one of thousands is far off where experts are nearly tied


@dataclasses.dataclass(frozen=True)
class MismatchLimits:
    """Bounds of a right engine's mismatch, nats per token."""

    mean: float
    high: float

    @classmethod
    def of(cls, tolerance: float) -> "MismatchLimits":
        """Makes the bounds of a `rollout.logp_tolerance`."""
        return cls(MEAN * tolerance, tolerance)

    def __str__(self) -> str:
        return f"rollout.logp_tolerance allows {self.mean:.3g} and {self.high:.3g}"


@dataclasses.dataclass(frozen=True)
class LogpGap:
    """|trainer's log-prob - engine's| of tokens, nats."""

    differences: np.ndarray  # [tokens] f32

    @property
    def mean(self) -> float:
        return float(self.differences.mean())

    @property
    def high(self) -> float:
        return float(np.quantile(self.differences, HIGH))

    @property
    def largest(self) -> float:
        """The largest: logged, not judged."""
        return float(self.differences.max())

    def within(self, bound: MismatchLimits, share: float = 1.0) -> bool:
        """Whether mean and quantile are within a share of the bounds; False if any difference is non-finite."""
        mean = float(np.minimum(self.differences, CAP * bound.mean).mean())
        return math.isfinite(self.largest) and mean <= share * bound.mean and self.high <= share * bound.high

    def __str__(self) -> str:
        text = f"{self.mean:.2g} nats per token on average and {self.high:.2g} at the {HIGH:.0%} quantile"
        return f"{text} (largest {self.largest:.2g}, {self.differences.size} tokens)"


def limits(c: Loop) -> MismatchLimits:
    """Returns the bounds: `rollout.logp_tolerance`, or by the dtypes of trainer and engine."""
    if c.rollout.logp_tolerance >= 0:
        return MismatchLimits.of(c.rollout.logp_tolerance)
    if c.rollout.quantization != "none":
        return MismatchLimits.of(TOLERANCE["quantized"])
    return MismatchLimits.of(max(TOLERANCE[dtype] for dtype in (c.rollout.dtype, c.model.compute_dtype)))


def describe_mismatch(gap: LogpGap, bound: MismatchLimits) -> str:
    """Returns the text of an error about a mismatch beyond the bounds."""
    return (
        f"the log-probs of engine and trainer differ by {gap}; {bound}: they do not have the same policy; compare"
        " rollout.dtype and model.compute_dtype, or raise rollout.logp_tolerance if rounding explains the difference"
    )


class Mismatch(RolloutError):
    """Samples that the policy of their version label did not generate; the trainer must not learn from them."""


def agree(
    c: Settings,
    inputs: Inputs,
    learner: StepLearner,
    now: TrainState,
    sampler: Sampler,
    version: int,
    hosts: Hosts = ALONE,
) -> str:
    """Samples a few responses, compares engine's and trainer's log-probs, and returns a line on their mismatch.

    Raises RolloutError where they have different policies. Each host uses its own engine.
    """
    count = max(1, min(16, c.actor.ppo_mini_batch_size, len(inputs.train.prompts)) // hosts.count)
    prompts, sampling = _longest_prompts(inputs, count), _probe_sampling(c, version)
    probes = trajectories.of_all(hosts, hosts.together(lambda: sampler.generate(prompts, sampling, version=version)))
    exchanges = [t.exchange for t in probes if t.exchange is not None]
    faults = [exchange.fault.partition("\n")[0] for exchange in exchanges if exchange.fault is not None]
    if not any(t.sampled.any() for t in probes):
        why = faults[0] if faults else "no token was sampled"
        raise RolloutError(
            f"none of the {len(probes)} first conversations has a turn of the policy; the first: {why};"
            " python -m jppo.rewards.check tries them, and shows all that a program wrote"
        )
    gap, bound = LogpGap(np.concatenate(_logprob_gaps(learner, now, probes))), limits(c)
    if not gap.within(bound):
        raise RolloutError(describe_mismatch(gap, bound))
    faults_note = f"; {len(faults)} of {len(probes)} conversations failed, the first: {faults[0]}" if faults else ""
    return f"engine and trainer agree: their log-probs differ by {gap}{faults_note}"


def require_published(
    c: Settings, inputs: Inputs, learner: StepLearner, now: TrainState, sampler: PolicySampler, hosts: Hosts = ALONE
) -> None:
    """Raises Mismatch where a server does not sample from the weights that were just published.

    Compares the log-probs of a few tokens per server. Each host asks its own servers.
    """
    if isinstance(sampler, InprocessSampler):  # samples from the trainer's arrays
        return
    version, prompts, bound = int(now.step), _longest_prompts(inputs, PROBES), limits(c)
    count, copies = (PROBES // 2, COPIES) if learner.plan.prices is not None else (PROBES, 1)
    mismatched: dict[str, LogpGap] = {}
    for tokens, share in PROBE_ROUNDS:
        sampling = dataclasses.replace(
            _probe_sampling(c, version), n=copies, max_tokens=min(tokens, c.data.max_response_length)
        )
        probes = trajectories.of_all(hosts, hosts.together(functools.partial(sampler.probe, prompts[:count], sampling)))
        count, copies = PROBES, 1
        by_server: dict[str, list[np.ndarray]] = {}
        for trajectory, gaps in zip(probes, _logprob_gaps(learner, now, probes), strict=True):
            by_server.setdefault(trajectory.server, []).append(gaps)
        measured = {server: LogpGap(np.concatenate(gaps)) for server, gaps in by_server.items()}
        # Non-finite log-probs are the trainer's: it diverged, and its next step or checkpoint says so.
        finite = {server: gap for server, gap in measured.items() if math.isfinite(gap.largest)}
        mismatched = {server: gap for server, gap in finite.items() if not gap.within(bound, share)}
        if not mismatched:
            return
    server, gap = next(iter(mismatched.items()))
    raise Mismatch(
        f"after the publish of version {version}, the log-probs of {server or 'the engine'} differ from the trainer's"
        f" by {gap}; {bound}: it does not sample from the published weights, and nothing is learned from its"
        " samples; look for a warning in its log, and give the same command again, or raise rollout.logp_tolerance if"
        " rounding explains the difference"
    )


def _longest_prompts(inputs: Inputs, count: int) -> list[Prompt]:
    """Returns the `count` longest prompts: only whole blocks of tokens are cached, and a stale cache must show."""
    return heapq.nlargest(count, inputs.train.prompts, key=lambda p: len(p.ids))


def _probe_sampling(c: Loop, version: int) -> Sampling:
    """Returns the sampling without filters: they renormalise the engine's log-probs, but not the trainer's."""
    return dataclasses.replace(step_sampling(c, version), n=1, top_p=1.0, top_k=-1, min_p=0.0, kept=0)


def _logprob_gaps(learner: StepLearner, now: TrainState, responses: Sequence[Trajectory]) -> list[np.ndarray]:
    """Returns |trainer's log-prob - engine's| of the sampled tokens of each response."""
    rewards, group = [Reward(math.nan, {}, None) for _ in responses], np.zeros(len(responses), np.int32)
    data = batch.flatten(responses, rewards, group, shape=(len(responses), learner.shape[1]))
    micros = batch.pack_micros(data, responses, plan=learner.plan, mesh=learner.mesh)
    recipe = dataclasses.replace(learner.recipe, bypass=False)
    data = ppo.with_old_logprob(learner.passes, recipe, data, micros, learner.policy(now))
    gap = np.abs(np.asarray(data["old_logprob"]) - data.rollout_logprob)
    return [row[mask] for row, mask in zip(gap, np.asarray(data.mask), strict=True)]


def sampling_warnings(c: Settings, step: int = 0) -> list[Alert]:
    """Returns warnings on the sampling settings, before the run does anything.

    A filtered distribution is renormalised at every token; the trainer's log-probs are of the full one without mask
    replay. Importance weights correct exactly this.
    """
    alerts = []
    cut = ", ".join(f"rollout.{name}={value:g}" for name, value in settings.cuts(c.rollout).items())
    weighted = c.algorithm.old_logprob == "correction" and c.algorithm.rollout_is != "none"
    if cut and not (c.rollout.mask_replay or weighted):
        message = f"{cut}: responses are drawn from a part of the policy, and learned from as if from the whole of it"
        remedy = "set rollout.mask_replay=True, or algorithm.old_logprob=correction with algorithm.rollout_is=token, or"
        alerts.append(Alert(step, "sampling_cut", message, f"{remedy} leave the cut to rollout.val_kwargs"))
    # In process, only the trainer can change the weights.
    if c.algorithm.old_logprob == "bypass" and c.rollout.max_kl_jump and c.rollout.name != "inprocess":
        message = (
            f"rollout.max_kl_jump={c.rollout.max_kl_jump:g}: servers whose weights are changed in mid-run go unnoticed,"
        )
        remedy = "set algorithm.old_logprob=decoupled, or rollout.max_kl_jump=0 where nobody else reaches the servers"
        why = "as algorithm.old_logprob=bypass computes no log-probs to compare theirs with"
        alerts.append(Alert(step, "mismatch_unchecked", f"{message} {why}", remedy))
    return alerts


class Match:
    """A check of each step's log-prob mismatch against the step before: a jump means another policy sampled."""

    def __init__(self, c: Settings):
        self._limit: float = c.rollout.max_kl_jump
        # `agree` has just measured a mismatch near 0 without filters. If the trainer does not replay them, the first
        # step sets the baseline.
        self._former_kl = None if settings.cuts(c.rollout) and not c.rollout.mask_replay else 0.0
        self._last_rows: batch.Micro | None = None

    def require(
        self,
        metrics: dict[str, float],
        data: Batch,
        micros: Sequence[batch.Micro],
        trajectories: Sequence[Trajectory],
    ) -> None:
        """Raises Mismatch where `rollout_corr/kl` rose too far since the step before; `micros` are the step's rows."""
        self._last_rows = micros[0] if micros else None
        kl = metrics.get(KL)
        if kl is None:  # bypass: the engine's log-probs are used as they are
            return
        former_kl, self._former_kl = self._former_kl, kl if math.isfinite(kl) else self._former_kl
        if not self._limit or former_kl is None or not kl - former_kl > self._limit:
            return
        server, versions, worst = _find_worst_server(data, trajectories)
        raise Mismatch(
            f"{KL} rose from {former_kl:.3g} to {kl:.3g} nats a token, more than rollout.max_kl_jump={self._limit:g}:"
            f" {server or 'the engine'} did not sample from version {versions} of the weights ({worst:.3g} nats off);"
            " nothing is learned from this step. Find out who has changed its weights and give the same command again,"
            " or raise the limit if the jump is wanted"
        )

    def require_finite(self, learner: StepLearner, now: TrainState) -> None:
        """Raises NonFinite where the models compute NaN or infinities for rows of the last step."""
        if (last_rows := self._last_rows) is None:
            return
        rows, passes, policy = last_rows.device, learner.passes, placing.to_device(learner.policy(now))

        def require_array(about: str, array: Array) -> None:
            if not np.isfinite(placing.fetch(array)[last_rows.host.mask]).all():
                raise NonFinite(f"the {about} are not finite numbers")

        require_array("log-probs of the policy", passes.logprob(policy, rows)[0])
        if passes.value is not None:
            require_array("values of the critic", passes.value(placing.to_device(learner.value(now)), rows))


def _find_worst_server(data: Batch, trajectories: Sequence[Trajectory]) -> tuple[str, str, float]:
    """Returns the server with the largest mismatch, its version labels, and the mismatch per token."""
    count = len(trajectories)
    mask, gap = (
        np.asarray(data.mask)[:count],
        np.asarray(data.rollout_logprob - np.asarray(data["old_logprob"]))[:count],
    )
    mismatches = []
    for server in sorted({t.server for t in trajectories if not t.given}):
        of_server = mask & np.array([t.server == server and not t.given for t in trajectories])[:, None]
        mismatches.append((float(gap[of_server].mean()) if of_server.any() else -math.inf, server))
    largest, server = max(mismatches)
    versions = {int(v) for t in trajectories if t.server == server and not t.given for v in t.version[t.sampled]}
    return server, ", ".join(map(str, sorted(versions))), largest
