"""Values as the mean of a histogram that learns by cross-entropy: HL-Gauss (Farebrother et al., arXiv:2403.03950).

A histogram has N bins of equal width over a range `span`, from low to high. Its logits are [..., N].
"""

import jax
import jax.numpy as jnp
from jax.scipy.special import ndtr

from jppo.types import Array

SIGMA = 0.75  # of a target's Gaussian, in bin widths: the paper's


def value(logits: Array, span: tuple[float, float]) -> Array:
    """Returns the mean of the bins' centres under softmax(logits)."""
    edges = _edges(logits, span)
    return jnp.sum(jax.nn.softmax(logits) * (edges[..., 1:] + edges[..., :-1]) / 2, axis=-1)


def loss(logits: Array, returns: Array, span: tuple[float, float]) -> tuple[Array, Array]:
    """Returns the cross-entropy to the histograms of the returns, and where a return is outside the range.

    The histogram of a return is a Gaussian around it, cut at the ends of the range (Imani & White, arXiv:1806.04613). A
    return outside the range has the histogram of the nearest end.
    """
    inside, edges = jnp.clip(returns, *span), _edges(logits, span)
    below = ndtr((edges - inside[..., None]) / (SIGMA * (edges[..., 1:2] - edges[..., :1])))
    target = jnp.diff(below) / (below[..., -1:] - below[..., :1])
    return -jnp.sum(target * jax.nn.log_softmax(logits), axis=-1), inside != returns


def _edges(logits: Array, span: tuple[float, float]) -> Array:
    edges = jnp.linspace(*span, logits.shape[-1] + 1, dtype=logits.dtype)
    return edges.reshape((1,) * (logits.ndim - 1) + (-1,))
