"""Gated delta nets: the recurrence against a loop over tokens, rows that are packed or padded, memory, bad input."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jppo.errors import UserError
from jppo.learner import cost, sharding
from jppo.learner.sharding import require_divisible
from jppo.models import cache, config_reader, decoder, delta, hf_write, lora
from jppo.rollout.servers.member import ServerSettings
from jppo.rollout.vllm.arguments import require_delta_nets
from tests.models.conftest import config_of

R, T, N, G, A, W = 2, 150, 2, 3, 10, 7


def arguments(rng):
    """Unit queries and keys, values, log decays from almost none to -50, rates."""
    q, k = (rng.normal(size=(R, T, N, A)) for _ in range(2))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = rng.normal(size=(R, T, N, G, W))
    decay = -np.exp(rng.normal(-2, 3, size=(1, 1, N, G))) * rng.uniform(0, 2, size=(R, T, N, G))
    return q, k, v, decay, rng.uniform(size=(R, T, N, G))


def by_token(q, k, v, decay, rate, segment, state):
    """The outputs and the last state in f64, token by token."""
    out = []
    for t in range(q.shape[1]):
        if t and segment[t] != segment[t - 1]:
            state = np.zeros_like(state)
        state = np.exp(decay[:, t])[..., None, None] * state
        wrong = v[:, t] - np.einsum("rngaw,rna->rngw", state, k[:, t])
        state = state + np.einsum("rna,rngw->rngaw", k[:, t], rate[:, t][..., None] * wrong)
        out.append(np.einsum("rngaw,rna->rngw", state, q[:, t]))
    return np.stack(out, axis=1), state


@pytest.mark.parametrize("lengths", [(150,), (40, 3, 1, 99, 7), (64, 86), (63, 1, 86)])
def test_chunks_give_what_single_tokens_do(rng, lengths):
    segment, given = np.repeat(np.arange(len(lengths)), lengths), arguments(rng)
    expected, last = by_token(*given, segment, np.zeros((R, N, G, A, W)))
    run = delta.number_runs(jnp.broadcast_to(jnp.asarray(segment, jnp.int32), (R, T)))
    found, state = jax.jit(delta.run_delta_rule)(*(jnp.asarray(x, jnp.float32) for x in given), run, None)
    np.testing.assert_allclose(found, expected, atol=2e-6)
    np.testing.assert_allclose(state, last, atol=2e-6)


def test_a_row_in_parts_gives_what_it_does_at_once(rng):
    given = [jnp.asarray(x, jnp.float32) for x in arguments(rng)]
    recurrence = jax.jit(delta.run_delta_rule)
    whole, last = recurrence(*given, jnp.zeros((R, T), jnp.int32), None)
    state, parts = jnp.zeros((R, N, G, A, W)), []
    for start, stop in ((0, 70), (70, 71), (71, 150)):
        zeros = jnp.zeros((R, stop - start), jnp.int32)
        found, state = recurrence(*(x[:, start:stop] for x in given), zeros, state)
        parts.append(found)
    np.testing.assert_allclose(np.concatenate(parts, axis=1), whole, atol=2e-6)
    np.testing.assert_allclose(state, last, atol=2e-6)


def test_equal_keys_do_not_blow_up():
    """Chunks of one repeated token: powers of the system would lose all digits."""
    unit = jnp.zeros((1, 128, 1, 4)).at[..., 0].set(1.0)
    v = jnp.arange(128.0).reshape(1, 128, 1, 1, 1)
    zeros = jnp.zeros((1, 128, 1, 1))
    found, _ = jax.jit(delta.run_delta_rule)(unit, unit, v, zeros, zeros + 1.0, jnp.zeros((1, 128), jnp.int32), None)
    np.testing.assert_allclose(found, v)  # each value replaces the one before


def test_the_convolution_sees_no_other_segment(rng):
    x, kernel = rng.normal(size=(1, 12, 5)).astype(np.float32), rng.normal(size=(5, 4)).astype(np.float32)
    segment = jnp.asarray([[1, 1, 1, 1, 1, 2, 2, 3, 3, 3, 0, 0]], jnp.int32)
    found = delta.convolve(jnp.pad(x, [(0, 0), (3, 0), (0, 0)]), jnp.asarray(kernel), delta.number_runs(segment))
    expected = [
        np.stack([np.convolve(part[:, c], kernel[c, ::-1])[: len(part)] for c in range(5)], axis=1)
        for part in np.split(x[0], [5, 7, 10])
    ]
    np.testing.assert_allclose(found[0], np.concatenate(expected), atol=1e-5)


CFG = config_reader.parse_config(config_of("qwen3.5-periods") | dict(initializer_range=0.2), path="config.json")


def test_packing_changes_no_gradient(rng):
    config = config_of("qwen3.5-periods") | dict(initializer_range=0.2, num_hidden_layers=3)  # one period
    cfg = config_reader.parse_config(config, path="config.json")
    values = jax.jit(lambda key: decoder.init_params(cfg, key, head="lm", param_dtype=jnp.float32))(jax.random.key(0))
    parts = [rng.integers(0, cfg.vocab_size, n).astype(np.int32) for n in (9, 1, 21)]

    @jax.jit
    def gradient(values, tokens, segment, position):
        def loss(values):
            hidden = decoder.Decoder(cfg, remat="dots").apply({"params": values}, tokens, segment, position)
            return jnp.sum(jnp.where(segment[:, :, None] > 0, hidden, 0.0) ** 3)

        return jax.grad(loss)(values)

    def in_rows(rows, segment, position):
        """Three rows of one length, so that one program serves both."""
        fill = [np.pad(x, ((0, 3 - len(x)), (0, 36 - x.shape[1])), constant_values=c) for x, c in
                zip((rows, segment, position), (7, 0, 0), strict=True)]  # fmt: skip
        return gradient(values, *fill)

    rows = np.stack([np.pad(part, (0, 21 - len(part)), constant_values=7) for part in parts])
    held = (np.arange(21) < np.array([9, 1, 21])[:, None]).astype(np.int32)
    apart = in_rows(rows, held, np.broadcast_to(np.arange(21, dtype=np.int32), rows.shape))
    packed = np.concatenate([*parts, np.full(5, 7, np.int32)])[None]
    segment = np.repeat([1, 2, 3, 0], [9, 1, 21, 5]).astype(np.int32)[None]
    position = np.concatenate([np.arange(n) for n in (9, 1, 21, 5)]).astype(np.int32)[None]
    together = in_rows(packed, segment, position)
    for one, each in zip(*map(jax.tree.leaves, (together, apart)), strict=True):
        np.testing.assert_allclose(one, each, rtol=1e-4, atol=1e-4 * np.abs(one).max())


def test_memory_grows_with_tokens_not_with_states():
    def temporary(length):
        shapes = [(1, length, 2, 64), (1, length, 2, 64), (1, length, 2, 2, 64), (1, length, 2, 2), (1, length, 2, 2)]
        given = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        run = jax.ShapeDtypeStruct((1, length), jnp.int32)

        def loss(given, run):
            return jnp.sum(delta.run_delta_rule(*given, run, None)[0] ** 2)

        return jax.jit(jax.grad(loss)).lower(given, run).compile().memory_analysis().temp_size_in_bytes

    states = 4 * (4096 - 1024) * 2 * 2 * 64 * 64  # f32, one after each token
    assert temporary(4096) - temporary(1024) < states / 4


def test_a_cache_has_states_in_place_of_keys():
    held = cache.empty_cache(CFG, rows=3, length=20, dtype=jnp.bfloat16)
    assert [type(one).__name__ for one in held] == 2 * ["DeltaCache", "DeltaCache", "LayerCache"]
    keys, states = 2 * 2 * 20 * 2 * 24, 4 * 2 * 3 * 10 * 14  # two layers' keys and values, four layers' states
    inputs = 4 * 3 * (2 * 2 * 10 + 6 * 14)
    assert cache.cache_row_bytes(CFG, length=20, dtype=jnp.bfloat16) == 2 * keys + 4 * states + 2 * inputs


def test_a_token_costs_its_products_with_the_state_and_no_pairs():
    config = dict(hidden_size=8, intermediate_size=12, num_attention_heads=2, num_key_value_heads=1, head_dim=4)
    config |= dict(vocab_size=10, num_hidden_layers=2, full_attention_interval=2, max_position_embeddings=64)
    config |= dict(linear_num_key_heads=1, linear_num_value_heads=3, linear_key_head_dim=5, linear_value_head_dim=7)
    cfg = config_reader.parse_config(config | dict(model_type="qwen3_5_text", partial_rotary_factor=0.5), path="here")
    # q with its gate, k, v, o; q k v, z, b, a, out, and three with each state of 5 by 7; two MLPs; the head
    attention = 8 * 16 + 2 * 8 * 4 + 8 * 8
    recurrent = 8 * (2 * 5 + 21) + 8 * 21 + 2 * 8 * 3 + 21 * 8 + 3 * 3 * 5 * 7
    pairs = 2 * 6 * 2 * 4  # one layer: 6 pairs of 3 tokens, by k and by v
    tokens = 3 * (attention + recurrent + 2 * 3 * 8 * 12)
    assert cost.forward(cfg, [3], head_tokens=1) == 2 * (tokens + pairs + 8 * 10)


def test_adapters_are_those_of_attention_and_mlps():
    found = lora.adapter_table(CFG, lora.Lora(2, 16, ("q_proj", "down_proj")), head="lm")
    names = [name for entry in found for name in entry.hf_names]
    modules = {name.removeprefix("base_model.model.model.layers.").rsplit(".", 2)[0] for name in names}
    assert modules == {f"{i}.mlp.down_proj" for i in range(6)} | {f"{i}.self_attn.q_proj" for i in (2, 5)}


@pytest.mark.parametrize(
    "changes, said",
    [
        (dict(linear_num_value_heads=5), "linear_num_value_heads=5 must be a multiple of linear_num_key_heads=2"),
        (
            dict(layer_types=["linear_attention"] * 5),
            r"layer_types=.* must be 6 of linear_attention and full_attention",
        ),
        (dict(layer_types=["mamba"] * 6), r"layer_types=.*mamba.* must be 6 of"),
        (dict(linear_key_head_dim="10"), "linear_key_head_dim='10' must be of type int"),
        (dict(full_attention_interval=0), "full_attention_interval=0 must be positive"),
        (
            dict(rope_parameters=dict(rope_theta=1e4, partial_rotary_factor=2.0)),
            "partial_rotary_factor=2.0 must turn an even",
        ),
        (
            dict(rope_parameters=None, partial_rotary_factor=0.21),
            "partial_rotary_factor=0.21 must turn an even",
        ),
        (dict(model_type="qwen3_5"), "its text model alone is qwen3_5_text"),
    ],
)
def test_delta_nets_that_cannot_be_read_are_refused_by_field(changes, said):
    with pytest.raises(UserError, match=rf"config\.json: .*{said}") as e:
        config_reader.parse_config(config_of("qwen3.5-periods") | changes, path="config.json")
    assert "\n" not in str(e.value)


def test_a_row_on_several_devices_is_refused():
    with pytest.raises(UserError, match=r"mesh\.sequence=2.*qwen3_5_text.*use mesh\.sequence=1") as e:
        require_divisible(CFG, sharding.mesh_of_shape((1, 1, 1, 2)))
    assert "\n" not in str(e.value)


def served(name, dtype, python):
    cfg = config_reader.parse_config(config_of(name), path="config.json")
    server = ServerSettings(python=python, dtype=dtype, max_model_len=20, vocab_size=99, delta=cfg.delta_kind)
    require_delta_nets(server, "cpu")


def test_vllm_on_a_cpu_serves_what_it_can(tmp_path):
    """An interpreter without packages stands for one that lacks torchvision."""
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -I "$@"\n')
    bare.chmod(0o755)
    served("qwen3-next-periods", "bfloat16", str(bare))
    served("qwen3-tied", "float32", str(bare))
    with pytest.raises(UserError, match=r"rollout\.dtype=float32: .*qwen3_next.*rollout\.name=inprocess$"):
        served("qwen3-next-periods", "float32", str(bare))
    with pytest.raises(UserError, match=r"qwen3_5_text models imports torchvision, .*rollout\.name=inprocess$"):
        served("qwen3.5-periods", "bfloat16", str(bare))


def test_a_critic_is_saved_as_the_classifier_of_transformers(checkpoint):
    auto = pytest.importorskip("transformers.models.auto.modeling_auto")
    changes = hf_write.classifier_changes(checkpoint("qwen3.5-periods")[0], pad_token_id=0)
    assert changes["architectures"] == [auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES["qwen3_5_text"]]
