"""Attention and rotation against plain loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jppo.models import attention, cache, rotary


def loop_attend(q, k, v, segment, sinks=None, *, scale, softcap=None, window=None):
    """One query at a time, f64: softmax over the earlier positions of its segment, those within the window.

    A head's sink is one score more, of a value of zeros.
    """
    R, T, H, _ = q.shape
    shared = H // k.shape[2]
    out = np.zeros(q.shape)
    for r, t, h in np.ndindex(R, T, H):
        seen = [s for s in range(t + 1) if segment[r, s] == segment[r, t] and (window is None or t - s < window)]
        scores = scale * np.array([q[r, t, h] @ k[r, s, h // shared] for s in seen], np.float64)
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        values = np.stack([v[r, s, h // shared] for s in seen])
        if sinks is not None:
            scores, values = np.append(scores, sinks[h]), np.append(values, np.zeros_like(values[:1]), 0)
        weight = np.exp(scores - scores.max())
        out[r, t, h] = weight / weight.sum() @ values
    return out


def plain(*, scale=0.5, softcap=None, windows=(None,)):
    return jax.jit(attention.make_plain(scale=scale, softcap=softcap, windows=windows))


@pytest.fixture
def rows(rng):
    """q, k, v and the segments of two rows."""
    q = rng.normal(size=(2, 9, 6, 4)).astype(np.float32)
    k, v = rng.normal(size=(2, 2, 9, 2, 4)).astype(np.float32)
    return (q, k, v), np.array([[1, 1, 1, 2, 3, 3, 3, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1, 1]], np.int32)


@pytest.fixture(params=[2, 64])
def block(request, monkeypatch):
    """How many queries are looked at together: five blocks, or one."""
    monkeypatch.setattr(attention, "SMALLEST_BLOCK", request.param)
    monkeypatch.setattr(attention, "LARGEST_BLOCK", request.param)


@pytest.mark.parametrize("softcap", [None, 0.8])
@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_attend_is_the_loop(rows, block, window, softcap):
    inputs, segment = rows
    expected = loop_attend(*inputs, segment, scale=0.3, softcap=softcap, window=window)
    attend = plain(scale=0.3, softcap=softcap, windows=(5, window))
    np.testing.assert_allclose(attend(*inputs, segment, jnp.int32(1)), expected, atol=2e-6)


@pytest.mark.parametrize("size", [0.5, 30.0, 300.0])
def test_sinks_are_scores_of_a_key_without_a_value(rng, rows, block, size):
    """Also such as no score comes near to, or far below, even where exp of the distance overflows f32."""
    inputs, segment = rows
    sinks = (size * rng.normal(size=6)).astype(np.float32)
    expected = loop_attend(*inputs, segment, sinks, scale=0.3, window=3)
    found = plain(scale=0.3, windows=(5, 3))(*inputs, segment, jnp.int32(1), sinks)
    np.testing.assert_allclose(found, expected, atol=2e-6)


@pytest.mark.parametrize("window,softcap,sinks", [(None, None, False), (3, 0.8, False), (3, 0.8, True)])
def test_its_gradient_is_the_loops(rng, rows, block, window, softcap, sinks):
    """Along a random direction, against differences of the loop in f64."""
    inputs, segment = rows
    if sinks:
        inputs = *inputs, rng.normal(size=6).astype(np.float32)
    given, *along = (rng.normal(size=x.shape) for x in (inputs[0], *inputs))

    def near(h):
        q, k, v, *rest = (x + h * d for x, d in zip(inputs, along, strict=True))
        return np.sum(given * loop_attend(q, k, v, segment, *rest, scale=0.3, softcap=softcap, window=window))

    attend = plain(scale=0.3, softcap=softcap, windows=(window,))
    total = jax.jit(jax.grad(lambda x: jnp.sum(given * attend(*x[:3], segment, 0, *x[3:]))))
    grads = total(inputs)
    found = sum(np.sum(np.asarray(g, np.float64) * d) for g, d in zip(grads, along, strict=True))
    assert found == pytest.approx((near(1e-5) - near(-1e-5)) / 2e-5, rel=1e-4, abs=1e-4)


def test_a_shared_prompt_is_to_each_segment_what_its_own_would_be(rng, block):
    """A row [prompt of 3, 2, 4, 1, 3 | empty] against a row for each; gradients add up at the prompt.

    Prompts may have 3 and samples 4 positions, so that with small blocks the last samples' keys are in two places.
    """
    segment = np.array([[-1, -1, -1, 1, 1, 2, 2, 2, 2, 3, 4, 4, 4, 0]], np.int32)
    wholes = [[0, 1, 2, 3, 4], [0, 1, 2, 5, 6, 7, 8], [0, 1, 2, 9], [0, 1, 2, 10, 11, 12]]
    q, k, v = (rng.normal(size=(1, 14, h, 4)).astype(np.float32) for h in (6, 2, 2))
    given = rng.normal(size=q.shape).astype(np.float32)
    attend = attention.make_plain(scale=0.3, softcap=0.8, windows=(None,), shared=(3, 4))

    def together(q, k, v):
        out = attend(q, k, v, segment, 0)
        return jnp.sum((given * out)[:, 3:13]), out

    def apart(q, k, v):
        total = 0.0
        for whole in wholes:
            at, one = np.array(whole), np.ones((1, len(whole)), np.int32)
            out = plain(scale=0.3, softcap=0.8)(q[:, at], k[:, at], v[:, at], one, 0)
            total += jnp.sum(given[:, at[3:]] * out[:, 3:])
        return total

    (_, found), grads = jax.jit(jax.value_and_grad(together, (0, 1, 2), has_aux=True))(q, k, v)
    for whole in wholes:
        one = loop_attend(*(x[:, whole] for x in (q, k, v)), np.ones((1, len(whole))), scale=0.3, softcap=0.8)
        np.testing.assert_allclose(found[:, whole], one, atol=2e-6)
    assert np.isfinite(found).all()
    expected = jax.jit(jax.grad(apart, (0, 1, 2)))(q, k, v)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), grads, expected)


@pytest.mark.parametrize("shared", [None, (64, 32), (200, 300), (1000, 4000)])
def test_blocks_are_all_of_the_row(shared):
    for length in (1, 63, 64, 65, 200, 4095, 9000):
        found = attention.query_blocks(length, shared)
        assert [i for b, _ in found for i in range(b.start, b.stop)] == list(range(length))
        assert max(b.stop - b.start for b, _ in found) <= max(64, min(1024, length / 4 + 8))
        pairs = 0
        for block, spans in found:
            keys = [i for span in spans for i in range(length)[span]]
            assert len(set(keys)) == len(keys) and set(range(block.start, block.stop)) <= set(keys)
            prompt, sample = shared or (0, length)
            if block.stop > prompt + sample:  # of a sample: the prompt, and as far back as it may begin
                begins = max(prompt, block.start - sample + 1)
                assert {*range(prompt), *range(begins, block.stop)} <= set(keys)
            else:
                assert keys == list(range(block.stop))
            pairs += len(keys) * (block.stop - block.start)
        assert attention.count_score_pairs(length, shared) == pairs


def test_backwards_it_holds_the_scores_of_one_block():
    """What is kept from the forward pass does not grow with the square of the row."""

    def kept(length):
        q, k = jnp.ones((1, length, 2, 4)), jnp.ones((1, length, 1, 4))
        segment = jnp.ones((1, length), jnp.int32)
        pull = jax.eval_shape(lambda q, k: jax.vjp(lambda q, k: plain()(q, k, k, segment, 0), q, k)[1], q, k)
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pull))

    assert kept(512) < 2.5 * kept(256)


@pytest.mark.parametrize("window, sinks", [(None, False), (3, False), (3, True)])
def test_a_cache_gives_what_the_row_gives(rng, window, sinks):
    """Newest tokens over a ring of what came before them, filled elsewhere with anything."""
    q = rng.normal(size=(2, 9, 6, 4)).astype(np.float32)
    k, v = rng.normal(size=(2, 2, 9, 2, 4)).astype(np.float32)
    settings = dict(scale=0.3, softcap=2.0, windows=(window,))
    sunk = rng.normal(size=6).astype(np.float32) if sinks else None
    whole = plain(**settings)(q, k, v, np.ones((2, 9), np.int32), 0, sunk)
    position, slot, slots = np.array([3, 7], np.int32), 2, 11
    here = q[[0, 1], position]
    ring = np.full((2, 2, 2, slots, 4), 1e3, np.float32)  # keys and values
    for row, last in enumerate(position):
        for p in range(last + 1):
            ring[:, row, :, (slot - last + p) % slots] = k[row, p], v[row, p]
    visible = cache.find_visible(position, np.int32(slot), slots, (window,), 0)
    attend = cache.make_attend_cached(scale=0.3, softcap=2.0)
    np.testing.assert_allclose(attend(here, *ring, visible, sunk), whole[np.arange(2), position], atol=2e-6)


def test_no_gradient_crosses_a_segment_border_or_time(rng):
    q, k, v = rng.normal(size=(3, 1, 6, 1, 4)).astype(np.float32)
    segment = jnp.array([[1, 1, 1, 2, 2, 2]])
    grad = jax.grad(lambda k, v: plain()(q, k, v, segment, 0)[0, 4].sum(), argnums=(0, 1))(k, v)
    for g in grad:
        assert (np.asarray(g)[0, [0, 1, 2, 5]] == 0).all()
    assert (np.asarray(grad[1])[0, [3, 4]] != 0).all()


def test_scores_too_large_for_bfloat16_stay_exact():
    """The softmax is f32: scores of 200 and 202.5, which bfloat16 would round to 200 and 202."""
    q = jnp.full((1, 2, 1, 4), 10.0, jnp.bfloat16)
    k = jnp.asarray(np.array([10.0, 10.125]).reshape(1, 2, 1, 1) * np.ones((1, 2, 1, 4)), jnp.bfloat16)
    v = jnp.asarray(np.array([0.0, 1.0]).reshape(1, 2, 1, 1) * np.ones((1, 2, 1, 4)), jnp.bfloat16)
    gap = 4 * 10 * 0.125 / 2
    out = plain()(q, k, v, jnp.ones((1, 2), jnp.int32), 0)[0, 1, 0, 0]
    np.testing.assert_allclose(float(out), 1 / (1 + np.exp(-gap)), atol=4e-3)


def test_rotate_turns_each_pair_by_its_angle(rng):
    x = rng.normal(size=(1, 3, 2, 6)).astype(np.float32)
    position = np.array([[0, 5, 1]], np.int32)
    cos, sin = rotary.compute_angles(position, rotary.frequencies(rotary.Rotary(100.0), 6))
    turned = np.asarray(rotary.rotate(x, cos, sin))
    for t, h, i in np.ndindex(3, 2, 3):
        angle = position[0, t] * 100.0 ** (-2 * i / 6)
        expected = complex(x[0, t, h, i], x[0, t, h, i + 3]) * np.exp(1j * angle)
        np.testing.assert_allclose(turned[0, t, h, [i, i + 3]], [expected.real, expected.imag], atol=1e-5)
