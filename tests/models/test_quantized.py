"""Quantised bases: their codes by the formats, products as with the decoded kernels, shards, bytes, runs, refusals."""

import json
import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from jppo import export, settings, train
from jppo.learner import state
from jppo.learner.sharding import make_mesh
from jppo.models import decoder, hf, lora, quantized
from jppo.models.lora import Lora
from jppo.settings import UserError
from tests.make import assert_close, changed, logits, untimed, weights, whole

TARGETS = ("q_proj", "v_proj", "o_proj", "down_proj")
METHODS = ("int8", "mxfp4")


@pytest.fixture
def numbers(rng):
    """[layers, 64 inputs, 3 heads, 4]: of many sizes, with a block of zeros, a negative zero and a single number."""
    x = rng.normal(size=(2, 64, 3, 4)) * np.exp(3 * rng.normal(size=(2, 64, 1, 1)))
    x[0, :32, 0], x[1, 3, 1], x[1, 32:, 2, 0], x[1, 40, 2, 0] = 0, -0.0, 0, 1e-30
    return x.astype(np.float32)


def int8(x, axes):
    """The formula, in numpy."""
    scale = np.abs(x).max(axes, keepdims=True) * np.float32(1 / 127)
    scale[scale == 0] = 1
    return np.rint(x / scale).astype(np.float32) * scale


def mxfp4(x):
    """Blocks of the second axis, by ml_dtypes' E2M1; too large numbers saturate."""
    blocks = x.reshape(x.shape[0], -1, 32, *x.shape[2:]).astype(np.float64)
    largest = np.abs(blocks).max(2, keepdims=True)
    power = 2.0 ** (np.floor(np.log2(np.where(largest > 0, largest, 1))) - 2)
    return (np.clip(blocks / power, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float64) * power).reshape(x.shape)


def test_codes_are_those_of_the_formats(numbers):
    found = quantized.encode(jnp.asarray(numbers), "mxfp4", (-3,))
    assert np.array_equal(found.astype(jnp.float32), mxfp4(numbers))
    assert found.codes.shape == (2, 32, 3, 4) and found.scales.shape == (2, 2, 3, 4)
    for axes in ((-3,), (-3, -2)):
        assert np.array_equal(
            quantized.encode(jnp.asarray(numbers), "int8", axes).astype(jnp.float32), int8(numbers, axes)
        )
    largest = np.abs(numbers - int8(numbers, (-3,))) / np.abs(numbers).max(-3, keepdims=True).clip(1e-37)
    assert largest.max() <= 0.5 / 127 * (1 + 1e-5)


def test_mxfp4_is_what_transformers_decodes(numbers):
    torch = pytest.importorskip("torch")
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    of_one = quantized.encode(jnp.asarray(numbers.reshape(2, 64, 12)), "mxfp4", (-2,))
    codes, scales = (np.asarray(x).transpose(0, 2, 1).copy() for x in (of_one.codes, of_one.scales))
    theirs = convert_moe_packed_tensors(torch.from_numpy(codes.reshape(2, 12, 2, 16)), torch.from_numpy(scales))
    assert np.array_equal(of_one.astype(jnp.bfloat16), theirs.float().numpy().astype(jnp.bfloat16))


def loaded(directory, method, mesh=None, dtype="float32"):
    """A model of the checkpoint with such a base and adapters that do something."""
    _, cfg = hf.read_config(directory)
    mesh, how = make_mesh((1,), jax.devices()[:1]) if mesh is None else mesh, Lora(4, 8, TARGETS, base=method)
    what = state.weights(cfg, mesh, head="lm", param_dtype=dtype, adapters=how)
    values = state.load(what, str(directory), init="pretrained", key=jax.random.key(0))
    learned, base = state.adapt(state.adapters(cfg, mesh, how, head="lm"), values, how, key=jax.random.key(1))
    return cfg, lora.join(jax.tree.map(lambda x: x + 0.05, learned), base)


def plain(model):
    """The same model with its base decoded."""
    params = jax.tree.map(quantized.decoded, model.base.params, is_leaf=quantized.is_quantized)
    return lora.join(model.learned, lora.Base(params, model.base.scale))


def loss_and_gradient(cfg, model, tokens, **how):
    @jax.jit
    def both(base, learned):
        def loss(learned):
            variables = lora.variables(lora.join(learned, base))
            hidden = decoder.Decoder(cfg, **how).apply(variables, tokens, *whole(tokens))
            return jnp.mean(jnp.square(hidden))

        return jax.value_and_grad(loss)(learned)

    return both(model.base, model.learned)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "how",
    [dict(scan_layers=False), dict(remat="full"), dict(dtype=jnp.bfloat16)],
    ids=["unrolled", "remat", "bfloat16"],
)
def test_products_and_gradients_are_those_of_the_decoded_base(checkpoint, rng, method, how):
    cfg, model = loaded(checkpoint("llama-blocks")[0], method)
    tokens = rng.integers(0, cfg.vocab_size, (2, 9)).astype(np.int32)
    ours, decoded = (loss_and_gradient(cfg, one, tokens, **how) for one in (model, plain(model)))
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(decoded), strict=True):
        assert_close(np.asarray(a), np.asarray(b), rel=1e-6)
    exact = hf.load_params(checkpoint("llama-blocks")[0], cfg, head="lm", param_dtype=jnp.float32)
    far = np.abs(logits(cfg, exact, tokens) - logits(cfg, model.base.params, tokens)).max()
    assert far > 1e-3, "the base is not quantised"


@pytest.mark.parametrize("method", METHODS)
def test_a_mesh_shards_codes_and_computes_the_same(checkpoint, rng, method):
    directory, _ = checkpoint("llama-blocks")
    cfg, one = loaded(directory, method)
    _, spread = loaded(directory, method, make_mesh((1, 2, 1), jax.devices()[:2]))
    kernel = spread.base.params["layers"]["mlp"]["gate"]["kernel"]
    assert kernel.codes.addressable_shards[0].data.size * 2 == kernel.codes.size
    for a, b in zip(jax.tree.leaves(one.base), jax.tree.leaves(spread.base), strict=True):
        assert np.array_equal(a, b)
    tokens = rng.integers(0, cfg.vocab_size, (2, 9)).astype(np.int32)
    assert_close(logits(cfg, lora.variables(spread), tokens), logits(cfg, lora.variables(one), tokens), rel=1e-5)


@pytest.mark.parametrize("method, share", [("int8", 0.55), ("mxfp4", 0.27)])
def test_layers_take_fewer_bytes(checkpoint, method, share):
    def size(method):
        _, model = loaded(checkpoint("llama-blocks")[0], method, dtype="bfloat16")
        return sum(x.nbytes for x in jax.tree.leaves([model.base.params["layers"][part] for part in ("attn", "mlp")]))

    assert size(method) <= share * size("none")


@pytest.mark.parametrize("method", METHODS)
def test_a_forecast_counts_the_same_bytes(checkpoint, method):
    cfg, model = loaded(checkpoint("llama-blocks")[0], method)
    what = state.weights(
        cfg,
        make_mesh((1,), jax.devices()[:1]),
        head="lm",
        param_dtype="float32",
        adapters=Lora(4, 8, TARGETS, base=method),
    )
    forecast = state.abstract(what)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), forecast) == jax.tree.map(
        lambda x: (x.shape, x.dtype), model.base.params
    )


def test_a_run_resumes_to_the_bit_and_exports_its_decoded_base(small_run, tmp_path):
    small_run.model.lora_rank, small_run.model.base_quantization = 4, "int8"
    small_run.algorithm.use_kl_in_reward, small_run.critic.value_head_std = True, 0.2
    small_run.actor.lr = small_run.critic.lr = 1e-2
    settings.check(small_run)
    train.train(small_run)
    run = pathlib.Path(small_run.trainer.run_dir)
    parts = changed(small_run, {"trainer.run_dir": str(tmp_path / "parts")})
    for steps in (1, 2):
        train.train(changed(parts, {"trainer.total_training_steps": steps}))
    assert weights(parts.trainer.run_dir) == weights(run) and untimed(parts.trainer.run_dir) == untimed(run)

    exact = tmp_path / "exact"  # the base, not quantised
    small_run.model.base_quantization = "none"
    train.train(changed(small_run, {"trainer.run_dir": str(exact), "actor.lr": 0.0, "critic.lr": 0.0}))
    base = safetensors.numpy.load_file(exact / "hf/model.safetensors")
    ours = safetensors.numpy.load_file(run / "hf/model.safetensors")
    adapter = safetensors.numpy.load_file(run / "adapter/adapter_model.safetensors")
    scale = json.loads((run / "adapter/adapter_config.json").read_text())
    for name, tensor in ours.items():
        expected = base[name]
        if "_proj.weight" in name:
            a, b = (adapter[f"base_model.model.{name.removesuffix('.weight')}.lora_{x}.weight"] for x in "AB")
            expected = int8(expected, (1,)) + scale["lora_alpha"] / scale["r"] * b @ a
        np.testing.assert_allclose(tensor, expected, rtol=1e-5, atol=1e-6)
    export.main([str(run), "--out", str(tmp_path / "merged"), "--merge_lora"])
    assert (tmp_path / "merged/model.safetensors").read_bytes() == weights(run)


def test_what_cannot_be_quantised_is_refused(small_run, checkpoint):
    small_run.model.base_quantization = "int8"
    with pytest.raises(UserError, match=r"model\.base_quantization='int8' .*model\.lora_rank"):
        settings.check(small_run)
    small_run.model.lora_rank, small_run.model.base_quantization = 2, "int4"
    with pytest.raises(UserError, match=r"model\.base_quantization='int4' is not known; .*'none', 'int8', 'mxfp4'"):
        settings.check(small_run)
    with pytest.raises(
        UserError,
        match=r"layers\.0\.self_attn\.o_proj\.weight has 10 inputs in a row, and MXFP4 has blocks of 32; take int8",
    ):
        loaded(checkpoint("qwen2-tied")[0], "mxfp4")
    for method in METHODS:  # for what it is, not for the widths of its heads
        with pytest.raises(UserError, match="routed experts, most of a mixtral model, are not quantised"):
            loaded(checkpoint("mixtral-full")[0], method)
