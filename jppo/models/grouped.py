"""Products of sorted rows with one kernel for each group of rows, for CPUs: `grouped`, by blocks of one group each.

XLA's CPU backend lowers `ragged_dot` to a product of every row with every kernel. Accelerators use
`grouped_chunks.py`.
"""

import functools
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped(x: jax.Array, kernel: jax.Array, sizes: jax.Array, transposed: bool = False) -> jax.Array:
    """Multiplies rows x [N, D] with kernel [E, D, M], cast to x's dtype: the first `sizes[0]` rows with kernel[0], ...

    `transposed` multiplies x [N, M] with the kernels' transposes. The kernel's gradient is summed in f32 and has the
    kernel's dtype.
    """
    chex.assert_rank([x, kernel, sizes], [2, 3, 1])
    return _by_blocks(x, kernel.astype(x.dtype), sizes, transposed=transposed)


def _forward(x: jax.Array, kernel: jax.Array, sizes: jax.Array, transposed: bool) -> tuple[jax.Array, Any]:
    return grouped(x, kernel, sizes, transposed), (x, kernel, sizes)


def _backward(transposed: bool, held: Any, given: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x, kernel, sizes = held
    given = given.astype(x.dtype)
    left, right = (given, x) if transposed else (x, given)
    slope = _kernel_by_blocks(left, right, sizes, dtype=kernel.dtype)
    return grouped(given, kernel, sizes, not transposed), slope, None


grouped.defvjp(_forward, _backward)


class _Blocks(NamedTuple):
    """Blocks of consecutive rows of one group each."""

    size: int  # rows of a block, 8 to 256
    needed: jax.Array  # [] i32, blocks that have rows
    group: jax.Array  # [blocks] i32
    start: jax.Array  # [blocks] i32, its first row
    end: jax.Array  # [blocks] i32, of its group

    def padded(self, x: jax.Array) -> jax.Array:
        """Appends rows, so that the last block is whole."""
        return jnp.pad(x, ((0, self.size), (0, 0)))

    def rows(self, x: jax.Array, i: jax.Array) -> jax.Array:
        """Returns block i of padded rows; it may end with rows of the next group."""
        return jax.lax.dynamic_slice_in_dim(x, self.start[i], self.size)


def _blocks(rows: int, sizes: jax.Array) -> _Blocks:
    groups = len(sizes)
    size = 1 << min(8, max(3, (rows // groups).bit_length() - 1))
    return _Blocks(size, *cut(sizes, size, rows // size + groups))


def cut(sizes: jax.Array, size: int, count: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Cuts sorted rows into `count` blocks of one group each, the last ones without rows.

    Returns the number of blocks that have rows, and of each its group, its first row, and the end of its group.
    """
    each = -(-sizes // size)
    last = jnp.cumsum(each)
    number = jnp.arange(count)
    group = jnp.minimum(jnp.searchsorted(last, number, side="right", method="compare_all"), len(sizes) - 1)
    end = jnp.cumsum(sizes)[group]
    return last[-1], group, end - sizes[group] + size * (number - (last - each)[group]), end


def _by_blocks(x: jax.Array, kernel: jax.Array, sizes: jax.Array, *, transposed: bool) -> jax.Array:
    blocks, wide = _blocks(len(x), sizes), jnp.promote_types(x.dtype, jnp.float32)
    padded = blocks.padded(x)

    def one(i: jax.Array, out: jax.Array) -> jax.Array:
        own = kernel[blocks.group[i]]
        y = jnp.einsum(
            "nm,dm->nd" if transposed else "nd,dm->nm", blocks.rows(padded, i), own, preferred_element_type=wide
        )
        # Rows of the next group are overwritten by its own block, which comes later.
        return jax.lax.dynamic_update_slice_in_dim(out, y.astype(x.dtype), blocks.start[i], 0)

    width = kernel.shape[1 if transposed else 2]
    found: jax.Array = jax.lax.fori_loop(0, blocks.needed, one, blocks.padded(jnp.zeros((len(x), width), x.dtype)))
    return found[: len(x)]


def _kernel_by_blocks(a: jax.Array, b: jax.Array, sizes: jax.Array, *, dtype: Any) -> jax.Array:
    blocks, wide = _blocks(len(a), sizes), jnp.promote_types(dtype, jnp.float32)
    left, right = blocks.padded(a), blocks.padded(b)

    def one(i: jax.Array, total: jax.Array) -> jax.Array:
        here = blocks.start[i] + jnp.arange(blocks.size) < blocks.end[i]
        own = jnp.where(here[:, None], blocks.rows(left, i), 0)
        new = jnp.einsum("nd,nm->dm", own, blocks.rows(right, i), preferred_element_type=wide)
        group = blocks.group[i]
        out: jax.Array = jax.lax.dynamic_update_index_in_dim(total, total[group] + new, group, 0)
        return out

    zeros = jnp.zeros((len(sizes), a.shape[1], b.shape[1]), wide)
    found: jax.Array = jax.lax.fori_loop(0, blocks.needed, one, zeros)
    return found.astype(dtype)
