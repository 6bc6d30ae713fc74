"""Masked moments against numpy on the kept entries; nothing behind a False is seen."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jppo.algorithms import masked

POISON = [np.nan, np.inf, -np.inf, 3e38]


@pytest.fixture
def poisoned():
    rng = np.random.default_rng(0)
    x, mask = rng.normal(3.0, 2.0, (4, 9)).astype(np.float32), rng.random((4, 9)) < 0.6
    x[~mask] = np.resize(POISON, (~mask).sum())
    return x, mask


def test_masked_sum_is_the_sum_of_what_is_kept(poisoned):
    x, mask = poisoned
    np.testing.assert_allclose(masked.masked_sum(x, mask), x[mask].sum(), rtol=1e-6)
    assert masked.masked_sum(x, np.zeros_like(mask)) == 0.0


def test_masked_sum_does_not_broadcast_a_mask():
    with pytest.raises(AssertionError):
        masked.masked_sum(np.ones((3, 4), np.float32), np.ones((1, 4), bool))


def test_moments_are_count_mean_and_squared_deviations(poisoned):
    x, mask = poisoned
    kept = x[mask].astype(np.float64)
    expected = [kept.size, kept.mean(), np.square(kept - kept.mean()).sum()]
    np.testing.assert_allclose(masked.moments(x, mask), expected, rtol=1e-5)
    np.testing.assert_array_equal(masked.moments(x, np.zeros_like(mask)), [0.0, 0.0, 0.0])


@given(st.lists(st.lists(st.floats(-50, 50, width=32), max_size=7), min_size=1, max_size=6))
def test_combined_moments_are_those_of_the_union(parts):
    def three(part):
        part = np.asarray(part, np.float64)
        mean = part.mean() if part.size else 0.0
        return np.array([part.size, mean, np.square(part - mean).sum()])

    union = np.concatenate([np.asarray(p, np.float64) for p in parts])
    n, mean, var = masked.combine([three(p) for p in parts])
    assert n == union.size
    np.testing.assert_allclose(mean, union.mean() if union.size else 0.0, atol=1e-9)
    np.testing.assert_allclose(var, union.var(ddof=1) if union.size > 1 else 0.0, rtol=1e-9, atol=1e-9)


def test_a_part_without_entries_changes_nothing():
    part = np.array([3.0, 2.0, 5.0])
    assert masked.combine([part, np.array([0.0, 7.0, 7.0])]) == masked.combine([part]) == (3.0, 2.0, 2.5)


def test_whitening_over_parts_is_whitening_over_their_union(poisoned):
    x, mask = poisoned
    _, mean, var = masked.combine([np.asarray(masked.moments(x[i : i + 1], mask[i : i + 1])) for i in range(4)])
    out = masked.whiten(x, mask, mean=jnp.float32(mean), var=jnp.float32(var))
    kept = x[mask].astype(np.float64)
    expected = (kept - kept.mean()) / np.sqrt(kept.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(np.asarray(out)[mask], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(np.asarray(out)[~mask], 0.0)


def test_equal_entries_whiten_to_zero_and_stay_finite():
    x = np.full((2, 3), 0.7, np.float32)
    out = masked.whiten(x, np.ones((2, 3), bool), mean=jnp.float32(0.7), var=jnp.float32(0.0))
    np.testing.assert_array_equal(out, 0.0)
