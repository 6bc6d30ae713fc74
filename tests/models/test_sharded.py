"""The model under jit on 8 devices: rows and parameters sharded, the same numbers, no gathered logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jppo.models import config_reader, decoder, heads, params

RULES = {"vocab": "tensor", "embed": "fsdp", "heads": "tensor", "kv_heads": "tensor", "mlp": "tensor"}


@pytest.fixture(params=["qwen2-tied", pytest.param("phi3-grouped", marks=pytest.mark.slow)])
def cfg(hf_config, request):
    shape = dict(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8, vocab_size=4096)
    return config_reader.parse_config(hf_config(request.param) | shape, path="config.json")


def test_eight_devices_give_the_numbers_of_one(cfg, rng):
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    rows = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    places = params.tree(
        params.table(cfg, head="lm"),
        lambda entry: NamedSharding(mesh, PartitionSpec(*(RULES.get(axis) for axis in entry.axes))),
    )

    def init(key):
        return decoder.init_params(cfg, key, head="lm", param_dtype=jnp.float32)

    alone = jax.jit(init)(jax.random.key(0))
    spread = jax.jit(init, out_shardings=places)(jax.random.key(0))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), alone, spread)

    tokens = rng.integers(0, cfg.vocab_size, (8, 64)).astype(np.int32)
    segment, position = np.ones_like(tokens), np.broadcast_to(np.arange(64, dtype=np.int32), tokens.shape)

    def loss(values, tokens, constrain):
        model = decoder.Decoder(cfg, constrain=constrain)
        hidden = model.apply({"params": values}, tokens, segment, position)
        logp, entropy = heads.logprob_entropy(
            (hidden, decoder.head_kernel(values, cfg), cfg),
            tokens,
            temperature=1.0,
            chunk_tokens=64,
            with_entropy=True,
        )
        return jnp.mean(logp + 0.1 * entropy)

    expected = jax.jit(jax.value_and_grad(lambda v, t: loss(v, t, decoder.identity)))(alone, tokens)

    def constrained(values, tokens):
        return loss(values, tokens, lambda x: jax.lax.with_sharding_constraint(x, rows))

    compiled = jax.jit(jax.value_and_grad(constrained)).lower(spread, jax.device_put(tokens, rows)).compile()
    found = compiled(spread, jax.device_put(tokens, rows))
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-7), found[1], expected[1])
    logits = 4 * tokens.size * cfg.vocab_size
    assert compiled.memory_analysis().temp_size_in_bytes < logits / 2
