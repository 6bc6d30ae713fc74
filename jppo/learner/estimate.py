"""The stage between scoring and learning, on the flat batch [B, L]: mismatch, correction, KL, rewards, advantages."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jppo.algorithms import correction, kl, masked, values
from jppo.algorithms.correction import geometric
from jppo.algorithms.masked import FAR, masked_sum
from jppo.learner.algorithm import Algorithm
from jppo.learner.views import EpisodeView, TokenView, view
from jppo.types import Array, Batch


@dataclasses.dataclass(frozen=True)
class Correction:
    """The effect of `algorithm.old_logprob='correction'`: importance weights, rejection, or both."""

    level: str | None  # token or sequence; None: no weights
    lower: float | None
    upper: float
    normalize: bool
    rules: tuple[correction.Rule, ...]  # empty: no rejection


def mismatch(batch: Batch) -> dict[str, Array]:
    """Computes metrics of the trainer's log-probs minus the engine's, for the same tokens and weights."""
    mask = batch.sampled
    difference = jnp.where(mask, _log_ratio(batch), 0.0)
    gap, divergences = jnp.abs(difference), correction.divergences(difference, mask)
    return {
        "rollout/logp_gap_mean": masked_sum(gap, mask) / token_count(mask),
        "rollout/logp_gap_max": jnp.max(gap),
        "rollout/ratio_min": jnp.exp(jnp.maximum(jnp.min(difference), -FAR)),
        "rollout/ratio_max": jnp.exp(jnp.minimum(jnp.max(difference), FAR)),
        "rollout_corr/kl": divergences["kl"],
        "rollout_corr/k3_kl": divergences["k3_kl"],
        "rollout_corr/chi2_token": divergences["chi2_token"],
        "rollout_corr/chi2_seq": divergences["chi2_seq"],
    }


def correct_mismatch(settings: Correction, batch: Batch) -> tuple[Batch, dict[str, Array]]:
    """Returns the batch with weights and without rejected tokens, and metrics of both.

    Nobody sampled a given token: its weight is 1, and no rule rejects it.
    """
    log_ratio, mask = _log_ratio(batch), batch.sampled
    kept_mask = correction.keep(log_ratio, mask, rules=settings.rules)
    rejected = mask & ~kept_mask
    sequences = jnp.maximum(jnp.sum(jnp.any(mask, axis=1), dtype=jnp.float32), 1.0)
    metrics: dict[str, Array] = {
        "rollout_corr/rollout_rs_masked_fraction": jnp.sum(rejected, dtype=jnp.float32) / token_count(mask),
        "rollout_corr/rollout_rs_seq_masked_fraction": jnp.sum(jnp.any(rejected, axis=1)) / sequences,
    }
    weight = None
    if settings.level is not None:
        unbounded = correction.raw_weights(log_ratio, mask, level=settings.level)
        weight = correction.bound_weights(unbounded, lower=settings.lower, upper=settings.upper)
        spread = correction.importance(weight, mask)
        metrics |= {
            "rollout_corr/rollout_is_mean": spread["mean"],
            "rollout_corr/rollout_is_max": spread["max"],
            "rollout_corr/rollout_is_min": spread["min"],
            "rollout_corr/rollout_is_eff_sample_size": spread["eff_sample_size"],
        }
        if settings.normalize:
            mean = correction.mean_weight(weight, mask, level=settings.level)
            weight = correction.normalized_weights(weight, mean=mean)
    if "given" in batch.arrays:
        given_tokens = batch.mask & batch["given"][:, None]
        kept_mask, weight = kept_mask | given_tokens, None if weight is None else jnp.where(given_tokens, 1.0, weight)
    return dataclasses.replace(batch, mask=kept_mask).with_arrays(weight=weight), metrics


def make_bypass_correction(settings: Correction) -> Callable[..., tuple[Array, Array | None]]:
    """Makes the correction of bypass: (logp, rollout log-probs, mask, segment) [R, T] -> kept tokens, and weights.

    Both follow the current policy, have no gradient, and change from one mini-batch to the next.
    """

    def correct(logp: Array, rollout_logp: Array, mask: Array, segment: Array) -> tuple[Array, Array | None]:
        log_ratio = jax.lax.stop_gradient(jnp.where(mask, logp - rollout_logp, 0.0))
        kept_mask = correction.keep(log_ratio, mask, rules=settings.rules, segment=segment)
        if settings.level is None:
            return kept_mask, None
        unbounded = correction.raw_weights(log_ratio, mask, level=settings.level, segment=segment)
        return kept_mask, correction.bound_weights(unbounded, lower=settings.lower, upper=settings.upper)

    return correct


def _log_ratio(batch: Batch) -> Array:
    return batch["old_logprob"] - batch.rollout_logprob


def token_count(mask: Array) -> Array:  # [] f32
    """Counts the trained tokens, at least 1."""
    return jnp.maximum(jnp.sum(mask, dtype=jnp.float32), 1.0)


def make_advantages(
    algorithm: Algorithm, *, kl_penalty: kl.Kind | None, correction: Correction | None, bypass: bool,
    value_norm_decay: float | None = None,
) -> Callable[..., tuple[dict[str, Array], dict[str, Array]]]:  # fmt: skip
    """Makes (batch, KL coefficient, statistics of returns) -> the batch's `mask` and new arrays, and metrics.

    `bypass`: the engine's log-probs are the old ones, so that there is no mismatch. With `value_norm_decay`, values are
    outputs of the critic on the scale of the past returns, and the returns become its targets on their new scale.
    """
    by_sequence = any(term.by_sequence for term in algorithm.terms)

    def advantages(
        batch: Batch, kl_coef: Array, value_norm: Array | None = None
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """Corrects the mismatch, subtracts the KL from the scores, and estimates advantages and returns."""
        metrics = {} if bypass else mismatch(batch)
        arrays: dict[str, Any] = {**batch.arrays}
        arrays |= {"turn_ends": masked.ends(batch.mask)} if algorithm.by_turn else {}  # before tokens are rejected
        if "entropy" in arrays:
            metrics["actor/entropy"] = masked_mean(batch["entropy"], batch.sampled)
        if "routing_differs" in arrays:
            metrics["rollout/routing_differs"] = masked_mean(batch["routing_differs"], batch.mask)
        if correction is not None:
            batch, correction_metrics = correct_mismatch(correction, batch)
            metrics |= correction_metrics
        mask, value, weight = batch.mask, batch.get("value"), batch.get("weight")
        if value is not None and value_norm is not None:
            value = values.denormalise(value, value_norm)
        if weight is not None and by_sequence:
            weight = geometric(weight, mask)
        scored = batch
        if not algorithm.scored:
            scored = dataclasses.replace(batch, score=jnp.zeros_like(batch.score)).with_arrays(earned=None)
        penalty = penalty_of(batch, kl_penalty)
        reward, total, reward_metrics = rewards(scored, penalty, kl_coef)
        metrics |= reward_metrics
        if "outcome" in algorithm.reads:
            arrays["outcome"] = outcomes(algorithm, batch, total)
        arrays |= {"reward": reward, "group": batch.group, "mask": mask, "value": value}
        arrays |= {"weight": jnp.ones_like(reward) if weight is None else weight}
        if "kl_reward" in algorithm.reads:
            arrays["kl_reward"] = jnp.where(mask, -kl_coef * penalty, 0.0)
        assert algorithm.advantage is not None and algorithm.transforms is not None
        estimated = algorithm.advantage(view(TokenView, algorithm.reads, arrays))
        advantage, returns = estimated if isinstance(estimated, tuple) else (estimated, estimated)
        for transform in algorithm.transforms:
            advantage = transform(advantage, mask)
        metrics |= distribution("critic/advantages", advantage, mask)  # as the loss sees them
        if value is not None:
            metrics |= value_metrics(value, returns, mask)
            if value_norm is not None and value_norm_decay is not None:
                value_norm = values.update_statistics(value_norm, returns, mask, decay=value_norm_decay)
                returns = jnp.where(mask, values.normalise(returns, value_norm), 0.0)
        added = {"mask": mask, "weight": weight, "reward": reward, "advantage": advantage, "value_norm": value_norm}
        added["returns"] = None if value is None else returns
        if "positive" in algorithm.loss_reads:
            added["positive"] = jnp.where(mask & (batch.score > 0)[:, None], 1.0, 0.0)
        return {name: x for name, x in added.items() if x is not None}, metrics

    return advantages


def outcomes(algorithm: Algorithm, batch: Batch, total: Array) -> Array:  # [B]
    """Returns the algorithm's outcome of each row's episode, [B]; `total` is each row's score less its KL penalties.

    An episode has the penalties and tokens of all its branches. The length of a response is its trained tokens, or all
    that were sampled if none is trained on: its score counts.
    """
    assert algorithm.outcome is not None

    episode = batch.get("episode")

    def sum_branches(x: Array) -> Array:
        return x if episode is None else jax.ops.segment_sum(x, jnp.asarray(episode), num_segments=len(x))

    length = sum_branches(jnp.sum(batch.mask, axis=1, dtype=jnp.float32))
    length = jnp.where(length > 0, length, sum_branches(batch.length))
    arrays = {**batch.arrays} | {"score": total, "length": length, "group": batch.group}
    if episode is not None:  # the score once, and the penalties of all branches; all rows have their episode's parts
        score = jnp.where(jnp.isnan(batch.score), 0.0, batch.score)
        penalty = score - total
        arrays["score"] = score - sum_branches(penalty)
    outcome = algorithm.outcome(view(EpisodeView, algorithm.reads, arrays))
    return outcome if episode is None else outcome[episode]


def penalty_of(batch: Batch, kind: kl.Kind | None) -> Array:  # [B, L]
    """Returns the KL of each token, to be subtracted from the reward; `kind` is `algorithm.kl_penalty`, None: zeros."""
    if kind is None:
        return jnp.zeros_like(batch.rollout_logprob)
    if kind in kl.EXACT:
        return jnp.where(batch.mask, batch["exact_kl"], 0.0)
    return jnp.where(batch.mask, kl.estimator(kind)(batch["old_logprob"], batch["ref_logprob"]), 0.0)


def rewards(batch: Batch, penalty: Array, kl_coef: Array) -> tuple[Array, Array, dict[str, Array]]:
    """Returns the rewards of tokens [B, L] and of sequences [B], and metrics of what the policy sampled.

    r_t = -β KL_t + e_t, plus the rest of the score, s - Σ e, at the last token. Of the earned e, parts outside the mask
    move (`masked.move_into_mask`). A sequence without a token has only its score.
    """
    mask, graded = batch.mask, ~jnp.isnan(batch.score)
    score = jnp.where(graded, batch.score, 0.0)
    reward = jnp.where(mask, masked.at_kept(score, masked.last(mask)) - kl_coef * penalty, 0.0)
    has_tokens = jnp.any(mask, axis=1)
    total = jnp.where(has_tokens, jnp.sum(reward, axis=1), score)  # whose rounding does not depend on the places
    if "earned" in batch.arrays:
        earned = masked.move_into_mask(batch["earned"], mask)
        reward = reward + earned - masked.at_kept(jnp.sum(earned, axis=1), masked.last(mask))
    sequence_penalty = jnp.sum(penalty, axis=1)
    if "given" in batch.arrays:
        graded, has_tokens = graded & ~batch["given"], has_tokens & ~batch["given"]
    return reward, total, {
        "critic/rewards/mean": masked_mean(total, graded),
        "critic/rewards/max": largest(total, graded),
        "critic/rewards/min": -largest(-total, graded),
        "actor/reward_kl_penalty": masked_mean(sequence_penalty / jnp.maximum(jnp.sum(mask, axis=1), 1), has_tokens),
        "actor/reward_kl_penalty_seq": masked_mean(sequence_penalty, has_tokens),
    }  # fmt: skip


def distribution(name: str, x: Array, mask: Array) -> dict[str, Array]:
    """Computes mean, extremes and standard deviation over the mask as metrics; 0 where nothing is kept."""
    return {
        f"{name}/mean": masked_mean(x, mask),
        f"{name}/max": largest(x, mask),
        f"{name}/min": -largest(-x, mask),
        f"{name}/std": jnp.sqrt(masked.variance(masked.moments(x, mask))),
    }


def largest(x: Array, mask: Array) -> Array:  # []
    """Returns the largest entry of the mask; 0 where nothing is kept."""
    return jnp.where(jnp.any(mask), jnp.max(jnp.where(mask, x, -jnp.inf)), 0.0)


def value_metrics(value: Array, returns: Array, mask: Array) -> dict[str, Array]:
    """Computes metrics of the critic's values against the returns; of equal returns nothing is explained: NaN."""
    error_variance, return_variance = (masked.variance(masked.moments(x, mask)) for x in (returns - value, returns))
    share = 1.0 - error_variance / (return_variance + 1e-5)
    explained = {"critic/vf_explained_var": jnp.where(return_variance < 1e-5, jnp.nan, share)}
    return explained | distribution("critic/returns", returns, mask) | distribution("critic/values", value, mask)


def masked_mean(x: Array, mask: Array) -> Array:  # []
    """Computes the mean over the mask; 0 where nothing is kept."""
    return masked.masked_sum(x, mask) / token_count(mask)
