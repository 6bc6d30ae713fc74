"""Products with parameters: any equation of the decoder, gradients in the dtypes that training wants. Quantised bases:
their codes by the formats, products as with the decoded kernels, shards, bytes, runs, refusals."""

import json
import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from jppo import export, settings, train
from jppo.errors import UserError
from jppo.learner import state
from jppo.learner.sharding import mesh_of_shape
from jppo.models import decoder, hf, kernels, lora
from jppo.models.kernels import einsum, product
from jppo.models.lora import Lora
from tests.make import assert_close, changed, logits, untimed, weights, whole

TARGETS = ("q_proj", "v_proj", "o_proj", "down_proj")
METHODS = ("int8", "mxfp4")
EQUATIONS = {
    "rtd,df->rtf": ((2, 3, 8), (8, 5)),
    "rtd,dha->rtha": ((2, 3, 8), (8, 2, 4)),
    "rtha,had->rtd": ((2, 3, 2, 4), (2, 4, 8)),
    "rtd,vd->rtv": ((2, 3, 8), (7, 8)),
}


@pytest.mark.parametrize("equation", EQUATIONS)
def test_value_and_gradients_are_numpys(rng, equation):
    x, kernel = (rng.normal(size=shape).astype(np.float32) for shape in EQUATIONS[equation])
    inputs, out = equation.split("->")
    a, b = inputs.split(",")
    y, pull = jax.vjp(lambda x, kernel: product(equation, x, kernel), x, kernel)
    given = rng.normal(size=y.shape).astype(np.float32)
    by_x, by_kernel = pull(given)
    np.testing.assert_allclose(y, np.einsum(equation, x, kernel), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(by_x, np.einsum(f"{out},{b}->{a}", given, kernel), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(by_kernel, np.einsum(f"{a},{out}->{b}", x, given), rtol=1e-5, atol=1e-5)


def test_a_kernel_in_f32_gets_its_gradient_unrounded(rng):
    """In bfloat16, 2^12 equal terms of 1 + 2^-7: a sum that is rounded on its way would be off by far more."""
    x, kernel = jnp.full((1, 4096, 1), 1 + 2**-7, jnp.bfloat16), jnp.ones((1, 1), jnp.float32)
    y, pull = jax.vjp(lambda x, kernel: product("rtd,df->rtf", x, kernel), x, kernel)
    by_x, by_kernel = pull(jnp.ones_like(y))
    assert (y.dtype, by_x.dtype, by_kernel.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    assert float(by_kernel[0, 0]) == 4096 * (1 + 2**-7)


TRANSPOSED = {
    "cv,cd->vd": ((8, 6), (8, 5)),
    "rkqs,rkqa->rksa": ((2, 3, 4, 5), (2, 3, 4, 6)),
    "rtd,rtf->df": ((1, 6, 3), (1, 6, 4)),
    "qs,qa->sa": ((7, 3), (7, 2)),  # an odd sum
}


@pytest.mark.parametrize("equation", TRANSPOSED)
def test_sums_over_the_first_axis_are_numpys(rng, equation):
    a, b = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in TRANSPOSED[equation])
    for dtype in (jnp.float32, jnp.bfloat16):
        found = jax.jit(einsum, static_argnums=(0, 3))(equation, a, b, dtype)
        exact = np.einsum(equation, np.asarray(a, np.float64), np.asarray(b, np.float64))
        assert found.dtype == dtype
        tolerance = 1e-5 if dtype == jnp.float32 else 2**-7
        np.testing.assert_allclose(np.asarray(found, np.float64), exact, rtol=tolerance, atol=tolerance)


def test_products_of_bfloat16_stay_so():
    """No operand is widened before a product, forwards or backwards: that would be the slow kind on every device."""

    def loss(x, kernel):
        return jnp.sum(product("rtd,vd->rtv", x, kernel, jnp.float32) ** 2)

    made = jax.make_jaxpr(jax.grad(loss, (0, 1)))(jnp.ones((1, 2, 4), jnp.bfloat16), jnp.ones((3, 4)))
    products = [e for e in jaxpr_equations(made.jaxpr) if e.primitive.name == "dot_general"]
    assert len(products) == 6  # three, each with a variant for CPUs
    assert {v.aval.dtype for e in products for v in e.invars} == {jnp.dtype(jnp.bfloat16)}


def jaxpr_equations(jaxpr):
    """Yields the equations of a jaxpr and of the functions that it calls."""
    for e in jaxpr.eqns:
        yield e
        for value in e.params.values():
            for inner in value if isinstance(value, tuple) else (value,):
                if hasattr(inner, "jaxpr"):
                    yield from jaxpr_equations(inner.jaxpr)


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
    found = kernels.quantize(jnp.asarray(numbers), "mxfp4", (-3,))
    assert np.array_equal(found.astype(jnp.float32), mxfp4(numbers))
    assert found.codes.shape == (2, 32, 3, 4) and found.scales.shape == (2, 2, 3, 4)
    for axes in ((-3,), (-3, -2)):
        assert np.array_equal(
            kernels.quantize(jnp.asarray(numbers), "int8", axes).astype(jnp.float32), int8(numbers, axes)
        )
    largest = np.abs(numbers - int8(numbers, (-3,))) / np.abs(numbers).max(-3, keepdims=True).clip(1e-37)
    assert largest.max() <= 0.5 / 127 * (1 + 1e-5)


def test_mxfp4_is_what_transformers_decodes(numbers):
    torch = pytest.importorskip("torch")
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    of_one = kernels.quantize(jnp.asarray(numbers.reshape(2, 64, 12)), "mxfp4", (-2,))
    codes, scales = (np.asarray(x).transpose(0, 2, 1).copy() for x in (of_one.codes, of_one.scales))
    theirs = convert_moe_packed_tensors(torch.from_numpy(codes.reshape(2, 12, 2, 16)), torch.from_numpy(scales))
    assert np.array_equal(of_one.astype(jnp.bfloat16), theirs.float().numpy().astype(jnp.bfloat16))


def loaded(directory, method, mesh=None, dtype="float32"):
    """A model of the checkpoint with such a base and adapters that do something."""
    _, cfg = hf.read_config(directory)
    mesh, how = mesh_of_shape((1,), jax.devices()[:1]) if mesh is None else mesh, Lora(4, 8, TARGETS, base=method)
    what = state.model_weights(cfg, mesh, head="lm", param_dtype=dtype, adapters=how)
    values = state.load_sharded(what, str(directory), init="pretrained", key=jax.random.key(0))
    learned, base = state.adapt(state.adapters(cfg, mesh, how, head="lm"), values, how, key=jax.random.key(1))
    return cfg, lora.join(jax.tree.map(lambda x: x + 0.05, learned), base)


def plain(model):
    """The same model with its base decoded."""
    params = jax.tree.map(kernels.dequantize, model.base.params, is_leaf=kernels.is_quantized)
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
    _, spread = loaded(directory, method, mesh_of_shape((1, 2, 1), jax.devices()[:2]))
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
    what = state.model_weights(
        cfg,
        mesh_of_shape((1,), jax.devices()[:1]),
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
