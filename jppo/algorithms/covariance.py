"""Tokens of high covariance between log-prob and advantage, for `clip_cov` and `kl_cov` (Cui et al., arXiv:2505.22617).

The covariance of a token is (log π - mean)(A - mean), with means over the mask. Such tokens lower the policy's entropy
most. Arrays are of a whole mini-batch, [B, L], whatever its cut into micro-batches; `count` is [] i32.
"""

import chex
import jax
import jax.numpy as jnp

from jppo.algorithms.masked import masked_sum
from jppo.types import Array


def covariance(logp: Array, advantage: Array, mask: Array) -> Array:  # [B, L]
    """Returns each token's summand of the covariance; -∞ outside the mask."""
    chex.assert_equal_shape([logp, advantage, mask])
    tokens = jnp.maximum(jnp.sum(mask, dtype=logp.dtype), 1.0)
    of_logp, of_advantage = (x - masked_sum(x, mask) / tokens for x in (logp, advantage))
    return jnp.where(mask, of_logp * of_advantage, -jnp.inf)


def largest(logp: Array, advantage: Array, mask: Array, *, count: Array) -> Array:  # [B, L] bool
    """Selects the `count` tokens of the highest covariance."""
    chex.assert_rank(count, 0)
    each = covariance(logp, advantage, mask)
    return (_rank(-each) < count) & jnp.asarray(mask)


def drawn(
    key: Array, logp: Array, old_logp: Array, advantage: Array, mask: Array,
    *, count: Array, low: float, high: float, clip_low: float, clip_high: float,
) -> Array:  # [B, L] bool  # fmt: skip
    """Draws at most `count` of the tokens whose covariance is above `low` and below `high`.

    Tokens that the surrogate's own clip holds are not drawn.
    """
    chex.assert_rank(count, 0)
    each = covariance(logp, advantage, mask)
    ratio = jnp.exp(jnp.where(mask, logp - old_logp, 0.0))
    held = -advantage * jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high) > -advantage * ratio
    there = (each > low) & (each < high) & ~held
    return (_rank(jnp.where(there, jax.random.uniform(key, mask.shape), jnp.inf)) < count) & there


def _rank(x: Array) -> Array:  # of [B, L], i32
    """Returns the place of each entry in ascending order."""
    flat = x.reshape(-1)
    places = (
        jnp.zeros(flat.size, jnp.int32).at[jnp.argsort(flat, stable=True)].set(jnp.arange(flat.size, dtype=jnp.int32))
    )
    return places.reshape(x.shape)
