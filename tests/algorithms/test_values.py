"""Statistics of returns against weighted means in numpy; the histogram's loss against a loop written from the paper."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jppo.algorithms import values

NONE = np.zeros(3, np.float32)


def test_statistics_are_weighted_moments_of_all_batches():
    """A batch of age k has weight (1 - d) d^k, shared by its returns."""
    rng = np.random.default_rng(0)
    stats, seen = NONE, []
    for n in (5, 1, 7):
        x = rng.normal(3.0, 2.0, (2, 6)).astype(np.float32)
        mask = np.arange(12).reshape(2, 6) < n
        stats = values.update_statistics(stats, np.where(mask, x, np.nan), mask, decay=0.6)
        seen = [(w * 0.6, y) for w, y in seen] + [(0.4, x[mask])]
        weights = np.concatenate([np.full(len(y), w / len(y)) for w, y in seen])
        every = np.concatenate([y for _, y in seen]).astype(np.float64)
        mean = np.average(every, weights=weights)
        expected = [weights.sum(), mean, np.average((every - mean) ** 2, weights=weights)]
        np.testing.assert_allclose(stats, expected, rtol=1e-5)


def test_statistics_by_hand():
    """Returns 1 and 3 in the first batch: mean 2, variance 1; decay 0.5 gives the batch the weight 0.5."""
    stats = values.update_statistics(NONE, np.float32([[1.0, 3.0]]), np.array([[True, True]]), decay=0.5)
    np.testing.assert_array_equal(stats, [0.5, 2.0, 1.0])
    # One return of 5 with weight 0.5 beside 0.25: mean (0.25 · 2 + 0.5 · 5) / 0.75 = 4.
    stats = values.update_statistics(stats, np.float32([[5.0, 9.0]]), np.array([[True, False]]), decay=0.5)
    np.testing.assert_allclose(stats, [0.75, 4.0, (1 / 3) * 1 + (1 / 3) * (2 / 3) * 9], rtol=1e-6)
    for mean in (3.0, -3.0):
        stats = np.float32([0.5, mean, 4.0])
        np.testing.assert_allclose(values.denormalise(np.float32(2.0), stats), mean + 4.0)
        np.testing.assert_allclose(values.normalise(np.float32(mean + 4.0), stats), 2.0)


def test_before_the_first_batch_and_without_tokens_nothing_changes():
    x, mask = np.float32([[1.0, 2.0]]), np.zeros((1, 2), np.bool_)
    np.testing.assert_array_equal(values.denormalise(x, NONE), x)
    np.testing.assert_array_equal(values.normalise(x, NONE), x)
    for stats in (NONE, np.float32([0.5, 2.0, 1.0])):
        np.testing.assert_array_equal(values.update_statistics(stats, x * np.nan, mask, decay=0.9), stats)


def test_large_returns_lose_no_digits_and_equal_ones_do_not_blow_up():
    mask = np.ones((1, 4), np.bool_)
    stats = values.update_statistics(NONE, np.float32([[10000, 10001, 10002, 10003]]), mask, decay=0.9)
    np.testing.assert_allclose(stats[2], 1.25, rtol=1e-4)
    equal = jax.jit(lambda x: values.update_statistics(NONE, x, mask, decay=0.9))(np.full((1, 4), 0.5, np.float32))
    np.testing.assert_allclose(values.normalise(np.float32(0.6), equal), 1.0, rtol=1e-5)  # 0.1 / √0.01


def paper_target(x, low, high, bins):
    """Farebrother et al., equation 6: shares of N(x, (0.75 width)²) between the edges, divided by their sum."""
    width = (high - low) / bins
    below = [0.5 * (1 + math.erf((low + i * width - x) / (math.sqrt(2) * 0.75 * width))) for i in range(bins + 1)]
    return np.array([(b - a) / (below[-1] - below[0]) for a, b in itertools.pairwise(below)])


@functools.partial(jax.jit, static_argnames="span")
def loss_and_slope(logits, returns, span):
    def total(logits):
        loss, outside = values.histogram_loss(logits, returns, span)
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


def test_a_histogram_by_hand():
    """Two bins over (-1, 1), a return of 0.5: Φ(-2) = 0.02275, Φ(-2/3) = 0.25249, Φ(2/3) = 0.74751."""
    high = (0.74751 - 0.25249) / (0.74751 - 0.02275)
    loss, _, slope = loss_and_slope(np.log([1.0, 3.0]), np.float64(0.5), (-1.0, 1.0))
    np.testing.assert_allclose(loss, -(1 - high) * math.log(1 / 4) - high * math.log(3 / 4), rtol=1e-4)
    np.testing.assert_allclose(slope, [1 / 4 - (1 - high), 3 / 4 - high], atol=1e-4)
    assert float(values.histogram_value(np.log([1.0, 3.0]), (-1.0, 1.0))) == pytest.approx(0.25)  # (-0.5 + 3 · 0.5) / 4


def test_a_histogram_that_has_learned_its_target_has_the_value_of_the_return():
    """Three standard deviations from the ends; the target is what the gradient lacks to the softmax."""
    span, returns = (-5.0, 5.0), np.linspace(-4.4, 4.4, 301)
    logits = np.zeros((301, 51))
    target = 1 / 51 - loss_and_slope(logits, returns, span)[2]
    np.testing.assert_allclose(target.sum(-1), 1.0, rtol=1e-12)
    assert target.min() > -1e-15
    found = values.histogram_value(np.log(np.maximum(target, 1e-300)), span)
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
