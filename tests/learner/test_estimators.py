"""Estimators as their settings make them."""

import jax
import numpy as np
import pytest

from jppo.learner import estimators


def test_the_critic_may_have_another_lambda():
    """Two tokens, γ = 1, rewards 0 and 4, values 1 and 2; the advantages with λ = 0.5, the returns with λ = 1.

    δ = (0 + 2 - 1, 4 - 2) = (1, 2).  A = (1 + 0.5 · 2, 2) = (2, 2).  Returns of λ = 1 are the reward to come: (4, 4);
    of λ = 0.5, A + V = (3, 4).
    """
    rows = np.float32([[0.0, 4.0]]), np.float32([[1.0, 2.0]]), np.float32([0.0]), np.array([[True, True]])

    def found(**how):
        return estimators.gae(gamma=1.0, **dict(lam=0.5, lam_alpha=None, critic_lam=None) | how).tokens(*rows)

    np.testing.assert_array_equal(found(), [[[2.0, 2.0]], [[3.0, 4.0]]])
    np.testing.assert_array_equal(found(critic_lam=0.5), [[[2.0, 2.0]], [[3.0, 4.0]]])
    np.testing.assert_array_equal(found(critic_lam=1.0), [[[2.0, 2.0]], [[4.0, 4.0]]])
    # α l = 2 makes λ = 0.5
    np.testing.assert_array_equal(found(lam=0.1, lam_alpha=1.0), [[[2.0, 2.0]], [[3.0, 4.0]]])
    np.testing.assert_allclose(found(lam=0.1, lam_alpha=1.0, critic_lam=0.1), [[[2.0, 2.0]], [[2.2, 4.0]]], rtol=1e-6)


@pytest.mark.parametrize("how,scans", [({}, 1), ({"critic_lam": 0.9}, 1), ({"critic_lam": 1.0}, 2)])
def test_a_second_scan_only_for_a_second_lambda(how, scans):
    made = estimators.gae(**dict(gamma=1.0, lam=0.9, lam_alpha=None, critic_lam=None) | how)
    rows, mask = np.ones((2, 3), np.float32), np.ones((2, 3), np.bool_)
    assert str(jax.make_jaxpr(made.tokens)(rows, rows, rows[:, 0], mask)).count("= scan[") == scans
