"""Outputs of experts for pairs of a row and an expert, which are sorted by expert."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jppo.models import grouped_chunks
from jppo.models.config import ModelConfig
from jppo.models.grouped import grouped
from jppo.models.modules import ACTIVATIONS

Of = tuple[ModelConfig, str | None]  # a model, and the mesh axis that shards its experts' width


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def each(
    of: Of, times: int, kernels: Any, rows: jax.Array, weight: jax.Array, sizes: jax.Array, order: jax.Array
) -> jax.Array:
    """Computes outputs [P, D], times weights [P, 1], of pairs of a row and an expert; each row is in `times` pairs.

    In this order the first `sizes[0]` pairs are of the first expert, the next ones of the second.
    """
    by_groups, by_chunks = (functools.partial(form, of, times) for form in (_by_groups, _by_chunks))
    out: jax.Array = jax.lax.platform_dependent(kernels, rows, weight, sizes, order, cpu=by_groups, default=by_chunks)
    return out


def _each_forward(of: Of, times: int, *args: Any) -> tuple[jax.Array, Any]:
    return each(of, times, *args), args


def _each_backward(of: Of, times: int, args: Any, given: jax.Array) -> tuple[Any, ...]:
    def gradient(form: Callable[..., jax.Array], given: jax.Array, *args: Any) -> tuple[Any, ...]:
        found: tuple[Any, ...] = jax.vjp(lambda *learned: form(of, times, *learned, *args[3:]), *args[:3])[1](given)
        return found

    by_groups, by_chunks = (functools.partial(gradient, form) for form in (_by_groups, _by_chunks))
    return *jax.lax.platform_dependent(given, *args, cpu=by_groups, default=by_chunks), None, None


each.defvjp(_each_forward, _each_backward)


def _by_groups(
    of: Of, times: int, kernels: Any, rows: jax.Array, weight: jax.Array, sizes: jax.Array, order: jax.Array
) -> jax.Array:
    def product(x: jax.Array, kernel: jax.Array, transposed: bool = False) -> jax.Array:
        return grouped(x, kernel, sizes, transposed)

    place = jnp.argsort(order)  # of each pair among the sorted ones
    sorted_ = _taken(times, rows, order, place), _taken(1, weight, order, place)
    return _taken(1, _of_experts(of, product, kernels, *sorted_), place, order)


def _by_chunks(
    of: Of, times: int, kernels: Any, rows: jax.Array, weight: jax.Array, sizes: jax.Array, order: jax.Array
) -> jax.Array:
    def of_blocks(kernels: Any, rows: Any) -> jax.Array:
        return _of_experts(of, grouped_chunks.product, kernels, *rows)

    how = grouped_chunks.Mapped(of_blocks, (times, 1))
    return grouped_chunks.mapped(how, kernels, (rows, weight), sizes, order)


def _of_experts(
    of: Of, product: Callable[..., jax.Array], kernels: Any, rows: jax.Array, weight: jax.Array
) -> jax.Array:
    """Computes experts' outputs, times weights, by a product of rows with the kernels of their experts."""
    cfg, split = of
    gate, up, down, *biases = kernels
    gates, ups = product(rows, gate), product(rows, up)
    if biases:
        ones = jnp.ones((*rows.shape[:-1], 1), rows.dtype)
        gates, ups = gates + product(ones, biases[0]), ups + product(ones, biases[1])
    outs = product(_gated(cfg, gates, ups), down, True)
    if biases:  # once, where several devices have a part of the width
        share = ones if split is None else ones * (jax.lax.axis_index(split) == 0)
        outs += product(share, biases[2], True)
    return (weight * outs.astype(weight.dtype)).astype(rows.dtype)


def _gated(cfg: ModelConfig, gate: jax.Array, up: jax.Array) -> jax.Array:
    """Computes an expert's activation: activation(gate) * up, or gate sigmoid(alpha gate) (up + 1) of clamped ones."""
    assert cfg.experts is not None
    if cfg.experts.clamp is None:
        return ACTIVATIONS[cfg.activation](gate) * up
    alpha, limit = cfg.experts.clamp
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return gate * jax.nn.sigmoid(alpha * gate) * (up + 1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _taken(times: int, x: jax.Array, order: jax.Array, place: jax.Array) -> jax.Array:
    """Returns x's rows, each repeated so many times, in this order; `place` inverts it. No gradient is a scatter."""
    return x[order // times]


def _taken_forward(times: int, x: jax.Array, order: jax.Array, place: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _taken(times, x, order, place), place


def _taken_backward(times: int, place: jax.Array, given: jax.Array) -> tuple[jax.Array, None, None]:
    return grouped_chunks.summed(given[place], times), None, None


_taken.defvjp(_taken_forward, _taken_backward)
