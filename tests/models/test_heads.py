"""Log-probs, entropy and values against plain numpy, and chunked against whole."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jppo.learner import sharding
from jppo.models import config_reader, heads

CFG = config_reader.parse_config(
    dict(
        model_type="llama", vocab_size=19, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, max_position_embeddings=8,
    ),
    path="config.json",
)  # fmt: skip


def logprob_entropy(hidden, kernel, targets, cfg=CFG, **settings):
    return heads.logprob_entropy((hidden, kernel, cfg), targets, **settings)


def draw(rng, R=3, T=11, D=8, V=19):
    hidden = rng.normal(size=(R, T, D)).astype(np.float32)
    kernel = rng.normal(size=(V, D)).astype(np.float32)
    return hidden, kernel, rng.integers(0, V, (R, T)).astype(np.int32)


def plain(hidden, kernel, targets, temperature):
    z = hidden.astype(np.float64) @ kernel.T.astype(np.float64) / temperature
    logp = z - z.max(-1, keepdims=True)
    logp -= np.log(np.exp(logp).sum(-1, keepdims=True))
    chosen = np.take_along_axis(logp, targets[:, :, None], 2)[:, :, 0]
    return chosen, -(np.exp(logp) * logp).sum(-1)


@pytest.mark.parametrize("chunk_tokens", [1, 6, 9, 32, 33, 10_000])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_equal_to_a_plain_softmax(rng, chunk_tokens, temperature):
    hidden, kernel, targets = draw(rng)
    settings = dict(temperature=temperature, chunk_tokens=chunk_tokens)
    logp, entropy = logprob_entropy(hidden, kernel, targets, **settings, with_entropy=True)
    expected = plain(hidden, kernel, targets, temperature)
    assert logp.dtype == entropy.dtype == jnp.float32
    np.testing.assert_allclose(logp, expected[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(entropy, expected[1], rtol=1e-5, atol=1e-5)
    alone, none = logprob_entropy(hidden, kernel, targets, **settings, with_entropy=False)
    np.testing.assert_allclose(alone, logp, rtol=1e-5)
    assert none.shape == logp.shape and (np.asarray(none) == 0).all()


@pytest.mark.parametrize("with_entropy", [True, False])
def test_gradient_is_that_of_the_whole(rng, with_entropy):
    hidden, kernel, targets = draw(rng)
    weight = rng.normal(size=targets.shape).astype(np.float32)

    def loss(hidden, kernel, chunk_tokens):
        logp, entropy = logprob_entropy(
            hidden, kernel, targets, temperature=0.8, chunk_tokens=chunk_tokens, with_entropy=with_entropy
        )
        return jnp.sum(weight * logp + 0.3 * weight**2 * entropy)

    def whole(hidden, kernel):
        logp = jax.nn.log_softmax(jnp.einsum("rtd,vd->rtv", hidden, kernel) / 0.8)
        entropy = -jnp.sum(jnp.exp(logp) * logp, -1) if with_entropy else 0.0
        chosen = jnp.take_along_axis(logp, targets[:, :, None], 2)[:, :, 0]
        return jnp.sum(weight * chosen + 0.3 * weight**2 * entropy)

    expected = jax.jit(jax.grad(whole, argnums=(0, 1)))(hidden, kernel)
    for chunk_tokens in (7, 1000):
        found = jax.jit(jax.grad(loss, argnums=(0, 1)), static_argnums=2)(hidden, kernel, chunk_tokens)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected)


@pytest.mark.parametrize("mesh_shape", [None, (2, 2, 2)])
def test_all_logits_are_never_in_memory(rng, mesh_shape):
    """The compiled gradient's temporaries stay below the [R, T, V] logits that it would take at once."""
    R, T, D, V = 8, 128, 8, 4096
    given = [jnp.asarray(x) for x in draw(rng, R, T, D, V)]
    cfg = dataclasses.replace(CFG, vocab_size=V, padded_vocab_size=V)
    mesh = None if mesh_shape is None else sharding.mesh_of_shape(mesh_shape)
    if mesh is not None:
        rows = sharding.rows_sharding(mesh)
        kernel = sharding.param_shardings(mesh, ("vocab", "embed"), jax.ShapeDtypeStruct((V, D), jnp.float32))
        given = [jax.device_put(x, place) for x, place in zip(given, (rows, kernel, rows), strict=True)]

    def temporaries(chunk_tokens):
        def loss(hidden, kernel, targets):
            how = dict(temperature=1.0, chunk_tokens=chunk_tokens, with_entropy=True)
            more = {} if mesh is None else dict(mask=targets >= 0, mesh=mesh)
            return logprob_entropy(hidden, kernel, targets, cfg, **how, **more)[0].sum()

        return jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*given).compile().memory_analysis().temp_size_in_bytes

    logits = 4 * R * T * V // (1 if mesh is None else 4)  # of the rows of a device
    assert logits > 4 * temporaries(16)
    assert mesh is not None or temporaries(R * T) >= logits


def test_bfloat16_states_have_f32_logits_and_an_f32_gradient_sum(rng):
    hidden, kernel, targets = draw(rng, T=64)
    rounded = np.asarray(jnp.asarray(hidden, jnp.bfloat16), np.float32)
    near = np.asarray(jnp.asarray(kernel, jnp.bfloat16), np.float32)
    settings = dict(temperature=1.0, chunk_tokens=12, with_entropy=True)

    def run(hidden, kernel):
        return logprob_entropy(hidden, kernel, targets, **settings)

    logp, entropy = run(jnp.asarray(rounded, jnp.bfloat16), kernel)
    assert logp.dtype == entropy.dtype == jnp.float32
    np.testing.assert_allclose(logp, plain(rounded, near, targets, 1.0)[0], rtol=1e-5, atol=1e-5)
    found = jax.jit(jax.grad(lambda k: run(jnp.asarray(rounded, jnp.bfloat16), k)[0].sum()))(kernel)
    exact = jax.jit(jax.grad(lambda k: run(rounded, k)[0].sum()))(near)
    assert found.dtype == jnp.float32
    assert np.abs(found - exact).max() < 0.02 * np.abs(exact).max()


def test_a_bfloat16_kernels_gradient_is_summed_over_chunks_in_f32(rng):
    hidden, kernel, _ = (jnp.asarray(x) for x in draw(rng, R=8, T=512))
    targets, kernel = jnp.full(hidden.shape[:2], 3), kernel.astype(jnp.bfloat16)

    def gradient(chunk_tokens):
        def loss(kernel):
            given = dict(temperature=1.0, chunk_tokens=chunk_tokens, with_entropy=False)
            return logprob_entropy(hidden.astype(jnp.bfloat16), kernel, targets, **given)[0].sum()

        return np.asarray(jax.jit(jax.grad(loss))(kernel), np.float32)

    whole, cut = gradient(10_000), gradient(8)  # 512 chunks: a sum in bfloat16 would stop growing
    assert np.abs(cut - whole).max() <= 2**-7 * np.abs(whole).max()  # one rounding of the result
    assert np.linalg.norm(cut - whole) <= 0.003 * np.linalg.norm(whole)


@pytest.mark.parametrize("bad", [dict(temperature=0.0), dict(chunk_tokens=0)])
def test_impossible_settings_are_refused(rng, bad):
    settings = dict(temperature=1.0, chunk_tokens=8, with_entropy=False) | bad
    with pytest.raises(ValueError, match=next(iter(bad))):
        logprob_entropy(*draw(rng), **settings)


def test_values_are_f32_products(rng):
    hidden = jnp.asarray(rng.normal(size=(2, 3, 5)), jnp.bfloat16)
    kernel = rng.normal(size=(5, 1)).astype(np.float32)
    found = heads.values(hidden, kernel)
    assert found.dtype == jnp.float32 and found.shape == (2, 3)
    np.testing.assert_allclose(found, (np.asarray(hidden, np.float64) @ kernel)[:, :, 0], rtol=1e-5, atol=1e-6)
    bins = rng.normal(size=(5, 3)).astype(np.float32)
    found = heads.values(hidden, bins)
    assert found.dtype == jnp.float32 and found.shape == (2, 3, 3)
    np.testing.assert_allclose(found, np.asarray(hidden, np.float64) @ bins, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("chunk_tokens", [8, 1000])
def test_rows_of_the_kernel_that_are_no_tokens_have_no_probability(rng, chunk_tokens):
    """What stands in them changes neither log-probs nor entropy, and gets no gradient."""
    hidden, kernel, targets = draw(rng)
    settings = dict(temperature=0.7, chunk_tokens=chunk_tokens, with_entropy=True)
    wide = dataclasses.replace(CFG, padded_vocab_size=24)
    padded = np.concatenate([kernel, 100 * rng.normal(size=(5, 8)).astype(np.float32)])

    def total(kernel, cfg):
        logp, entropy = logprob_entropy(hidden, kernel, targets, cfg, **settings)
        return jnp.sum(logp) + 0.1 * jnp.sum(entropy), (logp, entropy)

    graded = jax.jit(jax.grad(total, has_aux=True), static_argnums=1)
    found, grad = graded(padded, wide)[::-1]
    expected, plain_grad = graded(kernel, CFG)[::-1]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)
    np.testing.assert_allclose(grad[:19], plain_grad, rtol=1e-5, atol=1e-6)
    assert (np.asarray(grad[19:]) == 0).all()


def test_soft_cap_comes_before_the_temperature(rng):
    hidden, kernel, targets = draw(rng)
    capped = dataclasses.replace(CFG, logit_softcap=3.0)
    logp, _ = logprob_entropy(hidden, kernel, targets, capped, temperature=0.5, chunk_tokens=9, with_entropy=False)
    logits = 3.0 * np.tanh(hidden @ kernel.T / 3.0)
    expected = np.log(np.exp(logits / 0.5) / np.exp(logits / 0.5).sum(-1, keepdims=True))
    np.testing.assert_allclose(logp, np.take_along_axis(expected, targets[..., None], 2)[..., 0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("k", [1, 3, 5, 8])
def test_the_largest_logits_of_a_sharded_vocabulary_are_those_of_the_whole(k):
    """Many logits are equal: of these the first tokens count, on whichever device they are."""
    mesh = sharding.mesh_of_shape((1, 1, 2), jax.devices()[:2])
    logits = jnp.asarray(np.random.default_rng(k).integers(0, 4, (6, 8)), jnp.float32)
    spec = jax.sharding.PartitionSpec(None, "tensor")
    find = lambda x: heads.Vocabulary("tensor").largest(x, k)  # noqa: E731
    found = jax.shard_map(find, mesh=mesh, in_specs=spec, out_specs=spec)(logits)
    np.testing.assert_array_equal(found, heads.WHOLE_VOCABULARY.largest(logits, k))
    by_hand = [np.isin(np.arange(8), np.argsort(-row, kind="stable")[:k]) for row in np.asarray(logits)]
    np.testing.assert_array_equal(found, by_hand)


@pytest.mark.parametrize("tensor, chunk_tokens", [(1, 7), (1, 1000), (2, 3)])
def test_kept_tokens_are_the_whole_distribution(rng, tensor, chunk_tokens):
    """Log-probs, entropies, Σ p² and gradients are of a softmax over the kept logits alone, on each shard of them."""
    hidden, kernel, targets = draw(rng, R=4, T=8, V=16)
    cfg = dataclasses.replace(CFG, vocab_size=15, padded_vocab_size=16)  # the last row is no token
    kept = np.full((4, 8, 6), -1, np.int32)
    for at in np.ndindex(4, 8):
        targets[at] %= 15
        if sum(at) % 5:  # else the whole vocabulary
            ids = rng.permutation(15)[: rng.integers(1, 7)]
            targets[at] = ids[-1]
            kept[at][: len(ids)] = ids
    mesh, mask = sharding.mesh_of_shape((2, 1, tensor), jax.devices()[: 2 * tensor]), rng.random((4, 8)) < 0.8
    share = rng.normal(size=(3, 4, 8)).astype(np.float32)
    how = dict(temperature=0.7, chunk_tokens=chunk_tokens, with_entropy=True, more=[heads.sum_pi_squared_of])

    def ours(hidden, kernel):
        found = logprob_entropy(hidden, kernel, targets, cfg, mask=jnp.asarray(mask), kept=kept, mesh=mesh, **how)
        return jnp.sum(share * jnp.stack(found)), found

    def by_hand(hidden, kernel):
        out = jnp.zeros((3, 4, 8))
        for at in zip(*np.nonzero(mask), strict=True):
            ids = kept[at][kept[at] >= 0] if kept[at][0] >= 0 else np.arange(15)
            logp = jax.nn.log_softmax(kernel[ids] @ hidden[at] / 0.7)
            p, place = jnp.exp(logp), int(np.flatnonzero(ids == targets[at])[0])
            out = out.at[:, at[0], at[1]].set(jnp.stack([logp[place], -jnp.sum(p * logp), jnp.sum(p**2)]))
        return jnp.sum(share * out), out

    found, expected = (jax.grad(f, argnums=(0, 1), has_aux=True)(hidden, kernel) for f in (jax.jit(ours), by_hand))
    np.testing.assert_allclose(jnp.stack(found[1]), expected[1], rtol=1e-5, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found[0], expected[0])
    assert np.abs(expected[0][1]).max() > 0.1
