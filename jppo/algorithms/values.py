"""The scale and the form of a critic's values.

Running statistics of returns normalise them (Yu et al., arXiv:2103.01955). Statistics [3] are the weight, mean and
variance of past returns, in which a batch of age k has weight (1 - d) d^k. The weight is 0 before the first batch and
goes to 1.

A value may be the mean of a histogram that learns by cross-entropy: HL-Gauss (Farebrother et al., arXiv:2403.03950).
A histogram has N bins of equal width over a range `span`, from low to high. Its logits are [..., N].
"""

import jax
import jax.numpy as jnp
from jax.scipy.special import ndtr

from jppo.algorithms import masked
from jppo.types import Array

LEAST_VARIANCE = 1e-2  # as in the paper's code: equal returns must not magnify the critic's errors
SIGMA = 0.75  # of a target's Gaussian, in bin widths: the paper's


def update_statistics(stats: Array, returns: Array, mask: Array, *, decay: float) -> Array:  # [3]
    """Returns the statistics with a batch of returns added; the same ones if it is empty."""
    n, mean, squares = masked.moments(returns, mask)
    old_weight, new_weight = stats[0] * decay, jnp.where(n > 0, 1.0 - decay, 0.0)
    weight = old_weight + new_weight
    share = new_weight / jnp.maximum(weight, 1e-30)
    difference = mean - stats[1]
    variance = (1.0 - share) * stats[2] + share * squares / jnp.maximum(n, 1.0)
    variance += share * (1.0 - share) * jnp.square(difference)
    return jnp.where(n > 0, jnp.stack([weight, stats[1] + share * difference, variance]), stats)


def denormalise(x: Array, stats: Array) -> Array:
    """Returns mean + std x; x itself before the first batch."""
    return jnp.where(stats[0] > 0, stats[1] + _std(stats) * x, x)


def normalise(x: Array, stats: Array) -> Array:
    """Returns (x - mean) / std; x itself before the first batch."""
    return jnp.where(stats[0] > 0, (x - stats[1]) / _std(stats), x)


def _std(stats: Array) -> Array:
    return jnp.sqrt(jnp.maximum(stats[2], LEAST_VARIANCE))


def histogram_value(logits: Array, span: tuple[float, float]) -> Array:
    """Returns the mean of the bins' centres under softmax(logits)."""
    edges = _edges(logits, span)
    return jnp.sum(jax.nn.softmax(logits) * (edges[..., 1:] + edges[..., :-1]) / 2, axis=-1)


def histogram_loss(logits: Array, returns: Array, span: tuple[float, float]) -> tuple[Array, Array]:
    """Returns the cross-entropy to the histograms of the returns, and where a return is outside the range.

    The histogram of a return is a Gaussian around it, cut at the ends of the range (Imani & White, arXiv:1806.04613). A
    return outside the range has the histogram of the nearest end.
    """
    clipped, edges = jnp.clip(returns, *span), _edges(logits, span)
    cumulative = ndtr((edges - clipped[..., None]) / (SIGMA * (edges[..., 1:2] - edges[..., :1])))
    target = jnp.diff(cumulative) / (cumulative[..., -1:] - cumulative[..., :1])
    return -jnp.sum(target * jax.nn.log_softmax(logits), axis=-1), clipped != returns


def _edges(logits: Array, span: tuple[float, float]) -> Array:
    edges = jnp.linspace(*span, logits.shape[-1] + 1, dtype=logits.dtype)
    return edges.reshape((1,) * (logits.ndim - 1) + (-1,))
