"""The table of model families: what a family means where its config.json has no field, or omits it."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

from jppo.models import config_delta, config_experts
from jppo.models.config_fields import Fields


@dataclasses.dataclass(frozen=True)
class Family:
    """The differences of a family: defaults of fields that config.json omits, and properties without a field."""

    slides: Callable[[Fields, int], bool]  # whether a layer has a sliding window, if `layer_types` is absent
    qkv_bias: bool | None = None  # None: by the field `attention_bias`
    o_bias: bool | None = None
    mlp_bias: bool | None = False  # None: by the field `mlp_bias`
    tie_word_embeddings: bool = False
    all_kv_heads: bool = False  # num_key_value_heads is num_attention_heads where absent; else its default is a number
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    activation: str = "silu"
    gemma: bool = False  # norms by 1 + scale, embeddings times sqrt(D)
    centred: bool = False  # norms by 1 + scale
    gated: bool = False  # attention has an output gate
    partial_rotary: float | None = None  # `partial_rotary_factor`, if absent; None: the field does not count
    delta: config_delta.Layout | None = None
    qk_norm: Literal["head", "all"] | None = None
    pre_norms: bool = True
    post_norms: bool = False
    query_pre_attn_scalar: bool = False  # replaces head_dim in the scale of attention
    multipliers: bool = False  # of embeddings, attention and residuals, and a divisor of logits, are fields
    bare_layers: bool = False  # layers without rotary positions are a field
    attn_softcap: float | None = None
    logit_softcap: float | None = None
    fused: bool = False  # one tensor holds q, k and v, another gate and up
    first_context: int | None = None  # of rope scaling, where original_max_position_embeddings is absent
    local_theta: float | None = None  # sliding layers have their own frequencies
    theta: float = 10000.0
    rope: Mapping[str, Any] | None = None  # rope_parameters, where config.json has none
    window: int | None = 4096  # of sliding layers, where the field is absent
    rms_norm_eps: float = 1e-6
    bias_field: str = "attention_bias"
    biased: bool = False  # where that field is absent
    sinks: bool = False  # attention has a learned score of no key for each head
    quantization: str | None = None  # quant_method whose tensors are read as bfloat16
    experts: config_experts.Names | None = None
    latent: bool = False  # keys and values are computed from a latent
    gemma4: bool = False  # embeddings times sqrt(D), norms of values, and the parts of `config_gemma4.py`


def never(_: Fields, __: int) -> bool:
    return False


def always(_: Fields, __: int) -> bool:
    return True


def late(fields: Fields, layer: int) -> bool:
    first = fields.config.get("max_window_layers", 28)
    if not isinstance(first, int):
        raise fields.refuse("max_window_layers", "must be a whole number")
    return layer >= first


def _but_every(count: int) -> Callable[[Fields, int], bool]:
    """Returns all but the last of each `count` layers."""
    return lambda _, layer: (layer + 1) % count != 0


def _by_pattern(fields: Fields, layer: int) -> bool:
    every: int = fields.get("sliding_window_pattern", int, 6)  # Gemma 3 alone has this field
    return (layer + 1) % every != 0


_GEMMA = Family(never, tie_word_embeddings=True, head_dim=256, activation="gelu_pytorch_tanh", gemma=True)
_GEMMA2 = dataclasses.replace(
    _GEMMA, slides=_but_every(2), post_norms=True, query_pre_attn_scalar=True, attn_softcap=50.0, logit_softcap=30.0
)
_GEMMA3 = dataclasses.replace(
    _GEMMA2, slides=_by_pattern, qk_norm="head", attn_softcap=None, logit_softcap=None, theta=1e6, local_theta=1e4
)
_GEMMA4 = Family(
    _but_every(6),
    tie_word_embeddings=True,
    head_dim=256,
    activation="gelu_pytorch_tanh",
    qk_norm="head",
    post_norms=True,
    theta=1e6,
    local_theta=1e4,
    rope=dict(full_attention=dict(rope_type="proportional", partial_rotary_factor=0.25)),
    window=512,
    experts=config_experts.GEMMA4,
    gemma4=True,
)
_OLMO2 = Family(never, all_kv_heads=True, qk_norm="all", pre_norms=False, post_norms=True, rms_norm_eps=1e-5)
_QWEN35 = Family(never, head_dim=256, qk_norm="head", centred=True, gated=True, partial_rotary=0.25, delta="split")
FAMILIES = {
    "qwen2": Family(late, qkv_bias=True, o_bias=False),
    "qwen3": Family(late, head_dim=128, qk_norm="head"),
    "llama": Family(never, mlp_bias=None, all_kv_heads=True),
    "mistral": Family(always, qkv_bias=False, o_bias=False),
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA3,
    "gemma4_text": _GEMMA4,
    "qwen2_moe": Family(never, o_bias=False, bias_field="qkv_bias", biased=True, experts=config_experts.QWEN2),
    "qwen3_moe": Family(never, qk_norm="head", experts=config_experts.QWEN3),
    "mixtral": Family(
        always, qkv_bias=False, o_bias=False, theta=1e6, window=None, rms_norm_eps=1e-5, experts=config_experts.MIXTRAL
    ),
    "olmo2": _OLMO2,
    "olmo3": dataclasses.replace(_OLMO2, slides=_but_every(4), theta=5e5, local_theta=5e5),
    "smollm3": Family(never, mlp_bias=None, tie_word_embeddings=True, theta=2e6, bare_layers=True),
    "granite": Family(never, mlp_bias=None, all_kv_heads=True, multipliers=True),
    "phi3": Family(
        *(always, False, False),
        all_kv_heads=True,
        window=None,
        rms_norm_eps=1e-5,
        fused=True,
        partial_rotary=1.0,
        first_context=4096,
    ),
    "qwen3_5_text": _QWEN35,
    "qwen3_5_moe_text": dataclasses.replace(_QWEN35, experts=config_experts.QWEN35),
    "qwen3_next": dataclasses.replace(_QWEN35, delta="joined", experts=config_experts.QWEN3_NEXT),
    "olmoe": Family(never, all_kv_heads=True, qk_norm="all", rms_norm_eps=1e-5, experts=config_experts.OLMOE),
    "deepseek_v2": Family(never, all_kv_heads=True, latent=True, experts=config_experts.DEEPSEEK_V2),
    "deepseek_v3": Family(never, latent=True, experts=config_experts.DEEPSEEK_V3),
    "gpt_oss": Family(
        _but_every(2),
        head_dim=64,
        theta=150000.0,
        rope=dict(rope_type="yarn", factor=32.0, truncate=False, original_max_position_embeddings=4096),
        window=128,
        rms_norm_eps=1e-5,
        biased=True,
        sinks=True,
        quantization="mxfp4",
        experts=config_experts.GPT_OSS,
    ),
}
