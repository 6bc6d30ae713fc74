"""Rows of the parameter table for layers with experts or gated delta nets; `params.py` makes entries of them."""

from collections.abc import Callable
from typing import TypeVar

from jppo.models.config_delta import Delta
from jppo.models.config_experts import Experts
from jppo.models.config_gemma4 import Gemma4

T = TypeVar("T")


def delta(how: Delta, layer: Callable[..., list[T]]) -> list[T]:
    """Lists the parameters of gated delta nets."""
    rows = [
        *layer("delta/conv", "linear_attn.conv1d.weight", "Z 1 T", "LZ1T"),
        *layer("delta/a_log", "linear_attn.A_log", "O", "LO"),
        *layer("delta/dt_bias", "linear_attn.dt_bias", "O", "LO"),
        *layer("delta/scale", "linear_attn.norm.weight", "W", "LW"),
        *layer("delta/out/kernel", "linear_attn.out_proj.weight", "D OW", "LOWD"),
    ]
    if how.joined:
        return [
            *layer("delta/qkvz/kernel", "linear_attn.in_proj_qkvz.weight", "RX D", "LDRX"),
            *layer("delta/ba/kernel", "linear_attn.in_proj_ba.weight", "RY D", "LDRY"),
            *rows,
        ]
    return [
        *layer("delta/qkv/kernel", "linear_attn.in_proj_qkv.weight", "Z D", "LDZ"),
        *layer("delta/z/kernel", "linear_attn.in_proj_z.weight", "OW D", "LDOW"),
        *layer("delta/b/kernel", "linear_attn.in_proj_b.weight", "O D", "LDO"),
        *layer("delta/a/kernel", "linear_attn.in_proj_a.weight", "O D", "LDO"),
        *rows,
    ]


def gemma4(how: Gemma4, layer: Callable[..., list[T]]) -> list[T]:
    """Lists the parameters of a layer that only Gemma 4 has."""
    rows = layer("scalar", "layer_scalar", "1", "L1")
    if how.per_layer:
        rows += [
            *layer("per_layer_gate/kernel", "per_layer_input_gate.weight", "p D", "LDp"),
            *layer("per_layer_out/kernel", "per_layer_projection.weight", "D p", "LpD"),
            *layer("per_layer_norm/scale", "post_per_layer_input_norm.weight", "D", "LD"),
        ]
    return rows


def experts(how: Experts, layer: Callable[..., list[T]]) -> list[T]:
    """Lists the parameters of experts."""
    names = how.names
    module = f"{names.module}." if names.module else ""
    each = f"{module}experts.{{expert}}"
    rows = [*layer("experts/router", f"{module}{names.router}.weight", "E D", "LDE", sparse=True)]
    if names.fused is not None:
        gate_up, down = names.fused
        rows += [
            *layer("experts/gate_up", f"{module}experts.gate_up_proj", gate_up, "LNEDM", sparse=True),
            *layer("experts/down", f"{module}experts.down_proj", down, "LEDM", sparse=True),
        ]
        if names.beside:
            rows += [
                *layer("experts/router_norm/scale", "router.scale", "D", "LD", sparse=True),
                *layer("experts/expert_scale", "router.per_expert_scale", "E", "LE", sparse=True),
                *layer("mlp_own_norm/scale", "post_feedforward_layernorm_1.weight", "D", "LD", sparse=True),
                *layer("experts_norm/scale", "pre_feedforward_layernorm_2.weight", "D", "LD", sparse=True),
                *layer("experts_post_norm/scale", "post_feedforward_layernorm_2.weight", "D", "LD", sparse=True),
            ]
        if names.biased:
            rows += [
                *layer("experts/router_bias", f"{module}{names.router}.bias", "E", "LE", sparse=True),
                *layer("experts/gate_up_bias", f"{module}experts.gate_up_proj_bias", "E MN", "LNEM", sparse=True),
                *layer("experts/down_bias", f"{module}experts.down_proj_bias", "E D", "LED", sparse=True),
            ]
        return rows
    rows += [
        *layer("experts/gate", f"{each}.{names.gate}.weight", "M D", "LEDM", sparse=True),
        *layer("experts/up", f"{each}.{names.up}.weight", "M D", "LEDM", sparse=True),
        *layer("experts/down", f"{each}.{names.down}.weight", "D M", "LEDM", sparse=True),
    ]
    if how.routing.corrected:
        rows += layer("experts/correction", f"{module}gate.e_score_correction_bias", "E", "LE", sparse=True)
    if how.shared_width:
        shared = f"{module}{names.shared}"
        rows += [
            *layer("experts/shared/gate/kernel", f"{shared}.gate_proj.weight", "S D", "LDS", sparse=True),
            *layer("experts/shared/up/kernel", f"{shared}.up_proj.weight", "S D", "LDS", sparse=True),
            *layer("experts/shared/down/kernel", f"{shared}.down_proj.weight", "D S", "LSD", sparse=True),
        ]
    if names.shared_gate:
        rows += layer("experts/shared_gate", f"{module}shared_expert_gate.weight", "1 D", "LD1", sparse=True)
    return rows
