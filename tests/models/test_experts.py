"""Experts: their products, the gradient of a whole model against transformers', meshes, memory and bad input."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jppo.errors import UserError
from jppo.learner import sharding, state
from jppo.models import (
    config_reader,
    decoder,
    expert_products,
    experts,
    heads,
    hf,
    hf_write,
    lora,
    modules,
    router,
    sequence_parallel,
)
from jppo.models.attention import make_plain
from tests.make import whole
from tests.models.conftest import SHAPES, config_of

SPARSE = tuple(name for name in SHAPES if "num_experts_per_tok" in SHAPES[name])
GRADED = ("qwen2-moe-mixed", "gpt-oss-clamped", "deepseek3-grouped", "qwen3.5-periods")
ALSO_GRADED = tuple(name for name in (*SPARSE[::2], "qwen3.5-runs") if name not in GRADED)


FORMS = {"cpu": dict(cpu=True), "accelerator": dict(cpu=False), "accelerator, in chunks": dict(cpu=False)}


@pytest.fixture(params=FORMS)
def form(request, monkeypatch):
    """The forms for CPUs and accelerators; the last has copies of two groups' small kernels at a time."""
    if request.param.endswith("chunks"):
        monkeypatch.setattr(expert_products, "COPIES", 300)
    return FORMS[request.param]


@pytest.mark.parametrize("sizes", [(3, 0, 5, 1), (0, 0, 9, 0), (700, 0, 1, 300), (16, 16, 16, 16), (0, 2000, 0, 96)])
def test_blocks_compute_what_rows_one_by_one_do(rng, form, sizes):
    kernel, x, weight = (rng.normal(size=n).astype(np.float32) for n in ((4, 6, 5), (sum(sizes), 6), (sum(sizes), 1)))
    given, group = rng.normal(size=x.shape).astype(np.float32), np.repeat(np.arange(4), sizes)
    order = rng.permutation(len(x)).astype(np.int32)
    back = np.argsort(order)

    def of_blocks(kernel, rows):
        x, weight = rows
        return weight * expert_products.block_product(jnp.tanh(expert_products.block_product(x, kernel)), kernel, True)

    def expected(kernel, x, weight):
        own = kernel[group]
        return weight * jnp.einsum("nm,ndm->nd", jnp.tanh(jnp.einsum("nd,ndm->nm", x, own)), own)

    out, pull = jax.vjp(expected, *map(jnp.asarray, (kernel, x, weight)))
    by_kernel, *by_rows = pull(jnp.asarray(given))
    rows = jnp.asarray(x[back]), jnp.asarray(weight[back])
    args = jnp.asarray(kernel), rows, jnp.asarray(sizes), jnp.asarray(order)

    @jax.jit
    def found(given, *args):
        how = expert_products.GroupedMap(of_blocks, (1, 1))
        return expert_products.grouped_outputs(how, *args, **form), expert_products.grouped_gradients(
            how, *args, given, **form
        )

    same, (slope, slopes) = found(jnp.asarray(given[back]), *args)
    np.testing.assert_allclose(same[order], out, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(slope, by_kernel, rtol=1e-4, atol=1e-3)
    for a, b in zip(slopes, by_rows, strict=True):
        np.testing.assert_allclose(a[order], b, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", ["qwen2-moe-mixed", "gpt-oss-clamped"])
@pytest.mark.parametrize("chosen", [5, 2], ids=["all", "two"])
def test_the_form_for_accelerators_is_that_for_cpus(rng, name, chosen):
    """Each row in three pairs; experts without biases and with them, and such as no row has chosen."""
    cfg = config_reader.parse_config(config_of(name), path="config.json")
    E, N, D, M = 5, 14, 6, 4
    shapes = [(E, D, M)] * 3 + ([(E, 1, M), (E, 1, M), (E, D, 1)] if cfg.experts.names.fused else [])
    kernels = tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)
    rows, weight, given = (jnp.asarray(rng.normal(size=n), jnp.float32) for n in ((N, D), (3 * N, 1), (3 * N, D)))
    expert = rng.integers(0, chosen, 3 * N)
    sizes, order = np.bincount(expert, minlength=E), np.argsort(expert, kind="stable")

    args = expert_products.join_kernels(kernels), (rows, weight), jnp.asarray(sizes), jnp.asarray(order)
    how = expert_products.GroupedMap(functools.partial(expert_products.expert_blocks, (cfg, None)), (3, 1))

    def run(cpu, *args):
        return expert_products.grouped_outputs(how, *args, cpu=cpu), *expert_products.grouped_gradients(
            how, *args, given, cpu=cpu
        )

    found, expected = (jax.jit(functools.partial(run, cpu))(*args) for cpu in (False, True))
    chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-4)
    assert all(np.abs(x).max() > 0.1 for x in jax.tree.leaves(expected))


def test_a_narrow_product_is_summed_in_f32(rng):
    x = jnp.asarray(rng.normal(size=(40, 64)), jnp.bfloat16)
    kernel = jnp.asarray(rng.normal(size=(3, 64, 8)), jnp.float32)
    how = expert_products.GroupedMap(lambda kernel, rows: expert_products.block_product(rows[0], kernel), (1,))

    @jax.jit
    def run(kernel):
        return expert_products.grouped_map(how, kernel, (x,), jnp.asarray([11, 9, 20]), jnp.arange(40))

    found, pull = jax.vjp(run, kernel)
    narrow = np.asarray(kernel.astype(jnp.bfloat16), np.float32)
    exact = np.einsum("nd,ndm->nm", np.asarray(x, np.float32), np.repeat(narrow, [11, 9, 20], axis=0))
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(found, np.float32), exact, rtol=2**-8, atol=1e-3)
    slope = pull(jnp.ones((40, 8), jnp.bfloat16))[0]
    assert slope.dtype == jnp.float32
    expected = np.asarray(x, np.float32)[:11].sum(axis=0)
    np.testing.assert_allclose(slope[0], np.broadcast_to(expected[:, None], (64, 8)), rtol=1e-5, atol=1e-5)


def fused(model):
    """The gradients of a transformers model under the names of its files, where experts are apart."""
    found = {}
    for name, p in model.named_parameters():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            found[name] = p.grad.numpy()
            continue
        for i, grad in enumerate(p.grad.numpy()):
            parts = np.split(grad, 2) if "gate_up" in name else [grad]
            names = ("gate_proj", "up_proj") if "gate_up" in name else ("down_proj",)
            for part, projection in zip(parts, names, strict=True):
                found[f"{name.rsplit('.', 1)[0]}.{i}.{projection}.weight"] = part
    return found


def as_mixtrals(name):
    """A tensor's name in Mixtral's files."""
    if ".mlp." not in name:
        return name
    names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    for theirs, other in names.items():
        name = name.replace(theirs, other)
    return name.replace(".mlp.", ".block_sparse_moe.")


@pytest.mark.parametrize("name", [*GRADED, *(pytest.param(name, marks=pytest.mark.slow) for name in ALSO_GRADED)])
def test_the_gradient_is_that_of_transformers_the_routers_included(checkpoint, rng, name):
    torch = pytest.importorskip("torch")
    directory, model = checkpoint(name)
    _, cfg = hf.read_config(directory)
    values = hf.load_params(directory, cfg, head="lm", param_dtype=jnp.float32)
    # 0 is padding to transformers, and has no gradient there.
    tokens, targets = rng.integers(1, cfg.vocab_size, (2, 2, 19)).astype(np.int32)
    share = rng.normal(size=(2, 19)).astype(np.float32)

    def loss(values):
        hidden = decoder.Decoder(cfg).apply({"params": values}, tokens, *whole(tokens))
        state = hidden, decoder.head_kernel(values, cfg), cfg
        logp, _ = heads.logprob_entropy(state, targets, temperature=1.0, chunk_tokens=64, with_entropy=False)
        return jnp.sum(share * logp)

    ours = dict(hf_write.hf_tensors(jax.jit(jax.grad(loss))(values), cfg))
    model.zero_grad()
    logp = torch.log_softmax(model(torch.from_numpy(tokens).long()).logits, -1)
    chosen = logp.gather(2, torch.from_numpy(targets).long()[:, :, None])[:, :, 0]
    (torch.from_numpy(share) * chosen).sum().backward()
    theirs = fused(model)
    if cfg.family == "gpt_oss":
        theirs = {key: p.grad.numpy().copy() for key, p in model.named_parameters()}
    if cfg.family == "mixtral":
        theirs = {as_mixtrals(key): grad for key, grad in theirs.items()}
    buffers = [ours.pop(key) for key in list(ours) if key.endswith("e_score_correction_bias")]
    assert ours.keys() == theirs.keys() and all((slope == 0).all() for slope in buffers)
    model.zero_grad()
    routers = [key for key in theirs if key.endswith((".gate.weight", ".router.weight", ".router.bias", ".sinks"))]
    assert bool(routers) == (name in SPARSE) and all(np.abs(theirs[key]).max() > 1e-3 for key in routers)
    for key, grad in theirs.items():
        assert np.abs(ours[key] - grad).max() <= 1e-4 * max(np.abs(grad).max(), 1e-2), key


MESHED = config_of("qwen2-moe-mixed") | dict(
    hidden_size=32, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48, moe_intermediate_size=24,
    shared_expert_intermediate_size=16, vocab_size=64, num_hidden_layers=3, mlp_only_layers=[0], initializer_range=0.3,
    num_experts=8, num_experts_per_tok=3,
)  # fmt: skip
LATENT = config_of("deepseek3-grouped") | dict(
    hidden_size=32, intermediate_size=48, moe_intermediate_size=24, vocab_size=64, num_hidden_layers=3,
    first_k_dense_replace=1, initializer_range=0.3, n_routed_experts=20,
)  # fmt: skip

BIASED = config_of("gpt-oss-clamped") | dict(
    hidden_size=32, num_attention_heads=4, num_key_value_heads=2, intermediate_size=24, vocab_size=64,
    num_hidden_layers=2, initializer_range=0.3, num_local_experts=8,
)  # fmt: skip

RECURRENT_MESHED = MESHED | dict(
    model_type="qwen3_next", num_hidden_layers=4, full_attention_interval=2, mlp_only_layers=[], head_dim=8,
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=6, linear_value_head_dim=10,
    rms_norm_eps=0.5,
)  # fmt: skip
BESIDE = config_of("gemma4-experts") | dict(
    hidden_size=32, num_attention_heads=4, num_key_value_heads=2, num_global_key_value_heads=1, head_dim=8,
    intermediate_size=24, moe_intermediate_size=16, vocab_size=64, initializer_range=0.3, num_experts=8,
    rms_norm_eps=0.5,
)  # fmt: skip
KEPT = config_of("gemma4-shared") | dict(
    hidden_size=32, intermediate_size=24, vocab_size=64, vocab_size_per_layer_input=64, initializer_range=0.3,
    rms_norm_eps=0.5,
)  # fmt: skip
MIXTURES = {"shared": MESHED, "latent": LATENT, "biased": BIASED, "recurrent": RECURRENT_MESHED}
MIXTURES |= {"beside": BESIDE, "kept": KEPT}  # the last one has no experts


def graded(config, mesh_shape, tokens, segment, position, **settings):
    """The loss of a model on a mesh, and its gradient."""
    cfg, mesh = config_reader.parse_config(config, path="config.json"), sharding.mesh_of_shape(mesh_shape)
    what = state.model_weights(cfg, mesh, head="lm", param_dtype=np.float32)
    values = jax.jit(lambda key: decoder.init_params(cfg, key, head="lm", param_dtype=jnp.float32))(jax.random.key(0))
    values = jax.tree.map(lambda x: x + 0.1 * jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape), values)
    model = decoder.Decoder(
        cfg,
        constrain=sharding.constrain_to_rows(mesh),
        attend=sequence_parallel.exchange_positions(make_plain(**decoder.attention_settings(cfg)), mesh),
        lookup=modules.make_lookup(mesh),
        mesh=mesh,
        **settings,
    )

    def loss(values, tokens, segment, position):
        hidden = model.apply({"params": values}, tokens, segment, position)
        state = hidden, decoder.head_kernel(values, cfg), cfg
        logp, entropy = heads.logprob_entropy(
            state, tokens, temperature=1.0, chunk_tokens=16, with_entropy=True, mask=segment > 0, mesh=mesh
        )
        return jnp.sum(logp + 0.1 * entropy) / jnp.sum(segment > 0)

    rows = [jax.device_put(x, sharding.rows_sharding(mesh)) for x in (tokens, segment, position)]
    return jax.device_get(jax.jit(jax.value_and_grad(loss))(jax.device_put(values, what.shardings), *rows))


@functools.cache
def on_one_device(kind):
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, 64, (8, 16)).astype(np.int32)
    segment = (np.arange(16) < np.array([16, 9, 3, 12, 16, 1, 7, 14])[:, None]).astype(np.int32)
    rows = tokens, segment, np.broadcast_to(np.arange(16, dtype=np.int32), tokens.shape)
    return rows, graded(MIXTURES[kind], (1, 1, 1, 1), *rows)


@pytest.mark.parametrize(
    "kind, mesh_shape, settings",
    [
        ("recurrent", (1, 4, 2, 1), {}),
        ("latent", (1, 2, 1, 1, 2), dict(remat="full")),
        *(
            pytest.param(kind, mesh_shape, settings, marks=pytest.mark.slow)
            for kind, mesh_shape, settings in (
                ("shared", (1, 2, 1, 1, 2), dict(scan_layers=False)),
                ("shared", (1, 2, 2, 1), dict(remat="dots")),
                ("biased", (1, 1, 2, 2), {}),
                ("beside", (1, 2, 1, 1, 2), dict(scan_layers=False)),
                ("beside", (2, 1, 2, 1), dict(remat="full")),
                ("kept", (1, 2, 2, 2), dict(remat="dots")),
                ("kept", (2, 2, 1, 1), dict(scan_layers=False)),
                ("shared", (2, 1, 1, 1), {}),
                ("shared", (1, 2, 1, 1), dict(remat="full")),
                ("shared", (1, 1, 2, 1), dict(scan_layers=False)),
                ("shared", (1, 1, 1, 2), {}),
                ("shared", (1, 4, 1, 1), {}),
                ("latent", (2, 1, 2, 1), {}),
                ("latent", (1, 2, 2, 2), dict(remat="dots")),
                ("biased", (1, 2, 2, 1), dict(remat="full")),
                ("biased", (2, 1, 1, 2), {}),
                ("recurrent", (2, 2, 1, 1), {}),
                ("recurrent", (1, 1, 2, 1), dict(remat="full")),
                ("shared", (1, 1, 1, 1, 2), {}),
                ("shared", (1, 1, 2, 1, 2), dict(remat="full")),
                ("shared", (1, 1, 1, 1, 4), dict(remat="full")),
                ("shared", (1, 1, 1, 2, 2), {}),
                ("shared", (2, 1, 1, 1, 2), {}),
                ("shared", (1, 2, 1, 1, 4), dict(remat="dots")),
                ("shared", (1, 2, 1, 2), {}),
                ("latent", (1, 2, 1, 2), dict(remat="full")),
                ("biased", (1, 1, 2, 1, 2), {}),
                ("recurrent", (1, 1, 2, 1, 2), {}),
            )
        ),
    ],
)
def test_loss_and_gradient_are_those_of_one_device(kind, mesh_shape, settings):
    rows, (loss, gradient) = on_one_device(kind)
    found = graded(MIXTURES[kind], mesh_shape, *rows, **settings)
    np.testing.assert_allclose(found[0], loss, rtol=1e-5)
    jax.tree.map_with_path(
        lambda path, a, b: np.testing.assert_allclose(a, b, atol=1e-5, err_msg=jax.tree_util.keystr(path)),
        found[1],
        gradient,
    )
    largest = {jax.tree_util.keystr(path): np.abs(x).max() for path, x in jax.tree.leaves_with_path(gradient)}
    unmoved = [name for name in largest if name.endswith(("['correction']", "['scalar']"))]
    assert [name for name, size in largest.items() if size < 1e-3] == unmoved


@pytest.mark.parametrize("to", [(0,), (7, 0), (1, 2, 3, 4, 5, 6)])
def test_no_token_is_dropped_however_many_go_to_one_device(rng, to):
    """Of four devices with two experts each; more rounds follow until all were sent."""
    N, mesh = 12, sharding.mesh_of_shape((1, 1, 1, 1, 4))
    kernel = rng.normal(size=(8, 5, 6)).astype(np.float32)
    chosen = rng.choice(to, (4, N, 2)).astype(np.int32)
    x, weight, given = (rng.normal(size=(4, N, n)).astype(np.float32) for n in (5, 2, 5))

    def run(kernel, rows, weight, sizes, order):
        own = kernel[jnp.repeat(jnp.arange(2), sizes, total_repeat_length=len(rows))[jnp.argsort(order)]]
        return weight * jnp.einsum("nm,ndm->nd", jnp.tanh(jnp.einsum("nd,ndm->nm", rows, own)), own)

    def local(kernel, *rows):
        out = experts.run_experts(experts.TokenExchange(run, "expert", mesh, 8), kernel, *(row[0] for row in rows))
        return out[None]

    each = PartitionSpec("expert")
    spread = jax.shard_map(local, mesh=mesh, in_specs=(each,) * 4, out_specs=each)

    def expected(kernel, x, weight):
        own = kernel[chosen]  # [4, N, 2, 5, 6]
        inner = jnp.tanh(jnp.einsum("bnd,bnkdm->bnkm", x, own))
        return jnp.einsum("bnk,bnkm,bnkdm->bnd", weight, inner, own)

    args = tuple(map(jnp.asarray, (kernel, x, weight)))
    found, pull = jax.vjp(jax.jit(lambda *args: spread(*args, jnp.asarray(chosen))), *args)
    out, pull_expected = jax.vjp(expected, *args)
    np.testing.assert_allclose(found, out, rtol=1e-4, atol=1e-5)
    for slope, other in zip(pull(jnp.asarray(given)), pull_expected(jnp.asarray(given)), strict=True):
        np.testing.assert_allclose(slope, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("most, slots", [(0, 16), (16, 16), (17, 18), (21, 22), (64, 64)])
def test_no_more_rounds_follow_than_the_fullest_device_needs(most, slots):
    """Of 64 pairs, four devices have room for 16 each in the first round, and for 2 in each further one."""
    none = jnp.zeros(4, jnp.int32)
    route = experts._Route(None, jnp.arange(64), none, none, none, jnp.int32(most), none, none)
    sent = route.run_rounds(lambda begin, room, sent: sent.at[begin + jnp.arange(room)].add(1), jnp.zeros(999, int))
    np.testing.assert_array_equal(sent, np.arange(999) < slots)


def test_padding_and_neighbours_change_no_token(rng):
    """Tokens are routed one by one: no expert is ever full."""
    cfg = config_reader.parse_config(MESHED, path="config.json")
    kernels = [jnp.asarray(rng.normal(size=(8, 32, 24)), jnp.float32) for _ in range(3)]
    x, logits = (jnp.asarray(rng.normal(size=(2, 30, n)), jnp.float32) for n in (32, 8))
    logits = logits.at[:, :20].set(
        jnp.asarray([9.0, 5.0, 3.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    )  # most tokens go to three experts
    chosen = router.choose_experts(logits, cfg.experts)
    mix = jax.jit(lambda *rows: experts.mix(tuple(kernels), *rows, cfg))
    together = mix(x, *chosen)
    apart = [mix(*(a[i : i + 1, 13:] for a in (x, *chosen))) for i in range(2)]
    np.testing.assert_allclose(together[:, 13:], np.concatenate(apart), rtol=1e-4, atol=1e-4)


def test_no_array_has_tokens_by_experts_by_width():
    config = MESHED | dict(num_experts=64, moe_intermediate_size=64)
    cfg = config_reader.parse_config(config, path="config.json")
    shapes = [jax.ShapeDtypeStruct((64, 32, 64), jnp.float32)] * 3
    x, logits = (jax.ShapeDtypeStruct((4, 512, n), jnp.float32) for n in (32, 64))

    def loss(kernels, x, logits):
        return jnp.sum(experts.mix(kernels, x, *router.choose_experts(logits, cfg.experts), cfg) ** 2)

    compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(tuple(shapes), x, logits).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * (4 * 512) * 64 * 64 / 2


FP8 = {"quant_method": "fp8"}


@pytest.mark.parametrize(
    "name, changes, said",
    [
        ("qwen3-moe-normed", dict(num_experts_per_tok=10), "num_experts_per_tok=10 must be at most num_experts=9"),
        ("qwen3-moe-normed", dict(num_experts=None), "num_experts is missing"),
        ("qwen3-moe-normed", dict(moe_intermediate_size=0), "moe_intermediate_size=0 must be positive"),
        ("qwen3-moe-normed", dict(use_sliding_window=True), "use_sliding_window=True changes the mathematics"),
        ("qwen3-moe-normed", dict(norm_topk_prob="yes"), "norm_topk_prob='yes' must be of type bool"),
        ("qwen2-moe-mixed", dict(mlp_only_layers=[5]), r"mlp_only_layers=\[5\] must hold layers from 0 to 4"),
        ("qwen2-moe-mixed", dict(shared_expert_intermediate_size=None), "shared_expert_intermediate_size is missing"),
        ("mixtral-full", dict(router_jitter_noise=0.1), "router_jitter_noise=0.1 changes the mathematics"),
        ("mixtral-full", dict(num_local_experts=None), "num_local_experts is missing"),
        ("mixtral-full", dict(quantization_config={"quant_method": "mxfp4"}), "quantization_config=.*mxfp4"),
        ("olmoe-grouped", dict(clip_qkv=8.0), "clip_qkv=8.0 changes the mathematics"),
        ("deepseek2-lite", dict(norm_topk_prob=True), "norm_topk_prob=True is not supported; only False"),
        ("deepseek2-lite", dict(topk_method="noaux_tc"), "topk_method='noaux_tc' is not supported; only 'greedy' or"),
        ("deepseek2-lite", dict(moe_layer_freq=2), "moe_layer_freq=2 is not supported; only 1"),
        ("deepseek2-lite", dict(mlp_bias=True), "mlp_bias=True changes the mathematics"),
        ("deepseek2-lite", dict(kv_lora_rank=None), "kv_lora_rank is missing"),
        ("deepseek2-lite", dict(num_key_value_heads=3), "num_key_value_heads=3 must be num_attention_heads=6"),
        ("deepseek2-lite", dict(qk_rope_head_dim=5), "qk_rope_head_dim=5 must be even"),
        ("deepseek2-grouped", dict(n_group=5), "n_group=5 must divide n_routed_experts=12"),
        ("deepseek2-grouped", dict(topk_group=5), "topk_group=5 must be at most n_group=4"),
        ("deepseek3-grouped", dict(scoring_func="softmax"), "scoring_func='softmax' is not supported; only 'sigmoid'"),
        ("deepseek3-grouped", dict(n_group=15), "n_group=15 must divide n_routed_experts=15 into groups of 2 or more"),
        ("deepseek3-grouped", dict(topk_group=1), "topk_group=1 must be at most n_group=5, with num_experts_per_tok=4"),
        ("deepseek3-grouped", dict(n_shared_experts=None), "n_shared_experts is missing"),
        ("deepseek3-grouped", dict(quantization_config=FP8), "quantization_config=.*fp8"),
        ("gpt-oss-clamped", dict(quantization_config=FP8), "quantization_config=.*only absent or .*mxfp4"),
        ("gpt-oss-clamped", dict(swiglu_limit=-1.0), "swiglu_limit=-1.0 must be above 0"),
    ],
)
def test_experts_that_cannot_be_read_are_refused_by_field(name, changes, said):
    with pytest.raises(UserError, match=rf"config\.json: {said}") as e:
        config_reader.parse_config(config_of(name) | changes, path="config.json")
    assert "\n" not in str(e.value)


def test_adapters_of_fused_experts_are_refused_and_a_model_without_a_sparse_layer_has_none():
    cfg = config_reader.parse_config(config_of("qwen2-moe-mixed") | dict(decoder_sparse_step=6), path="config.json")
    assert cfg.experts is None and [stack.path for stack in cfg.stacks] == [("layers",)]
    cfg = config_reader.parse_config(config_of("gpt-oss-clamped"), path="config.json")
    with pytest.raises(UserError, match="a gpt_oss model has no down_proj; use all-linear, or some of q_proj, k") as e:
        lora.adapter_table(cfg, lora.Lora(2, 16, ("q_proj", "down_proj")), head="lm")
    assert "\n" not in str(e.value)
