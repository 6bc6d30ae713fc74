"""Heads: hidden states to log-probs, entropy and values; logits exist for one chunk of tokens at a time.

The kernel of the logits is [V, D], as an embedding table, so that a tied one needs no transposed copy. It may have
padding rows, so that a mesh divides them; these have probability 0. `by_logits` runs a function of logits chunk by
chunk on each device of the mesh, also in the backward pass.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jppo.models.config import ModelConfig
from jppo.models.kernels import einsum, product, recomputed_by
from jppo.models.sequence_parallel import HEADS, column_axes, gather_all, map_over_mesh, sum_grads, vary_like
from jppo.types import Array

# The logit of padding: its probability is 0, and its share of the entropy too.
NO_TOKEN = -1e30

# Hidden states [R, T, D], the kernel [V, D] of the logits, and their model's config.
State = tuple[jax.Array, jax.Array, ModelConfig]


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The tokens along the last axis of logits; a mesh axis may shard them over its devices."""

    axis: str | None = None

    def tokens(self, logits: jax.Array) -> jax.Array:
        """Returns the token of each logit."""
        local_ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
        return local_ids if self.axis is None else local_ids + jax.lax.axis_index(self.axis) * logits.shape[-1]

    def masked(self, logits: jax.Array, kept: jax.Array) -> jax.Array:
        """Removes the tokens outside of `kept` [C, K] from the logits [C, V], as truncated sampling does.

        Ids are padded with negative ones. A row whose first id is negative keeps the whole vocabulary.
        """
        V = logits.shape[-1]
        local_ids = kept if self.axis is None else kept - jax.lax.axis_index(self.axis) * V
        column = jnp.where((kept >= 0) & (local_ids >= 0), local_ids, V)  # those elsewhere are dropped
        row = jax.lax.broadcasted_iota(jnp.int32, kept.shape, 0)
        keep = jnp.zeros(logits.shape, bool).at[row, column].set(True, mode="drop") | (kept[:, :1] < 0)
        return jnp.where(keep, logits, NO_TOKEN)

    def total(self, x: jax.Array) -> jax.Array:
        """Sums x over the tokens, also where a mesh axis shards them."""
        local_sum = jnp.sum(x, axis=-1)
        return local_sum if self.axis is None else jax.lax.psum(local_sum, self.axis)

    def logsumexp(self, logits: jax.Array) -> jax.Array:
        """Computes log Σ exp(logits)."""
        if self.axis is None:
            return jax.nn.logsumexp(logits, axis=-1)
        largest: jax.Array = jax.lax.pmax(jnp.max(jax.lax.stop_gradient(logits), axis=-1), self.axis)
        return largest + jnp.log(self.total(jnp.exp(logits - largest[..., None])))

    def log_softmax(self, logits: jax.Array) -> jax.Array:
        """Converts logits to log-probs."""
        if self.axis is None:
            return jax.nn.log_softmax(logits)
        return logits - vary_like(self.logsumexp(logits), logits)[..., None]

    def largest(self, logits: jax.Array, k: int) -> jax.Array:
        """Returns a mask of the k largest logits; of equal ones the first tokens."""
        values, index = jax.lax.top_k(logits, min(k, logits.shape[-1]))
        tokens = jnp.take_along_axis(self.tokens(logits), index, axis=-1)
        if self.axis is not None:  # the largest of each device's largest
            scores, ids = (jax.lax.all_gather(x, self.axis, axis=x.ndim - 1, tiled=True) for x in (values, tokens))
            values, index = jax.lax.top_k(scores, k)
            tokens = jnp.take_along_axis(ids, index, axis=-1)
        threshold = values[..., -1:]
        last_tied = jnp.max(jnp.where(values == threshold, tokens, -1), axis=-1, keepdims=True)
        return (logits > threshold) | ((logits == threshold) & (self.tokens(logits) <= last_tied))


WHOLE_VOCABULARY = Vocabulary()


def logprob_entropy(
    state: State,
    targets: jax.Array,
    *,
    temperature: float,
    chunk_tokens: int,
    with_entropy: bool,
    mask: jax.Array | None = None,
    kept: Array | None = None,
    mesh: Mesh | None = None,
    more: Sequence[Callable[[jax.Array, jax.Array, Vocabulary], jax.Array]] = (),
) -> tuple[jax.Array, ...]:
    """Computes log p(target) and H(p) with p = softmax(logits / temperature): two of [R, T] f32, 0 outside the mask.

    targets is [R, T]. Without entropy the second is 0. `more` are further functions of logits and targets.
    `kept` is as in `by_logits`.
    """

    def body(vocabulary: Vocabulary, targets: jax.Array, logits: jax.Array) -> tuple[jax.Array, ...]:
        logp = logprob_of(logits, targets, vocabulary)
        entropy = entropy_of(logits, vocabulary) if with_entropy else jnp.zeros_like(logp)
        return logp, entropy, *(statistic(logits, targets, vocabulary) for statistic in more)

    options = dict[str, Any](temperature=temperature, chunk_tokens=chunk_tokens, mask=mask, kept=kept, mesh=mesh)
    return by_logits(body, [state], targets, **options)


def by_logits(
    body: Callable[..., tuple[jax.Array, ...]],
    states: Sequence[State],
    targets: jax.Array,
    *,
    temperature: float,
    chunk_tokens: int,
    mask: jax.Array | None = None,
    kept: Array | None = None,
    mesh: Mesh | None = None,
) -> tuple[jax.Array, ...]:
    """Runs `body(vocabulary, targets, *logits)` on the logits of each state at the temperature; arrays [R, T] f32.

    The body sees [C] targets and [C, V] f32 logits, C at most `chunk_tokens`, also in the backward pass. Outside the
    mask its outputs are 0. Each device of the mesh processes its own tokens of the mask. It gathers the kernel's
    columns, in the states' dtype, once for each direction. It sums the kernel's gradient over its chunks in f32 before
    devices exchange it. A sharded vocabulary stays sharded, and sums over it are exchanged. With `kept` [R, T, K], the
    logits are of these tokens only, as in `Vocabulary.masked`.
    """
    hidden, kernels = (tuple(jnp.asarray(state[i]) for state in states) for i in (0, 1))
    models, targets = tuple(state[2] for state in states), jnp.asarray(targets)
    chex.assert_rank([targets, *hidden], [2] + [3] * len(states))
    chex.assert_equal_shape_prefix([targets, *hidden], 2)
    if temperature <= 0 or chunk_tokens < 1:
        raise ValueError(f"{temperature=} must be above 0 and {chunk_tokens=} at least 1")
    mask = jnp.ones(targets.shape, bool) if mask is None else mask
    mesh = None if mesh is None or mesh.size == 1 else mesh
    plan = Chunking(functools.partial(_run_on_products, body, models, temperature), chunk_tokens, mesh)
    tokens = (targets,) if kept is None else (targets, jnp.asarray(kept))
    return tuple(chunked_outputs(plan, kernels, hidden, tokens, mask))


def _run_on_products(
    body: Callable[..., tuple[jax.Array, ...]],
    models: Sequence[ModelConfig],
    temperature: float,
    vocabulary: Vocabulary,
    tokens: tuple[jax.Array, ...],
    *products: jax.Array,
) -> tuple[jax.Array, ...]:
    """Runs the body on the logits of products [C, V]; `tokens` are the targets [C], and any kept tokens [C, K]."""
    targets, *kept = tokens
    logits = [_finish_logits(x, cfg, vocabulary) / temperature for x, cfg in zip(products, models, strict=True)]
    return body(vocabulary, targets, *([vocabulary.masked(x, *kept) for x in logits] if kept else logits))


def logprob_of(logits: jax.Array, targets: jax.Array, vocabulary: Vocabulary = WHOLE_VOCABULARY) -> jax.Array:
    """Computes log p(target) [...] of logits [..., V]."""
    chex.assert_rank(logits, targets.ndim + 1)
    # A comparison and not a gather: it fuses, its gradient is no scatter, and the vocabulary may be sharded.
    chosen = vocabulary.tokens(logits) == targets[..., None]
    return vocabulary.total(jnp.where(chosen, logits, 0.0)) - vocabulary.logsumexp(logits)


def entropy_of(logits: jax.Array, vocabulary: Vocabulary = WHOLE_VOCABULARY) -> jax.Array:
    """Computes H(p) = -Σ p log p [...] of logits [..., V]."""
    log_probs = vocabulary.log_softmax(logits)  # of every token: large logits would cancel otherwise
    return -vocabulary.total(jnp.exp(log_probs) * log_probs)


def sum_pi_squared_of(logits: jax.Array, _: jax.Array, vocabulary: Vocabulary = WHOLE_VOCABULARY) -> jax.Array:
    """Computes Σ p² [...] of logits [..., V]."""
    return vocabulary.total(jnp.exp(2.0 * vocabulary.log_softmax(logits)))


def logits_of(state: State) -> jax.Array:
    """Computes [R, T, V] logits, f32 at least: for a few positions only."""
    hidden, kernel, cfg = state
    dtype = jnp.promote_types(hidden.dtype, jnp.float32)
    return _finish_logits(product("rtd,vd->rtv", hidden, kernel, dtype), cfg)


def _finish_logits(products: jax.Array, cfg: ModelConfig, vocabulary: Vocabulary = WHOLE_VOCABULARY) -> jax.Array:
    """Finishes logits [..., V] of products with the kernel: divided, soft-capped, and with padding rows masked."""
    if cfg.logit_divisor != 1.0:
        products = products / cfg.logit_divisor
    if cfg.logit_softcap is not None:
        products = cfg.logit_softcap * jnp.tanh(products / cfg.logit_softcap)
    if cfg.padded_vocab_size == cfg.vocab_size:
        return products
    return jnp.where(vocabulary.tokens(products) < cfg.vocab_size, products, NO_TOKEN)


def values(hidden: jax.Array, kernel: jax.Array) -> jax.Array:
    """Computes [R, T] f32 values of the states, from hidden [R, T, D] and the score kernel [D, 1].

    A kernel [D, B] of a histogram makes its logits, [R, T, B] f32.
    """
    chex.assert_rank([hidden, kernel], [3, 2])
    hidden, kernel = hidden.astype(jnp.float32), kernel.astype(jnp.float32)
    single = kernel.shape[1] == 1
    return jnp.einsum("rtd,d->rt", hidden, kernel[:, 0]) if single else jnp.einsum("rtd,db->rtb", hidden, kernel)


@dataclasses.dataclass(frozen=True)
class Chunking:
    """How each device of a mesh computes the outputs of its own tokens."""

    # (vocabulary, arrays of tokens [C, ...], *raw logits [C, V]) -> arrays [C]
    outputs: Callable[..., tuple[jax.Array, ...]]
    chunk: int  # tokens
    mesh: Mesh | None  # None: one device

    def vocabulary(self, kernel: jax.Array) -> Vocabulary:
        """Returns how the mesh shards the tokens of such a whole kernel."""
        if self.mesh is None or self.mesh.shape[HEADS] == 1 or kernel.shape[0] % self.mesh.shape[HEADS]:
            return Vocabulary()
        return Vocabulary(HEADS)

    def on_mesh(self, fn: Callable[..., Any], kernels: Sequence[jax.Array], gradients: bool) -> Callable[..., Any]:
        """Maps `fn(vocabulary, columns, kernels, *arrays of rows)` over devices, each with its part of the arrays."""
        vocabulary, sharded = self.vocabulary(kernels[0]), tuple(column_axes(self.mesh, k.shape[1]) for k in kernels)
        fn = functools.partial(fn, self, vocabulary, sharded)
        if self.mesh is None:
            return fn
        specs = tuple(PartitionSpec(vocabulary.axis, axes or None) for axes in sharded)
        return map_over_mesh(fn, self.mesh, specs, gradients=gradients)


def _outputs_backward(plan: Chunking, args: Any, cotangents: Any) -> tuple[Any, ...]:
    return *plan.on_mesh(_backward, args[0], True)(*args, cotangents), None, None


@recomputed_by(_outputs_backward)
def chunked_outputs(
    plan: Chunking, kernels: Any, hidden: Any, tokens: tuple[jax.Array, ...], mask: jax.Array
) -> tuple[jax.Array, ...]:
    """Computes the plan's outputs [R, T] of each token of the mask, 0 elsewhere, from a kernel and states per model."""
    result: tuple[jax.Array, ...] = plan.on_mesh(_forward, kernels, False)(kernels, hidden, tokens, mask)
    return result


def _forward(
    plan: Chunking, vocabulary: Vocabulary, column_axes: Any, kernels: Any, hidden: Any, tokens: Any, mask: jax.Array
) -> tuple[jax.Array, ...]:
    """Computes the outputs of a device's tokens [R, T]."""
    flat, tokens = ([x.reshape(mask.size, *x.shape[2:]) for x in arrays] for arrays in (hidden, tokens))
    full_kernels, chunks = gather_all(kernels, column_axes, flat[0]), _Chunks.of(mask, plan.chunk)

    def chunk_outputs(index: jax.Array | None) -> tuple[jax.Array, ...]:
        products = [_products(chunks.take(x, index), kernel) for x, kernel in zip(flat, full_kernels, strict=True)]
        return plan.outputs(vocabulary, tuple(chunks.take(x, index) for x in tokens), *products)

    def run_chunk(index: jax.Array | None, results: Any) -> Any:
        return jax.tree.map(lambda array, new: chunks.put(array, index, new), results, chunk_outputs(index))

    shapes = jax.eval_shape(chunk_outputs, None)
    zeros = jax.tree.map(lambda kind: vary_like(jnp.zeros(mask.size, kind.dtype), mask), shapes)
    result = chunks.loop(run_chunk, zeros)
    outputs: tuple[jax.Array, ...] = jax.tree.map(lambda x: jnp.where(mask, x.reshape(mask.shape), 0), result)
    return outputs


def _backward(
    plan: Chunking,
    vocabulary: Vocabulary,
    column_axes: Any,
    kernels: Any,
    hidden: Any,
    tokens: Any,
    mask: jax.Array,
    cotangents: Any,
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Computes the gradients of the kernels and of a device's hidden states, with logits recomputed."""
    flat, tokens = ([x.reshape(mask.size, *x.shape[2:]) for x in arrays] for arrays in (hidden, tokens))
    cotangents = jax.tree.map(lambda x: jnp.where(mask, x, 0).reshape(-1), cotangents)
    dtype = flat[0].dtype
    full_kernels, chunks = gather_all(kernels, column_axes, flat[0]), _Chunks.of(mask, plan.chunk)
    flat = [vary_like(x, kernel) for x, kernel in zip(flat, full_kernels, strict=True)]

    def run_chunk(index: jax.Array | None, results: Any) -> Any:
        sums, grad_hidden = results
        states = [chunks.take(x, index) for x in flat]
        products = [_products(x, kernel) for x, kernel in zip(states, full_kernels, strict=True)]
        chunk_tokens = tuple(chunks.take(x, index) for x in tokens)
        pullback = jax.vjp(functools.partial(plan.outputs, vocabulary, chunk_tokens), *products)[1]
        grads = [x.astype(dtype) for x in pullback(jax.tree.map(lambda x: chunks.take(x, index), cotangents))]
        by_kernel = [einsum("cv,cd->vd", g, x, s.dtype) for g, x, s in zip(grads, states, sums, strict=True)]
        by_state = [einsum("cv,vd->cd", g, kernel, dtype) for g, kernel in zip(grads, full_kernels, strict=True)]
        sums = [total + new for total, new in zip(sums, by_kernel, strict=True)]
        return sums, [chunks.put(array, index, new) for array, new in zip(grad_hidden, by_state, strict=True)]

    zeros = [jnp.zeros_like(kernel, jnp.promote_types(kernel.dtype, jnp.float32)) for kernel in full_kernels]
    sums, grad_hidden = chunks.loop(run_chunk, (zeros, [jnp.zeros_like(x) for x in flat]))
    if vocabulary.axis is not None:  # each device has a partial sum, from its part of the vocabulary
        grad_hidden = [jax.lax.psum(new, vocabulary.axis) for new in grad_hidden]
    if plan.mesh is not None:
        sums = [sum_grads(total, axes) for total, axes in zip(sums, column_axes, strict=True)]
    by_kernel = tuple(total.astype(kernel.dtype) for total, kernel in zip(sums, kernels, strict=True))
    return by_kernel, tuple(new.reshape(x.shape) for new, x in zip(grad_hidden, hidden, strict=True))


@dataclasses.dataclass(frozen=True)
class _Chunks:
    """A device's tokens in chunks, masked-in tokens first, so that chunks without any are skipped."""

    order: jax.Array | None  # [chunks, width] of token indices, N for padding; None: one chunk of all
    needed: jax.Array | None  # [] i32, chunks with a token of the mask

    @classmethod
    def of(cls, mask: jax.Array, max_tokens: int) -> "_Chunks":
        """Makes even chunks of at most so many tokens: less padding at the end."""
        N = mask.size
        count = max(1, -(-N // max_tokens))
        if count == 1:
            return cls(None, None)
        width = -(-N // count)
        order = jnp.argsort(~mask.reshape(-1), stable=True)
        order = jnp.pad(order, (0, count * width - N), constant_values=N).reshape(count, width)
        return cls(order, -(-jnp.sum(mask, dtype=jnp.int32) // width))

    def loop(self, run_chunk: Callable[[jax.Array | None, Any], Any], start: Any) -> Any:
        """Runs `run_chunk(indices, results)` over the chunks that are needed."""
        if self.order is None or self.needed is None:
            return run_chunk(None, start)
        order = self.order
        with jax.named_scope(f"at_most_{len(order)}_times"):  # read by accounts of compiled programs
            return jax.lax.fori_loop(0, self.needed, lambda i, results: run_chunk(order[i], results), start)

    def take(self, x: jax.Array, index: jax.Array | None) -> jax.Array:
        """Takes a chunk of x; 0 for padding."""
        return x if index is None else x.at[index].get(mode="fill", fill_value=0)

    def put(self, x: jax.Array, index: jax.Array | None, part: jax.Array) -> jax.Array:
        """Replaces a chunk of x."""
        return part if index is None else x.at[index].set(part, mode="drop")


def _products(states: jax.Array, kernel: jax.Array) -> jax.Array:
    """Computes [C, V] products of states [C, D] with the kernel, f32 at least."""
    return einsum("cd,vd->cv", states, kernel, jnp.promote_types(states.dtype, jnp.float32))
