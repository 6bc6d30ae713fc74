"""Attention's rows in the table of parameters (`params.py`): paths, HF's names and axes."""

from collections.abc import Callable
from typing import Any

from jppo.models.config import ModelConfig

Layer = Callable[..., list[Any]]  # makes the entries of a row, one of each stack


def rows(model: ModelConfig, layer: Layer) -> list[Any]:
    """Lists the parameters of attention, without its norms of queries and keys by head."""
    found = _grouped(model, layer) if model.latent is None else _latent(model, layer)
    return found + (layer("attn/o/bias", "self_attn.o_proj.bias", "D", "LD") if model.o_bias else [])


def _grouped(model: ModelConfig, layer: Layer) -> list[Any]:
    of_q = "HGA" if model.gated else "HA"
    out = layer("attn/o/kernel", "self_attn.o_proj.weight", "D HA", "LHAD")
    if model.fused:
        out += layer("attn/qkv/kernel", "self_attn.qkv_proj.weight", "QA D", "LDQA")
    else:
        out += layer("attn/q/kernel", "self_attn.q_proj.weight", f"{of_q} D", f"LD{of_q}")
        out += layer("attn/k/kernel", "self_attn.k_proj.weight", "KA D", "LDKA", keyed=True)
        out += layer("attn/v/kernel", "self_attn.v_proj.weight", "KA D", "LDKA", valued=True)
    if model.qkv_bias:
        out += layer("attn/q/bias", "self_attn.q_proj.bias", of_q, f"L{of_q}")
        out += layer("attn/k/bias", "self_attn.k_proj.bias", "KA", "LKA", keyed=True)
        out += layer("attn/v/bias", "self_attn.v_proj.bias", "KA", "LKA", valued=True)
    return out + (layer("attn/sinks", "self_attn.sinks", "H", "LH") if model.sinks else [])


def _latent(model: ModelConfig, layer: Layer) -> list[Any]:
    assert model.latent is not None
    out = [
        *layer("attn/kv_a/kernel", "self_attn.kv_a_proj_with_mqa.weight", "J D", "LDJ"),
        *layer("attn/kv_norm/scale", "self_attn.kv_a_layernorm.weight", "C", "LC"),
        *layer("attn/kv_b/kernel", "self_attn.kv_b_proj.weight", "HU C", "LCHU"),
        *layer("attn/o/kernel", "self_attn.o_proj.weight", "D HW", "LHWD"),
    ]
    if model.qkv_bias:
        out += layer("attn/kv_a/bias", "self_attn.kv_a_proj_with_mqa.bias", "J", "LJ")
    if model.latent.query_rank is None:
        return out + layer("attn/q/kernel", "self_attn.q_proj.weight", "HA D", "LDHA")
    if model.qkv_bias:
        out += layer("attn/q_a/bias", "self_attn.q_a_proj.bias", "P", "LP")
    out += layer("attn/q_a/kernel", "self_attn.q_a_proj.weight", "P D", "LDP")
    out += layer("attn/q_norm/scale", "self_attn.q_a_layernorm.weight", "I", "LI")
    return out + layer("attn/q_b/kernel", "self_attn.q_b_proj.weight", "HA I", "LIHA")
