"""Rollout correction: the sampler's policy is not the trainer's, by rounding or by age; weigh tokens or leave them out.

`log_ratio` [R, T] is log π_trainer - log π_sampler of the sampled tokens. After verl's rollout correction and Yao et
al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training".
"""

import chex
import jax
import jax.numpy as jnp

from jppo.algorithms.masked import FAR, masked_sum, sequence_length, sequence_max, sequence_mean, sequence_sum
from jppo.structs import Array

Rule = tuple[str, float, float]  # name, lower and upper bound; only the rules of k1 have a lower one


def raw_weights(log_ratio: Array, mask: Array, segment: Array, *, level: str) -> Array:  # [R, T]
    """ρ = exp(log-ratio) of each token, or of its whole sequence: exp(Σ log-ratio). 0 outside the mask."""
    chex.assert_equal_shape([log_ratio, mask, segment])
    log_ratio = jnp.where(mask, log_ratio, 0.0)
    if level == "sequence":
        log_ratio = sequence_sum(log_ratio, mask, segment)
    return jnp.where(mask, jnp.exp(jnp.clip(log_ratio, -FAR, FAR)), 0.0)


def bounded(weight: Array, *, lower: float | None, upper: float) -> Array:
    """min(ρ, upper); with a lower bound too, ρ inside the band and 0 outside (IcePop)."""
    if lower is None:
        return jnp.minimum(weight, upper)
    return jnp.where((weight >= lower) & (weight <= upper), weight, 0.0)


def weight_sums(weight: Array, mask: Array, segment: Array, *, level: str) -> Array:  # [2]
    """Σ and count of the weights, by token or by sequence: the mean over a whole batch is the ratio of their sums."""
    chex.assert_equal_shape([weight, mask, segment])
    share = jnp.where(mask, 1.0, 0.0).astype(weight.dtype)
    if level == "sequence":
        share = share / jnp.maximum(sequence_length(mask, segment, weight.dtype), 1.0)
    return jnp.stack([jnp.sum(weight * share), jnp.sum(share)])


def normalized(weight: Array, *, mean: Array) -> Array:
    """ρ / mean, so that the batch's mean is 1; as it is where the mean is next to nothing."""
    chex.assert_rank(mean, 0)
    return weight / jnp.where(mean > 1e-8, mean, 1.0)


def geometric(weight: Array, mask: Array, segment: Array) -> Array:  # [R, T]
    """exp(mean over the sequence of log w): the weight of a loss that is one number for a sequence.

    1e-10 is added to each w, as in verl, so that a token of weight 0 does not silence its sequence.
    """
    return jnp.exp(sequence_mean(jnp.log(weight + 1e-10), mask, segment))


def keep(log_ratio: Array, mask: Array, segment: Array, *, rules: tuple[Rule, ...]) -> Array:  # [R, T] bool
    """The tokens of the mask that pass every rule.

    With d the log-ratio: k1 = -d must lie within the logs of both bounds; k2 = ½ d² and k3 = e^d - 1 - d must not
    exceed the upper one. `token_` judges each token, `seq_sum_`, `seq_mean_` and `seq_max_` a whole sequence at once.
    """
    chex.assert_equal_shape([log_ratio, mask, segment])
    d = jnp.clip(jnp.where(mask, log_ratio, 0.0), -FAR, FAR)
    statistics = {"k1": -d, "k2": 0.5 * jnp.square(d), "k3": jnp.expm1(d) - d}
    over = {"token": lambda x, *_: x, "seq_sum": sequence_sum, "seq_mean": sequence_mean, "seq_max": sequence_max}
    kept = jnp.asarray(mask)
    for name, lower, upper in rules:
        level, kind = name.rsplit("_", 1)
        found = over[level](statistics[kind], mask, segment)
        if kind == "k1":
            kept &= (found >= jnp.log(lower)) & (found <= jnp.log(upper))
        else:
            kept &= found <= upper
    return kept


def divergence_sums(log_ratio: Array, mask: Array, segment: Array) -> dict[str, Array]:
    """Sums over tokens, or over sequences, whose means are how far the trainer's policy is from the sampler's.

    kl = E[-d], k3_kl = E[e^d - d - 1], chi2_token = E[ρ²] - 1, chi2_seq = E[(Π ρ)²] - 1; d the log-ratio.
    """
    chex.assert_equal_shape([log_ratio, mask, segment])
    d = jnp.where(mask, log_ratio, 0.0)
    near = jnp.clip(d, -FAR, FAR)
    whole = jnp.clip(sequence_sum(d, mask, segment), -FAR, FAR)
    share = jnp.where(mask, 1.0, 0.0) / jnp.maximum(sequence_length(mask, segment, d.dtype), 1.0)
    return {
        "kl": masked_sum(-d, mask),
        "k3_kl": masked_sum(jnp.expm1(near) - near, mask),
        "chi2_token": masked_sum(jnp.exp(2.0 * near), mask),
        "chi2_seq": jnp.sum(jnp.exp(2.0 * whole) * share),
    }


def importance_sums(weight: Array, mask: Array) -> dict[str, Array]:
    """What the metrics of the weights are made of: sum, squares and the extremes over the mask."""
    weight = jax.lax.stop_gradient(weight)
    return {
        "weights": masked_sum(weight, mask),
        "squares": masked_sum(jnp.square(weight), mask),
        "is_max": jnp.max(jnp.where(mask, weight, -jnp.inf)),
        "is_min": jnp.min(jnp.where(mask, weight, jnp.inf)),
    }
