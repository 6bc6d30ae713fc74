"""Functions of logits in chunks of tokens, on a mesh: at most one chunk of logits exists, also in the backward pass."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jppo.models.product import einsum
from jppo.models.spread import HEADS, POSITIONS, columns, gathered, in_groups, row_axes, summed
from jppo.models.vocabulary import Vocabulary


@dataclasses.dataclass(frozen=True)
class Chunking:
    """How each device of a mesh computes the outputs of its own tokens."""

    outputs: Callable[..., tuple[jax.Array, ...]]  # (vocabulary, targets [C], *raw logits [C, V]) -> arrays [C]
    chunk: int  # tokens
    mesh: Mesh | None

    @property
    def alone(self) -> bool:
        """Whether there is one device."""
        return self.mesh is None or self.mesh.size == 1

    def vocabulary(self, kernel: jax.Array) -> Vocabulary:
        """Returns how the mesh shards the rows of such a whole kernel."""
        if self.mesh is None or self.alone or kernel.shape[0] % self.mesh.shape[HEADS]:
            return Vocabulary()
        return Vocabulary(HEADS if self.mesh.shape[HEADS] > 1 else None)

    def on_mesh(self, fn: Callable[..., Any], kernels: Sequence[jax.Array], gradients: bool) -> Callable[..., Any]:
        """Maps `fn(vocabulary, columns, kernels, *arrays of rows)` over devices, each with its part of the arrays."""
        vocabulary, sharded = self.vocabulary(kernels[0]), tuple(columns(self.mesh, k.shape[1]) for k in kernels)
        fn = functools.partial(fn, self, vocabulary, sharded)
        if self.mesh is None or self.alone:
            return fn
        of_kernels = tuple(PartitionSpec(vocabulary.axis, axes or None) for axes in sharded)

        def spread(fn: Callable[..., Any], *groups: tuple[str, ...]) -> Callable[..., Any]:
            rows = PartitionSpec(*groups, row_axes(), POSITIONS)
            outs = (tuple(PartitionSpec(*groups, *spec) for spec in of_kernels), rows) if gradients else rows

            def call(kernels: Any, *arrays: Any) -> Any:
                ins = of_kernels, *(rows for _ in arrays)
                on_each = jax.shard_map(fn, mesh=self.mesh, in_specs=ins, out_specs=outs, check_vma=False)
                return on_each(kernels, *arrays)

            return call

        return in_groups(spread, fn)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def outputs(plan: Chunking, kernels: Any, hidden: Any, targets: jax.Array, mask: jax.Array) -> tuple[jax.Array, ...]:
    """Computes the plan's outputs [R, T] of each token of the mask, 0 elsewhere, from a kernel and states per model."""
    found: tuple[jax.Array, ...] = plan.on_mesh(_forward, kernels, False)(kernels, hidden, targets, mask)
    return found


def _outputs_forward(plan: Chunking, *args: Any) -> tuple[Any, Any]:
    return outputs(plan, *args), args


def _outputs_backward(plan: Chunking, args: Any, given: Any) -> tuple[Any, ...]:
    return *plan.on_mesh(_backward, args[0], True)(*args, given), None, None


outputs.defvjp(_outputs_forward, _outputs_backward)


def _forward(
    plan: Chunking, vocabulary: Vocabulary, columns: Any, kernels: Any, hidden: Any, targets: jax.Array, mask: jax.Array
) -> tuple[jax.Array, ...]:
    """Computes the outputs of a device's tokens [R, T]."""
    flat, targets = [x.reshape(-1, x.shape[-1]) for x in hidden], targets.reshape(-1)
    whole, chunks = gathered(kernels, columns, flat[0].dtype), _Chunks.of(mask, plan.chunk)

    def of_chunk(index: jax.Array | None) -> tuple[jax.Array, ...]:
        raw = [_raw(chunks.take(x, index), kernel) for x, kernel in zip(flat, whole, strict=True)]
        return plan.outputs(vocabulary, chunks.take(targets, index), *raw)

    def one(index: jax.Array | None, so_far: Any) -> Any:
        return jax.tree.map(lambda all_, new: chunks.put(all_, index, new), so_far, of_chunk(index))

    kinds = jax.eval_shape(of_chunk, None)
    found = chunks.loop(one, jax.tree.map(lambda kind: jnp.zeros(mask.size, kind.dtype), kinds))
    out: tuple[jax.Array, ...] = jax.tree.map(lambda x: jnp.where(mask, x.reshape(mask.shape), 0), found)
    return out


def _backward(
    plan: Chunking,
    vocabulary: Vocabulary,
    columns: Any,
    kernels: Any,
    hidden: Any,
    targets: jax.Array,
    mask: jax.Array,
    given: Any,
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Computes the gradients of the kernels and of a device's hidden states, with logits recomputed."""
    flat, targets = [x.reshape(-1, x.shape[-1]) for x in hidden], targets.reshape(-1)
    given = jax.tree.map(lambda x: jnp.where(mask, x, 0).reshape(-1), given)
    dtype = flat[0].dtype
    whole, chunks = gathered(kernels, columns, dtype), _Chunks.of(mask, plan.chunk)

    def one(index: jax.Array | None, so_far: Any) -> Any:
        sums, slopes = so_far
        states = [chunks.take(x, index) for x in flat]
        raw = [_raw(x, kernel) for x, kernel in zip(states, whole, strict=True)]
        pull = jax.vjp(functools.partial(plan.outputs, vocabulary, chunks.take(targets, index)), *raw)[1]
        pulled = [x.astype(dtype) for x in pull(jax.tree.map(lambda x: chunks.take(x, index), given))]
        by_kernel = [einsum("cv,cd->vd", g, x, s.dtype) for g, x, s in zip(pulled, states, sums, strict=True)]
        by_state = [einsum("cv,vd->cd", g, kernel, dtype) for g, kernel in zip(pulled, whole, strict=True)]
        sums = [total + new for total, new in zip(sums, by_kernel, strict=True)]
        return sums, [chunks.put(all_, index, new) for all_, new in zip(slopes, by_state, strict=True)]

    zeros = [jnp.zeros(kernel.shape, jnp.promote_types(kernel.dtype, jnp.float32)) for kernel in whole]
    sums, slopes = chunks.loop(one, (zeros, [jnp.zeros_like(x) for x in flat]))
    if vocabulary.axis is not None:  # each device has a partial sum, from its part of the vocabulary
        slopes = [jax.lax.psum(new, vocabulary.axis) for new in slopes]
    if not plan.alone:
        sums = [summed(total, axes) for total, axes in zip(sums, columns, strict=True)]
    by_kernel = tuple(total.astype(kernel.dtype) for total, kernel in zip(sums, kernels, strict=True))
    return by_kernel, tuple(new.reshape(x.shape) for new, x in zip(slopes, hidden, strict=True))


@dataclasses.dataclass(frozen=True)
class _Chunks:
    """A device's tokens in chunks, masked-in tokens first, so that chunks without any are skipped."""

    order: jax.Array | None  # [chunks, width] of token indices, N for padding; None: one chunk of all
    needed: jax.Array | None  # [] i32, chunks with a token of the mask

    @classmethod
    def of(cls, mask: jax.Array, most: int) -> "_Chunks":
        """Makes even chunks of at most so many tokens: less padding at the end."""
        N = mask.size
        count = max(1, -(-N // most))
        if count == 1:
            return cls(None, None)
        width = -(-N // count)
        order = jnp.argsort(~mask.reshape(-1), stable=True)
        order = jnp.pad(order, (0, count * width - N), constant_values=N).reshape(count, width)
        return cls(order, -(-jnp.sum(mask, dtype=jnp.int32) // width))

    def loop(self, one: Callable[[jax.Array | None, Any], Any], start: Any) -> Any:
        """Runs `one(indices, so_far)` over the chunks that are needed."""
        if self.order is None or self.needed is None:
            return one(None, start)
        order = self.order
        with jax.named_scope(f"at_most_{len(order)}_times"):  # read by accounts of compiled programs
            return jax.lax.fori_loop(0, self.needed, lambda i, so_far: one(order[i], so_far), start)

    def take(self, x: jax.Array, index: jax.Array | None) -> jax.Array:
        """Takes a chunk of x; 0 for padding."""
        return x if index is None else x.at[index].get(mode="fill", fill_value=0)

    def put(self, x: jax.Array, index: jax.Array | None, part: jax.Array) -> jax.Array:
        """Replaces a chunk of x."""
        return part if index is None else x.at[index].set(part, mode="drop")


def _raw(states: jax.Array, kernel: jax.Array) -> jax.Array:
    """Computes [C, V] products of states [C, D] with the kernel, f32 at least."""
    return einsum("cd,vd->cv", states, kernel, jnp.promote_types(states.dtype, jnp.float32))
