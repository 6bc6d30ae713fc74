"""Position-wise functions of sorted rows with the kernels of their groups, in blocks of rows of one group each.

XLA lowers `ragged_dot` on CPUs and GPUs to dense products of every row with every kernel, and on TPUs its kernel's
gradient: with 128 experts 128 times the FLOP. Here at most one block of each group is partly empty.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jppo.models import product as products

COPIES = 2**31  # bytes of kernels, in f32, that an accelerator copies to blocks at a time


class _Chunks(NamedTuple):
    """Blocks of pairs of one group each, in chunks that are computed one after the other."""

    needed: jax.Array | int  # chunks to compute
    group: jax.Array  # [chunks, blocks] i32
    pair: jax.Array  # [chunks, blocks, size] i32; P where a block has none
    place: jax.Array  # [P] i32, of each pair among those of the blocks

    def run(self, one: Callable[[Any, Any], Any], start: Any) -> Any:
        """Runs `one(chunk, so far)` for the chunks."""
        return one(0, start) if len(self.group) == 1 else jax.lax.fori_loop(0, self.needed, one, start)

    def empty(self, like: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
        """Makes the array of all chunks' results, of which one is like this."""
        return jnp.zeros((len(self.group), *like.shape), like.dtype)

    def joined(self, found: jax.Array) -> jax.Array:
        """Returns the pairs [P, ...] of chunks' results [chunks, blocks, size, ...]."""
        return found.reshape(-1, *found.shape[3:])[self.place]


def _chunks(kernels: Any, sizes: jax.Array, order: jax.Array, *, cpu: bool) -> _Chunks:
    """Cuts pairs in the order of their groups into blocks.

    Larger blocks have more empty places, and smaller ones copy more kernels. At this size an H100 or a TPU would take
    as long for one as for the other. A CPU computes block by block, and none that is empty.
    """
    P, groups = len(order), len(sizes)
    if cpu:
        size = 1 << min(8, max(3, (P // groups).bit_length() - 1))
    else:
        size = 1 << max(3, (512 * P // groups).bit_length() // 2)
    blocks = max(1, (P + groups * (size - 1)) // size)  # at most, with rows
    most = 1 if cpu else max(1, COPIES // (4 * sum(x.size // groups for x in jax.tree.leaves(kernels))))
    chunks = -(-blocks // most)
    blocks = -(-blocks // chunks)  # of a chunk
    needed, group, start, end = _cut(sizes, size, chunks * blocks)
    row = start[:, None] + jnp.arange(size)[None]
    pair = order.at[jnp.where(row < end[:, None], row, P)].get(mode="fill", fill_value=P)
    place = jnp.zeros(P, jnp.int32).at[pair].set(jnp.arange(pair.size).reshape(pair.shape), mode="drop")
    shape = chunks, blocks
    return _Chunks(needed if cpu else chunks, group.reshape(shape), pair.reshape(*shape, size), place)


def _cut(sizes: jax.Array, size: int, count: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Cuts sorted rows into `count` blocks of one group each, the last ones without rows.

    Returns the number of blocks that have rows, and of each its group, its first row, and the end of its group.
    """
    each = -(-sizes // size)
    last = jnp.cumsum(each)
    number = jnp.arange(count)
    group = jnp.minimum(jnp.searchsorted(last, number, side="right", method="compare_all"), len(sizes) - 1)
    end = jnp.cumsum(sizes)[group]
    return last[-1], group, end - sizes[group] + size * (number - (last - each)[group]), end


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
    cpu, default = (functools.partial(outputs, how, cpu=cpu) for cpu in (True, False))
    found: jax.Array = jax.lax.platform_dependent(kernels, rows, sizes, order, cpu=cpu, default=default)
    return found


def _forward(how: Mapped, *args: Any) -> tuple[jax.Array, Any]:
    return mapped(how, *args), args


def _backward(how: Mapped, args: Any, given: jax.Array) -> tuple[Any, ...]:
    cpu, default = (functools.partial(gradients, how, cpu=cpu) for cpu in (True, False))
    return *jax.lax.platform_dependent(*args, given, cpu=cpu, default=default), None, None


mapped.defvjp(_forward, _backward)


def outputs(how: Mapped, kernels: Any, rows: Any, sizes: jax.Array, order: jax.Array, *, cpu: bool) -> jax.Array:
    """Computes the function chunk by chunk, on a CPU or an accelerator."""
    chunks, own = _chunks(kernels, sizes, order, cpu=cpu), _of_blocks(kernels, rows)

    def of(i: Any) -> jax.Array:
        return how.fn(own(chunks.group[i]), how.rows(rows, chunks.pair[i]))

    start = chunks.empty(jax.eval_shape(of, 0))
    return chunks.joined(chunks.run(lambda i, out: jax.lax.dynamic_update_index_in_dim(out, of(i), i, 0), start))


def gradients(
    how: Mapped, kernels: Any, rows: Any, sizes: jax.Array, order: jax.Array, given: jax.Array, *, cpu: bool
) -> tuple[Any, tuple[jax.Array, ...]]:
    """Computes the gradients of kernels and rows; those of kernels are summed in their dtype, f32 at least."""
    chunks, own = _chunks(kernels, sizes, order, cpu=cpu), _of_blocks(kernels, rows)

    def one(i: Any, so_far: Any) -> Any:
        group, pair = chunks.group[i], chunks.pair[i]
        slope = given.at[pair].get(mode="fill", fill_value=0)
        by_kernels, by_rows = jax.vjp(how.fn, own(group), how.rows(rows, pair))[1](slope)
        total = jax.tree.map(lambda total, new: _added(total, group, new), so_far[0], by_kernels)
        return total, tuple(
            jax.lax.dynamic_update_index_in_dim(all_, new, i, 0) for all_, new in zip(so_far[1], by_rows, strict=True)
        )

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)), kernels)
    start = tuple(chunks.empty(x) for x in jax.eval_shape(how.rows, rows, chunks.pair[0]))
    total, found = chunks.run(one, (zeros, start))
    total = jax.tree.map(lambda new, kernel: new.astype(kernel.dtype), total, kernels)
    return total, tuple(summed(chunks.joined(x), times) for x, times in zip(found, how.times, strict=True))


def _added(total: jax.Array, group: jax.Array, new: jax.Array) -> jax.Array:
    """Adds blocks' gradients to those of their groups."""
    if len(group) > 1:
        return total.at[group].add(new.astype(total.dtype))
    one: jax.Array = jax.lax.dynamic_update_index_in_dim(
        total, total[group[0]] + new[0].astype(total.dtype), group[0], 0
    )
    return one


def summed(x: jax.Array, times: int) -> jax.Array:
    """Sums so many consecutive rows each, in f32."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return jnp.sum(x.reshape(-1, times, *x.shape[1:]), axis=1, dtype=wide).astype(x.dtype)


def _of_blocks(kernels: Any, rows: Any) -> Callable[[jax.Array], Any]:
    """Makes the function that returns blocks' kernels; it copies narrow ones, and their gradients are wide."""
    narrow = jax.tree.map(lambda x: x.astype(rows[0].dtype), kernels)

    def own(group: jax.Array) -> Any:
        one = len(group) == 1
        return jax.tree.map(
            lambda x, wide: (x[group[0]][None] if one else x[group]).astype(wide.dtype), narrow, kernels
        )

    return own


def product(x: jax.Array, kernel: jax.Array, transposed: bool = False) -> jax.Array:
    """Multiplies rows of blocks [blocks, n, D] with their kernels [blocks, D, M], or [blocks, n, M] transposed."""
    return products.product("bnm,bdm->bnd" if transposed else "bnd,bdm->bnm", x, kernel)
