"""The rotary frequencies that a config.json asks for."""

from collections.abc import Mapping
from typing import Any

from jppo.models.config_fields import Fields
from jppo.models.rotary import Rotary
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


# Required fields of each supported rope_type, besides its base.
_STRETCHES = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
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
    if kind != "llama3":
        return Rotary(theta, factor)
    low, high = inner.get("low_freq_factor", float), inner.get("high_freq_factor", float)
    if not 0 < low < high:
        raise UserError(f"{fields.path}: {key}={dict(rope)!r}: high_freq_factor must be above low_freq_factor, above 0")
    context = inner.get("original_max_position_embeddings", int, fields.get("max_position_embeddings", int))
    return Rotary(theta, factor, (low, high, context))


def context(fields: Fields, rotary: Rotary) -> int:
    """Returns the model's context length."""
    context = fields.get("max_position_embeddings", int)
    return context if rotary.llama3 is not None else int(context * rotary.factor)
