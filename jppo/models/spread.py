"""Attention on a mesh. Everywhere else a device has some positions of a row, and attention needs all of them.

For it positions are exchanged for heads, and back afterwards (Ulysses, Jacobs et al., arXiv:2309.14509): a device has
all positions of its share of the heads. What `tensor` has spread already it goes on to divide.
"""

import dataclasses
import math
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jppo.models.attention import Attend

ROWS, POSITIONS, HEADS = ("data", "fsdp"), "sequence", "tensor"  # the axes of the mesh
COLUMNS = ("fsdp", POSITIONS)  # the axes that shard a parameter's D

# Axes over which the caller has divided the rows: it maps over groups of devices, and traces for the rows of one.
_DIVIDED: Any = jax.make_user_context(())


def divided(axis: str) -> AbstractContextManager[None]:
    """Traces for one group of devices along a mesh axis; the caller's vmap has that axis as its `spmd_axis_name`."""
    found: AbstractContextManager[None] = _DIVIDED((axis,))
    return found


def row_axes(axes: tuple[str, ...] = ROWS) -> tuple[str, ...]:
    """The axes over which a traced function shards its rows."""
    return tuple(axis for axis in axes if axis not in _DIVIDED.value)


def groups_of_rows() -> tuple[str, ...]:
    """The axes over which the caller has divided the rows."""
    return tuple(_DIVIDED.value)


@dataclasses.dataclass(frozen=True)
class Split:
    """Over which axes of the mesh attention has its rows and its heads; a row's positions are together."""

    rows: tuple[str, ...]
    heads: tuple[str, ...]

    def parts(self, mesh: Mesh) -> int:
        """Among how many devices the heads of a row are shared."""
        return math.prod(mesh.shape[axis] for axis in self.heads)


EXCHANGED = Split(ROWS, (HEADS, POSITIONS))  # rows whose positions are spread
WHOLE = Split((*ROWS, POSITIONS), (HEADS,))  # rows of which no device has a part only


def dividing(mesh: Mesh, axes: tuple[str, ...], size: int) -> tuple[str, ...]:
    """The axes, without the last ones if they are too many for the size."""
    while axes and size % math.prod(mesh.shape[axis] for axis in axes):
        axes = axes[:-1]
    return axes


def columns(mesh: Mesh | None, size: int) -> tuple[str, ...]:
    """The mesh axes that shard a parameter's D of that size; () without a mesh."""
    return () if mesh is None or mesh.size == 1 else dividing(mesh, COLUMNS, size)


def repeated(x: jax.Array, heads: int, parts: int) -> jax.Array:
    """Keys or values [R, T, K, A] in copies, as few as `parts` divides; each serves the query heads that follow it."""
    K = x.shape[2]
    needed = math.lcm(K, parts)
    return x if needed == K or heads % needed else jnp.repeat(x, needed // K, axis=2)


def exchanged(attend: Attend, mesh: Mesh) -> Attend:
    """The same attention for q, k and v whose positions are spread over `sequence` and heads over `tensor`."""
    parts = EXCHANGED.parts(mesh)
    if parts == 1:
        return attend

    def keep(x: jax.Array, *spec: str | tuple[str, ...] | None) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(row_axes(), *spec)))

    def over_mesh(q: jax.Array, k: jax.Array, v: jax.Array, segment: jax.Array, kind: jax.Array | int) -> jax.Array:
        H = q.shape[2]
        if H % parts:  # whoever reads settings refuses it
            return attend(q, k, v, segment, kind)
        k, v = repeated(k, H, parts), repeated(v, H, parts)
        # Both ends are said: else XLA exchanges what is projected, or scores in the backward pass, which are far more.
        q, k, v = (keep(keep(x, POSITIONS, HEADS), None, EXCHANGED.heads) for x in (q, k, v))
        mixed = attend(q, k, v, keep(segment), kind)
        return keep(keep(mixed, None, EXCHANGED.heads), POSITIONS, HEADS)

    return over_mesh
