"""Computation on each device of a mesh: attention with positions that several devices share, and groups of devices.

Positions are exchanged for heads, and back afterwards (Ulysses, Jacobs et al., arXiv:2309.14509): a device has
all positions of its share of the heads. Heads that `tensor` shards are divided further.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jppo.models.attention import Attend

EXPERT, POSITIONS, HEADS = "expert", "sequence", "tensor"  # axes of the mesh
ROWS = ("data", "fsdp", EXPERT)
COLUMNS = ("fsdp", EXPERT, POSITIONS)  # the axes that shard a parameter's D

# Axes along which the caller has split the rows: it maps over groups of devices, and traces for one group's rows.
_DIVIDED: Any = jax.make_user_context(())


def divide_rows(axis: str) -> AbstractContextManager[None]:
    """Traces for one group of devices along a mesh axis; the caller's vmap has that axis as its `spmd_axis_name`."""
    context: AbstractContextManager[None] = _DIVIDED((axis,))
    return context


def row_axes(axes: tuple[str, ...] = ROWS) -> tuple[str, ...]:
    """Returns the axes over which a traced function shards its rows."""
    return tuple(axis for axis in axes if axis not in _DIVIDED.value)


@dataclasses.dataclass(frozen=True)
class Split:
    """The mesh axes of attention's rows and of its heads; a row's positions are together."""

    rows: tuple[str, ...]
    heads: tuple[str, ...]

    def parts(self, mesh: Mesh) -> int:
        """Returns the number of devices that share the heads of a row."""
        return math.prod(mesh.shape[axis] for axis in self.heads)


EXCHANGED = Split(ROWS, (HEADS, POSITIONS))  # rows whose positions are sharded
WHOLE = Split((*ROWS, POSITIONS), (HEADS,))  # rows that are whole on a device


def fit_axes(mesh: Mesh | AbstractMesh, axes: tuple[str, ...], size: int) -> tuple[str, ...]:
    """Returns the axes without the last ones, so that their devices divide the size."""
    while axes and size % math.prod(mesh.shape[axis] for axis in axes):
        axes = axes[:-1]
    return axes


def column_axes(mesh: Mesh | AbstractMesh | None, size: int, other_axes: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Returns the mesh axes that shard a parameter's D of that size; () without a mesh.

    `other_axes` axes shard another dimension of the parameter.
    """
    axes = tuple(axis for axis in COLUMNS if axis not in other_axes)
    return () if mesh is None or mesh.size == 1 else fit_axes(mesh, axes, size)


def repeat_heads(x: jax.Array, heads: int, parts: int) -> jax.Array:
    """Repeats keys or values [R, T, K, A] as little as `parts` allows; each serves the query heads that follow it."""
    chex.assert_rank(x, 4)
    K = x.shape[2]
    num_heads = math.lcm(K, parts)
    return x if num_heads == K or heads % num_heads else jnp.repeat(x, num_heads // K, axis=2)


def exchange_positions(attend: Attend, mesh: Mesh) -> Attend:
    """Wraps attention for q, k and v whose positions are sharded over `sequence` and heads over `tensor`."""
    parts = EXCHANGED.parts(mesh)
    if parts == 1:
        return attend

    def constrain(x: jax.Array, *spec: str | tuple[str, ...] | None) -> jax.Array:
        out: jax.Array = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(row_axes(), *spec)))
        return out

    def over_mesh(q: jax.Array, k: jax.Array, v: jax.Array, segment: jax.Array, *kind_and_sinks: Any) -> jax.Array:
        chex.assert_rank([q, k, v, segment], [4, 4, 4, 2])
        H = q.shape[2]
        if H % parts:  # settings checks refuse it
            return attend(q, k, v, segment, *kind_and_sinks)
        k, v = repeat_heads(k, H, parts), repeat_heads(v, H, parts)
        # Both ends are constrained: else XLA exchanges projections, or backward scores, which are far larger.
        q, k, v = (constrain(constrain(x, POSITIONS, HEADS), None, EXCHANGED.heads) for x in (q, k, v))
        output = attend(q, k, v, constrain(segment), *kind_and_sinks)
        return constrain(constrain(output, None, EXCHANGED.heads), POSITIONS, HEADS)

    return over_mesh


def map_over_mesh(
    fn: Callable[..., Any],
    mesh: Mesh | AbstractMesh,
    specs: tuple[PartitionSpec, ...],
    *,
    gradients: bool,
    split: Split = EXCHANGED,
) -> Callable[..., Any]:
    """Maps a device's `fn(kernels, *arrays of rows)` over the mesh, also under `divide_rows`.

    `specs` are the kernels'. The results are of rows, or with `gradients` the pair of the kernels' and those of rows.
    vmap turns a loop into selects between old and new in each round; so each group runs its own loop instead.
    """

    def map_devices(fn: Callable[..., Any], *groups: tuple[str, ...]) -> Callable[..., Any]:
        rows = PartitionSpec(WHOLE.rows) if split is WHOLE else PartitionSpec(*groups, row_axes(), POSITIONS)
        outs = (tuple(PartitionSpec(*groups, *spec) for spec in specs), rows) if gradients else rows

        def call(kernels: Any, *arrays: Any) -> Any:
            ins = specs, *(rows for _ in arrays)
            return jax.shard_map(fn, mesh=mesh, in_specs=ins, out_specs=outs)(kernels, *arrays)

        return call

    def on_group(kernels: Any, *arrays: Any) -> Any:  # a first axis of length 1 is the device's group
        return jax.tree.map(lambda x: x[None], fn(kernels, *jax.tree.map(lambda x: x[0], arrays)))

    groups = tuple(_DIVIDED.value)
    if not groups:
        return map_devices(fn)
    mapped_fn: Callable[..., Any] = jax.custom_batching.custom_vmap(map_devices(fn))
    mapped_fn.def_vmap(functools.partial(_map_groups, map_devices(on_group, groups)))  # type: ignore[attr-defined]
    return mapped_fn


def _map_groups(fn: Callable[..., Any], count: int, batched: Any, kernels: Any, *arrays: Any) -> tuple[Any, Any]:
    """Maps over groups, for vmap: kernels are the same for all groups, arrays have one for each."""
    if any(jax.tree.leaves(batched[0])):
        raise ValueError("groups of devices share their kernels")
    arrays = jax.tree.map(
        lambda x, mapped: x if mapped else jnp.broadcast_to(x, (count, *x.shape)), arrays, tuple(batched[1:])
    )
    result = fn(kernels, *arrays)
    return result, jax.tree.map(lambda _: True, result)


def vary_like(x: jax.Array, like: jax.Array) -> jax.Array:
    """Marks x as varying over the mesh axes over which `like` varies, so that each device has its own gradient of it.

    The gradient of x is their sum: devices exchange it here, and not in each operation on x.
    """
    axes = jax.typeof(like).manual_axis_type.varying - jax.typeof(x).manual_axis_type.varying
    out: jax.Array = jax.lax.pcast(x, tuple(sorted(axes)), to="varying")
    return out


def gather_all(
    kernels: Sequence[jax.Array], column_axes: Sequence[tuple[str, ...]], like: jax.Array
) -> list[jax.Array]:
    """Gathers all columns of a device's kernels, in the dtype of `like`, an array of the device's rows."""
    pairs = zip((kernel.astype(like.dtype) for kernel in kernels), column_axes, strict=True)
    full = (jax.lax.all_gather(kernel, axes, axis=1, tiled=True) if axes else kernel for kernel, axes in pairs)
    return [vary_like(kernel, like) for kernel in full]


def sum_grads(total: jax.Array, axes: tuple[str, ...], expert_axis: str | None = None) -> jax.Array:
    """Sums a kernel's gradient over the mesh, in the kernel's shards; along `expert_axis` the kernels differ."""
    total = jax.lax.psum_scatter(total, axes, scatter_dimension=1, tiled=True) if axes else total
    other_axes = tuple(axis for axis in (*row_axes(), POSITIONS) if axis not in (*axes, expert_axis))
    out: jax.Array = jax.lax.psum(total, other_axes)
    return out
