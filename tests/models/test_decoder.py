"""The decoder against transformers, packed against apart, scanned against unrolled."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jppo.models import attention, cache, config_reader, decoder, heads, hf, params
from tests.make import assert_close, logits, whole
from tests.models.conftest import BY_FAMILY

RECURRENT = ("qwen3.5-periods", "qwen3.5-runs", "qwen3-next-periods")
REAL = ("stories260k", "stories260k-hd32", "tinystories-656k", "tinystories-656k-hd64")
CFG = config_reader.parse_config(
    dict(
        model_type="qwen2", vocab_size=37, hidden_size=24, intermediate_size=40, num_hidden_layers=3, head_dim=6,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=64,
        initializer_range=0.3,
    ),
    path="config.json",
)  # fmt: skip


init = jax.jit(
    lambda key, head: decoder.init_params(CFG, key, head=head, param_dtype=jnp.float32),
    static_argnames="head",
)


def load(directory, head="lm", key=None):
    _, cfg = hf.read_config(directory)
    return cfg, hf.load_params(directory, cfg, head=head, param_dtype=jnp.float32, key=key)


def reference_logits(model, tokens):
    torch = pytest.importorskip("torch")
    with torch.no_grad():
        return model(torch.from_numpy(tokens).long()).logits.numpy()


@pytest.mark.parametrize("name", BY_FAMILY)
def test_logits_and_logprobs_equal_transformers(checkpoint, rng, name):
    torch = pytest.importorskip("torch")
    directory, model = checkpoint(name)
    cfg, values = load(directory)
    tokens = rng.integers(0, cfg.vocab_size, (2, 29)).astype(np.int32)
    targets = rng.integers(0, cfg.vocab_size, (2, 29)).astype(np.int32)
    theirs = reference_logits(model, tokens)

    @jax.jit
    def run(values):
        hidden = decoder.Decoder(cfg).apply({"params": values}, tokens, *whole(tokens))
        state = hidden, decoder.head_kernel(values, cfg), cfg
        scored = heads.logprob_entropy(state, targets, temperature=0.7, chunk_tokens=10, with_entropy=True)
        return heads.logits_of(state), *scored

    ours, logp, entropy = run(values)
    assert_close(ours, theirs)
    scaled = torch.log_softmax(torch.from_numpy(theirs) / 0.7, -1)
    assert_close(logp, np.take_along_axis(scaled.numpy(), targets[:, :, None], 2)[:, :, 0])
    assert_close(entropy, -(scaled.exp() * scaled).sum(-1).numpy())


@pytest.fixture
def full_compilation(quick_compilation):
    """XLA optimizes as it does for a user."""
    jax.config.update("jax_disable_most_optimizations", False)  # quick_compilation restores it


@pytest.mark.parametrize("name", REAL)
def test_real_models_equal_transformers(shared, rng, full_compilation, name):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    directory = shared / "models" / name
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    cfg, values = load(directory)
    tokens = rng.integers(3, cfg.vocab_size, (2, 70)).astype(np.int32)
    theirs = reference_logits(model, tokens)
    ours = logits(cfg, values, tokens)
    assert_close(ours, theirs)
    # The text these models were trained on has low entropy; a wrongly loaded head could not predict it.
    assert_close(jax.nn.log_softmax(ours), torch.log_softmax(torch.from_numpy(theirs), -1).numpy())


DEEPSEEK = ("deepseek2-lite", "deepseek2-grouped", "deepseek3-grouped", "deepseek3-halves")
GEMMA4 = ("gemma4-shared", "gemma4-experts")
PACKED = ("qwen2-tied", "qwen2-moe-mixed", "gpt-oss-clamped", "olmo3-long", DEEPSEEK[2])
ALSO_PACKED = ("qwen3-moe-normed", "mixtral-sliding", "olmoe-tied", "olmo2-grouped", "smollm3-tied", "granite-scaled")
ALSO_PACKED += ("phi3-partial", DEEPSEEK[1], *GEMMA4)


@pytest.mark.parametrize(
    "name", [*PACKED, *RECURRENT, *(pytest.param(name, marks=pytest.mark.slow) for name in ALSO_PACKED)]
)
def test_packed_and_padded_rows_equal_separate_ones(checkpoint, rng, name):
    directory, model = checkpoint(name)
    cfg, values = load(directory)
    parts = [rng.integers(0, cfg.vocab_size, (1, n)).astype(np.int32) for n in (7, 1, 12)]
    theirs = [reference_logits(model, part)[0] for part in parts]

    packed = np.concatenate([*parts, np.zeros((1, 5), np.int32)], axis=1)
    segment = np.repeat([1, 2, 3, 0], [7, 1, 12, 5]).astype(np.int32)[None]
    position = np.concatenate([np.arange(n) for n in (7, 1, 12, 5)]).astype(np.int32)[None]
    ours = logits(cfg, values, packed, segment, position)
    assert_close(ours[0, :20], np.concatenate(theirs))

    padded = np.zeros((3, 15), np.int32)
    segment = np.zeros((3, 15), np.int32)
    for i, part in enumerate(parts):
        padded[i, : part.shape[1]] = part[0]
        segment[i, : part.shape[1]] = 1
    ours = logits(cfg, values, padded, segment, whole(padded)[1])
    for i, expected in enumerate(theirs):
        assert_close(ours[i, : len(expected)], expected)


def test_empty_rows_are_finite_and_give_no_gradient(rng):
    values = init(jax.random.key(0), head="lm")
    tokens = rng.integers(0, 37, (2, 8)).astype(np.int32)
    segment = np.stack([np.ones(8), np.zeros(8)]).astype(np.int32)
    position = whole(tokens)[1]

    def loss(values, rows):
        hidden = decoder.Decoder(CFG).apply(
            {"params": values}, *(jnp.asarray(x)[rows] for x in (tokens, segment, position))
        )
        return jnp.sum(jnp.where(jnp.asarray(segment)[rows, :, None] > 0, hidden, 0.0) ** 3)

    both, empty, full = (jax.jit(jax.grad(loss))(values, np.array(r)) for r in ([0, 1], [1], [0]))
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(both))
    assert all((np.asarray(g) == 0).all() for g in jax.tree.leaves(empty))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), both, full)


@pytest.fixture(scope="module")
def loss_and_gradient():
    """Settings of the decoder -> a loss and its gradient; computed once."""
    values = init(jax.random.key(1), head="lm")
    tokens = np.random.default_rng(0).integers(0, 37, (2, 9)).astype(np.int32)

    @functools.cache
    def compute(settings):
        def loss(values):
            return jnp.mean(
                decoder.Decoder(CFG, **dict(settings)).apply({"params": values}, tokens, *whole(tokens)) ** 3
            )

        return jax.jit(jax.value_and_grad(loss))(values)

    return lambda settings: compute(tuple(settings.items()))


@pytest.mark.parametrize(
    "settings",
    [dict(scan_layers=False), dict(remat="dots"), dict(remat="attention"), dict(remat="full", scan_layers=False)],
)
def test_unrolling_and_rematerialising_change_no_number(loss_and_gradient, settings):
    plain, other = loss_and_gradient({}), loss_and_gradient(settings)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), plain, other)


def test_rematerialising_keeps_less_for_the_backward_pass(rng):
    values = init(jax.random.key(1), head="lm")
    tokens = rng.integers(0, 37, (2, 16)).astype(np.int32)

    def saved(remat):
        """Floats that the forward pass hands to the backward one."""
        model = decoder.Decoder(CFG, remat=remat)
        _, pullback = jax.eval_shape(
            lambda p: jax.vjp(lambda p: model.apply({"params": p}, tokens, *whole(tokens)), p), values
        )
        return sum(leaf.size for leaf in jax.tree.leaves(pullback))

    assert saved("full") < saved("attention") < saved("dots") < saved("none")


def test_constrain_sees_every_residual_and_compute_dtype_is_kept(rng):
    values = init(jax.random.key(2), head="value")
    tokens = rng.integers(0, 37, (2, 5)).astype(np.int32)
    seen = []

    def constrain(x):
        seen.append((x.shape, x.dtype))
        return x

    @functools.partial(jax.jit, static_argnums=0)
    def apply(model, values):
        return model.apply({"params": values}, tokens, *whole(tokens))

    hidden = apply(decoder.Decoder(CFG, dtype=jnp.bfloat16, constrain=constrain), values)
    assert hidden.dtype == jnp.bfloat16
    assert len(seen) >= 3 and set(seen) == {((2, 5, 24), jnp.dtype(jnp.bfloat16))}
    exact = apply(decoder.Decoder(CFG), values)
    assert np.abs(np.asarray(hidden, np.float32) - exact).mean() < 0.05 * np.abs(exact).mean()


def test_init_is_what_it_says():
    values = init(jax.random.key(3), head="value")
    assert (values["layers"]["attn_norm"]["scale"] == 1).all() and (values["norm"]["scale"] == 1).all()
    assert (values["layers"]["attn"]["q"]["bias"] == 0).all()
    for path in ("embed/embedding", "layers/mlp/down/kernel", "layers/attn/o/kernel"):
        assert np.std(params.leaf_at(values, path.split("/"))) == pytest.approx(0.3, rel=0.1)
    assert values["score"]["kernel"].shape == (24, 1) and not np.any(values["score"]["kernel"])
    layers = values["layers"]["mlp"]["up"]["kernel"]
    assert not np.array_equal(layers[0], layers[1])  # each layer draws its own


@pytest.mark.parametrize("bins", [1, 51])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_new_value_head_has_the_standard_deviation_that_is_set(bins, dtype):
    cfg = dataclasses.replace(CFG, hidden_size=2000, value_bins=bins, value_head_std=0.02)
    made = decoder.init_head(cfg, jax.random.key(3), head="value", param_dtype=dtype)["score"]["kernel"]
    assert made.shape == (2000, bins) and made.dtype == dtype
    assert np.std(made.astype(np.float32)) == pytest.approx(0.02, rel=0.1)
    assert abs(np.mean(made.astype(np.float32))) < 0.002


DIFFERING = ("qwen2-sliding", "gemma3-long", "qwen3-moe-stepped", "mixtral-full", "olmoe-grouped", *DEEPSEEK[::3])
ALSO_DIFFERING = ("gpt-oss-clamped", "olmo3-mixed", "smollm3-biased", "granite-biased", "phi3-grouped", *GEMMA4)


@pytest.mark.parametrize("name", DIFFERING + ALSO_DIFFERING + RECURRENT)
@pytest.mark.parametrize(
    "settings", [dict(scan_layers=False), pytest.param(dict(remat="full"), marks=pytest.mark.slow)]
)
def test_layers_that_differ_may_be_unrolled_and_rematerialised(checkpoint, rng, name, settings):
    directory, model = checkpoint(name)
    cfg, values = load(directory)
    tokens = rng.integers(0, cfg.vocab_size, (2, 17)).astype(np.int32)
    assert_close(logits(cfg, values, tokens, **settings), reference_logits(model, tokens))


# tests/rollout/test_inprocess.py decodes some of the slow ones by a cache, too.
QUICK = ("qwen2-sliding", "qwen2-moe-mixed", "gpt-oss-clamped")
QUICK += (*RECURRENT[1:], GEMMA4[0])
SLOW = (
    RECURRENT[0],
    "llama-llama3",
    "mistral-sliding",
    "mixtral-sliding",
    "olmo3-long",
    "qwen3-biased",
    "gemma2-capped",
)
SLOW += ("gemma3-long", "qwen3-moe-normed", "olmoe-grouped", "smollm3-tied", "granite-scaled", "phi3-partial")
SLOW += (*DEEPSEEK[:2], DEEPSEEK[3], GEMMA4[1])


@pytest.mark.parametrize("name", [*QUICK, DEEPSEEK[2], *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_cache_gives_the_logits_of_the_whole_row(checkpoint, rng, name):
    """Prompts of two lengths in one call, then token by token, against the same rows at once."""
    directory, _ = checkpoint(name)
    cfg, values = load(directory)
    tokens = rng.integers(0, cfg.vocab_size, (2, 19)).astype(np.int32)
    expected = logits(cfg, values, tokens)
    kernel = decoder.head_kernel(values, cfg)
    split = decoder.split_layers({"params": values}, cfg)

    settings = decoder.attention_settings(cfg)
    to_cache = cache.make_attend_cached(scale=settings["scale"], softcap=settings["softcap"])

    @jax.jit
    def read(prompts, segment):
        hidden, held, _ = decoder.forward_prompts(
            split, cfg, prompts, segment, dtype=jnp.float32, attend=attention.make_plain(**settings)
        )
        return heads.logits_of((hidden, kernel, cfg)), held

    @jax.jit
    def forward(held, token, position, slot):
        hidden, held, _ = decoder.forward_token(
            split, cfg, token, position, held, slot, dtype=jnp.float32, attend=to_cache
        )
        return heads.logits_of((hidden, kernel, cfg))[:, 0], held

    lengths = np.array([11, 6])
    real = np.arange(11) < lengths[:, None]
    found, prompts = read(np.where(real, tokens[:, :11], 0), real.astype(np.int32))
    for i, n in enumerate(lengths):
        assert_close(np.asarray(found)[i, :n], expected[i, :n])
    empty = cache.empty_cache(cfg, rows=2, length=13, dtype=jnp.float32)
    slot = np.int32(7)  # in the middle of the ring, whose end the prompts and the tokens cross
    held = cache.write_prompts(empty, prompts, np.array([0, 1], np.int32), lengths, slot)
    for step in range(8):
        if step == 2:  # the ring is full: 11 and 2 tokens
            held, slot = cache.grow_cache(held, 19, slot), np.int32(0)
        at = (lengths + step).astype(np.int32)
        found, held = forward(held, tokens[[0, 1], at], at, slot)
        assert_close(np.asarray(found), expected[np.arange(2), at])
        slot = (slot + 1) % (13 if step < 2 else 19)
