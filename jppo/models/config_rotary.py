"""The rotary frequencies that a config.json asks for."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jppo.models.config_fields import Fields
from jppo.models.family_table import Family
from jppo.models.rotary import Rotary, Yarn
from jppo.models.stacks import Heads
from jppo.settings import UserError


@dataclasses.dataclass(frozen=True)
class _Model:
    """The facts of a model that its frequencies depend on."""

    fields: Fields
    family: Family
    head_dim: int
    longest: int | None  # tokens of a row


def read(
    fields: Fields, family: Family, head_dim: int, longest: int | None, whole: Heads | None = None
) -> tuple[Rotary, Rotary | None]:
    """Returns the frequencies of full layers, and of sliding ones if they have their own.

    `longest` is the largest number of tokens of a row, by which `longrope` chooses; None: the first context. The heads
    of full layers may have sizes of their own, `whole`.
    """
    places = {}
    for key in ("rope_scaling", "rope_parameters"):
        places[key] = fields.config.get(key) or {}
        if not isinstance(places[key], Mapping):
            raise fields.refuse(key, "must be an object or null")
    model = _Model(fields, family, head_dim, longest)
    theta = fields.get("rope_theta", float, family.theta)
    if family.local_theta is None:
        key = "rope_scaling" if places["rope_scaling"] else "rope_parameters"  # HF's earlier and present place
        return _stretched(model, key, places[key] or family.rope or {}, theta), None
    local_theta = fields.get("rope_local_base_freq", float, family.local_theta) if family.gemma else family.local_theta
    both = Fields(places["rope_parameters"] or family.rope or {}, f"{fields.path}: rope_parameters")
    full, local = both.get("full_attention", dict, {}), both.get("sliding_attention", dict, {})
    if set(both.config) - {"full_attention", "sliding_attention"}:
        raise fields.refuse("rope_parameters", "may hold full_attention and sliding_attention only")
    of_whole = model if whole is None else dataclasses.replace(model, head_dim=whole.head_dim)
    return (
        _stretched(of_whole, "rope_scaling", {**full, **places["rope_scaling"]}, theta),
        _stretched(model, "rope_parameters", local, local_theta),
    )


def bare_layers(fields: Fields, num_layers: int) -> list[bool]:
    """Returns whether each layer has no rotary positions: SmolLM3's `no_rope_layers`, in which 1 means that it has."""
    every = fields.get("no_rope_layer_interval", int, 4)
    turned = fields.get("no_rope_layers", list, [int((i + 1) % every != 0) for i in range(num_layers)])
    if len(turned) < num_layers or not all(one in (0, 1) for one in turned):
        raise fields.refuse("no_rope_layers", f"must have a 0 or 1 for each of num_hidden_layers={num_layers}")
    return [not one for one in turned[:num_layers]]


_OF_PICTURES = ("mrope_section", "mrope_interleaved")  # a text's three positions are equal
# Fields of each supported rope_type, besides its base.
_STRETCHES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        *("factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
        "original_max_position_embeddings",
    ),
    "proportional": ("factor", "partial_rotary_factor"),  # of Gemma 4
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
}


def _stretched(model: _Model, key: str, rope: Mapping[str, Any], theta: float) -> Rotary:
    fields = model.fields
    inner = Fields(rope, f"{fields.path}: {key}={dict(rope)!r}")
    kind = rope.get("rope_type", rope.get("type", "default"))
    kind = "longrope" if kind == "su" else kind  # its first name
    proportional = kind == "proportional" and model.family.gemma4
    part = 1.0 if proportional else _part(model, inner)
    said = {k for k, v in rope.items() if v is not None} - {"rope_theta", "rope_type", "type", *_OF_PICTURES}
    if part == 1.0 or model.family.partial_rotary:
        said.discard("partial_rotary_factor")
    known = [name for name in _STRETCHES if name != "proportional" or model.family.gemma4]
    if not isinstance(kind, str) or kind not in known or said - set(_STRETCHES[kind]):
        raise UserError(f"{fields.path}: {key}={dict(rope)!r} is not supported, only {', '.join(known)}")
    theta = inner.get("rope_theta", float, theta)
    factor = 1.0
    if "factor" in _STRETCHES[kind]:
        factor = inner.get("factor", float, 1.0) if proportional else inner.get("factor", float)
    if not (1e-6 <= theta <= 1e30 and 1e-3 <= factor <= 1e6):  # within float32
        rule = "rope_theta must be from 1e-6 to 1e30, and factor from 0.001 to 1e6"
        raise UserError(f"{fields.path}: {key}={dict(rope)!r}: {rule}")
    if proportional:
        share = inner.get("partial_rotary_factor", float, 1.0)
        if not 0 <= share <= 1:
            raise inner.refuse("partial_rotary_factor", "must be from 0 to 1")
        return Rotary(theta, factor, share=share, longest=_context(fields))
    if kind in ("default", "linear"):
        return Rotary(theta, factor, part=part)
    context = _context(fields)
    if kind == "dynamic":  # up to this context the frequencies are plain ones, of every row of a batch
        return Rotary(theta, part=part, longest=context)
    first = _first_context(model, inner)
    if kind == "yarn":
        return dataclasses.replace(_yarn(inner, theta, factor, first), part=part)
    if kind == "longrope":
        return dataclasses.replace(_longrope(model, inner, theta, first), part=part)
    low, high = inner.get("low_freq_factor", float), inner.get("high_freq_factor", float)
    if not 0 < low < high:
        raise UserError(f"{fields.path}: {key}={dict(rope)!r}: high_freq_factor must be above low_freq_factor, above 0")
    return Rotary(theta, factor, (low, high, first), part=part, longest=context)


def _part(model: _Model, inner: Fields) -> float:
    """Returns the part of a head that is turned."""
    name, outer, default = "partial_rotary_factor", model.fields, model.family.partial_rotary
    if default is None:  # the outer field does not count
        outer, default = inner, 1.0
    part: float = inner.get(name, float, outer.get(name, float, default))
    turned = int(model.head_dim * part) if 0 < part <= 1 else 0
    if turned % 2 or turned == 0:
        where = inner if name in inner else outer
        raise where.refuse(name, f"must turn an even number of head_dim={model.head_dim} dimensions")
    return part


def _first_context(model: _Model, inner: Fields) -> int:
    """Returns the context before scaling: by transformers' order of places."""
    name, fields = "original_max_position_embeddings", model.fields
    where, default = inner, _context(fields)
    if model.family.local_theta is None and (name in fields or model.family.first_context is not None):
        where, default = fields, model.family.first_context or default
    first: int = where.get(name, int, default)
    if first < 2:
        raise where.refuse(name, "must be at least 2")
    return first


def _context(fields: Fields) -> int:
    context: int = fields.get("max_position_embeddings", int)
    return context


def _yarn(inner: Fields, theta: float, factor: float, first: int) -> Rotary:
    fast, slow = inner.above_zero("beta_fast", 32.0), inner.above_zero("beta_slow", 1.0)
    if not 1e-3 <= slow < fast <= 1e6 or theta == 1.0:
        raise inner.refuse("beta_fast", f"must be above beta_slow={slow}, within 0.001 and 1e6, and rope_theta not 1")
    one, all_dims = inner.get("mscale", float, 0.0), inner.get("mscale_all_dim", float, 0.0)
    if one < 0 or all_dims < 0:
        raise inner.refuse("mscale", f"and mscale_all_dim={all_dims} must not be below 0")
    inferred = mscale(factor, one) / mscale(factor, all_dims) if one and all_dims else mscale(factor, 1.0)
    return Rotary(
        theta,
        factor,
        yarn=Yarn(fast, slow, first, inner.get("truncate", bool, True)),
        scale=inner.above_zero("attention_factor", inferred),
        longest=int(first * factor),  # vLLM's table of angles ends here
    )


def mscale(factor: float, weight: float) -> float:
    """Returns YaRN's factor of queries and keys for contexts that are `factor` times as long."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _longrope(model: _Model, inner: Fields, theta: float, first: int) -> Rotary:
    """Chooses the factors by the longest row of the run, as vLLM does by max_model_len: never by a batch."""
    context = _context(model.fields)
    long = model.longest is not None and model.longest > first
    key, count = "long_factor" if long else "short_factor", int(model.head_dim * _part(model, inner)) // 2
    divisors = inner.get(key, list)
    numbers = [x for x in divisors if isinstance(x, int | float) and not isinstance(x, bool) and 1e-6 < x < 1e6]
    if len(divisors) != count or len(numbers) != count:
        raise inner.refuse(key, f"must have {count} numbers, one for each pair of dimensions that is turned")
    scale = math.sqrt(1 + math.log(context / first) / math.log(first)) if context > first else 1.0
    return Rotary(theta, divisors=tuple(map(float, divisors)), scale=scale, longest=context if long else first)


def context(fields: Fields, rotary: Rotary) -> int:
    """Returns the model's context length."""
    context = _context(fields)
    return int(context * rotary.factor) if rotary.longest is None else min(context, rotary.longest)
