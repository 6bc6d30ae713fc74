"""Outputs of experts for pairs of a row and an expert."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jppo.models import grouped
from jppo.models.config import ModelConfig
from jppo.models.modules import ACTIVATIONS

Of = tuple[ModelConfig, str | None]  # a model, and the mesh axis that shards its experts' width


def each(
    of: Of, times: int, kernels: Any, rows: jax.Array, weight: jax.Array, sizes: jax.Array, order: jax.Array
) -> jax.Array:
    """Computes outputs [P, D], times weights [P, 1], of pairs of a row and an expert; each row is in `times` pairs.

    Kernels are `joined`. In this order the first `sizes[0]` pairs are of the first expert, the next ones of the second.
    """
    return grouped.mapped(mapped(of, times), kernels, (rows, weight), sizes, order)


def mapped(of: Of, times: int) -> grouped.Mapped:
    """Returns the experts' outputs as a function of blocks."""
    return grouped.Mapped(functools.partial(_of_blocks, of), (times, 1))


def joined(kernels: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Joins the kernels of gate and up, which are one product, and their biases."""
    gate, up, down, *biases = kernels
    pairs = [(gate, up), tuple(biases[:2])] if biases else [(gate, up)]
    both, *bias = (jnp.concatenate(pair, axis=-1) for pair in pairs)
    return both, down, *bias, *biases[2:]


def _of_blocks(of: Of, kernels: tuple[jax.Array, ...], rows: tuple[jax.Array, ...]) -> jax.Array:
    """Computes outputs of blocks of rows [blocks, n, D], with weights [blocks, n, 1], by their experts' kernels.

    The weights scale the input of down: so their gradient needs no outputs.
    """
    (cfg, split), (both, down, *biases), (x, weight) = of, kernels, rows
    inner = grouped.product(x, both)
    if biases:
        inner += grouped.product(jnp.ones_like(weight, x.dtype), biases[0])
    inner = _gated(cfg, *jnp.split(inner, 2, axis=-1))
    out = grouped.product((weight * inner.astype(weight.dtype)).astype(x.dtype), down, True)
    if biases:  # once, where several devices have a part of the width
        share = weight if split is None else weight * (jax.lax.axis_index(split) == 0)
        out += grouped.product(share.astype(x.dtype), biases[1], True)
    return out


def _gated(cfg: ModelConfig, gate: jax.Array, up: jax.Array) -> jax.Array:
    """Computes an expert's activation: activation(gate) * up, or gate sigmoid(alpha gate) (up + 1) of clamped ones."""
    assert cfg.experts is not None
    if cfg.experts.clamp is None:
        return ACTIVATIONS[cfg.activation](gate) * up
    alpha, limit = cfg.experts.clamp
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return gate * jax.nn.sigmoid(alpha * gate) * (up + 1)
