"""Attention and rotation against plain loops."""

import jax
import jax.numpy as jnp
import numpy as np

from jppo.models import attention


def loop_attend(q, k, v, segment):
    """One query at a time, f64: softmax over the earlier positions of its segment."""
    R, T, H, A = q.shape
    shared = H // k.shape[2]
    out = np.zeros(q.shape)
    for r, t, h in np.ndindex(R, T, H):
        seen = [s for s in range(t + 1) if segment[r, s] == segment[r, t]]
        scores = np.array([q[r, t, h] @ k[r, s, h // shared] for s in seen]) / np.sqrt(A)
        weight = np.exp(scores - scores.max())
        out[r, t, h] = weight / weight.sum() @ np.stack([v[r, s, h // shared] for s in seen])
    return out


def test_attend_is_the_loop(rng):
    q = rng.normal(size=(2, 9, 6, 4)).astype(np.float32)
    k, v = rng.normal(size=(2, 2, 9, 2, 4)).astype(np.float32)
    segment = np.array([[1, 1, 1, 2, 3, 3, 3, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1, 1]], np.int32)
    np.testing.assert_allclose(attention.attend(q, k, v, segment), loop_attend(q, k, v, segment), atol=2e-6)


def test_no_gradient_crosses_a_segment_border_or_time(rng):
    q, k, v = rng.normal(size=(3, 1, 6, 1, 4)).astype(np.float32)
    segment = jnp.array([[1, 1, 1, 2, 2, 2]])
    grad = jax.grad(lambda k, v: attention.attend(q, k, v, segment)[0, 4].sum(), argnums=(0, 1))(k, v)
    for g in grad:
        assert (np.asarray(g)[0, [0, 1, 2, 5]] == 0).all()
    assert (np.asarray(grad[1])[0, [3, 4]] != 0).all()


def test_scores_too_large_for_bfloat16_stay_exact():
    """The softmax is f32: scores of 200 and 202.5, which bfloat16 would round to 200 and 202."""
    q = jnp.full((1, 2, 1, 4), 10.0, jnp.bfloat16)
    k = jnp.asarray(np.array([10.0, 10.125]).reshape(1, 2, 1, 1) * np.ones((1, 2, 1, 4)), jnp.bfloat16)
    v = jnp.asarray(np.array([0.0, 1.0]).reshape(1, 2, 1, 1) * np.ones((1, 2, 1, 4)), jnp.bfloat16)
    gap = 4 * 10 * 0.125 / 2
    out = attention.attend(q, k, v, jnp.ones((1, 2), jnp.int32))[0, 1, 0, 0]
    np.testing.assert_allclose(float(out), 1 / (1 + np.exp(-gap)), atol=4e-3)


def test_rotate_turns_each_pair_by_its_angle(rng):
    x = rng.normal(size=(1, 3, 2, 6)).astype(np.float32)
    position = np.array([[0, 5, 1]], np.int32)
    cos, sin = attention.rotary_angles(position, head_dim=6, theta=100.0)
    turned = np.asarray(attention.rotate(x, cos, sin))
    for t, h, i in np.ndindex(3, 2, 3):
        angle = position[0, t] * 100.0 ** (-2 * i / 6)
        expected = complex(x[0, t, h, i], x[0, t, h, i + 3]) * np.exp(1j * angle)
        np.testing.assert_allclose(turned[0, t, h, [i, i + 3]], [expected.real, expected.imag], atol=1e-5)
