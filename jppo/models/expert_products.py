"""Outputs of experts for pairs of a row and an expert: products of sorted rows with the kernels of their groups.

They are computed in blocks of rows of one group each.

XLA lowers `ragged_dot` on CPUs and GPUs to dense products of every row with every kernel, and on TPUs its kernel's
gradient: with 128 experts 128 times the FLOP. Here at most one block of each group is partly empty.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jppo.models.config import ModelConfig
from jppo.models.kernels import product, recomputed_by
from jppo.models.modules import ACTIVATIONS

ModelAndAxis = tuple[ModelConfig, str | None]  # a model, and the mesh axis that shards its experts' width
COPIES = 2**31  # bytes of kernels, in f32, that an accelerator copies to blocks at a time


class _Chunks(NamedTuple):
    """Blocks of pairs of one group each, in chunks that are computed one after the other."""

    needed: jax.Array | int  # chunks to compute
    group: jax.Array  # [chunks, blocks] i32
    pair: jax.Array  # [chunks, blocks, size] i32; P where a block has none
    place: jax.Array  # [P] i32, of each pair among those of the blocks

    def run(self, step: Callable[[Any, Any], Any], start: Any) -> Any:
        """Runs `step(chunk, so far)` for the chunks."""
        return step(0, start) if len(self.group) == 1 else jax.lax.fori_loop(0, self.needed, step, start)

    def empty(self, example: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
        """Makes the array of all chunks' results, of which one is like this."""
        return jnp.zeros_like(example, shape=(len(self.group), *example.shape))

    def joined(self, result: jax.Array) -> jax.Array:
        """Returns the pairs [P, ...] of chunks' results [chunks, blocks, size, ...]."""
        return result.reshape(-1, *result.shape[3:])[self.place]


def _make_chunks(kernels: Any, sizes: jax.Array, order: jax.Array, *, cpu: bool) -> _Chunks:
    """Cuts pairs, in `order` by group, into chunks of blocks of one group each; `sizes` are the groups'.

    Larger blocks have more empty places, and smaller ones copy more kernels. At this size an H100 or a TPU would take
    as long for one as for the other. A CPU computes block by block, and none that is empty.
    """
    P, groups = len(order), len(sizes)
    if cpu:
        size = 1 << min(8, max(3, (P // groups).bit_length() - 1))
    else:
        size = 1 << max(3, (512 * P // groups).bit_length() // 2)
    blocks = max(1, (P + groups * (size - 1)) // size)  # at most, with rows
    max_blocks = 1 if cpu else max(1, COPIES // (4 * sum(x.size // groups for x in jax.tree.leaves(kernels))))
    chunks = -(-blocks // max_blocks)
    blocks = -(-blocks // chunks)  # of a chunk
    needed, group, start, end = _cut_blocks(sizes, size, chunks * blocks)
    row = start[:, None] + jnp.arange(size)[None]
    pair = order.at[jnp.where(row < end[:, None], row, P)].get(mode="fill", fill_value=P)
    position_of_pair = jnp.zeros(P, jnp.int32).at[pair].set(jnp.arange(pair.size).reshape(pair.shape), mode="drop")
    shape = chunks, blocks
    return _Chunks(needed if cpu else chunks, group.reshape(shape), pair.reshape(*shape, size), position_of_pair)


def _cut_blocks(sizes: jax.Array, size: int, count: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Cuts rows, sorted by groups of these `sizes`, into `count` blocks of one group each, the last ones without rows.

    Returns the number of blocks that have rows, and of each its group, its first row, and the end of its group.
    """
    blocks_of_group = -(-sizes // size)
    end_block = jnp.cumsum(blocks_of_group)
    block = jnp.arange(count)
    group = jnp.minimum(jnp.sum(end_block[:, None] <= block[None], axis=0, dtype=jnp.int32), len(sizes) - 1)
    end = jnp.cumsum(sizes)[group]
    return end_block[-1], group, end - sizes[group] + size * (block - (end_block - blocks_of_group)[group]), end


class GroupedMap(NamedTuple):
    """A position-wise function of blocks of rows with their kernels, and the number of pairs of each array's rows.

    `fn(kernels, rows)` takes the blocks' kernels [blocks, ...] and rows [blocks, n, ...], and returns [blocks, n, ...].
    """

    fn: Callable[[Any, tuple[jax.Array, ...]], jax.Array]
    times: tuple[int, ...]

    def rows(self, rows: Any, pair: jax.Array) -> tuple[jax.Array, ...]:
        """Takes the rows of blocks' pairs; 0 where there is none."""
        pairs = zip(rows, self.times, strict=True)
        return tuple(x.at[pair // times].get(mode="fill", fill_value=0) for x, times in pairs)


def _backward(mapping: GroupedMap, args: Any, cotangent: jax.Array) -> tuple[Any, ...]:
    cpu, default = (functools.partial(grouped_gradients, mapping, cpu=cpu) for cpu in (True, False))
    return *jax.lax.platform_dependent(*args, cotangent, cpu=cpu, default=default), None, None


@recomputed_by(_backward)
def grouped_map(
    mapping: GroupedMap, kernels: Any, rows: tuple[jax.Array, ...], sizes: jax.Array, order: jax.Array
) -> jax.Array:
    """Computes the function of P pairs of a row and a group; the first `sizes[0]` in this order with kernels[0], ...

    Results are [P, ...], by pair. Kernels are rounded to the dtype of the first of the rows.
    """
    cpu, default = (functools.partial(grouped_outputs, mapping, cpu=cpu) for cpu in (True, False))
    result: jax.Array = jax.lax.platform_dependent(kernels, rows, sizes, order, cpu=cpu, default=default)
    return result


def grouped_outputs(
    mapping: GroupedMap, kernels: Any, rows: Any, sizes: jax.Array, order: jax.Array, *, cpu: bool
) -> jax.Array:
    """Computes `grouped_map` chunk by chunk, on a CPU or an accelerator."""
    chunks, take_kernels = _make_chunks(kernels, sizes, order, cpu=cpu), _kernel_taker(kernels, rows)

    def run_chunk(i: Any) -> jax.Array:
        return mapping.fn(take_kernels(chunks.group[i]), mapping.rows(rows, chunks.pair[i]))

    start = chunks.empty(jax.eval_shape(run_chunk, 0))
    return chunks.joined(chunks.run(lambda i, out: jax.lax.dynamic_update_index_in_dim(out, run_chunk(i), i, 0), start))


def grouped_gradients(
    mapping: GroupedMap, kernels: Any, rows: Any, sizes: jax.Array, order: jax.Array, cotangent: jax.Array, *, cpu: bool
) -> tuple[Any, tuple[jax.Array, ...]]:
    """Computes the gradients of `grouped_map`: of kernels, summed in f32 at least, and of rows."""
    chunks, take_kernels = _make_chunks(kernels, sizes, order, cpu=cpu), _kernel_taker(kernels, rows)

    def add_chunk(i: Any, sums: Any) -> Any:
        group, pair = chunks.group[i], chunks.pair[i]
        block_cotangent = cotangent.at[pair].get(mode="fill", fill_value=0)
        grad_kernels, grad_rows = jax.vjp(mapping.fn, take_kernels(group), mapping.rows(rows, pair))[1](block_cotangent)
        total = jax.tree.map(lambda total, new: _add_by_group(total, group, new), sums[0], grad_kernels)
        return total, tuple(
            jax.lax.dynamic_update_index_in_dim(array, new, i, 0) for array, new in zip(sums[1], grad_rows, strict=True)
        )

    zeros = jax.tree.map(lambda x: jnp.zeros_like(x, jnp.promote_types(x.dtype, jnp.float32)), kernels)
    start = tuple(chunks.empty(x) for x in jax.eval_shape(mapping.rows, rows, chunks.pair[0]))
    total, result = chunks.run(add_chunk, (zeros, start))
    total = jax.tree.map(lambda new, kernel: new.astype(kernel.dtype), total, kernels)
    return total, tuple(
        sum_consecutive(chunks.joined(x), times) for x, times in zip(result, mapping.times, strict=True)
    )


def _add_by_group(total: jax.Array, group: jax.Array, block_sums: jax.Array) -> jax.Array:
    """Adds the gradients of blocks to their groups' sums."""
    if len(group) > 1:
        return total.at[group].add(block_sums.astype(total.dtype))
    updated: jax.Array = jax.lax.dynamic_update_index_in_dim(
        total, total[group[0]] + block_sums[0].astype(total.dtype), group[0], 0
    )
    return updated


def sum_consecutive(x: jax.Array, count: int) -> jax.Array:
    """Sums so many consecutive rows each, in f32."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return jnp.sum(x.reshape(-1, count, *x.shape[1:]), axis=1, dtype=wide).astype(x.dtype)


def _kernel_taker(kernels: Any, rows: Any) -> Callable[[jax.Array], Any]:
    """Makes the function that takes blocks' kernels by group: rounded copies, whose gradients are not rounded."""
    rounded = jax.tree.map(lambda x: x.astype(rows[0].dtype), kernels)

    def take_kernels(group: jax.Array) -> Any:
        is_single = len(group) == 1
        return jax.tree.map(
            lambda x, wide: (x[group[0]][None] if is_single else x[group]).astype(wide.dtype), rounded, kernels
        )

    return take_kernels


def block_product(x: jax.Array, kernel: jax.Array, transposed: bool = False) -> jax.Array:
    """Multiplies rows of blocks [blocks, n, D] with their kernels [blocks, D, M], or [blocks, n, M] transposed."""
    return product("bnm,bdm->bnd" if transposed else "bnd,bdm->bnm", x, kernel)


def expert_outputs(
    spec: ModelAndAxis, times: int, kernels: Any, rows: jax.Array, weight: jax.Array, sizes: jax.Array, order: jax.Array
) -> jax.Array:
    """Computes outputs [P, D], times weights [P, 1], of pairs of a row and an expert; each row is in `times` pairs.

    Kernels are by `join_kernels`. In this order the first `sizes[0]` pairs are of the first expert, the next ones of
    the second.
    """
    mapping = GroupedMap(functools.partial(expert_blocks, spec), (times, 1))
    return grouped_map(mapping, kernels, (rows, weight), sizes, order)


def join_kernels(kernels: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Joins the kernels of gate and up, which are one product, and their biases."""
    gate, up, down, *biases = kernels
    pairs = [(gate, up), tuple(biases[:2])] if biases else [(gate, up)]
    gate_up, *bias = (jnp.concatenate(pair, axis=-1) for pair in pairs)
    return gate_up, down, *bias, *biases[2:]


def expert_blocks(spec: ModelAndAxis, kernels: tuple[jax.Array, ...], rows: tuple[jax.Array, ...]) -> jax.Array:
    """Computes outputs of blocks of rows [blocks, n, D], with weights [blocks, n, 1], by their experts' kernels.

    The weights scale the input of down: so their gradient needs no outputs.
    """
    (cfg, width_axis), (gate_up, down, *biases), (x, weight) = spec, kernels, rows
    hidden = block_product(x, gate_up)
    if biases:
        hidden += block_product(jnp.ones_like(weight, x.dtype), biases[0])
    hidden = _activate(cfg, *jnp.split(hidden, 2, axis=-1))
    outputs = block_product((weight * hidden.astype(weight.dtype)).astype(x.dtype), down, True)
    if biases:  # once, where several devices have a part of the width
        bias_weight = weight if width_axis is None else weight * (jax.lax.axis_index(width_axis) == 0)
        outputs += block_product(bias_weight.astype(x.dtype), biases[1], True)
    return outputs


def _activate(cfg: ModelConfig, gate: jax.Array, up: jax.Array) -> jax.Array:
    """Computes an expert's activation: activation(gate) * up, or gate sigmoid(alpha gate) (up + 1) of clamped ones."""
    assert cfg.experts is not None
    if cfg.experts.clamp is None:
        return ACTIVATIONS[cfg.activation](gate) * up
    alpha, limit = cfg.experts.clamp
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return gate * jax.nn.sigmoid(alpha * gate) * (up + 1)
