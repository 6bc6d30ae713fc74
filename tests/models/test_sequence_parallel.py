"""Rows whose positions are spread over devices: the numbers of one device, and what the devices exchange for them."""

import contextlib
import functools
import math
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jppo.learner import sharding, state
from jppo.models import config_reader, decoder, fused, sequence_parallel
from tests.models.conftest import config_of

T = 24


@functools.cache
def drawn(name):
    """A model of that shape, its parameters, and rows: two trajectories, one, and two with an empty end."""
    cfg = config_reader.parse_config(config_of(name) | {"initializer_range": 0.4}, path="config.json")
    values = jax.jit(lambda key: decoder.init_params(cfg, key, head="lm", param_dtype=jnp.float32))(jax.random.key(0))
    rng = np.random.default_rng(0)
    lengths = [(11, 13, 0), (24, 0, 0), (9, 12, 3), (1, 20, 3)]
    segment = np.stack([np.repeat([1, 2, 0], each) for each in lengths]).astype(np.int32)
    position = np.stack([np.concatenate([np.arange(n) for n in each]) for each in lengths]).astype(np.int32)
    return cfg, values, (rng.integers(0, cfg.vocab_size, (4, T)).astype(np.int32), segment, position)


def states(cfg, mesh, how, kernel="xla"):
    """(parameters, tokens, segment, position) -> the last hidden states, on the mesh."""
    needs = fused.Needs(
        **decoder.attention_settings(cfg), head_dim=cfg.head_dim, dtype="float32", one_segment=False, longest=T
    )
    attend = fused.make_attention(kernel, needs, mesh=mesh, interpret=True)
    model = decoder.Decoder(
        cfg,
        constrain=sharding.constrain_to_rows(mesh),
        attend=sequence_parallel.exchange_positions(attend, mesh),
        **how,
    )
    return lambda values, *rows: model.apply({"params": values}, *rows)


def placed(cfg, values, rows, mesh):
    what = state.model_weights(cfg, mesh, head="lm", param_dtype=jnp.float32)
    return jax.device_put(values, what.shardings), *jax.device_put(rows, sharding.rows_sharding(mesh))


@pytest.mark.parametrize(
    "name, shape, kernel",
    [
        ("qwen2-sliding", (1, 1, 1, 2), "xla"),  # 6 heads of queries, 3 of keys: these are repeated
        ("qwen2-sliding", (2, 1, 1, 3), "xla"),
        ("mistral-sliding", (2, 1, 2, 2), "xla"),
        ("gemma2-capped", (1, 2, 1, 4), "xla"),
        ("gemma2-capped", (1, 1, 2, 2), "splash"),
        ("gemma3-long", (4, 1, 1, 2), "xla"),
        ("gemma-wide", (1, 1, 4, 1), "xla"),  # one head of keys for four devices of tensor
    ],
)
def test_windows_and_soft_caps_give_the_states_of_one_device(name, shape, kernel):
    cfg, values, rows = drawn(name)
    mesh = sharding.mesh_of_shape(shape)
    model = decoder.Decoder(cfg)
    expected = jax.jit(lambda v, *r: model.apply({"params": v}, *r))(values, *rows)
    found = jax.jit(states(cfg, mesh, {}, kernel))(*placed(cfg, values, rows, mesh))
    np.testing.assert_allclose(found, expected, atol=2e-5)
    assert float(jnp.std(expected)) > 0.1


def exchanges(text):
    """What a compiled program exchanges: the shape of the first result, the operation, and what it is for."""
    kinds = "all-to-all|all-gather|reduce-scatter|collective-permute"
    found = re.findall(rf"= \(?\w+\[([\d,]*)\].*? ({kinds})(?:-start)?\((?:.*op_name=\"([^\"]*)\")?", text)
    return [(tuple(int(n) for n in shape.split(",") if n), kind, what) for shape, kind, what in found]


@pytest.mark.parametrize("scan_layers", [True, False])
def test_q_k_v_and_what_comes_of_them_are_all_that_is_exchanged(scan_layers):
    """Four times a layer forwards, four backwards: nothing is gathered but parameters and segments."""
    cfg, values, rows = drawn("gemma2-capped")
    mesh = sharding.mesh_of_shape((1, 2, 1, 4))
    forward = states(cfg, mesh, dict(scan_layers=scan_layers))
    arguments = placed(cfg, values, rows, mesh)

    def loss(values, *rows):
        return jnp.sum(jnp.square(forward(values, *rows)))

    layers = 1 if scan_layers else cfg.num_layers
    for fn, times in ((forward, 4), (jax.grad(loss), 8)):
        seen = exchanges(jax.jit(fn).lower(*arguments).compile().as_text())
        attention = [(shape, kind) for shape, kind, what in seen if "/attn/" in what]
        exchanged = [shape for shape, kind in attention if kind == "all-to-all"]
        assert len(exchanged) == times * layers
        assert {math.prod(shape) for shape in exchanged} == {2 * T * 12 // 4}  # rows, positions and width of one head
        # The rest of what layers move between devices is kernels, or a segment's number for each position.
        others = {shape for shape, kind, what in seen if kind != "all-to-all" and "/embed/" not in what}
        assert others and all(T not in shape or shape == (2, T) for shape in others)


@pytest.mark.parametrize("heads, size, keys, seen", [(6, 5, 3, 6), (5, 4, 5, 5)])
def test_attention_gets_keys_for_the_heads_of_each_device(heads, size, keys, seen):
    """Two devices share six heads, and cannot share five."""
    found = []

    def attend(q, k, v, segment, kind):
        found.extend([k.shape, v.shape])
        return q

    over_mesh = sequence_parallel.exchange_positions(attend, sharding.mesh_of_shape((1, 1, 1, 2)))
    q, k = (jax.ShapeDtypeStruct((1, T, n, size), jnp.float32) for n in (heads, keys))
    segment = jax.ShapeDtypeStruct((1, T), jnp.int32)
    out = jax.eval_shape(lambda q, k, v, segment: over_mesh(q, k, v, segment, 0), q, k, k, segment)
    assert out.shape == q.shape and found == [(1, T, seen, size)] * 2


def test_keys_are_repeated_no_more_than_is_needed():
    x = jnp.arange(3.0).reshape(1, 1, 3, 1)
    for parts, expected in ((1, [0, 1, 2]), (3, [0, 1, 2]), (2, [0, 0, 1, 1, 2, 2]), (4, [0] * 4 + [1] * 4 + [2] * 4)):
        assert sequence_parallel.repeat_heads(x, 12, parts).reshape(-1).tolist() == expected
    assert (
        sequence_parallel.repeat_heads(x, 6, 4).shape[2] == 3
    )  # 4 divides no number of copies that 6 query heads share


def test_each_group_of_devices_runs_loops_of_its_own():
    """vmap alone makes one loop of all, until the last is done, with a condition for each."""

    mesh = sharding.mesh_of_shape((2, 1, 1), jax.devices()[:2])

    def doubled(_, x):  # until it has reached 100
        return jax.lax.while_loop(lambda x: x[0, 0] < 100, lambda x: 2 * x, x)

    @jax.jit
    def of_groups(x):
        return jax.vmap(lambda x: sequence_parallel.map_over_mesh(doubled, mesh, (), gradients=False)((), x))(x)

    x = jnp.array([[[3.0], [3.0]], [[7.0], [7.0]]])  # two rows of each group
    for divided, together in ((contextlib.nullcontext(), True), (sequence_parallel.divide_rows("data"), False)):
        with divided:
            assert of_groups(x)[..., 0].tolist() == [[192.0, 192.0], [112.0, 112.0]]
            assert ("bool[2]" in str(jax.make_jaxpr(of_groups)(x))) == together


@pytest.mark.parametrize("size, axes", [(8, "abc"), (4, "ab"), (6, "a"), (5, ""), (0, "abc")])
def test_as_many_axes_divide_a_size_as_can(size, axes):
    mesh = types.SimpleNamespace(shape=dict(a=2, b=2, c=2))
    assert "".join(sequence_parallel.fit_axes(mesh, ("a", "b", "c"), size)) == axes
