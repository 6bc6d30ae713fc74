"""An HF `config.json` to one frozen dataclass: all that the decoder and the parameter table know of a model.

A field that changes the mathematics and is not supported is an error that names it: nothing is dropped.
"""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from jppo.config import UserError

_REQUIRED = object()


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder's shape and mathematics, whatever its family; hashable, so that it may be static in jit."""

    family: str  # HF's model_type
    vocab_size: int  # V
    hidden_size: int  # D
    intermediate_size: int  # F
    num_layers: int  # L
    num_heads: int  # H
    num_kv_heads: int  # K
    head_dim: int  # A
    rope_theta: float
    rms_norm_eps: float
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    max_position_embeddings: int
    initializer_range: float  # standard deviation of random weights


@dataclasses.dataclass(frozen=True)
class _Family:
    """Where a family differs: what a field is when config.json leaves it out, and what has no field."""

    qkv_bias: bool | None  # None: as the field `attention_bias` says
    o_bias: bool | None
    mlp_bias: bool | None  # None: as the field `mlp_bias` says
    tie_word_embeddings: bool


FAMILIES = {
    "qwen2": _Family(qkv_bias=True, o_bias=False, mlp_bias=False, tie_word_embeddings=False),
    "llama": _Family(qkv_bias=None, o_bias=None, mlp_bias=None, tie_word_embeddings=False),
}

# Fields that change the mathematics, and the values under which they change nothing. An absent field is None.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": (None, "silu"),
    "use_sliding_window": (None, False),
    "pretraining_tp": (None, 1),
    "quantization_config": (None,),
    "partial_rotary_factor": (None, 1.0),
    "attention_dropout": (None, 0.0),
}


def from_hf(config: Mapping[str, Any], *, path: str | os.PathLike) -> ModelConfig:
    """The model that the parsed `config` describes; `path` is its file, for the errors."""
    name = config.get("model_type")
    if name not in FAMILIES:
        raise UserError(f"{path}: model_type={name!r} is not supported; use one of {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    _refuse_unsupported(config, path)

    def field(key: str, kind: type, default: Any = _REQUIRED) -> Any:
        return _field(config, path, key, kind, default)

    attention_bias = field("attention_bias", bool, False)
    hidden_size, num_heads = field("hidden_size", int), field("num_attention_heads", int)
    num_kv_heads = field("num_key_value_heads", int, num_heads)
    head_dim = field("head_dim", int, hidden_size // num_heads)
    if num_heads % num_kv_heads:
        raise UserError(f"{path}: num_key_value_heads={num_kv_heads} must divide num_attention_heads={num_heads}")
    if head_dim % 2:
        raise UserError(f"{path}: head_dim={head_dim} must be even: rotary embedding turns pairs")
    return ModelConfig(
        family=name,
        vocab_size=field("vocab_size", int),
        hidden_size=hidden_size,
        intermediate_size=field("intermediate_size", int),
        num_layers=field("num_hidden_layers", int),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope_theta=_rope_theta(config, path),
        rms_norm_eps=field("rms_norm_eps", float, 1e-6),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention_bias if family.o_bias is None else family.o_bias,
        mlp_bias=field("mlp_bias", bool, False) if family.mlp_bias is None else family.mlp_bias,
        tie_word_embeddings=field("tie_word_embeddings", bool, family.tie_word_embeddings),
        max_position_embeddings=field("max_position_embeddings", int),
        initializer_range=field("initializer_range", float, 0.02),
    )


def _field(config: Mapping[str, Any], path: str | os.PathLike, key: str, kind: type, default: Any) -> Any:
    value = config.get(key)
    if value is None:  # HF writes null for "as the class has it"
        if default is _REQUIRED:
            raise UserError(f"{path}: {key} is missing; a model's config.json must give it")
        return default
    accepted = (int, float) if kind is float else kind
    if not isinstance(value, accepted) or isinstance(value, bool) != (kind is bool):
        raise UserError(f"{path}: {key}={value!r} must be of type {kind.__name__}")
    result = kind(value)
    if kind is int and result < 1:
        raise UserError(f"{path}: {key}={value} must be positive")
    return result


def _refuse_unsupported(config: Mapping[str, Any], path: str | os.PathLike) -> None:
    for key, neutral in _NEUTRAL.items():
        if config.get(key) not in neutral:
            allowed = " or ".join("absent" if v is None else repr(v) for v in neutral)
            raise UserError(
                f"{path}: {key}={config[key]!r} changes the mathematics and is not supported; only {allowed}"
            )
    layer_types = config.get("layer_types")
    if layer_types is not None and set(layer_types) != {"full_attention"}:
        raise UserError(f"{path}: layer_types={layer_types!r} is not supported; only 'full_attention' is")


def _rope_theta(config: Mapping[str, Any], path: str | os.PathLike) -> float:
    """The base of the rotary frequencies, from either of the places where HF has kept it."""
    for key in ("rope_scaling", "rope_parameters"):
        rope = config.get(key)
        if rope is None:
            continue
        if not isinstance(rope, Mapping):
            raise UserError(f"{path}: {key}={rope!r} must be an object or null")
        kind = rope.get("rope_type", rope.get("type", "default"))
        others = {k for k, v in rope.items() if v is not None} - {"rope_theta", "rope_type", "type"}
        if kind != "default" or others:
            raise UserError(f"{path}: {key}={dict(rope)!r} is not supported; only rope_type 'default' is")
        if rope.get("rope_theta") is not None:
            return _field(rope, f"{path}: {key}", "rope_theta", float, _REQUIRED)
    return _field(config, path, "rope_theta", float, 10000.0)
