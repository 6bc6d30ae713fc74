"""Statistics of returns against weighted means in numpy, and by hand."""

import jax
import numpy as np

from jppo.algorithms import values

NONE = np.zeros(3, np.float32)


def test_statistics_are_weighted_moments_of_all_batches():
    """A batch of age k has weight (1 - d) d^k, shared by its returns."""
    rng = np.random.default_rng(0)
    stats, seen = NONE, []
    for n in (5, 1, 7):
        x = rng.normal(3.0, 2.0, (2, 6)).astype(np.float32)
        mask = np.arange(12).reshape(2, 6) < n
        stats = values.updated(stats, np.where(mask, x, np.nan), mask, decay=0.6)
        seen = [(w * 0.6, y) for w, y in seen] + [(0.4, x[mask])]
        weights = np.concatenate([np.full(len(y), w / len(y)) for w, y in seen])
        every = np.concatenate([y for _, y in seen]).astype(np.float64)
        mean = np.average(every, weights=weights)
        expected = [weights.sum(), mean, np.average((every - mean) ** 2, weights=weights)]
        np.testing.assert_allclose(stats, expected, rtol=1e-5)


def test_by_hand():
    """Returns 1 and 3 in the first batch: mean 2, variance 1; decay 0.5 gives the batch the weight 0.5."""
    stats = values.updated(NONE, np.float32([[1.0, 3.0]]), np.array([[True, True]]), decay=0.5)
    np.testing.assert_array_equal(stats, [0.5, 2.0, 1.0])
    # One return of 5 with weight 0.5 beside 0.25: mean (0.25 · 2 + 0.5 · 5) / 0.75 = 4.
    stats = values.updated(stats, np.float32([[5.0, 9.0]]), np.array([[True, False]]), decay=0.5)
    np.testing.assert_allclose(stats, [0.75, 4.0, (1 / 3) * 1 + (1 / 3) * (2 / 3) * 9], rtol=1e-6)
    for mean in (3.0, -3.0):
        stats = np.float32([0.5, mean, 4.0])
        np.testing.assert_allclose(values.denormalised(np.float32(2.0), stats), mean + 4.0)
        np.testing.assert_allclose(values.normalised(np.float32(mean + 4.0), stats), 2.0)


def test_before_the_first_batch_and_without_tokens_nothing_changes():
    x, mask = np.float32([[1.0, 2.0]]), np.zeros((1, 2), np.bool_)
    np.testing.assert_array_equal(values.denormalised(x, NONE), x)
    np.testing.assert_array_equal(values.normalised(x, NONE), x)
    for stats in (NONE, np.float32([0.5, 2.0, 1.0])):
        np.testing.assert_array_equal(values.updated(stats, x * np.nan, mask, decay=0.9), stats)


def test_large_returns_lose_no_digits_and_equal_ones_do_not_blow_up():
    mask = np.ones((1, 4), np.bool_)
    stats = values.updated(NONE, np.float32([[10000, 10001, 10002, 10003]]), mask, decay=0.9)
    np.testing.assert_allclose(stats[2], 1.25, rtol=1e-4)
    equal = jax.jit(lambda x: values.updated(NONE, x, mask, decay=0.9))(np.full((1, 4), 0.5, np.float32))
    np.testing.assert_allclose(values.normalised(np.float32(0.6), equal), 1.0, rtol=1e-5)  # 0.1 / √0.01
