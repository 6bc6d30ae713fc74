"""The table of model families: what a family means where its config.json has no field, or omits it."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from jppo.models.config import DeepSeekVersion, DeltaLayout, ExpertNames

# Whether a layer has a sliding window, if `layer_types` is absent: qwen's late layers and Gemma 3's pattern are fields.
# A number: all but the last of so many layers.
Slides = Literal["never", "always", "late", "pattern"] | int

VERSION_2 = DeepSeekVersion("softmax", ("greedy", "group_limited_greedy"), dense_layers=0, normalized=False, scale=1.0)
VERSION_3 = DeepSeekVersion("sigmoid", ("noaux_tc",), dense_layers=3, normalized=True, scale=2.5)
QWEN2 = ExpertNames(shared="shared_expert", shared_gate=True)
QWEN3 = ExpertNames()
QWEN3_NEXT = dataclasses.replace(QWEN2, normalized_default=True)
QWEN35 = dataclasses.replace(QWEN2, normalized=True, mixed=False)
OLMOE = ExpertNames(width="intermediate_size", mixed=False)
MIXTRAL = ExpertNames(
    "num_local_experts", "intermediate_size", "block_sparse_moe", "w1", "w3", "w2", normalized=True, mixed=False
)
DEEPSEEK_V2 = ExpertNames("n_routed_experts", shared="shared_experts", deepseek=VERSION_2)
DEEPSEEK_V3 = ExpertNames("n_routed_experts", shared="shared_experts", deepseek=VERSION_3)
GPT_OSS = ExpertNames(
    "num_local_experts",
    "intermediate_size",
    normalized=True,
    mixed=False,
    router="router",
    fused=("E D MN", "E M D"),
    biased=True,
)
GEMMA4 = ExpertNames(
    module="",
    normalized=True,
    mixed=False,
    router="router.proj",
    fused=("E NM D", "E D M"),
    active="top_k_experts",
    switch="enable_moe_block",
    beside=True,
)


@dataclasses.dataclass(frozen=True)
class Family:
    """The differences of a family: defaults of fields that config.json omits, and properties without a field."""

    slides: Slides
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
    delta: DeltaLayout | None = None
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
    experts: ExpertNames | None = None
    latent: bool = False  # keys and values are computed from a latent
    gemma4: bool = False  # embeddings times sqrt(D), norms of values, and the parts of `config.Gemma4`


_GEMMA = Family("never", tie_word_embeddings=True, head_dim=256, activation="gelu_pytorch_tanh", gemma=True)
_GEMMA2 = dataclasses.replace(
    _GEMMA, slides=2, post_norms=True, query_pre_attn_scalar=True, attn_softcap=50.0, logit_softcap=30.0
)
_GEMMA3 = dataclasses.replace(
    _GEMMA2, slides="pattern", qk_norm="head", attn_softcap=None, logit_softcap=None, theta=1e6, local_theta=1e4
)
_GEMMA4 = Family(
    6,
    tie_word_embeddings=True,
    head_dim=256,
    activation="gelu_pytorch_tanh",
    qk_norm="head",
    post_norms=True,
    theta=1e6,
    local_theta=1e4,
    rope=dict(full_attention=dict(rope_type="proportional", partial_rotary_factor=0.25)),
    window=512,
    experts=GEMMA4,
    gemma4=True,
)
_OLMO2 = Family("never", all_kv_heads=True, qk_norm="all", pre_norms=False, post_norms=True, rms_norm_eps=1e-5)
_QWEN35 = Family("never", head_dim=256, qk_norm="head", centred=True, gated=True, partial_rotary=0.25, delta="split")
FAMILIES = {
    "qwen2": Family("late", qkv_bias=True, o_bias=False),
    "qwen3": Family("late", head_dim=128, qk_norm="head"),
    "llama": Family("never", mlp_bias=None, all_kv_heads=True),
    "mistral": Family("always", qkv_bias=False, o_bias=False),
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA3,
    "gemma4_text": _GEMMA4,
    "qwen2_moe": Family("never", o_bias=False, bias_field="qkv_bias", biased=True, experts=QWEN2),
    "qwen3_moe": Family("never", qk_norm="head", experts=QWEN3),
    "mixtral": Family(
        "always", qkv_bias=False, o_bias=False, theta=1e6, window=None, rms_norm_eps=1e-5, experts=MIXTRAL
    ),
    "olmo2": _OLMO2,
    "olmo3": dataclasses.replace(_OLMO2, slides=4, theta=5e5, local_theta=5e5),
    "smollm3": Family("never", mlp_bias=None, tie_word_embeddings=True, theta=2e6, bare_layers=True),
    "granite": Family("never", mlp_bias=None, all_kv_heads=True, multipliers=True),
    "phi3": Family(
        *("always", False, False),
        all_kv_heads=True,
        window=None,
        rms_norm_eps=1e-5,
        fused=True,
        partial_rotary=1.0,
        first_context=4096,
    ),
    "qwen3_5_text": _QWEN35,
    "qwen3_5_moe_text": dataclasses.replace(_QWEN35, experts=QWEN35),
    "qwen3_next": dataclasses.replace(_QWEN35, delta="joined", experts=QWEN3_NEXT),
    "olmoe": Family("never", all_kv_heads=True, qk_norm="all", rms_norm_eps=1e-5, experts=OLMOE),
    "deepseek_v2": Family("never", all_kv_heads=True, latent=True, experts=DEEPSEEK_V2),
    "deepseek_v3": Family("never", latent=True, experts=DEEPSEEK_V3),
    "gpt_oss": Family(
        2,
        head_dim=64,
        theta=150000.0,
        rope=dict(rope_type="yarn", factor=32.0, truncate=False, original_max_position_embeddings=4096),
        window=128,
        rms_norm_eps=1e-5,
        biased=True,
        sinks=True,
        quantization="mxfp4",
        experts=GPT_OSS,
    ),
}
