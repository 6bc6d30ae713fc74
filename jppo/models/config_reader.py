"""A parsed config.json to one frozen dataclass for the decoder and the parameter table, by the table of families.

An unsupported field that changes the mathematics is an error that names it: nothing is dropped.
"""

import os
from collections.abc import Mapping
from typing import Any

from jppo.errors import UserError
from jppo.models import config_fields, families
from jppo.models.config import AttentionKind, Delta, DeltaLayout, Heads, Latent, ModelConfig
from jppo.models.config_fields import Fields
from jppo.models.families import FAMILIES, Family
from jppo.models.rotary import STILL, Rotary

MOST_LAYERS = 10_000  # more than any model has; a loop visits each

# Fields that change the mathematics, and the values without effect. An absent field is None.
_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "pretraining_tp": (None, 1),
    "partial_rotary_factor": (None, 1.0),
    "attention_dropout": (None, 0.0),
    "resid_pdrop": (None, 0.0),
    "embd_pdrop": (None, 0.0),
    "use_bidirectional_attention": (None, False),
    "is_causal": (None, True),
    "per_layer_config": (None,),
    "clip_qkv": (None,),
    "router_jitter_noise": (None, 0.0),
}
ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
# Models that read pictures too, whose text model is trained; their files' names for it begin with one of PREFIXES.
MULTIMODAL = ("gemma3", "gemma4", "mistral3", "qwen3_5", "qwen3_5_moe")
PREFIXES = ("model.language_model.", "language_model.model.")
_SHARED = ("tie_word_embeddings", "dtype", "torch_dtype", "eos_token_id", "quantization_config")  # fields of the whole
_OMITTED_FIELDS = {  # fields that published files leave out, as transformers fills them in
    "gemma3_text": dict(vocab_size=262208, num_attention_heads=8, num_key_value_heads=4, head_dim=256),
}
_UNSUPPORTED_MODELS = {  # models that users try, and their errors
    "gemma3": "it reads pictures too; its text model alone is gemma3_text",
    "qwen3_5": "it reads pictures too; its text model alone is qwen3_5_text",
    "qwen3_5_moe": "it reads pictures too; its text model alone is qwen3_5_moe_text",
    "gemma3n": "it reads pictures and sound too, and its text model is not supported either",
    "gemma3n_text": "embeddings in every layer, alternating updates, and layers that share keys and values",
    "gemma4": "it reads pictures too; its text model alone is gemma4_text",
    "granitemoe": "a mixture of experts with fused kernels",
    "olmo": "layer norms without weights",
    "phi": "layer norms, and attention and MLP side by side",
}


def is_multimodal(config: Mapping[str, Any]) -> bool:
    """Whether a config.json describes a model that reads pictures or sound too."""
    return config.get("model_type") in MULTIMODAL and isinstance(config.get("text_config"), dict)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the config of a multimodal model's text model; any other config as it is."""
    if not is_multimodal(config):
        return config
    text: dict[str, Any] = config["text_config"]
    shared = {name: config[name] for name in _SHARED if config.get(name) is not None}
    if text.get("use_bidirectional_attention") == "vision":  # among the tokens of a picture
        shared["use_bidirectional_attention"] = None
    return _OMITTED_FIELDS.get(str(text.get("model_type")), {}) | text | shared


def parse_config(config: Mapping[str, Any], *, path: str | os.PathLike[str], longest: int | None = None) -> ModelConfig:
    """Reads the model from the parsed `config`; `path` is its file, for the errors.

    `longest` is the largest number of tokens of a row, which chooses the factors of `longrope`; None: short ones.
    """
    fields = Fields(text_config(config), str(path))
    name, family = _family(fields)
    _refuse_unsupported(fields, family)
    hidden_size, num_heads = fields.get("hidden_size", int), fields.get("num_attention_heads", int)
    num_layers, num_kv_heads = _num_layers(fields), _num_kv_heads(fields, family, num_heads)
    latent = _read_latent(fields, num_heads) if family.latent else None
    head_dim = latent.head_dim if latent is not None else _head_dim(fields, family, hidden_size, num_heads)
    windows = _layer_windows(fields, family, num_layers)
    full_heads = (
        config_fields.read_full_heads(fields, windows, num_heads, num_kv_heads, head_dim) if family.gemma4 else None
    )
    rotary_dim = head_dim if latent is None else latent.rotary_dim
    rotary, sliding_rotary = config_fields.read_rotary(fields, family, rotary_dim, longest, full_heads)
    layers = _layer_kinds(fields, family, windows, rotary, sliding_rotary, full_heads)
    kinds = tuple(dict.fromkeys(layers))
    vocab_size = fields.get("vocab_size", int)
    return ModelConfig(
        family=name,
        multimodal=is_multimodal(config),
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.get(_width_field(family), int),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        kinds=kinds,
        layer_kinds=tuple(kinds.index(kind) for kind in layers),
        rms_norm_eps=fields.above_zero("rms_norm_eps", family.rms_norm_eps),
        norm_offset=1.0 if family.gemma or family.centred else 0.0,
        qk_norm=family.qk_norm,
        pre_norms=family.pre_norms,
        post_norms=family.post_norms,
        fused=family.fused,
        **_read_biases(fields, family),
        activation=_activation(fields, family),
        embed_scale=_embed_scale(fields, family, hidden_size),
        residual_scale=_multiplier(fields, family, "residual_multiplier"),
        query_scale=_query_scale(fields, family, head_dim, rotary),
        sinks=family.sinks,
        attn_softcap=_softcap(fields, "attn_logit_softcapping", family.attn_softcap),
        logit_divisor=_multiplier(fields, family, "logits_scaling"),
        logit_softcap=_softcap(fields, "final_logit_softcapping", family.logit_softcap),
        tie_word_embeddings=fields.get("tie_word_embeddings", bool, family.tie_word_embeddings),
        max_position_embeddings=config_fields.context_length(fields, rotary),
        initializer_range=fields.above_zero("initializer_range", 0.02),
        padded_vocab_size=vocab_size,
        experts=config_fields.read_experts(fields, family.experts, num_layers),
        quantization=fields.get("quantization_config", dict, {}).get("quant_method"),
        latent=latent,
        further_layers=fields.from_zero("num_nextn_predict_layers", 0),
        gated=family.gated,
        delta=None if family.delta is None else _read_delta(fields, family.delta, num_layers),
        gemma4=config_fields.read_gemma4(fields, windows, vocab_size) if family.gemma4 else None,
    )


def _read_biases(fields: Fields, family: Family) -> dict[str, bool]:
    """Returns which projections add a bias: by the file, unless all models of the family are alike."""
    attention = fields.get(family.bias_field, bool, family.biased)
    return dict(
        qkv_bias=attention if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention if family.o_bias is None else family.o_bias,
        mlp_bias=fields.get("mlp_bias", bool, False) if family.mlp_bias is None else family.mlp_bias,
    )


def _num_layers(fields: Fields) -> int:
    layers: int = fields.get("num_hidden_layers", int)
    if layers > MOST_LAYERS:
        raise fields.refuse("num_hidden_layers", f"must be at most {MOST_LAYERS}")
    return layers


def _num_kv_heads(fields: Fields, family: Family, num_heads: int) -> int:
    has_default = family.all_kv_heads or "num_key_value_heads" in fields.config
    heads: int = (
        fields.get("num_key_value_heads", int, num_heads) if has_default else fields.get("num_key_value_heads", int)
    )
    if num_heads % heads:
        raise fields.refuse("num_key_value_heads", f"must divide num_attention_heads={num_heads}")
    return heads


def _family(fields: Fields) -> tuple[str, Family]:
    name = fields.config.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        why = f" ({_UNSUPPORTED_MODELS[name]})" if isinstance(name, str) and name in _UNSUPPORTED_MODELS else ""
        raise UserError(f"{fields.path}: model_type={name!r} is not supported{why}; use one of {', '.join(FAMILIES)}")
    return name, FAMILIES[name]


def _head_dim(fields: Fields, family: Family, hidden_size: int, num_heads: int) -> int:
    size: int = fields.get("head_dim", int, hidden_size // num_heads if family.head_dim is None else family.head_dim)
    if size % 2 or not size:
        raise UserError(f"{fields.path}: head_dim={size} must be even and above 0: rotary embedding turns pairs")
    return size


def _refuse_unsupported(fields: Fields, family: Family) -> None:
    """Raises UserError for a field that changes the mathematics and is not supported."""
    quantization = fields.get("quantization_config", dict, {})
    if quantization and (family.quantization is None or quantization.get("quant_method") != family.quantization):
        allowed = "absent" if family.quantization is None else f"absent or quant_method={family.quantization}"
        raise fields.refuse("quantization_config", f"is not supported; only {allowed}: use a bfloat16 checkpoint")
    allowed_values = dict(_NEUTRAL_VALUES)
    if family.partial_rotary:
        del allowed_values["partial_rotary_factor"]
    if family.gemma4:
        allowed_values["use_bidirectional_attention"] = (None, False, "vision")  # texts are causal
        del allowed_values["per_layer_config"]
    if family.bare_layers:  # SmolLM3's file has a 2, which its class does not read
        del allowed_values["pretraining_tp"]
    if family.attn_softcap is None:
        allowed_values["attn_logit_softcapping"] = (None,)
    if family.experts is not None or family.bare_layers:
        allowed_values["use_sliding_window"] = (None, False)
    if family.latent:
        allowed_values["mlp_bias"] = (None, False)
    if family.experts is families.DEEPSEEK_V2:
        allowed_values["rope_interleave"] = (None, True)
    if not (family.query_pre_attn_scalar or family.gemma4):
        allowed_values["final_logit_softcapping"] = (None,)
    for key, values in allowed_values.items():
        if fields.config.get(key) not in values:
            allowed = " or ".join("absent" if v is None else repr(v) for v in values)
            raise fields.refuse(key, f"changes the mathematics and is not supported; only {allowed}")


def _width_field(family: Family) -> str:
    """Returns the field of the MLP's width; of the experts' where no layer has an MLP."""
    names = family.experts
    return "intermediate_size" if names is None or names.mixed or names.beside else names.width


def _activation(fields: Fields, family: Family) -> str:
    key = "hidden_activation" if family.query_pre_attn_scalar or family.gemma4 else "hidden_act"
    name: str = fields.get(key, str, family.activation)
    if family.gemma and key == "hidden_act" and name == "gelu":  # Gemma 1's old files mean the approximation
        name = family.activation
    if name not in ACTIVATIONS:
        raise fields.refuse(key, f"changes the mathematics and is not supported; only {' or '.join(ACTIVATIONS)}")
    return name


def _multiplier(fields: Fields, family: Family, key: str) -> float:
    """Reads a factor; 1 where the family has none."""
    return fields.above_zero(key, 1.0) if family.multipliers else 1.0


def _embed_scale(fields: Fields, family: Family, hidden_size: int) -> float:
    if family.gemma or family.gemma4:
        return float(hidden_size**0.5)
    return _multiplier(fields, family, "embedding_multiplier")


def _query_scale(fields: Fields, family: Family, head_dim: int, rotary: Rotary) -> float:
    if family.gemma4:
        return 1.0
    if family.latent:  # YaRN's `mscale_all_dim` raises it
        rope = fields.config.get("rope_scaling") or fields.config.get("rope_parameters") or {}
        yarn_scale = config_fields.mscale(rotary.factor, Fields(rope, fields.path).get("mscale_all_dim", float, 0.0))
        return float(head_dim**-0.5 * yarn_scale**2)
    if family.multipliers:
        return _multiplier(fields, family, "attention_multiplier")
    scalar = fields.above_zero("query_pre_attn_scalar", 256.0) if family.query_pre_attn_scalar else head_dim
    return float(scalar**-0.5)


def _softcap(fields: Fields, key: str, default: float | None) -> float | None:
    cap: float | None = fields.or_null(key, float, default)
    if cap is not None and cap <= 0:
        raise fields.refuse(key, "must be above 0, or null for none")
    return cap


def _layer_kinds(
    fields: Fields,
    family: Family,
    windows: list[int | None],
    rotary: Rotary,
    sliding_rotary: Rotary | None,
    full_heads: Heads | None,
) -> list[AttentionKind]:
    """Returns the kind of each layer."""
    bare = config_fields.read_bare_layers(fields, len(windows)) if family.bare_layers else [False] * len(windows)
    rotaries = [rotary if window is None or sliding_rotary is None else sliding_rotary for window in windows]
    return [
        AttentionKind(window, STILL if still else layer_rotary, full_heads if window is None else None)
        for window, layer_rotary, still in zip(windows, rotaries, bare, strict=True)
    ]


def _layer_windows(fields: Fields, family: Family, num_layers: int) -> list[int | None]:
    """Returns the window of each layer, or None."""
    if family.delta is not None:
        return [None] * num_layers
    # transformers writes 0 for a mixture without windows.
    window = None if family.slides == "never" else fields.or_null("sliding_window", int, family.window)
    has_switch = family.slides == "late"  # qwen's, whose window counts only if switched on
    if has_switch and not fields.get("use_sliding_window", bool, False):
        window = None
    types = fields.get("layer_types", list, None)
    if types is None or family.slides == "always":
        optional = has_switch or family.slides == "always"  # no window: no layer slides
        slides = [_layer_slides(fields, family, i) and not (optional and window is None) for i in range(num_layers)]
    else:
        slides = [kind == "sliding_attention" for kind in types]
    expected_types = ["sliding_attention" if layer_slides else "full_attention" for layer_slides in slides]
    if types is not None and expected_types != types:
        raise fields.refuse(
            "layer_types", f"must be {num_layers} of full_attention and sliding_attention, as {expected_types}"
        )
    if len(expected_types) != num_layers:
        raise fields.refuse("layer_types", f"must have one entry for each of num_hidden_layers={num_layers}")
    if any(slides) and (window is None or family.slides == "never"):
        raise fields.refuse("layer_types", f"is not supported with sliding_window={window}: no layer can slide")
    if family.gemma4:  # transformers lets the last layer see all
        slides[-1] = False
    return [window if layer_slides else None for layer_slides in slides]


def _layer_slides(fields: Fields, family: Family, layer: int) -> bool:
    """Whether a layer has a sliding window, if `layer_types` is absent."""
    if family.slides == "late":
        first_sliding = fields.config.get("max_window_layers", 28)
        if not isinstance(first_sliding, int):
            raise fields.refuse("max_window_layers", "must be a whole number")
        return layer >= first_sliding
    if family.slides == "pattern" or isinstance(family.slides, int):
        interval = fields.get("sliding_window_pattern", int, 6) if family.slides == "pattern" else family.slides
        return bool((layer + 1) % interval != 0)
    return family.slides == "always"


def _read_latent(fields: Fields, num_heads: int) -> Latent:
    """Reads the sizes of latent attention."""
    kv_heads = fields.get("num_key_value_heads", int, num_heads)
    if kv_heads != num_heads:
        raise fields.refuse("num_key_value_heads", f"must be num_attention_heads={num_heads}: heads share one latent")
    rotary_dim = fields.get("qk_rope_head_dim", int)
    if rotary_dim % 2:
        raise fields.refuse("qk_rope_head_dim", "must be even: rotary embedding turns pairs")
    if fields.get("head_dim", int, rotary_dim) != rotary_dim:
        raise fields.refuse("head_dim", f"must be qk_rope_head_dim={rotary_dim} or absent")
    return Latent(
        query_rank=fields.or_null("q_lora_rank", int, 1536),
        rank=fields.get("kv_lora_rank", int),
        plain_dim=fields.get("qk_nope_head_dim", int),
        rotary_dim=rotary_dim,
        value_dim=fields.get("v_head_dim", int),
        interleaved=bool(fields.or_null("rope_interleave", bool, True)),
    )


def _read_delta(fields: Fields, layout: DeltaLayout, num_layers: int) -> Delta | None:
    """Reads the delta nets; None if every layer has attention."""
    types = fields.get("layer_types", list, None)
    if types is None:
        interval = fields.get("full_attention_interval", int, 4)
        types = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(num_layers)]
    if len(types) != num_layers or not set(types) <= {"linear_attention", "full_attention"}:
        raise fields.refuse("layer_types", f"must be {num_layers} of linear_attention and full_attention")
    linear = tuple(kind == "linear_attention" for kind in types)
    if not any(linear):
        return None
    key_heads, value_heads = fields.get("linear_num_key_heads", int, 16), fields.get("linear_num_value_heads", int, 32)
    if value_heads % key_heads:
        raise fields.refuse("linear_num_value_heads", f"must be a multiple of linear_num_key_heads={key_heads}")
    return Delta(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=fields.get("linear_key_head_dim", int, 128),
        value_dim=fields.get("linear_value_head_dim", int, 128),
        taps=fields.get("linear_conv_kernel_dim", int, 4),
        joined=layout == "joined",
        linear=linear,
    )
