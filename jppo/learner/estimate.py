"""From scores to advantages: token rewards, the estimator, whitening over the whole batch."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jppo.algorithms import masked
from jppo.learner import batch
from jppo.structs import Array, Reward, Rows, Scored, Trajectory


@dataclasses.dataclass(frozen=True)
class Estimator:
    """One of `algorithm.adv_estimator`: what it computes, and what must be there for it."""

    # (token reward, value or None, outcome [B], rows) -> advantage and returns [R, T]
    tokens: Callable[[Array, Any, Array, Rows], tuple[Array, Array]]
    # (score, length, group) [B] -> the outcome [B] that `tokens` is given; None: the greedy responses' scores
    sequences: Callable[[Array, Array, Array], Array] | None = None
    whiten: bool = False
    critic: bool = False
    greedy: bool = False  # a greedy response is drawn and graded for every prompt


def spread(reward: Array, value: Array | None, outcome: Array, rows: Rows) -> tuple[Array, Array]:
    """The `tokens` of an estimator by sequence: each token has its sequence's advantage, which is its return too."""
    advantage = masked.spread(outcome, rows.sequence, rows.mask)
    return advantage, advantage


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What is known of a batch's trajectories once they are graded; all [B]."""

    score: np.ndarray  # f32, NaN where the grader failed
    group: np.ndarray  # i32, equal for the samples of one prompt
    greedy: np.ndarray | None  # f32, the score of the prompt's greedy response


def groups(failed: np.ndarray, n: int) -> np.ndarray:  # [B] bool -> [B] i32
    """Which samples are compared: `n` in turn are of one prompt; one whose grader failed is alone.

    A group's number is the index of its first member that has a score.
    """
    index = np.arange(len(failed)).reshape(-1, n)
    first = np.where(failed.reshape(-1, n), len(failed), index).min(1, keepdims=True)
    return np.where(failed, index.reshape(-1), np.repeat(first, n)).astype(np.int32)


def outcomes(
    rewards: list[Reward], baseline: list[Reward] | None, *, n: int, compared: bool
) -> tuple[Outcome, np.ndarray]:
    """What the estimator is told of a batch, and which samples can be learned from [B] bool.

    A sample can't be whose grader failed, nor one that has nothing to be measured by: its prompt's greedy response was
    not graded, or, where samples are `compared`, it is the only one of its prompt that was.
    """
    failed = np.isnan([r.score for r in rewards])
    group = groups(failed, n)
    best = None
    usable = ~failed
    if baseline is not None:
        best = np.repeat(np.array([r.score for r in baseline], np.float32), n)
        usable &= ~np.isnan(best)
        best = np.nan_to_num(best)
    if compared:
        usable &= np.bincount(group, minlength=len(group))[group] > 1
    score = np.array([r.score for r in rewards], np.float32)
    return Outcome(score=score, group=group, greedy=best), usable


def trainable(trajectory: Trajectory, usable: bool) -> Trajectory:
    """The trajectory as it is, or one that nothing is learned from."""
    return trajectory if usable else dataclasses.replace(trajectory, sampled=np.zeros_like(trajectory.sampled))


def make_reward(sequences: int) -> Callable[..., tuple[Array, dict[str, Array]]]:
    """(rows, scores [B], KL penalty or None, its coefficient) -> token rewards [R, T], and sums by sequence [B]."""

    def reward(rows: Rows, score: Array, penalty: Array | None, kl_coef: Array) -> tuple[Array, dict[str, Array]]:
        last = masked.last_of_sequence(rows.mask, rows.segment)
        out = masked.spread(score, rows.sequence, last)
        penalty = jnp.zeros_like(out) if penalty is None else penalty
        out = jnp.where(rows.mask, out - kl_coef * penalty, 0.0)
        ones = jnp.ones_like(out)
        return out, {
            "length": masked.collect(ones, rows.sequence, rows.mask, sequences=sequences),
            "kl": masked.collect(penalty, rows.sequence, rows.mask, sequences=sequences),
        }

    return reward


def make_tokens(estimator: Estimator) -> Callable[..., dict[str, Array]]:
    """(rows, token reward, value or None, outcome [B]) -> advantage, returns, and the moments of what is reported."""

    def tokens(rows: Rows, reward: Array, value: Array | None, outcome: Array) -> dict[str, Array]:
        advantage, returns = estimator.tokens(reward, value, outcome, rows)
        out = {"advantage": advantage, "returns": returns, "advantage_moments": masked.moments(advantage, rows.mask)}
        if value is not None:
            out["return_moments"] = masked.moments(returns, rows.mask)
            out["value_moments"] = masked.moments(value, rows.mask)
            out["error_moments"] = masked.moments(returns - value, rows.mask)
        return out

    return tokens


def finish(rows: Rows, advantage: Array, mean: Array, var: Array, *, whiten: bool) -> tuple[Array, dict[str, Array]]:
    """The advantage as the loss sees it, and its sum and extremes."""
    out = masked.whiten(advantage, rows.mask, mean=mean, var=var) if whiten else advantage
    return out, {
        "sum": masked.masked_sum(out, rows.mask),
        "max": jnp.max(jnp.where(rows.mask, out, -jnp.inf)),
        "min": jnp.min(jnp.where(rows.mask, out, jnp.inf)),
    }


def advantages(
    passes: Any, scored: Sequence[Scored], penalty: Sequence[Array | None], outcome: Outcome, kl_coef: Array
) -> tuple[list[Scored], dict[str, float]]:
    """Places the scores, takes off the KL, estimates and whitens: the rows with advantages and returns, and metrics."""
    rows = [one.rows for one in scored]
    graded = ~np.isnan(outcome.score)
    score = np.where(graded, outcome.score, 0.0).astype(np.float32)
    rewards = batch.each(lambda r, p: passes.reward(r, score, p, kl_coef), rows, penalty)
    sums = jax.device_get([found for _, found in rewards])
    length, kl = (np.sum([one[key] for one in sums], axis=0) for key in ("length", "kl"))
    with np.errstate(over="ignore", invalid="ignore"):  # a KL that overflows is found by the update, which is skipped
        total = (score - float(kl_coef) * kl).astype(np.float32)
    whole = outcome.greedy
    if passes.sequences is not None:
        whole = passes.sequences(total, length.astype(np.float32), outcome.group)
    elif whole is None:
        whole = np.zeros_like(score)
    raw = batch.each(lambda one, reward: passes.tokens(one.rows, reward[0], one.value, whole), scored, rewards)
    found = jax.device_get([{k: v for k, v in one.items() if k.endswith("moments")} for one in raw])
    moments = {name: masked.combine([one[name] for one in found]) for name in found[0]}
    _, mean, var = (np.float32(x) for x in moments["advantage_moments"])
    final = batch.each(lambda r, one: passes.finish(r, one["advantage"], mean, var), rows, raw)
    out = [
        dataclasses.replace(one, advantage=advantage, returns=None if one.value is None else parts["returns"])
        for one, parts, (advantage, _) in zip(scored, raw, final, strict=True)
    ]
    return out, _metrics(jax.device_get([stats for _, stats in final]), moments, total[graded], kl, length)


def _metrics(
    stats: list[dict[str, np.ndarray]], moments: dict[str, tuple[float, float, float]],
    total: np.ndarray, kl: np.ndarray, length: np.ndarray,
) -> dict[str, float]:  # fmt: skip
    tokens = max(moments["advantage_moments"][0], 1.0)
    kept = length > 0
    out = {
        "critic/rewards/mean": float(total.mean()),
        "critic/rewards/max": float(total.max()),
        "critic/rewards/min": float(total.min()),
        "critic/advantages/mean": float(sum(one["sum"] for one in stats)) / tokens,
        "critic/advantages/max": float(max(one["max"] for one in stats)) if kept.any() else 0.0,
        "critic/advantages/min": float(min(one["min"] for one in stats)) if kept.any() else 0.0,
        "actor/reward_kl_penalty": float(np.mean(kl[kept] / length[kept])) if kept.any() else 0.0,
        "actor/reward_kl_penalty_seq": float(np.mean(kl[kept])) if kept.any() else 0.0,
    }
    if "value_moments" in moments:
        out["critic/returns/mean"] = moments["return_moments"][1]
        out["critic/values/mean"] = moments["value_moments"][1]
        out["critic/vf_explained_var"] = 1.0 - moments["error_moments"][2] / (moments["return_moments"][2] + 1e-5)
    return out
