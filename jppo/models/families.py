"""Model families: an HF `config.json` to one frozen dataclass for the decoder and the parameter table.

An unsupported field that changes the mathematics is an error that names it: nothing is dropped.
"""

import os
from collections.abc import Mapping
from typing import Any

from jppo.models import config_delta, config_experts, config_gemma4, config_latent, config_rotary
from jppo.models.config import Kind, ModelConfig
from jppo.models.config_fields import Fields
from jppo.models.family_table import FAMILIES, Family, always, late, never
from jppo.models.rotary import STILL, Rotary
from jppo.models.stacks import Heads
from jppo.settings import UserError

MOST_LAYERS = 10_000  # more than any model has; a loop visits each

# Fields that change the mathematics, and the values without effect. An absent field is None.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
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
_RELATIVES = {  # models that users try, and their errors
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


def from_hf(config: Mapping[str, Any], *, path: str | os.PathLike[str], longest: int | None = None) -> ModelConfig:
    """Reads the model from the parsed `config`; `path` is its file, for the errors.

    `longest` is the largest number of tokens of a row, which chooses the factors of `longrope`; None: short ones.
    """
    fields = Fields(config, str(path))
    name, family = _family(fields)
    _refuse_unsupported(fields, family)
    attention_bias = fields.get(family.bias_field, bool, family.biased)
    hidden_size, num_heads = fields.get("hidden_size", int), fields.get("num_attention_heads", int)
    num_layers, num_kv_heads = _num_layers(fields), _num_kv_heads(fields, family, num_heads)
    latent = config_latent.read(fields, num_heads) if family.latent else None
    head_dim = latent.head_dim if latent is not None else _head_dim(fields, family, hidden_size, num_heads)
    windows = _windows(fields, family, num_layers)
    whole = config_gemma4.whole_heads(fields, windows, num_heads, num_kv_heads, head_dim) if family.gemma4 else None
    turned = head_dim if latent is None else latent.rotary_dim
    rotary, local = config_rotary.read(fields, family, turned, longest, whole)
    layers = _layers(fields, family, windows, rotary, local, whole)
    kinds = tuple(dict.fromkeys(layers))
    vocab_size = fields.get("vocab_size", int)
    return ModelConfig(
        family=name,
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
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention_bias if family.o_bias is None else family.o_bias,
        mlp_bias=fields.get("mlp_bias", bool, False) if family.mlp_bias is None else family.mlp_bias,
        activation=_activation(fields, family),
        embed_scale=_embed_scale(fields, family, hidden_size),
        residual_scale=_multiplier(fields, family, "residual_multiplier"),
        query_scale=_query_scale(fields, family, head_dim, rotary),
        sinks=family.sinks,
        attn_softcap=_softcap(fields, "attn_logit_softcapping", family.attn_softcap),
        logit_divisor=_multiplier(fields, family, "logits_scaling"),
        logit_softcap=_softcap(fields, "final_logit_softcapping", family.logit_softcap),
        tie_word_embeddings=fields.get("tie_word_embeddings", bool, family.tie_word_embeddings),
        max_position_embeddings=config_rotary.context(fields, rotary),
        initializer_range=fields.above_zero("initializer_range", 0.02),
        padded_vocab_size=vocab_size,
        experts=config_experts.read(fields, family.experts, num_layers),
        quantization=fields.get("quantization_config", dict, {}).get("quant_method"),
        latent=latent,
        further_layers=fields.from_zero("num_nextn_predict_layers", 0),
        gated=family.gated,
        delta=None if family.delta is None else config_delta.read(fields, family.delta, num_layers),
        gemma4=config_gemma4.read(fields, windows, vocab_size) if family.gemma4 else None,
    )


def _num_layers(fields: Fields) -> int:
    found: int = fields.get("num_hidden_layers", int)
    if found > MOST_LAYERS:
        raise fields.refuse("num_hidden_layers", f"must be at most {MOST_LAYERS}")
    return found


def _num_kv_heads(fields: Fields, family: Family, num_heads: int) -> int:
    given = family.all_kv_heads or "num_key_value_heads" in fields.config
    found: int = fields.get("num_key_value_heads", int, num_heads) if given else fields.get("num_key_value_heads", int)
    if num_heads % found:
        raise fields.refuse("num_key_value_heads", f"must divide num_attention_heads={num_heads}")
    return found


def _family(fields: Fields) -> tuple[str, Family]:
    name = fields.config.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        why = f" ({_RELATIVES[name]})" if isinstance(name, str) and name in _RELATIVES else ""
        raise UserError(f"{fields.path}: model_type={name!r} is not supported{why}; use one of {', '.join(FAMILIES)}")
    return name, FAMILIES[name]


def _head_dim(fields: Fields, family: Family, hidden_size: int, num_heads: int) -> int:
    size: int = fields.get("head_dim", int, hidden_size // num_heads if family.head_dim is None else family.head_dim)
    if size % 2 or not size:
        raise UserError(f"{fields.path}: head_dim={size} must be even and above 0: rotary embedding turns pairs")
    return size


def _refuse_unsupported(fields: Fields, family: Family) -> None:
    how = fields.get("quantization_config", dict, {})
    if how and (family.quantization is None or how.get("quant_method") != family.quantization):
        only = "absent" if family.quantization is None else f"absent or quant_method={family.quantization}"
        raise fields.refuse("quantization_config", f"is not supported; only {only}: use a bfloat16 checkpoint")
    neutral = dict(_NEUTRAL)
    if family.partial_rotary:
        del neutral["partial_rotary_factor"]
    if family.gemma4:
        neutral["use_bidirectional_attention"] = (None, False, "vision")  # texts are causal
        del neutral["per_layer_config"]
    if family.bare_layers:  # SmolLM3's file has a 2, which its class does not read
        del neutral["pretraining_tp"]
    if family.attn_softcap is None:
        neutral["attn_logit_softcapping"] = (None,)
    if family.experts is not None or family.bare_layers:
        neutral["use_sliding_window"] = (None, False)
    if family.latent:
        neutral["mlp_bias"] = (None, False)
    if family.experts is config_experts.DEEPSEEK_V2:
        neutral["rope_interleave"] = (None, True)
    if not (family.query_pre_attn_scalar or family.gemma4):
        neutral["final_logit_softcapping"] = (None,)
    for key, values in neutral.items():
        if fields.config.get(key) not in values:
            allowed = " or ".join("absent" if v is None else repr(v) for v in values)
            raise fields.refuse(key, f"changes the mathematics and is not supported; only {allowed}")


def _width_field(family: Family) -> str:
    """Returns the field of the MLP's width; of the experts' where no layer has an MLP."""
    how = family.experts
    return "intermediate_size" if how is None or how.mixed or how.beside else how.width


def _activation(fields: Fields, family: Family) -> str:
    key = "hidden_activation" if family.query_pre_attn_scalar or family.gemma4 else "hidden_act"
    name: str = fields.get(key, str, family.activation)
    if family.gemma and key == "hidden_act" and name == "gelu":  # Gemma 1's old files mean the approximation
        name = family.activation
    if name not in ACTIVATIONS:
        raise fields.refuse(key, f"changes the mathematics and is not supported; only {' or '.join(ACTIVATIONS)}")
    return name


def _multiplier(fields: Fields, family: Family, key: str) -> float:
    return fields.above_zero(key, 1.0) if family.multipliers else 1.0


def _embed_scale(fields: Fields, family: Family, hidden_size: int) -> float:
    if family.gemma or family.gemma4:
        return float(hidden_size**0.5)
    return _multiplier(fields, family, "embedding_multiplier")


def _query_scale(fields: Fields, family: Family, head_dim: int, rotary: Rotary) -> float:
    if family.gemma4:
        return 1.0
    if family.latent:
        return config_latent.query_scale(fields, head_dim, rotary)
    if family.multipliers:
        return _multiplier(fields, family, "attention_multiplier")
    scalar = fields.above_zero("query_pre_attn_scalar", 256.0) if family.query_pre_attn_scalar else head_dim
    return float(scalar**-0.5)


def _softcap(fields: Fields, key: str, default: float | None) -> float | None:
    cap: float | None = fields.or_null(key, float, default)
    if cap is not None and cap <= 0:
        raise fields.refuse(key, "must be above 0, or null for none")
    return cap


def _layers(
    fields: Fields, family: Family, windows: list[int | None], rotary: Rotary, local: Rotary | None, whole: Heads | None
) -> list[Kind]:
    """Returns the kind of each layer."""
    bare = config_rotary.bare_layers(fields, len(windows)) if family.bare_layers else [False] * len(windows)
    turns = [rotary if window is None or local is None else local for window in windows]
    return [
        Kind(window, STILL if one else turn, whole if window is None else None)
        for window, turn, one in zip(windows, turns, bare, strict=True)
    ]


def _windows(fields: Fields, family: Family, num_layers: int) -> list[int | None]:
    """Returns the window of each layer, or None."""
    if family.delta is not None:
        return [None] * num_layers
    # transformers writes 0 for a mixture without windows.
    window = None if family.slides is never else fields.or_null("sliding_window", int, family.window)
    switch = family.slides is late  # qwen's, whose window counts only if switched on
    if switch and not fields.get("use_sliding_window", bool, False):
        window = None
    types = fields.get("layer_types", list, None)
    if types is None or family.slides is always:
        optional = switch or family.slides is always  # no window: no layer slides
        slides = [family.slides(fields, i) and not (optional and window is None) for i in range(num_layers)]
    else:
        slides = [kind == "sliding_attention" for kind in types]
    said = ["sliding_attention" if one else "full_attention" for one in slides]
    if types is not None and said != types:
        raise fields.refuse("layer_types", f"must be {num_layers} of full_attention and sliding_attention, as {said}")
    if len(said) != num_layers:
        raise fields.refuse("layer_types", f"must have one entry for each of num_hidden_layers={num_layers}")
    if any(slides) and (window is None or family.slides is never):
        raise fields.refuse("layer_types", f"is not supported with sliding_window={window}: no layer can slide")
    if family.gemma4:  # transformers lets the last layer see all
        slides[-1] = False
    return [window if one else None for one in slides]
