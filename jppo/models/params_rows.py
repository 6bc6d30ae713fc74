"""Rows of the parameter table for layers with experts or gated delta nets; `params.py` makes entries of them."""

from collections.abc import Callable
from typing import TypeVar

from jppo.models.config_delta import Delta
from jppo.models.config_experts import Experts

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


def experts(how: Experts, layer: Callable[..., list[T]]) -> list[T]:
    """Lists the parameters of experts."""
    names = how.names
    each = f"{names.module}.experts.{{expert}}"
    rows = [*layer("experts/router", f"{names.module}.{names.router}.weight", "E D", "LDE", sparse=True)]
    if names.fused:
        return [
            *rows,
            *layer("experts/router_bias", f"{names.module}.{names.router}.bias", "E", "LE", sparse=True),
            *layer("experts/gate_up", f"{names.module}.experts.gate_up_proj", "E D MN", "LNEDM", sparse=True),
            *layer("experts/gate_up_bias", f"{names.module}.experts.gate_up_proj_bias", "E MN", "LNEM", sparse=True),
            *layer("experts/down", f"{names.module}.experts.down_proj", "E M D", "LEDM", sparse=True),
            *layer("experts/down_bias", f"{names.module}.experts.down_proj_bias", "E D", "LED", sparse=True),
        ]
    rows += [
        *layer("experts/gate", f"{each}.{names.gate}.weight", "M D", "LEDM", sparse=True),
        *layer("experts/up", f"{each}.{names.up}.weight", "M D", "LEDM", sparse=True),
        *layer("experts/down", f"{each}.{names.down}.weight", "D M", "LEDM", sparse=True),
    ]
    if how.routing.corrected:
        rows += layer("experts/correction", f"{names.module}.gate.e_score_correction_bias", "E", "LE", sparse=True)
    if how.shared_width:
        shared = f"{names.module}.{names.shared}"
        rows += [
            *layer("experts/shared/gate/kernel", f"{shared}.gate_proj.weight", "S D", "LDS", sparse=True),
            *layer("experts/shared/up/kernel", f"{shared}.up_proj.weight", "S D", "LDS", sparse=True),
            *layer("experts/shared/down/kernel", f"{shared}.down_proj.weight", "D S", "LSD", sparse=True),
        ]
    if names.shared_gate:
        rows += layer("experts/shared_gate", f"{names.module}.shared_expert_gate.weight", "1 D", "LD1", sparse=True)
    return rows
