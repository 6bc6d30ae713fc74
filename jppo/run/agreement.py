"""Checks that rollout engine and trainer have the same policy, by the log-probs of the same tokens."""

import dataclasses
import heapq
import math
from collections.abc import Sequence

import numpy as np

from jppo import settings
from jppo.distributed.hosts import ALONE, Hosts
from jppo.learner import batch, ppo
from jppo.learner.make import Learner
from jppo.models import placing
from jppo.rollout.inprocess import InprocessSampler
from jppo.rollout.make import Source, sampling
from jppo.rollout.protocol import RolloutError, Sampler
from jppo.run.inputs import Inputs
from jppo.runlog import trajectories
from jppo.runlog.checkpoint import NonFinite
from jppo.settings import Settings
from jppo.types import Array, Batch, Prompt, Reward, Sampling, TrainState, Trajectory

KL = "rollout_corr/kl"
PROBES, PROBE_TOKENS = 8, 4  # responses, and tokens of each, that check a publish
MEAN = 0.25  # of rollout.logp_tolerance, which bounds the largest mismatch: rounding alone has a far smaller mean


class Mismatch(RolloutError):
    """Samples that the policy of their version label did not generate; the trainer must not learn from them."""


def agree(
    c: Settings,
    inputs: Inputs,
    learner: Learner,
    now: TrainState,
    sampler: Sampler,
    version: int,
    hosts: Hosts = ALONE,
) -> str:
    """Returns a line on the log-prob mismatch; raises where engine and trainer have different policies.

    Each host asks its own engine.
    """
    count = max(1, min(16, c.actor.ppo_mini_batch_size, len(inputs.train.prompts)) // hosts.count)
    longest, some = _longest(inputs, count), _unfiltered(c, version)
    drawn = trajectories.of_all(hosts, hosts.together(lambda: sampler.generate(longest, some, version=version)))
    faults = [t.exchange.fault for t in drawn if t.exchange is not None and t.exchange.fault is not None]
    if not any(t.sampled.any() for t in drawn):
        why = faults[0] if faults else "no token was sampled"
        raise RolloutError(f"none of the {len(drawn)} first conversations has a turn of the policy; the first: {why}")
    gap = float(np.concatenate(_gaps(learner, now, drawn)).max())
    if not gap <= c.rollout.logp_tolerance:
        raise RolloutError(
            f"the log-probs of engine and trainer differ by up to {gap:.3g} on the same tokens, more than"
            f" rollout.logp_tolerance={c.rollout.logp_tolerance:g}: they do not have the same policy; compare"
            " rollout.dtype and model.compute_dtype, or raise the tolerance if bfloat16 explains the gap"
        )
    failed = f"; {len(faults)} of {len(drawn)} conversations failed, the first: {faults[0]}" if faults else ""
    tokens = sum(len(t.tokens) for t in drawn)
    return f"engine and trainer agree: largest log-prob mismatch {gap:.1e} on {tokens} tokens{failed}"


def require_published(
    c: Settings, inputs: Inputs, learner: Learner, now: TrainState, sampler: Source, hosts: Hosts = ALONE
) -> None:
    """Raises Mismatch where a server does not sample from the weights that were just published.

    Compares the log-probs of a few tokens per server. Each host asks its own servers.
    """
    if isinstance(sampler, InprocessSampler):  # samples from the trainer's arrays
        return
    version, longest = int(now.step), _longest(inputs, PROBES)
    some = dataclasses.replace(_unfiltered(c, version), max_tokens=min(PROBE_TOKENS, c.data.max_response_length))
    drawn = trajectories.of_all(hosts, hosts.together(lambda: sampler.probe(longest, some)))
    by_server: dict[str, list[np.ndarray]] = {}
    for trajectory, gap in zip(drawn, _gaps(learner, now, drawn), strict=True):
        by_server.setdefault(trajectory.server, []).append(gap)
    for server, gaps in by_server.items():
        mean, limit = float(np.concatenate(gaps).mean()), c.rollout.logp_tolerance
        # Non-finite log-probs are the trainer's: it diverged, and its next step or checkpoint says so.
        if math.isfinite(mean) and mean > MEAN * limit:
            raise Mismatch(
                f"after the publish of version {version}, the log-probs of {server or 'the engine'} differ from the"
                f" trainer's by {mean:.3g} nats a token, more than a quarter of rollout.logp_tolerance={limit:g}: it"
                " does not sample from the published weights, and nothing is learned from its samples; look for a"
                " warning in its log, and give the same command again, or raise the tolerance if rounding explains the"
                " difference"
            )


def _longest(inputs: Inputs, count: int) -> list[Prompt]:
    """Returns the longest prompts: only whole blocks of tokens are cached, and a stale cache must show."""
    return heapq.nlargest(count, inputs.train.prompts, key=lambda p: len(p.ids))


def _unfiltered(c: Settings, version: int) -> Sampling:
    """Returns the sampling without filters: they renormalise the engine's log-probs, but not the trainer's."""
    return dataclasses.replace(sampling(c, version), n=1, top_p=1.0, top_k=-1, min_p=0.0)


def _gaps(learner: Learner, now: TrainState, drawn: Sequence[Trajectory]) -> list[np.ndarray]:
    """Returns |trainer's log-prob - engine's| of the sampled tokens of each response."""
    rewards, group = [Reward(math.nan, {}, None) for _ in drawn], np.zeros(len(drawn), np.int32)
    data = batch.flatten(drawn, rewards, group, shape=(len(drawn), learner.shape[1]))
    micros = batch.micros(data, drawn, plan=learner.plan, mesh=learner.mesh)
    recipe = dataclasses.replace(learner.recipe, bypass=False)
    data = ppo.with_old_logprob(learner.passes, recipe, data, micros, learner.policy(now))
    gap = np.abs(np.asarray(data.old_logprob) - data.rollout_logprob)
    return [row[mask] for row, mask in zip(gap, np.asarray(data.mask), strict=True)]


class Match:
    """A check of each step's log-prob mismatch against the step before: a jump means another policy sampled."""

    def __init__(self, c: Settings):
        self._limit: float = c.rollout.max_kl_jump
        # `agree` has just measured a mismatch near 0 without filters. With filters, the first step sets the baseline.
        self._before = None if settings.cuts(c.rollout) else 0.0
        self._last: batch.Micro | None = None

    def require(
        self,
        metrics: dict[str, float],
        data: Batch,
        micros: Sequence[batch.Micro],
        trajectories: Sequence[Trajectory],
    ) -> None:
        """Raises Mismatch where `rollout_corr/kl` rose too far since the last step."""
        self._last = micros[0] if micros else None
        now = metrics.get(KL)
        if now is None:  # bypass: the engine's log-probs are used as they are
            return
        before, self._before = self._before, now if math.isfinite(now) else self._before
        if not self._limit or before is None or not now - before > self._limit:
            return
        server, versions, worst = _worst(data, trajectories)
        raise Mismatch(
            f"{KL} rose from {before:.3g} to {now:.3g} nats a token, more than rollout.max_kl_jump={self._limit:g}:"
            f" {server or 'the engine'} did not sample from version {versions} of the weights ({worst:.3g} nats off);"
            " nothing is learned from this step. Find out who has changed its weights and give the same command again,"
            " or raise the limit if the jump is wanted"
        )

    def require_finite(self, learner: Learner, now: TrainState) -> None:
        """Raises NonFinite where the models compute NaN or infinities for rows of the last step."""
        if (last := self._last) is None:
            return
        rows, passes, policy = last.device, learner.passes, placing.to_device(learner.policy(now))

        def require(about: str, array: Array) -> None:
            if not np.isfinite(placing.fetch(array)[last.host.mask]).all():
                raise NonFinite(f"the {about} are not finite numbers")

        require("log-probs of the policy", passes.logprob(policy, rows)[0])
        if passes.value is not None:
            require("values of the critic", passes.value(placing.to_device(learner.value(now)), rows))


def _worst(data: Batch, trajectories: Sequence[Trajectory]) -> tuple[str, str, float]:
    """Returns the server with the largest mismatch, its version labels, and the mismatch per token."""
    count = len(trajectories)
    mask, gap = np.asarray(data.mask)[:count], np.asarray(data.rollout_logprob - np.asarray(data.old_logprob))[:count]
    found = []
    for server in sorted({t.server for t in trajectories}):
        mine = mask & np.array([t.server == server for t in trajectories])[:, None]
        found.append((float(gap[mine].mean()) if mine.any() else -math.inf, server))
    worst, server = max(found)
    versions = {int(v) for t in trajectories if t.server == server for v in t.version[t.sampled]}
    return server, ", ".join(map(str, sorted(versions))), worst
