"""The rotary frequencies that a config.json asks for."""

import math
from collections.abc import Mapping
from typing import Any

from jppo.models.config_fields import Fields
from jppo.models.rotary import Rotary, Yarn
from jppo.settings import UserError


def read(fields: Fields, theta: float, local_theta: float | None) -> tuple[Rotary, Rotary | None]:
    """Returns the frequencies of full layers, and of sliding ones if they have their own; with a family's defaults."""
    places = {}
    for key in ("rope_scaling", "rope_parameters"):
        places[key] = fields.config.get(key) or {}
        if not isinstance(places[key], Mapping):
            raise fields.refuse(key, "must be an object or null")
    theta = fields.get("rope_theta", float, theta)
    if local_theta is None:
        key = "rope_scaling" if places["rope_scaling"] else "rope_parameters"  # HF's earlier and present place
        return _stretched(fields, key, places[key], theta), None
    local_theta = fields.get("rope_local_base_freq", float, local_theta)
    both = dict(places["rope_parameters"])
    full, local = both.pop("full_attention", None) or {}, both.pop("sliding_attention", None) or {}
    if both:
        raise fields.refuse("rope_parameters", "may hold full_attention and sliding_attention only")
    return (
        _stretched(fields, "rope_scaling", {**full, **places["rope_scaling"]}, theta),
        _stretched(fields, "rope_parameters", local, local_theta),
    )


def bare_layers(fields: Fields, num_layers: int) -> list[bool]:
    """Returns whether each layer has no rotary positions: SmolLM3's `no_rope_layers`, in which 1 means that it has."""
    every = fields.get("no_rope_layer_interval", int, 4)
    turned = fields.get("no_rope_layers", list, [int((i + 1) % every != 0) for i in range(num_layers)])
    if len(turned) < num_layers or not all(one in (0, 1) for one in turned):
        raise fields.refuse("no_rope_layers", f"must have a 0 or 1 for each of num_hidden_layers={num_layers}")
    return [not one for one in turned[:num_layers]]


# Fields of each supported rope_type, besides its base.
_STRETCHES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        *("factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
        "original_max_position_embeddings",
    ),
}


def _stretched(fields: Fields, key: str, rope: Mapping[str, Any], theta: float) -> Rotary:
    inner = Fields(rope, f"{fields.path}: {key}={dict(rope)!r}")
    kind = rope.get("rope_type", rope.get("type", "default"))
    said = {k for k, v in rope.items() if v is not None} - {"rope_theta", "rope_type", "type"}
    if rope.get("partial_rotary_factor") == 1.0:
        said.remove("partial_rotary_factor")
    if not isinstance(kind, str) or kind not in _STRETCHES or said - set(_STRETCHES[kind]):
        why = "; it depends on the longest row of a batch" if kind == "dynamic" else ""
        raise UserError(f"{fields.path}: {key}={dict(rope)!r} is not supported, only {', '.join(_STRETCHES)}{why}")
    theta = inner.get("rope_theta", float, theta)
    factor = 1.0 if kind == "default" else inner.get("factor", float)
    if theta <= 0 or factor <= 0:
        raise UserError(f"{fields.path}: {key}={dict(rope)!r}: rope_theta and factor must be above 0")
    if kind in ("default", "linear"):
        return Rotary(theta, factor)
    first = inner.get("original_max_position_embeddings", int, fields.get("max_position_embeddings", int))
    if kind == "yarn":
        return _yarn(inner, theta, factor, first)
    low, high = inner.get("low_freq_factor", float), inner.get("high_freq_factor", float)
    if not 0 < low < high:
        raise UserError(f"{fields.path}: {key}={dict(rope)!r}: high_freq_factor must be above low_freq_factor, above 0")
    return Rotary(theta, factor, (low, high, first))


def _yarn(inner: Fields, theta: float, factor: float, first: int) -> Rotary:
    fast, slow = inner.above_zero("beta_fast", 32.0), inner.above_zero("beta_slow", 1.0)
    if fast <= slow or theta == 1.0:
        raise inner.refuse("beta_fast", f"must be above beta_slow={slow}, and rope_theta={theta} not 1")
    one, all_dims = inner.get("mscale", float, 0.0), inner.get("mscale_all_dim", float, 0.0)
    inferred = _mscale(factor, one) / _mscale(factor, all_dims) if one and all_dims else _mscale(factor, 1.0)
    scale = inner.above_zero("attention_factor", inferred)
    return Rotary(theta, factor, yarn=Yarn(fast, slow, first, inner.get("truncate", bool, True)), scale=scale)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def context(fields: Fields, rotary: Rotary) -> int:
    """Returns the model's context length."""
    context: int = fields.get("max_position_embeddings", int)
    if rotary.yarn is not None:  # max_position_embeddings is the scaled one; vLLM's table of angles ends here
        return min(context, int(rotary.yarn.context * rotary.factor))
    return context if rotary.llama3 is not None else int(context * rotary.factor)
