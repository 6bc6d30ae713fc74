"""Fields of a config.json, each read with its type; and groups of fields: rotary frequencies, experts, Gemma 4's.

An error names file, field and value. `config_reader.py` makes a model's config of them.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jppo.errors import UserError
from jppo.models.config import DeepSeekVersion, ExpertNames, Experts, Gemma4, Heads, Routing
from jppo.models.families import VERSION_2, VERSION_3, Family
from jppo.models.rotary import Rotary, Yarn

LARGEST = 1 << 40  # of a whole number: more than any model has
_REQUIRED = object()
GLOBAL_HEAD_DIM = 512  # of layers without a window, where config.json has none
_PICTURE_FIELDS = ("mrope_section", "mrope_interleaved")  # a text's three positions are equal
# Fields of each supported rope_type, besides its base.
_SCALING_FIELDS: dict[str, tuple[str, ...]] = {
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


class Fields:
    """The fields of one config.json."""

    def __init__(self, config: Mapping[str, Any], path: str):
        self.config, self.path = config, path

    def __contains__(self, key: str) -> bool:
        return self.config.get(key) is not None  # HF writes null for "the class's default"

    def get(self, key: str, kind: type, default: Any = _REQUIRED) -> Any:
        """Returns the field's value, from 1 to `LARGEST` if it is a whole number."""
        value = self.config.get(key)
        if value is None:
            if default is _REQUIRED:
                raise UserError(f"{self.path}: {key} is missing; a model's config.json must give it")
            return default
        accepted = (int, float) if kind is float else kind
        if not isinstance(value, accepted) or isinstance(value, bool) != (kind is bool):
            raise UserError(f"{self.path}: {key}={value!r} must be of type {kind.__name__}")
        try:
            result = kind(value)
        except OverflowError:
            result = math.inf
        if kind is float and not math.isfinite(result):
            raise UserError(f"{self.path}: {key}={value!r} must be a finite number")
        if kind is int and result < 1:
            raise UserError(f"{self.path}: {key}={value} must be positive")
        if kind is int and result > LARGEST:
            raise UserError(f"{self.path}: {key}={value} must be at most {LARGEST}")
        return result

    def from_zero(self, key: str, default: int) -> int:
        """Returns the value of a field that is a whole number, 0 or more."""
        if self.config.get(key) == 0:
            return 0
        value: int = self.get(key, int, default)
        return value

    def above_zero(self, key: str, default: float) -> float:
        """Returns the value of a field that is a number above 0."""
        value: float = self.get(key, float, default)
        if not value > 0:
            raise UserError(f"{self.path}: {key}={value!r} must be above 0")
        return value

    def or_null(self, key: str, kind: type, default: Any) -> Any:
        """Returns the same for a field in which null means none, and absence the default."""
        return self.get(key, kind, None) if key in self.config else default

    def refuse(self, key: str, why: str) -> UserError:
        """Makes the error of an unsupported field."""
        return UserError(f"{self.path}: {key}={self.config.get(key)!r} {why}")


@dataclasses.dataclass(frozen=True)
class _Model:
    """The facts of a model that its frequencies depend on."""

    fields: Fields
    family: Family
    head_dim: int
    longest: int | None  # tokens of a row


def read_rotary(
    fields: Fields, family: Family, head_dim: int, longest: int | None, full_heads: Heads | None = None
) -> tuple[Rotary, Rotary | None]:
    """Reads the rotary frequencies of full layers, and of sliding ones if they have their own.

    `longest` is the largest number of tokens of a row, by which `longrope` chooses; None: the first context. The heads
    of full layers may have sizes of their own, `full_heads`.
    """
    rope_fields = {}
    for key in ("rope_scaling", "rope_parameters"):
        rope_fields[key] = fields.config.get(key) or {}
        if not isinstance(rope_fields[key], Mapping):
            raise fields.refuse(key, "must be an object or null")
    model = _Model(fields, family, head_dim, longest)
    theta = fields.get("rope_theta", float, family.theta)
    if family.local_theta is None:
        key = "rope_scaling" if rope_fields["rope_scaling"] else "rope_parameters"  # HF's earlier and present place
        return _read_frequencies(model, key, rope_fields[key] or family.rope or {}, theta), None
    local_theta = fields.get("rope_local_base_freq", float, family.local_theta) if family.gemma else family.local_theta
    by_window = Fields(rope_fields["rope_parameters"] or family.rope or {}, f"{fields.path}: rope_parameters")
    full, local = by_window.get("full_attention", dict, {}), by_window.get("sliding_attention", dict, {})
    if set(by_window.config) - {"full_attention", "sliding_attention"}:
        raise fields.refuse("rope_parameters", "may hold full_attention and sliding_attention only")
    full_model = model if full_heads is None else dataclasses.replace(model, head_dim=full_heads.head_dim)
    return (
        _read_frequencies(full_model, "rope_scaling", {**full, **rope_fields["rope_scaling"]}, theta),
        _read_frequencies(model, "rope_parameters", local, local_theta),
    )


def read_bare_layers(fields: Fields, num_layers: int) -> list[bool]:
    """Returns whether each layer has no rotary positions: SmolLM3's `no_rope_layers`, in which 1 means that it has."""
    interval = fields.get("no_rope_layer_interval", int, 4)
    has_positions = fields.get("no_rope_layers", list, [int((i + 1) % interval != 0) for i in range(num_layers)])
    if len(has_positions) < num_layers or not all(flag in (0, 1) for flag in has_positions):
        raise fields.refuse("no_rope_layers", f"must have a 0 or 1 for each of num_hidden_layers={num_layers}")
    return [not flag for flag in has_positions[:num_layers]]


def _read_frequencies(model: _Model, key: str, rope: Mapping[str, Any], theta: float) -> Rotary:
    """Reads the frequencies in the object `rope` of the field `key`, with the base `theta` by default."""
    fields = model.fields
    rope_fields = Fields(rope, f"{fields.path}: {key}={dict(rope)!r}")
    kind = rope.get("rope_type", rope.get("type", "default"))
    kind = "longrope" if kind == "su" else kind  # its first name
    proportional = kind == "proportional" and model.family.gemma4
    rotated_part = 1.0 if proportional else _rotated_part(model, rope_fields)
    present = {k for k, v in rope.items() if v is not None} - {"rope_theta", "rope_type", "type", *_PICTURE_FIELDS}
    if rotated_part == 1.0 or model.family.partial_rotary:
        present.discard("partial_rotary_factor")
    supported = [name for name in _SCALING_FIELDS if name != "proportional" or model.family.gemma4]
    if not isinstance(kind, str) or kind not in supported or present - set(_SCALING_FIELDS[kind]):
        raise UserError(f"{fields.path}: {key}={dict(rope)!r} is not supported, only {', '.join(supported)}")
    theta = rope_fields.get("rope_theta", float, theta)
    factor = 1.0
    if "factor" in _SCALING_FIELDS[kind]:
        factor = rope_fields.get("factor", float, 1.0) if proportional else rope_fields.get("factor", float)
    if not (1e-6 <= theta <= 1e30 and 1e-3 <= factor <= 1e6):  # within float32
        rule = "rope_theta must be from 1e-6 to 1e30, and factor from 0.001 to 1e6"
        raise UserError(f"{fields.path}: {key}={dict(rope)!r}: {rule}")
    if proportional:
        frequency_share = rope_fields.get("partial_rotary_factor", float, 1.0)
        if not 0 <= frequency_share <= 1:
            raise rope_fields.refuse("partial_rotary_factor", "must be from 0 to 1")
        return Rotary(theta, factor, share=frequency_share, longest=_context_length(fields))
    if kind in ("default", "linear"):
        return Rotary(theta, factor, part=rotated_part)
    context = _context_length(fields)
    if kind == "dynamic":  # up to this context the frequencies are plain ones, of every row of a batch
        return Rotary(theta, part=rotated_part, longest=context)
    first_context = _first_context(model, rope_fields)
    if kind == "yarn":
        return dataclasses.replace(_read_yarn(rope_fields, theta, factor, first_context), part=rotated_part)
    if kind == "longrope":
        return dataclasses.replace(_read_longrope(model, rope_fields, theta, first_context), part=rotated_part)
    low_factor, high_factor = rope_fields.get("low_freq_factor", float), rope_fields.get("high_freq_factor", float)
    if not 0 < low_factor < high_factor:
        raise UserError(f"{fields.path}: {key}={dict(rope)!r}: high_freq_factor must be above low_freq_factor, above 0")
    return Rotary(theta, factor, (low_factor, high_factor, first_context), part=rotated_part, longest=context)


def _rotated_part(model: _Model, rope_fields: Fields) -> float:
    """Returns the part of a head's dimensions that is rotated."""
    name, source, default = "partial_rotary_factor", model.fields, model.family.partial_rotary
    if default is None:  # the outer field does not count
        source, default = rope_fields, 1.0
    part: float = rope_fields.get(name, float, source.get(name, float, default))
    rotated_dims = int(model.head_dim * part) if 0 < part <= 1 else 0
    if rotated_dims % 2 or rotated_dims == 0:
        used = rope_fields if name in rope_fields else source
        raise used.refuse(name, f"must turn an even number of head_dim={model.head_dim} dimensions")
    return part


def _first_context(model: _Model, rope_fields: Fields) -> int:
    """Returns the context length before scaling, from the field that transformers would read."""
    name, fields = "original_max_position_embeddings", model.fields
    source, default = rope_fields, _context_length(fields)
    if model.family.local_theta is None and (name in fields or model.family.first_context is not None):
        source, default = fields, model.family.first_context or default
    first: int = source.get(name, int, default)
    if first < 2:
        raise source.refuse(name, "must be at least 2")
    return first


def _context_length(fields: Fields) -> int:
    context: int = fields.get("max_position_embeddings", int)
    return context


def _read_yarn(rope: Fields, theta: float, factor: float, first: int) -> Rotary:
    """Reads YaRN's ramp and scale."""
    fast, slow = rope.above_zero("beta_fast", 32.0), rope.above_zero("beta_slow", 1.0)
    if not 1e-3 <= slow < fast <= 1e6 or theta == 1.0:
        raise rope.refuse("beta_fast", f"must be above beta_slow={slow}, within 0.001 and 1e6, and rope_theta not 1")
    mscale_one, all_dims = rope.get("mscale", float, 0.0), rope.get("mscale_all_dim", float, 0.0)
    if mscale_one < 0 or all_dims < 0:
        raise rope.refuse("mscale", f"and mscale_all_dim={all_dims} must not be below 0")
    inferred = mscale(factor, mscale_one) / mscale(factor, all_dims) if mscale_one and all_dims else mscale(factor, 1.0)
    return Rotary(
        theta,
        factor,
        yarn=Yarn(fast, slow, first, rope.get("truncate", bool, True)),
        scale=rope.above_zero("attention_factor", inferred),
        longest=int(first * factor),  # vLLM's table of angles ends here
    )


def mscale(factor: float, weight: float) -> float:
    """Returns YaRN's factor of queries and keys for contexts that are `factor` times as long."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _read_longrope(model: _Model, rope: Fields, theta: float, first: int) -> Rotary:
    """Reads LongRoPE's divisors: by the longest row of the run, as vLLM does by max_model_len, never by a batch."""
    context = _context_length(model.fields)
    long = model.longest is not None and model.longest > first
    key, count = ("long_factor" if long else "short_factor", int(model.head_dim * _rotated_part(model, rope)) // 2)
    divisors = rope.get(key, list)
    valid = [x for x in divisors if isinstance(x, int | float) and not isinstance(x, bool) and 1e-6 < x < 1e6]
    if len(divisors) != count or len(valid) != count:
        raise rope.refuse(key, f"must have {count} numbers, one for each pair of dimensions that is turned")
    scale = math.sqrt(1 + math.log(context / first) / math.log(first)) if context > first else 1.0
    return Rotary(theta, divisors=tuple(map(float, divisors)), scale=scale, longest=context if long else first)


def context_length(fields: Fields, rotary: Rotary) -> int:
    """Returns the longest context of a model, with its rotary scaling."""
    context = _context_length(fields)
    return int(context * rotary.factor) if rotary.longest is None else min(context, rotary.longest)


def read_experts(fields: Fields, names: ExpertNames | None, num_layers: int) -> Experts | None:
    """Reads the experts; None if no layer has any."""
    if names is None or (names.switch and not fields.get(names.switch, bool, False)):
        return None
    sparse = _sparse_layers(fields, names, num_layers)
    if not any(sparse):
        return None
    # transformers 5 writes num_experts under its other name.
    count_field = "num_local_experts" if "num_local_experts" in fields else names.count
    count, active = fields.get(count_field, int), fields.get(names.active, int)
    if active > count:
        raise fields.refuse(names.active, f"must be at most {count_field}={count}")
    width = fields.get(names.width, int)
    shared_width = fields.get("shared_expert_intermediate_size", int) if names.shared_gate else 0
    if names.deepseek is not None:
        shared_width = width * fields.get("n_shared_experts", int)
    clamp = None
    if names.biased:
        clamp = fields.above_zero("swiglu_alpha", 1.702), fields.above_zero("swiglu_limit", 7.0)
    return Experts(
        count=count,
        active=active,
        width=width,
        shared_width=shared_width,
        normalized=_read_normalized(fields, names),
        sparse=sparse,
        names=names,
        routing=Routing() if names.deepseek is None else _read_routing(fields, names.deepseek, count, active),
        clamp=clamp,
    )


def _read_normalized(fields: Fields, names: ExpertNames) -> bool:
    if names.normalized is not None:
        return names.normalized
    default = names.normalized_default if names.deepseek is None else names.deepseek.normalized
    return bool(fields.or_null("norm_topk_prob", bool, default))  # null is false, as in transformers


def _sparse_layers(fields: Fields, names: ExpertNames, num_layers: int) -> tuple[bool, ...]:
    """Returns whether each layer has experts: all but DeepSeek's first ones, or by fields of step and exceptions."""
    if not names.mixed:
        return (True,) * num_layers
    if names.deepseek is not None:
        num_dense = fields.from_zero("first_k_dense_replace", names.deepseek.dense_layers)
        return tuple(i >= num_dense for i in range(num_layers))
    step = fields.get("decoder_sparse_step", int, 1)
    dense = fields.get("mlp_only_layers", list, [])
    if not all(isinstance(i, int) and 0 <= i < num_layers for i in dense):
        raise fields.refuse("mlp_only_layers", f"must hold layers from 0 to {num_layers - 1}")
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers))


def _read_routing(fields: Fields, version: DeepSeekVersion, count: int, active: int) -> Routing:
    """Reads a DeepSeek model's routing."""
    method = fields.get("topk_method", str, version.methods[0])
    restrictions: dict[str, tuple[Any, tuple[Any, ...]]] = {"topk_method": (method, version.methods)}
    restrictions["scoring_func"] = (fields.get("scoring_func", str, version.scoring), (version.scoring,))
    # transformers knows neither other strides of sparse layers nor, in version 2, normalized weights.
    restrictions["moe_layer_freq"] = (fields.get("moe_layer_freq", int, 1), (1,))
    if version is VERSION_2:
        restrictions["norm_topk_prob"] = (fields.get("norm_topk_prob", bool, version.normalized), (False,))
    for key, (value, allowed) in restrictions.items():
        if value not in allowed:
            raise fields.refuse(key, f"is not supported; only {' or '.join(map(repr, allowed))}")
    groups, best_groups = 1, 1
    if method != "greedy":
        groups, best_groups = fields.get("n_group", int), fields.get("topk_group", int)
    smallest_group = 2 if version is VERSION_3 else 1  # experts that score a group
    if count % groups or count // groups < smallest_group:
        raise fields.refuse("n_group", f"must divide n_routed_experts={count} into groups of {smallest_group} or more")
    if best_groups > groups or active > best_groups * (count // groups):
        raise fields.refuse(
            "topk_group", f"must be at most n_group={groups}, with num_experts_per_tok={active} experts"
        )
    scale = fields.above_zero("routed_scaling_factor", version.scale)
    return Routing(version.scoring, groups, best_groups, scale, corrected=version is VERSION_3)


def read_gemma4(fields: Fields, windows: list[int | None], vocab_size: int) -> Gemma4:
    """Reads the parts of a model that only Gemma 4 has; `windows` are its layers'."""
    is_null = "hidden_size_per_layer_input" in fields.config and "hidden_size_per_layer_input" not in fields
    per_layer = 0 if is_null else fields.from_zero("hidden_size_per_layer_input", 256)
    name = "vocab_size_per_layer_input"
    if per_layer and fields.get(name, int, 262144) != vocab_size:
        raise fields.refuse(name, f"must be vocab_size={vocab_size}")
    num_shared, is_full = fields.from_zero("num_kv_shared_layers", 0), [window is None for window in windows]
    first_shared = len(windows) - num_shared
    if first_shared < 1 or not set(is_full[first_shared:]) <= set(is_full[:first_shared]):
        raise fields.refuse("num_kv_shared_layers", "must leave an earlier layer of each kind with keys of its own")
    return Gemma4(
        per_layer=per_layer,
        shared_layers=num_shared,
        double_shared=fields.get("use_double_wide_mlp", bool, False),
        joined=fields.get("attention_k_eq_v", bool, False),
    )


def read_full_heads(
    fields: Fields, windows: list[int | None], num_heads: int, num_kv_heads: int, head_dim: int
) -> Heads:
    """Returns the sizes of keys and values in layers without a window."""
    sizes: Any = {"head_dim": fields.get("global_head_dim", int, GLOBAL_HEAD_DIM)}
    if fields.get("attention_k_eq_v", bool, False):
        sizes |= {"num_key_value_heads": fields.get("num_global_key_value_heads", int, num_kv_heads)}
    if "per_layer_config" in fields.config:  # as transformers 5 writes it
        layers = fields.get("per_layer_config", dict, {})
        full = {str(i) for i, window in enumerate(windows) if window is None}
        sizes = next(iter(layers.values()), {})
        alike = all(one == sizes for one in layers.values()) and set(map(str, layers)) == (full if layers else set())
        if not alike or not isinstance(sizes, dict) or not set(sizes) <= {"head_dim", "num_key_value_heads"}:
            raise fields.refuse(
                "per_layer_config", "must give all layers without a window, and no others, the same head sizes"
            )
    inner = Fields(sizes, f"{fields.path}: per_layer_config")
    heads, size = (inner.get("num_key_value_heads", int, num_kv_heads), inner.get("head_dim", int, head_dim))
    if num_heads % heads or size % 2:
        raise UserError(
            f"{fields.path}: layers without a window have num_key_value_heads={heads}, which must divide"
            f" num_attention_heads={num_heads}, and head_dim={size}, which must be even"
        )
    return Heads(heads, size)
