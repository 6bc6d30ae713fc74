"""Grouped products as batched ones, for accelerators: blocks of rows, as many at a time as there are groups.

XLA lowers `ragged_dot` on GPUs to dense products of every row with every kernel, and on TPUs its kernel's gradient:
with 128 experts 128 times the FLOP, and on GPUs an array of all rows for each expert. Here at most one block of each
group is partly empty.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jppo.models import product as products
from jppo.models.grouped import cut


class _Chunks(NamedTuple):
    """Blocks of pairs of one group each, in chunks."""

    group: jax.Array  # [chunks, blocks] i32
    pair: jax.Array  # [chunks, blocks, size] i32; P where a block has none
    place: jax.Array  # [P] i32, of each pair among those of the blocks

    def joined(self, found: jax.Array) -> jax.Array:
        """Returns the pairs [P, ...] of blocks' results [chunks, blocks, size, ...]."""
        return found.reshape(-1, *found.shape[3:])[self.place]


def _chunks(order: jax.Array, sizes: jax.Array) -> _Chunks:
    """Cuts pairs in the order of their groups into blocks.

    Larger blocks have more empty places, and smaller ones copy more kernels: at this size an H100 or a TPU would take
    as long for one as for the other.
    """
    P, groups = len(order), len(sizes)
    size = 1 << max(3, (512 * P // groups).bit_length() // 2)
    chunks = -(-(P // size + groups) // groups)
    _, group, start, end = cut(sizes, size, chunks * groups)
    row = start[:, None] + jnp.arange(size)[None]
    pair = order.at[jnp.where(row < end[:, None], row, P)].get(mode="fill", fill_value=P)
    place = jnp.zeros(P, jnp.int32).at[pair].set(jnp.arange(pair.size).reshape(pair.shape), mode="drop")
    return _Chunks(group.reshape(chunks, groups), pair.reshape(chunks, groups, size), place)


class Mapped(NamedTuple):
    """A position-wise function of blocks of rows with their kernels, and how many pairs each row of an array is in.

    `fn(kernels, rows)` gets those of blocks, [blocks, ...] and [blocks, n, ...], and returns [blocks, n, ...].
    """

    fn: Callable[[Any, tuple[jax.Array, ...]], jax.Array]
    times: tuple[int, ...]

    def rows(self, rows: Any, pair: jax.Array) -> tuple[jax.Array, ...]:
        """Takes the rows of blocks' pairs; 0 where there is none."""
        pairs = zip(rows, self.times, strict=True)
        return tuple(x.at[pair // times].get(mode="fill", fill_value=0) for x, times in pairs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def mapped(how: Mapped, kernels: Any, rows: tuple[jax.Array, ...], sizes: jax.Array, order: jax.Array) -> jax.Array:
    """Computes the function of P pairs of a row and a group; the first `sizes[0]` in this order with kernels[0], ...

    Results are [P, ...], by pair. Kernels are rounded to the dtype of the first of the rows.
    """
    chunks, own = _chunks(order, sizes), _of_blocks(kernels, rows)

    def one(_: None, chunk: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
        group, pair = chunk
        return None, how.fn(own(group), how.rows(rows, pair))

    return chunks.joined(jax.lax.scan(one, None, (chunks.group, chunks.pair))[1])


def _forward(how: Mapped, *args: Any) -> tuple[jax.Array, Any]:
    return mapped(how, *args), args


def _backward(how: Mapped, args: Any, given: jax.Array) -> tuple[Any, Any, None, None]:
    """Computes the gradients chunk by chunk; those of kernels are summed in their dtype, f32 at least."""
    kernels, rows, sizes, order = args
    chunks, own = _chunks(order, sizes), _of_blocks(kernels, rows)

    def one(total: Any, chunk: tuple[jax.Array, jax.Array]) -> tuple[Any, Any]:
        group, pair = chunk
        slope = given.at[pair].get(mode="fill", fill_value=0)
        by_kernels, by_rows = jax.vjp(how.fn, own(group), how.rows(rows, pair))[1](slope)
        return jax.tree.map(lambda all_, new: all_.at[group].add(new.astype(all_.dtype)), total, by_kernels), by_rows

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)), kernels)
    total, found = jax.lax.scan(one, zeros, (chunks.group, chunks.pair))
    total = jax.tree.map(lambda new, kernel: new.astype(kernel.dtype), total, kernels)
    by_rows = (summed(chunks.joined(x), times) for x, times in zip(found, how.times, strict=True))
    return total, tuple(by_rows), None, None


mapped.defvjp(_forward, _backward)


def summed(x: jax.Array, times: int) -> jax.Array:
    """Sums so many consecutive rows each, in f32."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return jnp.sum(x.reshape(-1, times, *x.shape[1:]), axis=1, dtype=wide).astype(x.dtype)


def _of_blocks(kernels: Any, rows: Any) -> Callable[[jax.Array], Any]:
    """Makes the function that returns blocks' kernels; it copies narrow ones, and their gradients are wide."""
    narrow = jax.tree.map(lambda x: x.astype(rows[0].dtype), kernels)
    return lambda group: jax.tree.map(lambda x, wide: x[group].astype(wide.dtype), narrow, kernels)


def product(x: jax.Array, kernel: jax.Array, transposed: bool = False) -> jax.Array:
    """Multiplies rows of blocks [blocks, n, D] with their kernels [blocks, D, M], or [blocks, n, M] transposed."""
    return products.product("bnm,bdm->bnd" if transposed else "bnd,bdm->bnm", x, kernel)
