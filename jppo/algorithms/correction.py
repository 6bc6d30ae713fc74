"""Rollout correction for the log-prob mismatch from rounding or staleness: importance weights and rejection.

`log_ratio` [B, L] is log π_trainer - log π_rollout of the sampled tokens, a sequence a row; with `segment`, rows [R, T]
hold several. After verl's rollout correction and Yao et al., "Your Efficient RL Framework Secretly Brings You
Off-Policy RL Training".
"""

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp

from jppo.algorithms.masked import FAR, masked_sum, sequence_max, sequence_sum
from jppo.types import Array

Rule = tuple[str, float, float]  # name, lower and upper bound; only the rules of k1 have a lower one


def raw_weights(log_ratio: Array, mask: Array, *, level: str, segment: Array | None = None) -> Array:  # [B, L]
    """ρ = exp(log-ratio) of each token, or of its whole sequence: exp(Σ log-ratio). 0 outside the mask."""
    chex.assert_equal_shape([log_ratio, mask])
    log_ratio = jnp.where(mask, log_ratio, 0.0)
    if level == "sequence":
        log_ratio = _sums(log_ratio, mask, segment)
    return jnp.where(mask, jnp.exp(jnp.clip(log_ratio, -FAR, FAR)), 0.0)


def bound_weights(weight: Array, *, lower: float | None, upper: float) -> Array:
    """min(ρ, upper); with a lower bound too, ρ inside the band and 0 outside (IcePop)."""
    if lower is None:
        return jnp.minimum(weight, upper)
    return jnp.where((weight >= lower) & (weight <= upper), weight, 0.0)


def mean_weight(weight: Array, mask: Array, *, level: str) -> Array:  # []
    """The mean of the weights over tokens, or over sequences."""
    chex.assert_equal_shape([weight, mask])
    share = jnp.where(mask, 1.0, 0.0).astype(weight.dtype)
    if level == "sequence":
        share = share / _lengths(mask, weight.dtype)
    return jnp.sum(weight * share) / jnp.maximum(jnp.sum(share), 1.0)


def normalized_weights(weight: Array, *, mean: Array) -> Array:
    """ρ / mean, so that the batch's mean is 1; unchanged where the mean is almost 0."""
    chex.assert_rank(mean, 0)
    return weight / jnp.where(mean > 1e-8, mean, 1.0)


def geometric(weight: Array, mask: Array) -> Array:  # [B, L]
    """exp(mean over the sequence of log w): the weight of a loss with one number per sequence.

    1e-10 is added to each w, as in verl, so that a token of weight 0 does not silence its sequence.
    """
    logs = jnp.where(mask, jnp.log(weight + 1e-10), 0.0)
    return jnp.where(mask, jnp.exp(jnp.sum(logs, axis=1, keepdims=True) / _lengths(mask, weight.dtype)), 0.0)


def keep(
    log_ratio: Array, mask: Array, *, rules: tuple[Rule, ...], segment: Array | None = None
) -> Array:  # [B, L] bool
    """Returns the tokens of the mask that pass every rule.

    With d the log-ratio: k1 = -d must be within the logs of both bounds; k2 = ½ d² and k3 = e^d - 1 - d must not
    exceed the upper one. `token_` judges each token, `seq_sum_`, `seq_mean_` and `seq_max_` a whole sequence at once.
    """
    chex.assert_equal_shape([log_ratio, mask])
    d = jnp.clip(jnp.where(mask, log_ratio, 0.0), -FAR, FAR)
    statistics = {"k1": -d, "k2": 0.5 * jnp.square(d), "k3": jnp.expm1(d) - d}  # 0 outside the mask
    aggregates: dict[str, Callable[[Array], Array]] = {
        "token": lambda x: x,
        "seq_sum": lambda x: _sums(x, mask, segment),
        "seq_mean": lambda x: _sums(x, mask, segment) / _lengths(mask, d.dtype, segment),
        "seq_max": lambda x: _largest(x, mask, segment),
    }
    passed = jnp.asarray(mask)
    for name, lower, upper in rules:
        level, kind = name.rsplit("_", 1)
        aggregate = aggregates[level](statistics[kind])
        if kind == "k1":
            passed &= (aggregate >= jnp.log(lower)) & (aggregate <= jnp.log(upper))
        else:
            passed &= aggregate <= upper
    return passed


def divergences(log_ratio: Array, mask: Array) -> dict[str, Array]:
    """Measures how far the trainer's policy is from the rollout engine's, as means over tokens or over sequences.

    kl = E[-d], k3_kl = E[e^d - d - 1], chi2_token = E[ρ²] - 1, chi2_seq = E[(Π ρ)²] - 1; d the log-ratio.
    """
    chex.assert_equal_shape([log_ratio, mask])
    d = jnp.where(mask, log_ratio, 0.0)
    clipped = jnp.clip(d, -FAR, FAR)
    sequence_log_ratio, has_tokens = jnp.clip(jnp.sum(d, axis=1), -FAR, FAR), jnp.any(mask, axis=1)
    tokens, sequences = (jnp.maximum(jnp.sum(x, dtype=d.dtype), 1.0) for x in (mask, has_tokens))
    return {
        "kl": masked_sum(-d, mask) / tokens,
        "k3_kl": masked_sum(jnp.expm1(clipped) - clipped, mask) / tokens,
        "chi2_token": masked_sum(jnp.exp(2.0 * clipped), mask) / tokens - 1.0,
        "chi2_seq": masked_sum(jnp.exp(2.0 * sequence_log_ratio), has_tokens) / sequences - 1.0,
    }


def importance(weight: Array, mask: Array) -> dict[str, Array]:
    """Mean and extremes of the weights over the mask, and the effective sample size: (Σ w)² / (n Σ w²)."""
    weight = jax.lax.stop_gradient(weight)
    tokens = jnp.maximum(jnp.sum(mask, dtype=weight.dtype), 1.0)
    total, squares = masked_sum(weight, mask), masked_sum(jnp.square(weight), mask)
    return {
        "mean": total / tokens,
        "max": jnp.max(jnp.where(mask, weight, -jnp.inf)),
        "min": jnp.min(jnp.where(mask, weight, jnp.inf)),
        "eff_sample_size": jnp.square(total) / jnp.maximum(tokens * squares, 1e-30),
    }


def _sums(x: Array, mask: Array, segment: Array | None) -> Array:  # [B, 1], or of segments [R, T]
    """Sums the entries of each sequence, which are 0 outside the mask."""
    return jnp.sum(x, axis=1, keepdims=True) if segment is None else sequence_sum(x, mask, segment)


def _largest(x: Array, mask: Array, segment: Array | None) -> Array:
    """Returns the largest kept entry of each sequence; -inf without any."""
    x = jnp.where(mask, x, -jnp.inf)
    return jnp.max(x, axis=1, keepdims=True) if segment is None else sequence_max(x, segment)


def _lengths(mask: Array, dtype: jnp.dtype, segment: Array | None = None) -> Array:
    """Counts the kept entries of each sequence, at least 1."""
    return jnp.maximum(_sums(jnp.asarray(mask, dtype), mask, segment), 1.0)
