"""Running statistics of returns, by which a critic's values are normalised (Yu et al., arXiv:2103.01955).

Statistics [3] are the weight, mean and variance of past returns, in which a batch of age k has weight (1 - d) d^k. The
weight is 0 before the first batch and goes to 1.
"""

import jax.numpy as jnp

from jppo.algorithms import masked
from jppo.types import Array

LEAST_VARIANCE = 1e-2  # as in the paper's code: equal returns must not magnify the critic's errors


def updated(stats: Array, returns: Array, mask: Array, *, decay: float) -> Array:  # [3]
    """Returns the statistics with a batch of returns added; the same ones if it is empty."""
    n, mean, squares = masked.moments(returns, mask)
    old, new = stats[0] * decay, jnp.where(n > 0, 1.0 - decay, 0.0)
    weight = old + new
    share = new / jnp.maximum(weight, 1e-30)
    between = mean - stats[1]
    variance = (1.0 - share) * stats[2] + share * squares / jnp.maximum(n, 1.0)
    variance += share * (1.0 - share) * jnp.square(between)
    return jnp.where(n > 0, jnp.stack([weight, stats[1] + share * between, variance]), stats)


def denormalised(x: Array, stats: Array) -> Array:
    """Returns mean + std x; x itself before the first batch."""
    return jnp.where(stats[0] > 0, stats[1] + _std(stats) * x, x)


def normalised(x: Array, stats: Array) -> Array:
    """Returns (x - mean) / std; x itself before the first batch."""
    return jnp.where(stats[0] > 0, (x - stats[1]) / _std(stats), x)


def _std(stats: Array) -> Array:
    return jnp.sqrt(jnp.maximum(stats[2], LEAST_VARIANCE))
