"""The log-prob mismatch (trainer vs. rollout engine): measured in every step, corrected on request."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jppo.algorithms import correction
from jppo.algorithms.masked import FAR, masked_sum
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
    difference = jnp.where(batch.mask, _log_ratio(batch), 0.0)
    gap, apart = jnp.abs(difference), correction.divergences(difference, batch.mask)
    return {
        "rollout/logp_gap_mean": masked_sum(gap, batch.mask) / tokens(batch.mask),
        "rollout/logp_gap_max": jnp.max(gap),
        "rollout/ratio_min": jnp.exp(jnp.maximum(jnp.min(difference), -FAR)),
        "rollout/ratio_max": jnp.exp(jnp.minimum(jnp.max(difference), FAR)),
        "rollout_corr/kl": apart["kl"],
        "rollout_corr/k3_kl": apart["k3_kl"],
        "rollout_corr/chi2_token": apart["chi2_token"],
        "rollout_corr/chi2_seq": apart["chi2_seq"],
    }


def corrected(what: Correction, batch: Batch) -> tuple[Batch, dict[str, Array]]:
    """Returns the batch with weights and without rejected tokens, and metrics of both."""
    log_ratio, mask = _log_ratio(batch), batch.mask
    kept = correction.keep(log_ratio, mask, rules=what.rules)
    rejected = mask & ~kept
    sequences = jnp.maximum(jnp.sum(jnp.any(mask, axis=1), dtype=jnp.float32), 1.0)
    metrics: dict[str, Array] = {
        "rollout_corr/rollout_rs_masked_fraction": jnp.sum(rejected, dtype=jnp.float32) / tokens(mask),
        "rollout_corr/rollout_rs_seq_masked_fraction": jnp.sum(jnp.any(rejected, axis=1)) / sequences,
    }
    weight = None
    if what.level is not None:
        raw = correction.raw_weights(log_ratio, mask, level=what.level)
        weight = correction.bounded(raw, lower=what.lower, upper=what.upper)
        spread = correction.importance(weight, mask)
        metrics |= {
            "rollout_corr/rollout_is_mean": spread["mean"],
            "rollout_corr/rollout_is_max": spread["max"],
            "rollout_corr/rollout_is_min": spread["min"],
            "rollout_corr/rollout_is_eff_sample_size": spread["eff_sample_size"],
        }
        if what.normalize:
            weight = correction.normalized(weight, mean=correction.mean_weight(weight, mask, level=what.level))
    return dataclasses.replace(batch, mask=kept, weight=weight), metrics


def make_current(what: Correction) -> Callable[..., tuple[Array, Array | None]]:
    """Makes the correction of bypass: (logp, rollout log-probs, mask, segment) [R, T] -> kept tokens, and weights.

    Both follow the current policy, have no gradient, and change from one mini-batch to the next.
    """

    def current(logp: Array, rollout_logp: Array, mask: Array, segment: Array) -> tuple[Array, Array | None]:
        log_ratio = jax.lax.stop_gradient(jnp.where(mask, logp - rollout_logp, 0.0))
        kept = correction.keep(log_ratio, mask, rules=what.rules, segment=segment)
        if what.level is None:
            return kept, None
        raw = correction.raw_weights(log_ratio, mask, level=what.level, segment=segment)
        return kept, correction.bounded(raw, lower=what.lower, upper=what.upper)

    return current


def _log_ratio(batch: Batch) -> Array:
    assert batch.old_logprob is not None
    return batch.old_logprob - batch.rollout_logprob


def tokens(mask: Array) -> Array:  # [] f32
    """Counts the kept tokens, at least 1."""
    return jnp.maximum(jnp.sum(mask, dtype=jnp.float32), 1.0)
