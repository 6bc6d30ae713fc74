"""Products of sorted rows with one kernel for each group of rows: `grouped`, without an array of rows by groups."""

import functools
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

# Dimension numbers of the products below, the ragged axis of rows first.
_ROWS = functools.partial(jax.lax.RaggedDotDimensionNumbers, lhs_ragged_dimensions=[0])
_FORWARD = _ROWS(dot_dimension_numbers=(([1], [1]), ([], [])), rhs_group_dimensions=[0])
_TRANSPOSED = _ROWS(dot_dimension_numbers=(([1], [2]), ([], [])), rhs_group_dimensions=[0])
_KERNEL = _ROWS(dot_dimension_numbers=(([0], [0]), ([], [])), rhs_group_dimensions=[])


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped(x: jax.Array, kernel: jax.Array, sizes: jax.Array, transposed: bool = False) -> jax.Array:
    """Multiplies rows x [N, D] with kernel [E, D, M], cast to x's dtype: the first `sizes[0]` rows with kernel[0], ...

    `transposed` multiplies x [N, M] with the kernels' transposes. The kernel's gradient is summed in f32 and has the
    kernel's dtype.
    """
    chex.assert_rank([x, kernel, sizes], [2, 3, 1])
    kernel = kernel.astype(x.dtype)

    def ragged(x: jax.Array, kernel: jax.Array, sizes: jax.Array) -> jax.Array:
        numbers = _TRANSPOSED if transposed else _FORWARD
        return jax.lax.ragged_dot_general(x, kernel, sizes, numbers, preferred_element_type=x.dtype)

    blocks = functools.partial(_by_blocks, transposed=transposed)
    out: jax.Array = jax.lax.platform_dependent(x, kernel, sizes, cpu=blocks, default=ragged)
    return out


def _forward(x: jax.Array, kernel: jax.Array, sizes: jax.Array, transposed: bool) -> tuple[jax.Array, Any]:
    return grouped(x, kernel, sizes, transposed), (x, kernel, sizes)


def _backward(transposed: bool, held: Any, given: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x, kernel, sizes = held
    given = given.astype(x.dtype)
    rows = (given, x) if transposed else (x, given)

    def ragged(a: jax.Array, b: jax.Array, sizes: jax.Array) -> jax.Array:
        wide = jnp.promote_types(kernel.dtype, jnp.float32)
        return jax.lax.ragged_dot_general(a, b, sizes, _KERNEL, preferred_element_type=wide).astype(kernel.dtype)

    by_kernel = functools.partial(_kernel_by_blocks, dtype=kernel.dtype)
    slope = jax.lax.platform_dependent(*rows, sizes, cpu=by_kernel, default=ragged)
    return grouped(given, kernel, sizes, not transposed), slope, None


grouped.defvjp(_forward, _backward)


class _Blocks(NamedTuple):
    """Blocks of consecutive rows of one group each. XLA's CPU backend would multiply every row with every kernel."""

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
    count = -(-sizes // size)
    last = jnp.cumsum(count)
    number = jnp.arange(rows // size + groups)
    group = jnp.minimum(jnp.searchsorted(last, number, side="right", method="compare_all"), groups - 1)
    end = jnp.cumsum(sizes)[group]
    start = end - sizes[group] + size * (number - (last - count)[group])
    return _Blocks(size, last[-1], group, start, end)


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
