"""Estimators of KL by definition, in expectation, and far out; the exact KL against a sum; the controller by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jppo.algorithms import kl

FEW = settings(max_examples=10, deadline=None, derandomize=True)
SEEDS = st.integers(0, 2**16)
P = np.log(np.array([0.5, 0.3, 0.15, 0.05]))
Q = np.log(np.array([0.2, 0.4, 0.1, 0.3]))
# Of d = log π - log π_ref: value and slope.
BY_DEFINITION = {
    ("kl", "k1"): (lambda d: d, lambda d: 1.0),
    ("abs",): (lambda d: abs(d), lambda d: np.sign(d)),
    ("mse", "k2"): (lambda d: d * d / 2, lambda d: d),
    ("low_var_kl", "k3"): (lambda d: min(np.exp(-d) + d - 1, 10), lambda d: (1 - np.exp(-d)) * (np.exp(-d) + d < 11)),
}
CASES = [(name, *two) for names, two in BY_DEFINITION.items() for name in names]


@functools.partial(jax.jit, static_argnums=0)
def value_and_slope(name, logp, ref_logp):
    return jax.vmap(jax.value_and_grad(kl.ESTIMATORS[name]))(jnp.asarray(logp), jnp.asarray(ref_logp))


def test_every_name_has_a_plus():
    names = {name for name, *_ in CASES}
    assert set(kl.ESTIMATORS) == names | {f"{name}+" for name in names}


@pytest.mark.parametrize("name,value,slope", CASES)
@FEW
@given(seed=SEEDS)
def test_value_and_gradient_by_definition_and_a_plus_has_that_of_k2(name, value, slope, seed):
    logp, ref_logp = -np.random.default_rng(seed).exponential(1.0, (2, 9))
    d = logp - ref_logp
    for suffix, gradient in [("", slope), ("+", lambda d: d)]:
        found, grad = value_and_slope(name + suffix, logp, ref_logp)
        np.testing.assert_allclose(found, [value(x) for x in d], rtol=1e-10, atol=1e-13)
        np.testing.assert_allclose(grad, [gradient(x) for x in d], rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("name", kl.ESTIMATORS)
def test_kl_of_a_policy_and_itself_is_0(name):
    logp = np.linspace(-9.0, 0.0, 7, dtype=np.float32)
    np.testing.assert_array_equal(kl.ESTIMATORS[name](logp, logp), 0.0)


@pytest.mark.parametrize("name", kl.ESTIMATORS)
def test_k1_and_k3_are_unbiased_over_the_policys_own_actions(name):
    estimate = np.sum(np.exp(P) * kl.ESTIMATORS[name](P, Q))
    unbiased = name.strip("+") in ("kl", "k1", "low_var_kl", "k3")
    assert np.isclose(estimate, np.sum(np.exp(P) * (P - Q)), rtol=1e-10) == unbiased


@pytest.mark.parametrize("name", kl.ESTIMATORS)
def test_the_expected_gradient_is_the_kls_for_k2_and_every_plus(name):
    """Σ_a π(a) ∇ k(a) over the logits of π, the actions' probabilities held: what sampling them estimates."""

    def expected(logits):
        logp = jax.nn.log_softmax(logits)
        return jnp.sum(jnp.exp(P) * kl.ESTIMATORS[name](logp, Q))

    right = name.endswith("+") or name in ("mse", "k2")
    assert np.allclose(jax.jit(jax.grad(expected))(P), full_slope(P, Q), rtol=1e-10) == right


def test_k3_by_hand_and_never_negative():
    # d = ln 2: 2 - ln 2 - 1;  d = -ln 4: 1/4 + ln 4 - 1
    found = kl.k3(np.log([0.25, 0.8]), np.log([0.5, 0.2]))
    np.testing.assert_allclose(found, [1 - np.log(2), np.log(4) - 0.75], rtol=1e-12)
    d = np.random.default_rng(0).normal(0, 5, 1000).astype(np.float32)
    assert np.min(kl.k3(np.zeros_like(d), d)) >= 0.0


def test_k3_of_policies_that_are_close():
    """½ d² + d³/6 to the next term, where e^d - d - 1 would be all rounding."""
    with jax.enable_x64(False):
        d = np.float32([-1e-2, -1e-3, 1e-3, 1e-2])
        exact = d.astype(np.float64)
        np.testing.assert_allclose(kl.k3(np.zeros_like(d), d), exact**2 / 2 + exact**3 / 6, rtol=1e-3)
        d = np.random.default_rng(0).normal(0, 1e-3, 1000).astype(np.float32)
        assert np.min(kl.k3(np.zeros_like(d), d)) >= 0.0


@pytest.mark.parametrize("name", [name for name in kl.ESTIMATORS if name not in ("kl", "k1")])
def test_no_gradient_where_policy_and_reference_are_equal(name):
    """As everywhere in a first step; k1 alone pushes on."""
    logp = np.linspace(-9.0, 0.0, 7)
    np.testing.assert_array_equal(value_and_slope(name, logp, logp)[1], 0.0)


def test_k1_keeps_its_sign():
    np.testing.assert_array_equal(kl.k1(np.float32([-1.0, -3.0]), np.float32([-2.0, -1.0])), [1.0, -2.0])


@pytest.mark.parametrize("name", kl.ESTIMATORS)
def test_value_and_gradient_stay_finite_far_apart(name):
    with jax.enable_x64(False):
        gap = np.float32([-1e4, -100.0, -25.0, 25.0, 100.0, 1e4])
        value, grad = value_and_slope(name, np.zeros_like(gap), gap)
        assert np.all(np.isfinite(value)) and np.all(np.isfinite(grad))
        if name.strip("+") in ("k3", "low_var_kl"):
            np.testing.assert_array_equal(value, 10.0)


@pytest.mark.parametrize("name", kl.ESTIMATORS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_dtype_and_jit(name, dtype):
    value, grad = value_and_slope(name, P.astype(dtype), Q.astype(dtype))
    assert value.dtype == grad.dtype == dtype


# The exact KL


full = jax.jit(kl.full)
full_slope = jax.jit(jax.grad(lambda logits, ref_logits: jnp.sum(kl.full(logits, ref_logits))))


def by_sum(logits, ref_logits):
    """Σ_a π(a) (log π(a) - log π_ref(a)), and its slope π(a) (log π(a) - log π_ref(a) - KL) for each logit."""
    p, q = np.exp(logits), np.exp(ref_logits)
    p, q = p / p.sum(), q / q.sum()
    exact = sum(p[a] * (np.log(p[a]) - np.log(q[a])) for a in range(p.size))
    return exact, [p[a] * (np.log(p[a]) - np.log(q[a]) - exact) for a in range(p.size)]


@FEW
@given(seed=SEEDS)
def test_full_is_the_sum_over_the_vocabulary(seed):
    logits, ref_logits = np.random.default_rng(seed).normal(0.0, 2.0, (2, 3, 11))
    grad = full_slope(logits, ref_logits)
    found = full(logits, ref_logits)
    for r in range(3):
        exact, slope = by_sum(logits[r], ref_logits[r])
        np.testing.assert_allclose(found[r], exact, rtol=1e-10)
        np.testing.assert_allclose(grad[r], slope, rtol=1e-9, atol=1e-13)
        move = np.zeros((3, 11))
        move[r, 4] = 1e-6
        difference = full(logits + move, ref_logits) - full(logits - move, ref_logits)
        np.testing.assert_allclose(difference[r] / 2e-6, slope[4], rtol=1e-5, atol=1e-8)
    assert np.all(found >= 0)
    np.testing.assert_allclose(full(logits + 5.0, ref_logits - 3.0), found, rtol=1e-10)  # logits, not log-probs
    assert not np.allclose(full(ref_logits, logits), found)


def test_full_by_hand():
    """(¾, ¼) against (¼, ¾): ¾ ln 3 - ¼ ln 3. Of a distribution and itself: 0."""
    p, q = np.log([3.0, 1.0]), np.log([1.0, 3.0])
    np.testing.assert_allclose(full(p, q), np.log(3) / 2, rtol=1e-12)
    assert full(p, p) == 0.0
    np.testing.assert_allclose(full_slope(p, p), 0.0, atol=1e-16)


@pytest.mark.parametrize("name,other_way", [("full", False), ("full_forward", True)])
def test_both_directions_have_torchs_values_and_gradients(name, other_way):
    """torch's kl_div(x, y) is KL(y ‖ x) of log-probs."""
    logits, ref_logits = np.random.default_rng(2).normal(0.0, 2.0, (2, 5, 13))
    here, there = torch.tensor(logits, requires_grad=True), torch.tensor(ref_logits)
    logp, ref_logp = here.log_softmax(-1), there.log_softmax(-1)
    two = (logp, ref_logp) if other_way else (ref_logp, logp)
    expected = torch.nn.functional.kl_div(*two, reduction="none", log_target=True).sum(-1)
    expected.sum().backward()
    divergence = kl.EXACT[name]
    np.testing.assert_allclose(divergence(logits, ref_logits), expected.detach(), rtol=1e-10)
    slope = jax.grad(lambda logits: jnp.sum(divergence(logits, ref_logits)))(logits)
    np.testing.assert_allclose(slope, here.grad, rtol=1e-9, atol=1e-13)


def test_full_forward_by_hand():
    """(½, ½) to a teacher of (¼, ¾): ¼ ln ½ + ¾ ln 3/2; the slope of the logits is π - π_ref = (¼, -¼)."""
    p, q = np.log([1.0, 1.0]), np.log([1.0, 3.0])
    np.testing.assert_allclose(kl.full_forward(p, q), 0.25 * np.log(0.5) + 0.75 * np.log(1.5), rtol=1e-12)
    np.testing.assert_allclose(jax.grad(kl.full_forward)(p, q), [0.25, -0.25], rtol=1e-12)


@pytest.mark.parametrize("scale", [100.0, 1e4])
def test_full_and_its_gradient_stay_finite(scale):
    with jax.enable_x64(False):
        logits, ref_logits = scale * np.random.default_rng(0).normal(size=(2, 3, 11)).astype(np.float32)
        grad = full_slope(logits, ref_logits)
        found = full(logits, ref_logits)
        assert np.isfinite(found).all() and np.isfinite(grad).all() and np.all(found >= 0)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_dtype_jit_and_vmap_of_full(dtype):
    logits, ref_logits = np.random.default_rng(1).normal(size=(2, 5, 7)).astype(dtype)
    found = jax.vmap(full)(logits, ref_logits)
    assert found.dtype == dtype
    np.testing.assert_allclose(found, full(logits, ref_logits), rtol=1e-5)


# The controller


@pytest.mark.parametrize(
    "coef,current,expected",
    [
        (0.2, 0.11, 0.202),  # 10 % above the target: 0.1 * 100 / 1000 more
        (0.2, 0.09, 0.198),
        (0.2, 0.1, 0.2),
        (0.2, 5.0, 0.204),  # the error counts as 20 % at most
        (0.2, 0.0, 0.196),
        (0.2, -3.0, 0.196),
        (0.0, 5.0, 0.0),
    ],
)
def test_the_coefficient_follows_the_kl_by_hand(coef, current, expected):
    rule = functools.partial(kl.adaptive, steps=100, target=0.1, horizon=1000)
    np.testing.assert_allclose(rule(np.float64(coef), np.float64(current)), expected, rtol=1e-12)
    found = jax.jit(rule)(jnp.float32(coef), jnp.float32(current))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert found.dtype == np.float32


def test_the_coefficient_over_steps():
    """Two steps too far away, one too near: 0.1 · 1.02 · 1.02 · 0.99."""
    coef = jnp.float64(0.1)
    for current in (0.9, 0.6, 0.45):
        coef = kl.adaptive(coef, current, steps=64, target=0.5, horizon=640)
    np.testing.assert_allclose(coef, 0.1 * 1.02 * 1.02 * 0.99, rtol=1e-12)
