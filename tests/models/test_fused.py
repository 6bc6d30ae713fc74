"""Fused attention: each kernel against XLA's, interpreted; what each compiles to; which is chosen; the errors."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jppo.errors import UserError
from jppo.learner.sharding import mesh_of_shape
from jppo.models import config_reader, decoder, fused
from jppo.models.fused import Needs

CLOSE = {"float32": 1e-5, "bfloat16": 1e-2}  # of the norm


def needs(**changes):
    kinds = dict(scale=0.3, softcap=None, windows=(None,), head_dim=16, dtype="float32", one_segment=False)
    return Needs(**kinds | changes)


def batch(rng, asked, *, R=2, T=300, H=4, K=2, longest=130, sizes=None):
    """q, k, v and segments: shared rows with an empty end, or one trajectory a row. `sizes` are those of q and v."""
    A, W = (asked.head_dim, asked.head_dim) if sizes is None else sizes
    q, k, v = (rng.normal(size=(R, T, *head)) for head in ((H, A), (K, A), (K, W)))
    segment = np.zeros((R, T), np.int32)
    for r in range(R):
        if asked.one_segment:
            segment[r, : T - 45 * r] = 1
        else:
            edges = [0, 20 + r, 20 + r + longest, min(T, 55 + r + longest)]
            for number, (start, end) in enumerate(itertools.pairwise(edges), 1):
                segment[r, start:end] = number
    return *(jnp.asarray(x, asked.dtype) for x in (q, k, v)), jnp.asarray(segment)


def gradients(attend, weight, kind):
    """(q, k, v, any sinks, segment) -> attention of layers of that kind, and the gradients of its weighted sum."""

    def loss(varied, segment, kind):
        out = attend(*varied[:3], segment, kind, *varied[3:])
        return jnp.sum(weight * out.astype(jnp.float32)), out

    both = jax.jit(jax.grad(loss, has_aux=True))

    def run(*varied, segment):
        grads, out = both(varied, segment, jnp.int32(kind))
        assert out.dtype == varied[0].dtype and out.shape == (*varied[0].shape[:3], varied[2].shape[3])
        return [np.asarray(x, np.float64) for x in (out, *grads)]

    return run


def assert_agree(rng, kernel, asked, *, kind=0, mesh=None, exact=None, **shape):
    q, k, v, segment = batch(rng, asked, **shape)
    full = (np.asarray(segment) > 0)[..., None, None]
    weight = jnp.asarray(full * rng.normal(size=(*q.shape[:3], v.shape[3])), jnp.float32)
    attend = fused.make_attention(kernel, asked, mesh=mesh, interpret=True)
    sinks = [jnp.asarray(rng.normal(size=q.shape[2]), jnp.float32)] if asked.sinks else []
    found = gradients(attend, weight, kind)(q, k, v, *sinks, segment=segment)
    plain = fused.make_attention("xla", asked if exact is None else exact)
    expected = gradients(plain, weight, kind)(*(x.astype(jnp.float32) for x in (q, k, v)), *sinks, segment=segment)
    assert all(np.isfinite(x).all() for x in found)
    found[0], expected[0] = found[0] * full, expected[0] * full  # nobody reads what is in empty positions
    for name, x, y in zip(("out", "dq", "dk", "dv", "dsinks"), found, expected, strict=False):
        error = np.linalg.norm(x - y) / np.linalg.norm(y)
        assert error < CLOSE[asked.dtype], f"{name}: {error}"


@pytest.mark.parametrize(
    "kernel, changes, kind",
    [
        ("splash", dict(), 0),
        ("splash", dict(dtype="bfloat16", softcap=2.0), 0),
        ("splash", dict(softcap=1.0, windows=(3,)), 0),
        ("splash", dict(windows=(None, 140)), 0),
        ("splash", dict(windows=(140, None, 60)), 2),
        ("splash", dict(windows=(60, None), sinks=True), 0),
        ("splash", dict(dtype="bfloat16", sinks=True), 0),
        ("cudnn", dict(dtype="bfloat16", one_segment=True), 0),
        ("cudnn", dict(dtype="bfloat16", one_segment=True, windows=(None, 3)), 0),
        ("cudnn", dict(dtype="bfloat16", one_segment=True, windows=(None, 3)), 1),
        ("cudnn", dict(dtype="bfloat16"), 0),
        ("cudnn", dict(dtype="bfloat16", windows=(None, 3)), 1),
    ],
)
def test_a_kernel_gives_what_xla_gives(rng, kernel, changes, kind):
    assert_agree(rng, kernel, needs(**changes), kind=kind)


@pytest.mark.parametrize("H, K", [(3, 1), (2, 2)])
def test_any_number_of_heads_shares_keys(rng, H, K):
    assert_agree(rng, "splash", needs(), T=128, H=H, K=K, longest=50)


@pytest.mark.parametrize("sizes", [(14, 24), (24, 10)])
def test_values_may_have_another_size_than_keys(rng, sizes):
    assert_agree(rng, "splash", needs(head_dim=24), T=128, longest=50, sizes=sizes)


def test_a_window_as_long_as_the_longest_trajectory_is_none(rng):
    assert needs(windows=(None, 50), longest=51).used_windows == needs(windows=(None, 50)).used_windows == (None, 50)
    asked = needs(windows=(None, 50), longest=50)
    assert asked.used_windows == (None, None)
    assert_agree(rng, "splash", asked, kind=1, T=128, longest=50, exact=needs(windows=(None, 50)))


# 4 query and 2 key/value heads: tensor divides both, only the query heads, and none.
@pytest.mark.parametrize(
    "kernel, shape",
    [
        ("packed cudnn", (2, 2, 2)),
        ("splash", (1, 4, 2)),
        ("splash with sinks", (1, 2, 2, 2)),
        ("splash", (2, 1, 4)),
        ("cudnn", (2, 1, 4)),
        ("splash", (1, 1, 8)),
        ("splash", (2, 1, 2, 2)),
        ("packed cudnn", (1, 2, 1, 4)),
    ],
)
def test_a_mesh_changes_nothing(rng, kernel, shape):
    mesh = mesh_of_shape(shape)
    changes = {
        "packed cudnn": dict(dtype="bfloat16", windows=(None, 30)),
        "splash": dict(windows=(None, 30)),
        "splash with sinks": dict(windows=(None, 30), sinks=True),
        "cudnn": dict(dtype="bfloat16", one_segment=True, windows=(None, 30)),
    }
    assert_agree(
        rng,
        kernel.split()[-1] if "packed" in kernel else kernel.split()[0],
        needs(**changes[kernel]),
        kind=-1,
        mesh=mesh,
        R=4,
        T=128,
        longest=50,
    )


def test_a_whole_model_with_two_kinds_of_layers(hf_config, rng, quick_compilation):
    cfg = config_reader.parse_config(hf_config("gemma2-capped"), path="config.json")
    asked = Needs(
        **decoder.attention_settings(cfg), head_dim=cfg.head_dim, dtype="float32", one_segment=False, longest=70
    )
    assert len(set(asked.used_windows)) == 2 and asked.softcap is not None
    values = jax.jit(lambda key: decoder.init_params(cfg, key, head="lm", param_dtype=jnp.float32))(jax.random.key(0))
    tokens = rng.integers(0, cfg.vocab_size, (2, 100)).astype(np.int32)
    segment = np.repeat([[1, 2, 0], [1, 2, 3]], [70, 20, 10], axis=1).astype(np.int32)
    position = np.concatenate([np.arange(n, dtype=np.int32) for n in (70, 20, 10)]) * np.ones_like(tokens)

    def states_and_gradient(attend):
        model = decoder.Decoder(cfg, remat="full", attend=attend)

        def loss(values):
            states = model.apply({"params": values}, tokens, segment, position)
            return jnp.mean(jnp.square(states)), states

        return jax.jit(jax.grad(loss, has_aux=True))(values)

    found = states_and_gradient(fused.make_attention("splash", asked, interpret=True))
    expected = states_and_gradient(None)
    np.testing.assert_allclose(found[1], expected[1], atol=1e-4)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-6), found[0], expected[0])


def program(kernel, asked, platform, *, mesh=None, T=384):
    """What a device of the platform would be given for the gradients: none is needed to write it."""
    dtype, A = jnp.dtype(asked.dtype), asked.head_dim
    q, k = (jax.ShapeDtypeStruct((4, T, heads, A), dtype) for heads in (4, 2))
    segment = jax.ShapeDtypeStruct((4, T), jnp.int32)
    attend = fused.make_attention(kernel, asked, mesh=mesh)

    def loss(varied, segment, kind):
        return jnp.sum(attend(*varied[:3], segment, kind, *varied[3:]).astype(jnp.float32))

    sinks = [jax.ShapeDtypeStruct((4,), jnp.float32)] if asked.sinks else []
    traced = jax.jit(jax.grad(loss)).trace([q, k, k, *sinks], segment, jax.ShapeDtypeStruct((), jnp.int32))
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert f"{T}x{T}x" not in text, "holds the scores of a row"
    return text


def test_xla_alone_holds_the_scores():
    """Of a block of queries: that is all of so short a row."""
    with pytest.raises(AssertionError, match="holds the scores of a row"):
        program("xla", needs(), "cuda", T=64)


@pytest.fixture
def cudnn(monkeypatch):
    """As if there were a cuDNN."""
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91000)


@pytest.mark.parametrize("spread", [False, True])
def test_cudnn_is_asked_for_what_is_needed(cudnn, spread):
    mesh = mesh_of_shape((2, 2, 2)) if spread else None
    asked = needs(dtype="bfloat16", head_dim=128, one_segment=True, windows=(None, 50))
    text = program("cudnn", asked, "cuda", mesh=mesh)
    settings = [
        re.findall(pattern, text.replace("\\22", ""))
        for pattern in (r"__cudnn\$\w+", r"mask_type: (\w+)", r"fmha_scale: ([\d.]+)", r"sliding_window_length: (\d+)")
    ]
    calls, masks, scales, windows = (set(found) for found in settings)
    assert calls == {"__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"}
    assert (masks, scales, windows) == ({"CAUSAL"}, {"0.3"}, {"0", "50"})  # 0 is none


def test_packed_rows_are_asked_for_by_their_offsets(cudnn, monkeypatch):
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_compute_capability", lambda _: True)
    text = program("cudnn", needs(dtype="bfloat16", head_dim=256, windows=(None, 50)), "cuda").replace("\\22", "")
    assert set(re.findall(r"mask_type: (\w+)", text)) == {"PADDING_CAUSAL"}
    assert set(re.findall(r"max_seg_per_batch: (\d+)", text)) == {str(fused.PACKED)}
    assert set(re.findall(r"sliding_window_length: (\d+)", text)) == {"0", "50"}


def test_the_segments_of_a_row_are_its_trajectories_in_order():
    rows = np.zeros((3, 40), np.int32)
    rows[0, :30] = np.repeat([1, 2, 3], [5, 20, 5])
    rows[2] = np.repeat(np.arange(1, fused.PACKED + 1), [2] * 8 + [3] * 8)  # as many as a row may hold
    start, length = (np.asarray(x) for x in fused.find_segments(jnp.asarray(rows)))
    assert start[0, :4].tolist() == [0, 5, 25, -1] and length[0, :4].tolist() == [5, 20, 5, -1]
    assert (start[1] == -1).all() and (length[1] == -1).all()
    assert length[2].tolist() == [2] * 8 + [3] * 8 and (start[2][1:] == np.cumsum(length[2])[:-1]).all()


def test_what_no_trajectory_holds_is_selected_away_forward_and_backward(monkeypatch):
    """cuDNN leaves it unwritten: here it is NaN."""

    def unwritten(q, k, v, start, length, scale, window):
        @jax.custom_vjp
        def attend(q, k, v):
            return spoilt(q)

        inside = jnp.arange(q.shape[1]) < 20
        spoilt = lambda x: jnp.where(inside[:, None, None], x, jnp.nan)  # noqa: E731
        attend.defvjp(lambda q, k, v: (spoilt(q), (k, v)), lambda kv, g: (spoilt(g), *map(spoilt, kv)))
        return attend(q, k, v)

    monkeypatch.setattr(fused, "_attend_packed", unwritten)
    attend = fused.make_attention("cudnn", needs(dtype="bfloat16"))
    x = jnp.ones((1, 128, 2, 16), jnp.bfloat16)
    segment = jnp.where(jnp.arange(128) < 20, 1, 0)[None]
    out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, segment, 0), x, x, x)
    assert all(np.isfinite(np.asarray(y, np.float32)).all() for y in (out, *pull(jnp.ones_like(out))))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "head_dim, more", [(64, dict(sinks=True)), (80, dict(softcap=50.0)), (256, dict(softcap=50.0))]
)
def test_the_splash_kernels_are_valid_mosaic(dtype, head_dim, more):
    mesh = mesh_of_shape((2, 2, 2))
    asked = needs(dtype=dtype, head_dim=head_dim, windows=(None, 60), **more)
    with jax.default_matmul_precision("highest" if dtype == "float32" else "default"):
        text = program("splash", asked, "tpu", mesh=mesh)
    kernels = re.findall(r"custom_call @tpu_custom_call", text)
    assert len(kernels) >= 2 * 2  # forward and backward, of both windows


@pytest.mark.parametrize("row", [32, 128, 512, 1024])
def test_blocks_fit_in_a_cores_memory_and_divide_a_row(row):
    largest = fused._splash_blocks(1024, row)["block_q"]
    assert largest * row <= 256 * 1024 and (largest == 1024 or 2 * largest * row > 256 * 1024)


MISTRAL = dict(dtype="bfloat16", head_dim=128, windows=(4096,))
GEMMA2 = dict(dtype="bfloat16", head_dim=256, windows=(4096, None), softcap=50.0)
GPT_OSS = dict(dtype="bfloat16", head_dim=64, windows=(128, None), sinks=True, one_segment=True)
ROW = dict(dtype="bfloat16", head_dim=128, one_segment=True)
SHARED = ROW | dict(one_segment=False, shared=(64, 32))


@pytest.mark.parametrize(
    "backend, gpu, changes, expected",
    [
        ("cpu", None, ROW, "xla"),
        ("gpu", (9, 0), ROW, "cudnn"),
        ("gpu", (8, 0), ROW, "cudnn"),
        ("gpu", (7, 5), ROW, "xla"),
        ("gpu", (0, 0), ROW, "xla"),
        ("gpu", (9, 0), ROW | dict(dtype="float16"), "cudnn"),
        ("gpu", (9, 0), ROW | dict(dtype="float32"), "xla"),
        ("gpu", (9, 0), ROW | dict(one_segment=False), "cudnn"),
        ("gpu", (8, 0), ROW | dict(one_segment=False), "xla"),
        ("gpu", (9, 0), SHARED, "xla"),
        ("gpu", (9, 0), ROW | dict(head_dim=100), "xla"),
        ("gpu", (9, 0), ROW | dict(head_dim=256), "cudnn"),
        ("gpu", (8, 9), ROW | dict(head_dim=256), "xla"),
        ("gpu", (9, 0), ROW | dict(head_dim=264), "xla"),
        ("gpu", (9, 0), MISTRAL | dict(one_segment=True), "cudnn"),
        ("gpu", (9, 0), MISTRAL, "cudnn"),
        ("gpu", (9, 0), GEMMA2 | dict(one_segment=True), "xla"),
        ("gpu", (9, 0), GPT_OSS, "xla"),
        ("tpu", None, GPT_OSS, "splash"),
        ("tpu", None, ROW, "splash"),
        ("tpu", None, MISTRAL, "splash"),
        ("tpu", None, GEMMA2 | dict(dtype="float32"), "splash"),
    ],
)
def test_auto_takes_the_kernel_that_can(backend, gpu, changes, expected):
    kernel, why = fused.choose_kernel("auto", needs(**changes), backend=backend, gpu=gpu)
    assert kernel == expected
    assert (why is not None) == (backend == "gpu" and expected == "xla")
    assert fused.choose_kernel("xla", needs(**changes), backend=backend) == ("xla", None)
    if expected != "xla":
        assert fused.choose_kernel(expected, needs(**changes), backend=backend, gpu=gpu) == (expected, None)
    fused.make_attention(kernel, needs(**changes))


def test_auto_says_why_nothing_is_fused():
    _, why = fused.choose_kernel("auto", needs(**GEMMA2), backend="gpu", gpu=(9, 0))
    cap = "it has no soft cap, and the model caps its scores at 50"
    assert why == f"no fused attention, so the scores of whole rows are held in memory (cudnn: {cap})"


@pytest.mark.parametrize(
    "name, backend, gpu, changes, said",
    [
        ("flash", "gpu", (9, 0), {}, "'flash' must be one of auto, xla, cudnn, splash"),
        ("cudnn", "cpu", None, {}, "it runs on a gpu, and the devices are of platform cpu"),
        ("cudnn", "tpu", None, {}, "it runs on a gpu, and the devices are of platform tpu"),
        ("splash", "gpu", (9, 0), {}, "it runs on a tpu, and the devices are of platform gpu"),
        ("cudnn", "gpu", (7, 5), ROW, "compute capability 8.0 or more, and this one has 7.5"),
        ("cudnn", "gpu", (0, 0), ROW, "compute capability 8.0 or more, and this one has none"),
        ("cudnn", "gpu", (8, 9), ROW | dict(one_segment=False), "from compute capability 9.0 on, and this GPU has 8.9"),
        ("cudnn", "gpu", (9, 0), SHARED, "data.packing=prefix has prompts that several see"),
        ("splash", "tpu", None, SHARED, "data.packing=prefix has prompts that several see"),
        ("cudnn", "gpu", (9, 0), ROW | dict(dtype="float32"), "bfloat16 or float16, and the model in float32"),
        ("cudnn", "gpu", (9, 0), ROW | dict(head_dim=100), "up to 256, and the model's head_dim is 100"),
        ("cudnn", "gpu", (8, 6), ROW | dict(head_dim=192), "up to 128, and the model's head_dim is 192"),
        ("cudnn", "gpu", (9, 0), GEMMA2, "no soft cap, and the model caps its scores at 50"),
        ("cudnn", "gpu", (9, 0), GPT_OSS, "no attention sinks, and the model has one for each head"),
    ],
)
def test_a_kernel_asked_for_by_name_must_be_able(name, backend, gpu, changes, said):
    with pytest.raises(UserError) as e:
        fused.choose_kernel(name, needs(**changes), backend=backend, gpu=gpu)
    message = str(e.value)
    assert message.startswith("model.attention=") and said in message and "\n" not in message
    assert name == "flash" or message.endswith("; use model.attention=auto")


def test_windows_that_count_a_row_are_none_of_shared_prompts():
    with pytest.raises(UserError, match=r"sliding window of 4096 tokens.* use data\.packing=buckets"):
        fused.choose_kernel("auto", needs(**MISTRAL | dict(shared=(8000, 192), longest=8192)), backend="cpu")
    assert (
        fused.choose_kernel("auto", needs(**MISTRAL | dict(shared=(4000, 96), longest=4096)), backend="cpu")[0] == "xla"
    )


def test_no_kernel_is_made_that_would_leave_something_out():
    for kernel, changes in (("cudnn", GEMMA2), ("cudnn", GPT_OSS), ("cudnn", dict(one_segment=True))):
        with pytest.raises(UserError, match=f"attention by {kernel}: .*; use xla"):
            fused.make_attention(kernel, needs(**changes))


def test_this_machine_has_no_gpu():
    assert fused.capability(jax.devices()[0]) == (0, 0)
    assert fused.choose_kernel("auto", needs(), backend="cpu") == ("xla", None)
