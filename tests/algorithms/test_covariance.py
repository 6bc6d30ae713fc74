"""Tokens of high covariance by hand, in any layout, and their losses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jppo.algorithms import covariance, losses

NAN = np.nan
# Means over the mask: log π -2, A 0; covariances 1, -2, 0, 2, -1.
LOGP = np.array([[-1.0, -1.0, NAN, -2.0], [NAN, -3.0, -3.0, NAN]])
ADVANTAGE = np.array([[1.0, -2.0, NAN, 2.0], [NAN, -2.0, 1.0, NAN]])
MASK = np.array([[True, True, False, True], [False, True, True, False]])


def tokens(selected):
    return [tuple(map(int, one)) for one in np.argwhere(np.asarray(selected))]


def test_each_tokens_summand_by_hand():
    found = np.asarray(covariance.covariance(LOGP, ADVANTAGE, MASK))
    np.testing.assert_allclose(found[MASK], [1, -2, 0, 2, -1], atol=1e-6)
    assert np.all(found[~MASK] == -np.inf)


@pytest.mark.parametrize(
    "count,expected", [(1, [(1, 1)]), (2, [(0, 0), (1, 1)]), (9, [(0, 0), (0, 1), (0, 3), (1, 1), (1, 2)])]
)
def test_the_largest_are_taken_and_nothing_outside_the_mask(count, expected):
    assert tokens(covariance.largest(LOGP, ADVANTAGE, MASK, count=jnp.int32(count))) == expected


HOW = dict(low=-1.5, high=1.5, clip_low=0.2, clip_high=0.2)


def drawn(key, count, old=LOGP, **changes):
    key = jax.random.key(key)
    return tokens(covariance.drawn(key, LOGP, old, ADVANTAGE, MASK, count=jnp.int32(count), **HOW | changes))


def test_only_tokens_of_the_band_are_drawn_and_at_most_so_many():
    assert drawn(0, 9) == [(0, 0), (0, 3), (1, 2)]
    assert drawn(0, 9, low=-9, high=0.5) == [(0, 1), (0, 3), (1, 2)]
    assert drawn(0, 9, low=5.0, high=6.0) == []
    several = {tuple(drawn(key, 1)) for key in range(40)}
    assert several == {((0, 0),), ((0, 3),), ((1, 2),)}, "each token can be drawn"


def test_tokens_that_the_clip_holds_are_not_drawn():
    """The first has ratio 2 and A > 0, the last 2 and A > 0 too; the second would be held at a ratio below 0.8."""
    old = LOGP - np.log(2.0) * np.array([[1.0, 0, 0, 0], [0, 0, 1.0, 0]])
    assert drawn(0, 9, old) == [(0, 3)]


def test_selected_tokens_have_no_surrogate_in_clip_cov_and_a_penalty_in_kl_cov():
    """Ratios 2 and 1/2, A = 1 and -1, ε = 0.2: -1.2 and 0.8; β = 3: -2 and 1/2, and 3 log 2 more of the selected."""
    logp, old, a = np.log([[2.0, 0.5]]) - 3, np.full((1, 2), -3.0), np.array([[1.0, -1.0]])
    mask, segment = np.ones((1, 2), bool), np.ones((1, 2), np.int32)
    for selected in ([False, False], [True, False], [True, True]):
        chosen = np.array([selected])
        loss, held, lower = losses.clip_cov(logp, old, a, mask, segment, chosen, clip_low=0.2, clip_high=0.2)
        np.testing.assert_allclose(loss, np.where(chosen, 0.0, [[-1.2, 0.8]]), rtol=1e-6)
        np.testing.assert_array_equal(held, chosen)
        loss, held, lower = losses.kl_cov(logp, old, a, mask, segment, chosen, ppo_kl_coef=3.0)
        np.testing.assert_allclose(loss, [[-2.0, 0.5]] + 3 * np.log(2) * chosen, rtol=1e-6)
        assert not np.any(lower)
