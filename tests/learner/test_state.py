"""The train state is made where it will lie: no device has a whole parameter while it is made."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jppo.algorithms import values
from jppo.learner import optim, sharding, state
from jppo.models import config_reader
from jppo.models.config import pad_vocab
from jppo.models.decoder import init_params

SHAPE = dict(
    model_type="qwen2", num_hidden_layers=4, hidden_size=128, intermediate_size=256, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=2001, max_position_embeddings=64, rms_norm_eps=1e-6, rope_theta=1e4,
    hidden_act="silu",
)  # fmt: skip


def nbytes(tree):
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def on_each(tree):
    """The bytes on every device."""
    return {sum(x.addressable_shards[i].data.nbytes for x in jax.tree.leaves(tree)) for i in range(len(jax.devices()))}


@pytest.mark.parametrize("mesh_shape", [(1, 8, 1, 1), (1, 2, 2, 2)])
@pytest.mark.parametrize("head", ["lm", "value"])
def test_random_weights_and_moments_are_drawn_in_their_shards(mesh_shape, head):
    mesh = sharding.mesh_of_shape(mesh_shape)
    cfg = pad_vocab(config_reader.parse_config(SHAPE, path="here"), mesh.shape["tensor"])
    what = state.model_weights(cfg, mesh, head=head, param_dtype=jnp.float32)
    whole, largest = nbytes(what.shapes), max(map(nbytes, jax.tree.leaves(what.shapes)))

    values = state.load_sharded(what, "no/path", init="random", key=jax.random.key(0))
    (here,) = on_each(values)
    assert whole / 8 <= here < 1.1 * whole / 8  # norms, and key/value heads of biases, are small
    draw = functools.partial(init_params, cfg, head=head, param_dtype=jnp.float32)
    made = jax.jit(draw, out_shardings=what.shardings).lower(jax.random.key(0)).compile().memory_analysis()
    assert made.output_size_in_bytes + made.temp_size_in_bytes < 2.5 * whole / 8 and made.temp_size_in_bytes < largest

    tx = optim.make_optimizer(optax.adamw, grad_clip=1.0)
    opt, places = state.init_optimizer(tx, what, values)
    (moments,) = on_each(opt)
    assert 2 * here <= moments < 2.01 * here
    made = jax.jit(lambda p: tx.init(optim.in_f32(p)), out_shardings=places).lower(values).compile().memory_analysis()
    assert made.temp_size_in_bytes < largest / 8
    assert all((np.asarray(x.addressable_shards[0].data) == 0).all() for x in jax.tree.leaves(opt))


@pytest.mark.parametrize("value_norm", [None, (0.0, 0.0, 0.0)])
def test_the_state_before_the_first_step(value_norm):
    """The statistics of returns have the shape of `values.update_statistics`: the second step compiles nothing."""
    mesh = sharding.mesh_of_shape((1, 2, 1, 1))
    policy = {"w": jax.device_put(jnp.ones(4), sharding.replicated(mesh))}
    now = state.begin_state(policy, None, None, None, kl_coef=0.25, seed=3, value_norm=value_norm)
    assert (int(now.step), float(now.kl_coef), int(now.bad_steps), now.value) == (0, 0.25, 0, None)
    assert now.policy is policy and jax.random.key_data(now.key).tolist() == [0, 3]
    assert {x.sharding.mesh for x in (now.step, now.kl_coef, now.bad_steps)} == {mesh}
    if value_norm:
        later = values.update_statistics(now.value_norm, jnp.ones((1, 2)), jnp.ones((1, 2), bool), decay=0.5)
        assert now.value_norm.shape == later.shape and not now.value_norm.any()
    else:
        assert now.value_norm is None
