"""Estimators of KL by their definition, their signs, and what they are in expectation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jppo.algorithms import kl

P = np.log(np.array([0.5, 0.3, 0.15, 0.05]))
Q = np.log(np.array([0.2, 0.4, 0.1, 0.3]))


@pytest.mark.parametrize("name", kl.ESTIMATORS)
def test_kl_of_a_policy_and_itself_is_0(name):
    logp = np.linspace(-9.0, 0.0, 7, dtype=np.float32)
    np.testing.assert_array_equal(kl.ESTIMATORS[name](logp, logp), 0.0)


@pytest.mark.parametrize("name", kl.ESTIMATORS)
def test_unbiased_over_the_policys_own_actions(name):
    exact = np.sum(np.exp(P) * (P - Q))
    estimate = np.sum(np.exp(P) * kl.ESTIMATORS[name](jnp.float32(P), jnp.float32(Q)))
    np.testing.assert_allclose(estimate, exact, rtol=1e-5)


def test_k3_by_hand_and_never_negative():
    # d = ln 2: 2 - ln 2 - 1;  d = -ln 4: 1/4 + ln 4 - 1
    found = kl.k3(np.log([0.25, 0.8]).astype(np.float32), np.log([0.5, 0.2]).astype(np.float32))
    np.testing.assert_allclose(found, [1 - np.log(2), np.log(4) - 0.75], rtol=1e-5)
    d = np.random.default_rng(0).normal(0, 5, 1000).astype(np.float32)
    assert np.min(kl.k3(np.zeros_like(d), d)) >= 0.0


def test_k1_keeps_its_sign():
    np.testing.assert_array_equal(kl.k1(np.float32([-1.0, -3.0]), np.float32([-2.0, -1.0])), [1.0, -2.0])


@pytest.mark.parametrize("name", kl.ESTIMATORS)
def test_value_and_gradient_stay_finite_far_apart(name):
    gap = np.float32([-100.0, -25.0, 25.0, 100.0])
    value, grad = jax.vmap(jax.value_and_grad(kl.ESTIMATORS[name]))(np.zeros_like(gap), gap)
    assert np.all(np.isfinite(value)) and np.all(np.isfinite(grad))
    if name in ("k3", "low_var_kl"):
        np.testing.assert_array_equal(value, 10.0)
