"""The histogram's loss against a loop written from the paper, and by hand; targets that keep their mean, and ends."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jppo.algorithms import hl_gauss


def paper_target(x, low, high, bins):
    """Farebrother et al., equation 6: shares of N(x, (0.75 width)²) between the edges, divided by their sum."""
    width = (high - low) / bins
    below = [0.5 * (1 + math.erf((low + i * width - x) / (math.sqrt(2) * 0.75 * width))) for i in range(bins + 1)]
    return np.array([(b - a) / (below[-1] - below[0]) for a, b in itertools.pairwise(below)])


@functools.partial(jax.jit, static_argnames="span")
def loss_and_slope(logits, returns, span):
    def total(logits):
        loss, outside = hl_gauss.loss(logits, returns, span)
        return jnp.sum(loss), (loss, outside)

    (_, (loss, outside)), slope = jax.value_and_grad(total, has_aux=True)(logits)
    return loss, outside, slope


@pytest.mark.parametrize("span, bins", [((-2.0, 3.0), 11), ((0.0, 1.0), 2), ((-100.0, 0.5), 51)])
def test_loss_and_gradient_are_the_papers(span, bins):
    rng = np.random.default_rng(0)
    logits, returns = 3 * rng.normal(size=(4, 5, bins)), rng.uniform(*span, (4, 5))
    loss, outside, slope = loss_and_slope(logits, returns, span)
    for at in np.ndindex(4, 5):
        target = paper_target(returns[at], *span, bins)
        logp = logits[at] - np.log(np.sum(np.exp(logits[at])))
        np.testing.assert_allclose(loss[at], -np.sum(target * logp), rtol=1e-10)
        np.testing.assert_allclose(slope[at], np.exp(logp) - target, atol=1e-12)
    assert not outside.any()


def test_by_hand():
    """Two bins over (-1, 1), a return of 0.5: Φ(-2) = 0.02275, Φ(-2/3) = 0.25249, Φ(2/3) = 0.74751."""
    high = (0.74751 - 0.25249) / (0.74751 - 0.02275)
    loss, _, slope = loss_and_slope(np.log([1.0, 3.0]), np.float64(0.5), (-1.0, 1.0))
    np.testing.assert_allclose(loss, -(1 - high) * math.log(1 / 4) - high * math.log(3 / 4), rtol=1e-4)
    np.testing.assert_allclose(slope, [1 / 4 - (1 - high), 3 / 4 - high], atol=1e-4)
    assert float(hl_gauss.value(np.log([1.0, 3.0]), (-1.0, 1.0))) == pytest.approx(0.25)  # (-0.5 + 3 · 0.5) / 4


def test_a_histogram_that_has_learned_its_target_has_the_value_of_the_return():
    """Three standard deviations from the ends; the target is what the gradient lacks to the softmax."""
    span, returns = (-5.0, 5.0), np.linspace(-4.4, 4.4, 301)
    logits = np.zeros((301, 51))
    target = 1 / 51 - loss_and_slope(logits, returns, span)[2]
    np.testing.assert_allclose(target.sum(-1), 1.0, rtol=1e-12)
    assert target.min() > -1e-15
    found = hl_gauss.value(np.log(np.maximum(target, 1e-300)), span)
    np.testing.assert_allclose(found, returns, atol=2e-4 * 10 / 51)  # of a bin


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_return_outside_the_range_counts_as_its_end(dtype):
    span, logits = (-1.0, 2.0), np.random.default_rng(3).normal(size=(6, 7)).astype(dtype)
    returns = np.array([-1.0, -1.5, -3e38, 2.0, 2.1, np.inf], dtype)
    loss, outside, slope = loss_and_slope(np.repeat(logits[:1], 6, 0), returns, span)
    assert loss.dtype == dtype and outside.tolist() == [False, True, True, False, True, True]
    for first, same in ((0, (1, 2)), (3, (4, 5))):
        for other in same:
            np.testing.assert_allclose(loss[other], loss[first], rtol=1e-6)
            np.testing.assert_allclose(slope[other], slope[first], atol=1e-6)
    assert np.isfinite(slope).all() and loss[0] != loss[3]
