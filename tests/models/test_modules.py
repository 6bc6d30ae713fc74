"""The look-up of embeddings: its values, and the gradient of tokens that a micro-batch has often."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jppo.learner import sharding
from jppo.models import config_reader
from jppo.models.decoder import Decoder, init_params
from jppo.models.modules import PerLayer, look_up, make_lookup
from tests.learner.conftest import hf_config
from tests.models.conftest import config_of


def gradient(table, tokens, given):
    return jax.jit(lambda t: jax.vjp(lambda t: look_up(t, tokens, t.dtype), t)[1](given)[0])(table)


def by_hand(table, tokens, given):
    out = np.zeros(table.shape, np.float64)
    np.add.at(out, np.asarray(tokens).reshape(-1), np.asarray(given, np.float64).reshape(-1, table.shape[1]))
    return out


@pytest.mark.parametrize("occurrences", [1, 200, 1622, 4033])
def test_a_frequent_tokens_gradient_is_the_sum_over_its_occurrences(rng, occurrences):
    tokens = np.concatenate([np.full(occurrences, 3), rng.integers(4, 32, 4096 - occurrences)]).reshape(4, 1024)
    table = jnp.asarray(rng.normal(size=(32, 8)), jnp.bfloat16)
    given = jnp.asarray(1.0 + 0.1 * rng.normal(size=(4, 1024, 8)), jnp.bfloat16)
    found = gradient(table, jnp.asarray(tokens), given)
    assert found.dtype == jnp.bfloat16 and (np.asarray(found[:3]) == 0).all()
    np.testing.assert_allclose(np.asarray(found, np.float64), by_hand(table, tokens, given), rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("count", [5, 400])
def test_values_and_gradients_for_few_and_many_tokens(rng, dtype, count):
    table = jnp.asarray(rng.normal(size=(16, 4)), dtype)
    tokens = jnp.asarray(rng.integers(0, 16, (1, count)))
    given = jnp.asarray(rng.normal(size=(1, count, 4)), dtype)
    np.testing.assert_array_equal(look_up(table, tokens, table.dtype), np.asarray(table)[np.asarray(tokens)])
    found = np.asarray(gradient(table, tokens, given), np.float64)
    np.testing.assert_allclose(found, by_hand(table, tokens, given), rtol=2**-8, atol=2e-3 if count > 5 else 1e-6)


def test_no_table_in_f32_is_made():
    V, D = 50_000, 64
    shapes = (jax.ShapeDtypeStruct((V, D), jnp.bfloat16), jax.ShapeDtypeStruct((1, 64), jnp.int32))

    def loss(table, tokens):
        return jnp.sum(look_up(table, tokens, table.dtype).astype(jnp.float32) ** 2)

    program = jax.jit(jax.grad(loss))
    account = program.lower(*shapes).compile().memory_analysis()
    assert account.output_size_in_bytes == 2 * V * D and account.temp_size_in_bytes < V * D


def test_over_a_mesh_it_is_the_same(rng):
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    table = jnp.asarray(rng.normal(size=(32, 8)), jnp.bfloat16)
    tokens, given = jnp.asarray(rng.integers(0, 8, (8, 64))), jnp.asarray(rng.normal(size=(8, 64, 8)), jnp.bfloat16)
    alone = gradient(table, tokens, given)
    there = jax.device_put(table, NamedSharding(mesh, P("tensor", "fsdp")))
    rows = NamedSharding(mesh, P("fsdp"))
    spread = gradient(there, jax.device_put(tokens, rows), jax.device_put(given, rows))
    np.testing.assert_allclose(np.asarray(spread, np.float32), np.asarray(alone, np.float32), rtol=2**-7)


def test_the_decoder_learns_a_frequent_tokens_row():
    """Of a row of 1,024 times the same token, by parameters in bfloat16 and in f32."""
    cfg = config_reader.parse_config(hf_config() | dict(max_position_embeddings=4096, num_hidden_layers=1), path="here")
    tokens = jnp.full((1, 1024), 3)
    segment, position = jnp.repeat(jnp.arange(1, 129), 8)[None], jnp.tile(jnp.arange(8), 128)[None]
    draw = functools.partial(init_params, cfg, head="value", param_dtype=jnp.bfloat16)
    params = jax.jit(draw)(jax.random.key(0))

    def row(params, dtype):
        def loss(params):
            out = Decoder(cfg, param_dtype=dtype).apply({"params": params}, tokens, segment, position)
            return jnp.sum(out.astype(jnp.float32) * jnp.linspace(0.5, 1.5, cfg.hidden_size)[None, None])

        return np.asarray(jax.jit(jax.grad(loss))(params)["embed"]["embedding"][3], np.float32)

    wide = row(jax.tree.map(lambda p: p.astype(jnp.float32), params), jnp.float32)
    narrow = row(params, jnp.bfloat16)
    assert np.linalg.norm(narrow - wide) < 0.02 * np.linalg.norm(wide)


@pytest.mark.parametrize("shape", [(2, 2, 2, 1), (1, 2, 2, 2), (1, 4, 1, 2), (8, 1, 1, 1)])
@pytest.mark.parametrize("width", [8, 6])  # 6: no part of it for each of the devices that share columns
def test_a_mesh_gives_the_rows_and_the_gradient_of_one_device_and_gathers_no_table(shape, width):
    mesh, rng = sharding.mesh_of_shape(shape), np.random.default_rng(3)
    table = rng.normal(size=(24, width)).astype(np.float32)
    tokens = rng.integers(0, 24, (8, 12)).astype(np.int32)
    given = rng.normal(size=(8, 12, width)).astype(np.float32)
    place = sharding.param_shardings(mesh, ("vocab", "embed"), jax.ShapeDtypeStruct(table.shape, table.dtype))
    spread = jax.device_put(table, place)
    rows = [jax.device_put(x, sharding.rows_sharding(mesh)) for x in (tokens, given)]

    def both(look, table, tokens, given):
        out, pull = jax.vjp(lambda table: look(table, tokens, jnp.float32), table)
        return out, pull(given)[0]

    expected = both(look_up, table, tokens, given)
    run = jax.jit(functools.partial(both, make_lookup(mesh)), out_shardings=(rows[1].sharding, place))
    found = run(spread, *rows)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)
    program = run.lower(spread, *rows).compile().as_text()
    assert not re.findall(r"f32\[[\d,]*\]\S* all-gather", program)
    summed = [re.findall(r"f32\[\d+,\d+,\d+\]", results) for results in re.findall(r"= (.*) all-reduce\(", program)]
    assert sum(map(len, summed)) == (shape[2] > 1), "rows are summed over parts of V, forwards; backwards nothing is"


def test_each_layer_has_embeddings_of_the_token_and_of_the_first_layers_input(rng):
    """Gemma 4: (norm(x W / sqrt(D)) + sqrt(P) e) / sqrt(2), by layer."""
    cfg = config_reader.parse_config(config_of("gemma4-shared"), path="config.json")
    D, L, width = cfg.hidden_size, cfg.num_layers, cfg.gemma4.per_layer
    table, kernel = rng.normal(size=(cfg.padded_vocab_size, L * width)), rng.normal(size=(D, L * width))
    scale, x = rng.normal(size=width), rng.normal(size=(2, 3, D))
    tokens = rng.integers(0, cfg.vocab_size, (2, 3))
    weights = {"embed": {"embedding": table}, "project": {"kernel": kernel}, "norm": {"scale": scale}}
    weights = jax.tree.map(jnp.float32, weights)
    found = PerLayer(cfg, jnp.float32, look_up).apply({"params": weights}, jnp.asarray(tokens), jnp.float32(x))
    state = (x @ kernel / np.sqrt(D)).reshape(2, 3, L, width)
    normed = state / np.sqrt(np.mean(state**2, axis=-1, keepdims=True) + cfg.rms_norm_eps) * (scale + cfg.norm_offset)
    token = np.sqrt(width) * table[tokens].reshape(2, 3, L, width)
    np.testing.assert_allclose(found, (normed + token) / np.sqrt(2), atol=1e-4)
