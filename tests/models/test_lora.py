"""Adapters: against peft, merged against beside, and what they leave alone."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors

from jppo.errors import UserError
from jppo.models import decoder, heads, hf, hf_write, lora, params
from jppo.models.lora import Lora
from tests.make import assert_close, logits, whole

ALL = Lora(rank=3, alpha=8, targets=tuple(lora.TARGETS))
OF_ATTENTION = Lora(rank=3, alpha=8, targets=("q_proj", "k_proj", "v_proj", "o_proj"))


def adapted(directory, how, *, head="lm", seed=0):
    """The model of a checkpoint with adapters that do something."""
    _, cfg = hf.read_config(directory)
    values = hf.load_params(directory, cfg, head=head, param_dtype=jnp.float32, key=jax.random.key(9))
    learned = lora.init(cfg, how, jax.random.key(seed))
    noise = np.random.default_rng(seed)
    learned = jax.tree.map(lambda x: x + 0.2 * noise.normal(size=x.shape).astype(np.float32), learned)
    if head == "value":
        learned["score"] = values.pop("score")
    return cfg, lora.join(learned, lora.Base(values, how.scale))


def test_equations():
    assert lora.adapter_equations("rtd,dha->rtha") == ("rtd,dz->rtz", "rtz,zha->rtha")
    assert lora.adapter_equations("rtha,had->rtd") == ("rtha,haz->rtz", "rtz,zd->rtd")
    assert lora.adapter_equations("rtf,fd->rtd") == ("rtf,fz->rtz", "rtz,zd->rtd")


@pytest.mark.parametrize(
    "name, targets",
    [
        ("qwen2-tied", ("v_proj", "down_proj")),
        pytest.param("llama-biased", tuple(lora.TARGETS), marks=pytest.mark.slow),
        pytest.param("gemma3-long", tuple(lora.TARGETS), marks=pytest.mark.slow),
        ("gpt-oss-clamped", OF_ATTENTION.targets),
        pytest.param("phi3-partial", ("qkv_proj", "gate_up_proj"), marks=pytest.mark.slow),
        ("deepseek2-lite", ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")),
        ("qwen3.5-periods", tuple(lora.TARGETS)),
        pytest.param("qwen2-moe-mixed", tuple(lora.TARGETS), marks=pytest.mark.slow),
        pytest.param("mixtral-full", tuple(lora.TARGETS), marks=pytest.mark.slow),
        pytest.param("qwen2-tied", tuple(lora.TARGETS), marks=pytest.mark.slow),
        pytest.param("llama-biased", ("v_proj", "down_proj"), marks=pytest.mark.slow),
        pytest.param("gemma3-long", ("v_proj", "down_proj"), marks=pytest.mark.slow),
    ],
)
def test_merged_weights_are_the_adapters_beside_them(checkpoint, rng, tmp_path, name, targets):
    directory, _ = checkpoint(name)
    cfg, model = adapted(directory, Lora(2, 16, targets))
    tokens = rng.integers(0, cfg.vocab_size, (2, 13)).astype(np.int32)
    out = hf_write.save_model(tmp_path / "merged", model, cfg, source=directory, dtype=jnp.float32)
    values = hf.load_params(out, cfg, head="lm", param_dtype=jnp.float32)
    beside = logits(cfg, lora.variables(model), tokens)
    assert_close(beside, logits(cfg, values, tokens))
    assert np.abs(beside - logits(cfg, model.base.params, tokens)).max() > 0.1 * np.abs(beside).max()


LATENT = Lora(3, 8, ("o_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"))
DENSE = ("qwen2-untied", "gemma2-capped", "olmo3-mixed", "smollm3-biased", "granite-scaled", "phi3-grouped")
DENSE += ("qwen3.5-periods", "gemma4-shared")


@pytest.mark.parametrize(
    "name, how",
    [
        *((name, ALL) for name in DENSE[::3]),
        *(pytest.param(name, ALL, marks=pytest.mark.slow) for name in sorted({*DENSE} - {*DENSE[::3]})),
        ("olmoe-grouped", OF_ATTENTION),
        ("gpt-oss-unbiased", OF_ATTENTION),
        ("deepseek3-grouped", LATENT),
        pytest.param("mixtral-full", OF_ATTENTION, marks=pytest.mark.slow),
        pytest.param("qwen2-moe-mixed", OF_ATTENTION, marks=pytest.mark.slow),
    ],
)
def test_peft_loads_them_and_says_the_same(checkpoint, rng, tmp_path, name, how):
    peft, torch = pytest.importorskip("peft"), pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    directory, _ = checkpoint(name)
    cfg, model = adapted(directory, how)
    out = hf_write.save_adapter(tmp_path / "adapter", model.learned, cfg, how, base=str(directory))
    eager = dict(attn_implementation="eager", experts_implementation="eager")
    base = transformers.AutoModelForCausalLM.from_pretrained(directory, **eager)
    named = [one for one, module in base.named_modules() if isinstance(module, torch.nn.Linear)]
    theirs = peft.PeftModel.from_pretrained(base, out)
    found = {k: v for k, v in theirs.state_dict().items() if "lora_" in k}
    targets = tuple(f".{target}" for target in lora.targets_of(cfg, how))
    assert len(found) == 2 * sum(one.endswith(targets) for one in named)
    tokens = rng.integers(0, cfg.vocab_size, (2, 11)).astype(np.int32)
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens).long()).logits.numpy()
    assert_close(logits(cfg, lora.variables(model), tokens), expected)


def test_peft_loads_a_critics_with_its_score(checkpoint, tmp_path):
    peft, torch = pytest.importorskip("peft"), pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    directory, _ = checkpoint("qwen2-tied", "AutoModelForSequenceClassification")
    cfg, model = adapted(directory, ALL, head="value")
    model.learned["score"] = jax.tree.map(lambda x: x + 1.0, model.learned["score"])
    out = hf_write.save_adapter(tmp_path / "adapter", model.learned, cfg, ALL, head="value", base=str(directory))
    base = transformers.AutoModelForSequenceClassification.from_pretrained(directory)
    theirs = peft.PeftModel.from_pretrained(base, out)
    tokens = np.arange(2, 11, dtype=np.int32)[None]
    variables = lora.variables(model)
    hidden = decoder.Decoder(cfg).apply(variables, tokens, *whole(tokens))
    ours = heads.values(hidden, variables["params"]["score"]["kernel"])[0, -1]
    with torch.no_grad():
        assert_close(np.asarray(ours), theirs(torch.from_numpy(tokens).long()).logits[0, 0].numpy())


def test_fresh_adapters_change_nothing_and_are_drawn_as_peft_draws_them(checkpoint, rng):
    directory, _ = checkpoint("llama-biased")
    _, cfg = hf.read_config(directory)
    values = hf.load_params(directory, cfg, head="lm", param_dtype=jnp.float32)
    learned = lora.init(cfg, ALL, jax.random.key(0))
    tokens = rng.integers(0, cfg.vocab_size, (1, 7)).astype(np.int32)
    model = lora.join(learned, lora.Base(values, ALL.scale))
    np.testing.assert_array_equal(logits(cfg, lora.variables(model), tokens), logits(cfg, values, tokens))
    for module, inputs in ((("attn", "q"), 36), (("attn", "o"), 4 * 14), (("mlp", "down"), 50)):
        a = np.asarray(params.leaf_at(learned, ("lora", "layers", *module, "a")))
        assert a[0].size == inputs * 3 and 0.8 < np.abs(a).max() * inputs**0.5 <= 1
        assert not np.array_equal(a[0], a[1])


@pytest.mark.parametrize(
    "name, length, path, a_of, b_of",
    [
        ("qwen2-tied", 6, ("attn", "q"), "ldha,lrha->ldr", "ldha,ldr->lrha"),
        ("olmoe-grouped", 9, ("experts", "down"), "ledm,lerd->lemr", "ledm,lemr->lerd"),
    ],
)
def test_the_gradient_of_adapters_is_that_of_the_merged_model(checkpoint, rng, name, length, path, a_of, b_of):
    """dL/dA = scale dL/dW B^T, and dL/dB = scale A^T dL/dW."""
    directory, _ = checkpoint(name)
    cfg, model = adapted(directory, ALL)
    tokens = rng.integers(0, cfg.vocab_size, (1, length)).astype(np.int32)

    def loss(variables):
        return jnp.sum(decoder.Decoder(cfg).apply(variables, tokens, *whole(tokens)) ** 2)

    grad = jax.jit(jax.grad(lambda learned: loss(lora.variables(lora.join(learned, model.base)))))(model.learned)
    table = params.table(cfg, head="lm")
    parts = {e.path: lora.kernel_and_adapter(e, model) for e in table}
    merged = params.tree(
        table, lambda e: parts[e.path][0] if parts[e.path][1] is None else lora.merge(e, *parts[e.path])
    )
    full = params.leaf_at(jax.jit(jax.grad(lambda values: loss({"params": values})))(merged), ("layers", *path))
    full = full if path[0] == "experts" else full["kernel"]
    a, b = (params.leaf_at(model.learned, ("lora", "layers", *path, x)) for x in "ab")
    found = params.leaf_at(grad, ("lora", "layers", *path))
    assert_close(np.asarray(found["a"]), ALL.scale * np.einsum(a_of, full, b))
    assert_close(np.asarray(found["b"]), ALL.scale * np.einsum(b_of, full, a))


@pytest.mark.parametrize("name, module", [("mixtral-full", "block_sparse_moe"), ("qwen2-moe-mixed", "mlp")])
def test_adapters_of_experts_have_the_names_and_shapes_of_linear_layers(checkpoint, tmp_path, name, module):
    """As vLLM reads them, and peft did while transformers had a module for each expert."""
    directory, _ = checkpoint(name)
    how = Lora(3, 6, ("gate_proj", "down_proj"))
    cfg, model = adapted(directory, how)
    out = hf_write.save_adapter(tmp_path / "adapter", model.learned, cfg, how, base=str(directory))
    with safetensors.safe_open(out / "adapter_model.safetensors", "np") as file:
        shapes = {key: tuple(file.get_tensor(key).shape) for key in file.keys()}  # noqa: SIM118
    gate, down = ("w1", "w2") if name == "mixtral-full" else ("gate_proj", "down_proj")
    layer = [i for i, sparse in enumerate(cfg.experts.sparse) if sparse][-1]
    at = f"base_model.model.model.layers.{layer}.{module}.experts.{cfg.experts.count - 1}"
    D, M = cfg.hidden_size, cfg.experts.width
    assert shapes[f"{at}.{gate}.lora_A.weight"] == (3, D) and shapes[f"{at}.{gate}.lora_B.weight"] == (M, 3)
    assert shapes[f"{at}.{down}.lora_A.weight"] == (3, M) and shapes[f"{at}.{down}.lora_B.weight"] == (D, 3)
    shared = sum("shared_expert" in key for key in shapes)
    assert shared == (4 * sum(cfg.experts.sparse) if cfg.experts.shared_width else 0)
    said = json.loads((out / "adapter_config.json").read_text())["target_modules"]
    assert set(said) == {gate, down}


@pytest.mark.parametrize("seed, expected", [(0, 0), (1, 0x514E28B7), (2**32 - 1, 0x81F16F39)])
def test_numbers_are_hashed_as_by_murmurhash3(seed, expected):
    """Known hashes of MurmurHash3 (x86, 32 bits) for empty data, which are the last step alone, of the seed."""
    assert int(lora.hash_32_bits(jnp.uint32(seed))) == expected


def test_dropout_zeroes_its_share_and_keeps_the_mean():
    x = jnp.ones((1, 64, 4, 32))
    seeds = lora.hash_32_bits(np.arange(64, dtype=np.uint32)).reshape(1, 64)
    found = np.asarray(lora.drop_elements(x, jnp.asarray(seeds), jnp.float32(0.3)))
    assert set(np.unique(found)) == {0.0, np.float32(1 / np.float32(1 - np.float32(0.3)))}
    share = (found == 0).mean()
    assert abs(share - 0.3) < 4 * (0.3 * 0.7 / found.size) ** 0.5
    zeros = (found == 0).reshape(64, -1)
    assert np.abs(np.corrcoef(zeros) - np.eye(64)).max() < 0.45 and len(np.unique(zeros, axis=0)) == 64


@pytest.mark.parametrize("text", ["", "q_proj,x_proj", "lm_head", "all", "q,v"])
def test_unknown_targets_are_refused_by_name(text):
    with pytest.raises(UserError, match="target_modules") as e:
        lora.parse_targets(text)
    assert "q_proj" in str(e.value) and "all-linear" in str(e.value)
    assert lora.parse_targets("all-linear") == tuple(lora.TARGETS)
    assert lora.parse_targets("v_proj, q_proj") == ("q_proj", "v_proj"), "in one order"


def test_what_peft_reads(tmp_path, checkpoint):
    directory, _ = checkpoint("llama-tied")
    cfg, model = adapted(directory, Lora(2, 16, ("q_proj",)))
    out = hf_write.save_adapter(tmp_path / "a", model.learned, cfg, Lora(2, 16, ("q_proj",)), base="some/base")
    said = json.loads((out / "adapter_config.json").read_text())
    assert (said["r"], said["lora_alpha"], said["target_modules"]) == (2, 16, ["q_proj"])
    assert said["base_model_name_or_path"] == "some/base" and said["task_type"] == "CAUSAL_LM"


@pytest.mark.parametrize(
    "name, targets, absent",
    [("phi3-grouped", ("q_proj", "o_proj"), "q_proj"), ("qwen2-tied", ("qkv_proj",), "qkv_proj")],
)
def test_modules_that_the_model_lacks_are_refused(checkpoint, name, targets, absent):
    _, cfg = hf.read_config(checkpoint(name)[0])
    with pytest.raises(
        UserError, match=rf"a {cfg.family} model has no {absent}; use all-linear, or some of .*o_proj"
    ) as e:
        lora.adapter_table(cfg, Lora(2, 16, targets), head="lm")
    assert "\n" not in str(e.value)
