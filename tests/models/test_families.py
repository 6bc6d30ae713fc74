"""config.json to ModelConfig: what is read, what defaults to what, and what is refused by name."""

import math

import pytest

from jppo.errors import UserError
from jppo.models import config_reader
from jppo.models.config import AttentionKind
from jppo.models.rotary import Rotary


def test_fields_are_read(hf_config):
    cfg = config_reader.parse_config(hf_config("llama-biased"), path="config.json")
    assert (cfg.family, cfg.vocab_size, cfg.hidden_size, cfg.intermediate_size) == ("llama", 71, 36, 50)
    assert (cfg.num_layers, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim) == (2, 4, 1, 14)
    assert cfg.kinds == (AttentionKind(None, Rotary(5e5)),) and cfg.layer_kinds == (0, 0)
    assert (cfg.rms_norm_eps, cfg.max_position_embeddings) == (1e-5, 128)
    assert (cfg.qkv_bias, cfg.o_bias, cfg.mlp_bias, cfg.tie_word_embeddings) == (True, True, True, False)
    qwen = config_reader.parse_config(hf_config("qwen2-untied"), path="config.json")
    assert (qwen.qkv_bias, qwen.o_bias, qwen.mlp_bias, qwen.head_dim) == (True, False, False, 12)
    hash(qwen)


def test_absent_fields_are_as_transformers_has_them(hf_config):
    transformers = pytest.importorskip("transformers")
    config = hf_config("llama-tied")
    for key in (
        "num_key_value_heads",
        "tie_word_embeddings",
        "rope_theta",
        "rms_norm_eps",
        "initializer_range",
    ):
        config.pop(key, None)
    cfg = config_reader.parse_config(config, path="config.json")
    theirs = transformers.LlamaConfig(hidden_size=32, num_attention_heads=2)
    assert cfg.num_kv_heads == theirs.num_key_value_heads and cfg.head_dim == theirs.head_dim
    assert cfg.tie_word_embeddings == theirs.tie_word_embeddings and cfg.rms_norm_eps == theirs.rms_norm_eps
    assert cfg.initializer_range == theirs.initializer_range
    assert cfg.kinds[0].rotary == Rotary(theirs.rope_parameters["rope_theta"])
    assert cfg.qkv_bias == theirs.attention_bias and cfg.mlp_bias == theirs.mlp_bias
    for name in ("qwen2-moe-mixed", "qwen3-tied", "qwen3-moe-normed", "olmoe-grouped", "gpt-oss-clamped"):
        config = {k: v for k, v in hf_config(name).items() if k not in ("qkv_bias", "attention_bias")}
        theirs = transformers.AutoConfig.for_model(config["model_type"])
        bias = theirs.qkv_bias if name == "qwen2-moe-mixed" else theirs.attention_bias
        assert config_reader.parse_config(config, path="config.json").qkv_bias == bias, name
    gemma = {k: v for k, v in hf_config("gemma2-capped").items() if k != "query_pre_attn_scalar"}
    scalar = transformers.Gemma2Config().query_pre_attn_scalar
    assert config_reader.parse_config(gemma, path="config.json").query_scale == pytest.approx(scalar**-0.5)
    gemma4 = {k: v for k, v in hf_config("gemma4-experts").items() if k != "num_kv_shared_layers"}
    theirs = transformers.Gemma4TextConfig()
    shared = theirs.num_kv_shared_layers
    assert config_reader.parse_config(gemma4, path="config.json").gemma4.shared_layers == shared
    bare = {k: v for k, v in gemma4.items() if k not in ("use_double_wide_mlp", "attention_k_eq_v")}
    found = config_reader.parse_config(bare, path="config.json").gemma4
    assert (found.double_shared, found.joined) == (theirs.use_double_wide_mlp, theirs.attention_k_eq_v)


@pytest.mark.parametrize(
    "name", ["llama-tied", "qwen2-untied", "mistral-full", "gemma-even", "deepseek3-halves", "olmoe-tied"]
)
def test_absent_kv_heads_are_as_transformers_has_them_or_refused(hf_config, name):
    transformers = pytest.importorskip("transformers")
    config = {k: v for k, v in hf_config(name).items() if k != "num_key_value_heads"}
    if transformers.AutoConfig.for_model(**config).num_key_value_heads == config["num_attention_heads"]:
        assert config_reader.parse_config(config, path="config.json").num_kv_heads == config["num_attention_heads"]
    else:
        with pytest.raises(UserError, match=r"^config\.json: num_key_value_heads is missing"):
            config_reader.parse_config(config, path="config.json")


@pytest.mark.parametrize(
    "name",
    ["gemma-wide", "gemma2-capped", "gemma3-long", "gemma4-experts", "gpt-oss-clamped", "granite-scaled", "llama-tied"]
    + ["mistral-full", "mixtral-full", "olmo2-grouped", "olmo3-long", "olmoe-grouped", "phi3-grouped", "qwen2-tied"]
    + ["qwen2-moe-mixed", "qwen3-tied", "qwen3-moe-normed", "qwen3-next-periods", "qwen3.5-periods", "smollm3-tied"],
)
def test_an_absent_epsilon_is_that_of_transformers(hf_config, name):
    transformers = pytest.importorskip("transformers")
    config = {k: v for k, v in hf_config(name).items() if k != "rms_norm_eps"}
    theirs = transformers.AutoConfig.for_model(**config)
    assert config_reader.parse_config(config, path="config.json").rms_norm_eps == theirs.rms_norm_eps


def test_absent_fields_of_a_deepseek_model_are_as_transformers_has_them(hf_config):
    transformers = pytest.importorskip("transformers")
    left_out = ("norm_topk_prob", "routed_scaling_factor", "first_k_dense_replace", "rope_interleave", "rms_norm_eps")
    for name, theirs in (("2-lite", transformers.DeepseekV2Config()), ("3-halves", transformers.DeepseekV3Config())):
        config = hf_config(f"deepseek{name}") | {"num_hidden_layers": 5}
        cfg = config_reader.parse_config({k: v for k, v in config.items() if k not in left_out}, path="config.json")
        assert cfg.experts.normalized == theirs.norm_topk_prob and cfg.rms_norm_eps == theirs.rms_norm_eps
        assert cfg.experts.routing.scale == theirs.routed_scaling_factor
        assert cfg.experts.sparse.count(False) == theirs.first_k_dense_replace
        assert cfg.latent.interleaved == getattr(theirs, "rope_interleave", True)
    null = hf_config("deepseek3-grouped") | dict(norm_topk_prob=None, rope_interleave=None)  # false in transformers
    cfg = config_reader.parse_config(null, path="config.json")
    assert (cfg.experts.normalized, cfg.latent.interleaved) == (False, False)


def test_the_published_deepseek_models_are_read():
    """The fields of their config.json files that bear on the model."""
    rope = dict(type="yarn", factor=40, beta_fast=32, beta_slow=1, original_max_position_embeddings=4096)
    lite = dict(
        model_type="deepseek_v2", aux_loss_alpha=0.001, ep_size=1, first_k_dense_replace=1, hidden_act="silu",
        hidden_size=2048, intermediate_size=10944, kv_lora_rank=512, max_position_embeddings=163840,
        moe_intermediate_size=1408, moe_layer_freq=1, n_group=1, n_routed_experts=64, n_shared_experts=2,
        norm_topk_prob=False, num_attention_heads=16, num_experts_per_tok=6, num_hidden_layers=27,
        num_key_value_heads=16, pretraining_tp=1, q_lora_rank=None, qk_nope_head_dim=128, qk_rope_head_dim=64,
        rms_norm_eps=1e-6, rope_theta=10000, routed_scaling_factor=1.0, scoring_func="softmax", seq_aux=True,
        tie_word_embeddings=False, topk_group=1, topk_method="greedy", v_head_dim=128, vocab_size=102400,
        rope_scaling=rope | dict(mscale=0.707, mscale_all_dim=0.707),
    )  # fmt: skip
    cfg = config_reader.parse_config(lite, path="config.json")
    assert (cfg.head_dim, cfg.latent.cached_dim, cfg.kernel_dim) == (192, 576, 192)
    assert cfg.experts.widths == (1408, 2816) and cfg.unread is None
    assert cfg.query_scale == pytest.approx(192**-0.5 * (0.1 * 0.707 * math.log(40) + 1) ** 2)
    large = lite | dict(
        model_type="deepseek_v3", first_k_dense_replace=3, n_group=8, topk_group=4, n_shared_experts=1,
        q_lora_rank=1536, n_routed_experts=256, norm_topk_prob=True, num_attention_heads=128, num_key_value_heads=128,
        num_hidden_layers=61, num_nextn_predict_layers=1, scoring_func="sigmoid", topk_method="noaux_tc",
    )  # fmt: skip
    cfg = config_reader.parse_config(large, path="config.json")
    assert (cfg.experts.routing.groups, cfg.experts.routing.best_groups, cfg.experts.routing.corrected) == (8, 4, True)
    assert cfg.unread == "1 multi-token prediction layer(s) after layer 60 are not read"


@pytest.mark.parametrize(
    "rope",
    [
        dict(rope_theta=7e5),
        dict(rope_theta=7e5, rope_scaling=None),
        dict(rope_theta=7e5, rope_scaling={"type": "default"}),
        dict(rope_parameters={"rope_theta": 7e5, "rope_type": "default"}),
        dict(rope_parameters={"rope_theta": 700000}, rope_theta=None),
    ],
)
def test_rope_theta_in_every_place_of_it(hf_config, rope):
    assert config_reader.parse_config(hf_config("llama-tied") | rope, path="config.json").kinds[0].rotary == Rotary(7e5)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "mamba"),
        ("model_type", None),
        ("hidden_act", "gelu"),
        ("use_bidirectional_attention", True),
        ("is_causal", False),
        ("per_layer_config", {"1": {"num_experts_per_tok": 1}}),
        ("final_logit_softcapping", 30.0),
        ("attn_logit_softcapping", 50.0),
        ("model_type", "gemma3"),
        ("model_type", "gemma4"),
        ("model_type", "gemma3n_text"),
        ("pretraining_tp", 2),
        ("quantization_config", {"bits": 4}),
        ("attention_dropout", 0.1),
        ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}),
        ("rope_scaling", {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}),
        ("rope_scaling", {"type": "linear"}),
        ("rope_scaling", {"type": "linear", "factor": 0.0}),
        ("rope_scaling", {"type": "dynamic", "factor": 2.0, "alpha": 3.0}),
        ("rope_scaling", {"type": "longrope", "short_factor": [1.0] * 5, "long_factor": [1.0] * 4, "factor": 2.0}),
        ("rope_scaling", {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0] * 5}),
        ("rope_parameters", {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0, "alpha": 2.0}),
        ("rope_parameters", {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0, "beta_fast": 1.0}),
        ("rope_parameters", {"rope_theta": 1e4, "rope_type": "yarn"}),
        ("rope_parameters", {"rope_type": "yarn", "factor": 4.0, "mscale": -1.0}),
        ("rope_parameters", {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}),
        ("rope_parameters", 3),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("hidden_size", "64"),
        ("hidden_size", None),
        ("vocab_size", 0),
        ("num_hidden_layers", True),
        ("tie_word_embeddings", 1),
        ("num_key_value_heads", 4),
        ("head_dim", 9),
    ],
)
def test_unsupported_is_refused_by_file_field_and_value(hf_config, field, value):
    with pytest.raises(UserError) as e:
        config_reader.parse_config(hf_config("qwen2-tied") | {field: value}, path="some/config.json")
    assert "some/config.json" in str(e.value) and field in str(e.value) and "\n" not in str(e.value)
    if value is not None:
        shown = str(value) if not isinstance(value, dict) else next(iter(value))
        assert shown in str(e.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("rms_norm_eps", value) for value in (math.inf, math.nan, 0.0, -1e-6, 10**400)),
        *(("rope_theta", value) for value in (math.nan, math.inf, -1.0)),
        *(("initializer_range", value) for value in (math.inf, -0.02)),
        ("rope_scaling", {"rope_type": "linear", "factor": math.inf}),
        ("rope_scaling", {"rope_type": "linear", "factor": 1e308}),
        ("max_position_embeddings", 10**400),
        ("head_dim", 10**400),
        ("rope_scaling", {"rope_type": ["linear"], "factor": 2.0}),
        ("model_type", ["llama"]),
        ("num_hidden_layers", 2**31),
        ("hidden_size", 1),  # fewer than heads: head_dim is 0
        ("model_type", {}),
    ],
)
def test_numbers_that_no_model_has_are_refused_by_name(hf_config, field, value):
    with pytest.raises(UserError, match=rf"config\.json: .*({field}|factor|head_dim=0)") as e:
        config_reader.parse_config(hf_config("llama-tied") | {field: value}, path="config.json")
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("smollm3-tied", "no_rope_layers", [1, 1, 0, 1]),
        ("smollm3-tied", "no_rope_layers", [1, 1, 0, 1, 2]),
        ("smollm3-tied", "use_sliding_window", True),
        ("llama-yarn", "original_max_position_embeddings", 10**400),
        ("olmo2-grouped", "clip_qkv", 8.0),
        ("olmo2-grouped", "final_logit_softcapping", 3.0),
        ("olmo3-long", "layer_types", ["chunked_attention"] * 5),
        ("olmo3-long", "rope_parameters", {"rope_theta": 1e4}),
        ("gemma3-long", "rope_parameters", {"full_attention": 3}),
        ("gemma2-capped", "hidden_activation", "gelu"),
        ("deepseek2-lite", "rope_interleave", False),
        ("gemma4-shared", "num_kv_shared_layers", 7),
        ("gemma4-shared", "num_kv_shared_layers", 5),  # no full layer before them
        ("gemma4-shared", "vocab_size_per_layer_input", 60),
        ("gemma4-shared", "use_bidirectional_attention", "all"),
        ("gemma4-shared", "per_layer_config", {"0": {"head_dim": 4}}),
        ("gemma4-shared", "per_layer_config", {"2": {"head_dim": 4}, "6": {"head_dim": 8}}),
        ("gemma4-shared", "per_layer_config", {"2": {"sliding_window": 3}, "6": {"sliding_window": 3}}),
        ("gemma4-shared", "per_layer_config", {"2": 3, "6": 3}),
        ("gemma4-experts", "top_k_experts", 9),
        ("granite-scaled", "residual_multiplier", 0.0),
        ("granite-scaled", "logits_scaling", "8"),
        ("phi3-grouped", "partial_rotary_factor", 0.7),
        ("phi3-grouped", "partial_rotary_factor", 1e308),
        ("phi3-grouped", "resid_pdrop", 0.1),
        ("phi3-grouped", "rope_scaling", {"type": "yarn", "short_factor": [1.0] * 5, "long_factor": [1.0] * 5}),
    ],
)
def test_a_familys_own_fields_are_refused_by_name(hf_config, name, field, value):
    with pytest.raises(UserError, match=rf"^config\.json: {field}") as e:
        config_reader.parse_config(hf_config(name) | {field: value}, path="config.json")
    assert "\n" not in str(e.value)


def test_the_first_context_of_scaled_positions_has_two_tokens_or_more(hf_config):
    def parsed(first):
        rope = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=first)
        return config_reader.parse_config(hf_config("qwen2-tied") | {"rope_scaling": rope}, path="config.json")

    assert parsed(2).max_position_embeddings == 8
    with pytest.raises(UserError, match="original_max_position_embeddings=1 must be at least 2"):
        parsed(1)


def test_the_last_layers_of_gemma_4_take_keys_of_the_last_of_their_kind_before_them(hf_config):
    """Layers ssfsssf, of which three share: those with a window the keys of the fourth layer, the last of the third."""
    cfg = config_reader.parse_config(hf_config("gemma4-shared"), path="config.json")
    assert [one.keys for one in cfg.layer_modules] == ["own", "own", "kept", "kept", "shared", "shared", "shared"]


@pytest.mark.parametrize(
    "changes",
    [{}, dict(global_head_dim=None), dict(per_layer_config={}), dict(layer_types=None, num_hidden_layers=8)],
)
def test_layers_of_gemma_4_have_the_sizes_of_transformers(hf_config, changes):
    transformers = pytest.importorskip("transformers")
    config = {k: v for k, v in (hf_config("gemma4-experts") | changes).items() if v is not None}
    theirs = transformers.AutoConfig.for_model(**config)
    cfg = config_reader.parse_config(config, path="config.json")
    each = [theirs.per_layer_config[i] for i in range(cfg.num_layers)]
    assert [cfg.heads_of(one) for one in cfg.layer_modules] == [(one.num_key_value_heads, one.head_dim) for one in each]
    slides = [cfg.kinds[kind].window is not None for kind in cfg.layer_kinds]
    assert slides == [kind == "sliding_attention" for kind in theirs.layer_types]


@pytest.mark.parametrize("name", ["gemma2-capped", "gemma3-long", "olmo3-long", "gpt-oss-clamped"])
def test_fields_of_gemma_3_count_only_there(hf_config, name):
    transformers = pytest.importorskip("transformers")
    config = hf_config(name) | dict(sliding_window_pattern=3, rope_local_base_freq=2e3)
    theirs = transformers.AutoConfig.for_model(**config)
    cfg = config_reader.parse_config(config, path="config.json")
    slides = [cfg.kinds[kind].window is not None for kind in cfg.layer_kinds]
    assert slides == [kind == "sliding_attention" for kind in theirs.layer_types]
    if name in ("gemma3-long", "olmo3-long"):
        theta = theirs.rope_parameters["sliding_attention"]["rope_theta"]
        assert cfg.kinds[cfg.layer_kinds[0]].rotary.theta == theta
