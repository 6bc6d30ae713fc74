"""The clipped losses by hand-worked tables, special cases and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jppo.algorithms import losses

# ratio, advantage -> loss, clip holds, d loss / d logp, worked by hand with ε = 0.2
POLICY = [
    (1.0, 2.0, -2.0, False, -2.0),
    (1.1, 2.0, -2.2, False, -2.2),
    (1.5, 2.0, -2.4, True, 0.0),  # already better by more than ε: no more reward for it
    (0.5, 2.0, -1.0, False, -1.0),  # worse: pulled back
    (1.5, -2.0, 3.0, False, 3.0),
    (0.5, -2.0, 1.6, True, 0.0),
    (0.9, -2.0, 1.8, False, 1.8),
    (1.7, 0.0, 0.0, False, 0.0),
]
# new, old, return -> loss, clip holds, d loss / d new, with c = 0.5
VALUE = [
    (1.0, 1.0, 3.0, 2.0, False, -2.0),
    (1.2, 1.0, 3.0, 1.62, False, -1.8),
    (2.0, 1.0, 3.0, 1.125, True, 0.0),  # moved towards the return by more than c
    (0.0, 1.0, 3.0, 4.5, False, -3.0),  # moved away: pulled back
    (0.0, 1.0, -1.0, 1.125, True, 0.0),
]


@pytest.mark.parametrize("ratio,advantage,loss,held,slope", POLICY)
def test_policy_table(ratio, advantage, loss, held, slope):
    def one(logp):
        found, clipped = losses.clipped_policy(logp, jnp.float32(-2.0), jnp.float32(advantage), clip_ratio=0.2)
        return found, clipped

    (found, clipped), grad = jax.value_and_grad(one, has_aux=True)(jnp.float32(-2.0 + np.log(ratio)))
    np.testing.assert_allclose(found, loss, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(grad, slope, rtol=1e-5, atol=1e-6)
    assert bool(clipped) == held


@pytest.mark.parametrize("new,old,target,loss,held,slope", VALUE)
def test_value_table(new, old, target, loss, held, slope):
    def one(v):
        return losses.clipped_value(v, jnp.float32(old), jnp.float32(target), cliprange_value=0.5)

    (found, clipped), grad = jax.value_and_grad(one, has_aux=True)(jnp.float32(new))
    np.testing.assert_allclose(found, loss, rtol=1e-5)
    np.testing.assert_allclose(grad, slope, rtol=1e-5, atol=1e-6)
    assert bool(clipped) == held


def test_ratio_1_gives_the_plain_policy_gradient():
    logp, advantage = np.random.default_rng(0).normal(size=(2, 50)).astype(np.float32)

    def total(x):
        return jnp.sum(losses.clipped_policy(x, logp, advantage, clip_ratio=0.2)[0])

    np.testing.assert_allclose(jax.grad(total)(logp), -advantage, rtol=1e-6)
    np.testing.assert_allclose(total(logp), -advantage.sum(), rtol=1e-5)


def test_an_explicit_0_clips_everything_that_moved():
    loss, held = losses.clipped_policy(
        np.float32([0.1, -0.1]), np.zeros(2, np.float32), np.float32([1.0, -1.0]), clip_ratio=0.0
    )
    np.testing.assert_array_equal(loss, [-1.0, 1.0])
    assert held.all()


@pytest.mark.parametrize("advantage", [-2.0, 2.0])
@pytest.mark.parametrize("gap", [-100.0, -20.0, 20.0, 100.0])
def test_loss_and_gradient_stay_finite_far_apart(advantage, gap):
    def one(logp):
        return losses.clipped_policy(logp, jnp.float32(0), jnp.float32(advantage), clip_ratio=0.2)[0]

    value, grad = jax.value_and_grad(one)(jnp.float32(gap))
    assert np.isfinite(value) and np.isfinite(grad)


def test_a_value_at_its_return_has_no_loss():
    x = np.float32([-1.0, 0.0, 2.5])
    loss, held = losses.clipped_value(x, x, x, cliprange_value=0.5)
    np.testing.assert_array_equal(loss, 0.0)
    assert not held.any()
