"""Causal attention within segments. `cache.py` attends to the cache of generated rows."""

import functools
from collections.abc import Callable
from typing import Any, Protocol

import chex
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jppo.models.kernels import einsum


class Attend(Protocol):
    """Attention of rows, to [R, T, H, A]: q [R, T, H, A], k and v [R, T, K, A], segment [R, T].

    `kind` is an index into the layers' windows. `sinks` [H] are learned scores in the softmax's denominator, without a
    value. v may have another head size than q and k; the result has v's.
    """

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        segment: jax.Array,
        kind: jax.Array | int,
        sinks: jax.Array | None = None,
        /,
    ) -> jax.Array: ...


Windows = tuple[int | None, ...]  # of each kind of layer; None: no window

Spans = tuple[slice, ...]  # parts of a row's keys

NAME = "attention"  # under which remat policies save outputs and the softmax's residuals

SMALLEST_BLOCK, LARGEST_BLOCK = 64, 1024  # of queries
UNSEEN = -1e30  # the score of a key that is not seen


def make_plain(
    *, scale: float, softcap: float | None, windows: Windows, shared: tuple[int, int] | None = None
) -> Attend:
    """Makes attention by XLA alone, on any backend. It holds the scores of one block of queries at a time.

    The backward pass recomputes them from each query's log Σ exp(scores). With `shared` prompts, segment -1 is a
    prompt that all later segments of its row see, besides themselves. It ends before position `shared[0]`. Segments
    that end after the sum of the two are no longer than `shared[1]`. Keys that no query of a block sees are skipped.
    Windows, which count positions of a row, must all be None then.
    """
    assert shared is None or all(window is None for window in windows)
    score = functools.partial(_scores, scale=scale, softcap=softcap, windows=windows, shared_prompts=shared is not None)

    @jax.custom_vjp
    def attend(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        segment: jax.Array,
        kind: jax.Array | int,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        chex.assert_rank([q, k, v, segment], [4, 4, 4, 2])
        return _forward(score, shared, q, k, v, segment, kind, sinks)[0]

    attend.defvjp(
        functools.partial(_forward, score, shared),
        functools.partial(_backward, score, shared, scale=scale, softcap=softcap),
    )
    return attend


def _scores(
    q: jax.Array,
    k: jax.Array,
    segment: jax.Array,
    kind: jax.Array | int,
    block: slice,
    spans: Spans,
    *,
    scale: float,
    softcap: float | None,
    windows: Windows,
    shared_prompts: bool,
) -> tuple[jax.Array, jax.Array]:
    """Computes the scores of a block of queries [R, K, G, T, A] with the keys in `spans`; and which are visible."""
    queries = q[:, :, :, block]
    R, K, G, B, A = queries.shape
    keys = _take_spans(k, spans, 2)
    scores = scale * _dot("rkqa,rksa->rkqs", queries.reshape(R, K, G * B, A), keys)
    scores = scores.reshape(R, K, G, B, keys.shape[2])
    positions = jnp.arange(q.shape[3], dtype=jnp.int32)
    visible = in_window(positions[None, block, None], _take_spans(positions, spans, 0)[None, None, :], windows, kind)
    key_segment = _take_spans(segment, spans, 1)[:, None]
    same_segment = segment[:, block, None] == key_segment
    visible &= same_segment | (key_segment < 0) if shared_prompts else same_segment
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap), visible[:, None, None]


def _forward(
    compute_scores: Callable[..., tuple[jax.Array, jax.Array]],
    shared: tuple[int, int] | None,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment: jax.Array,
    kind: jax.Array | int,
    sinks: jax.Array | None,
) -> tuple[jax.Array, Any]:
    """Computes softmax(scores) v; returns it and, for `_backward`, the arguments and each query's log Σ exp(scores)."""
    queries, keys, vals = _by_head(q, k.shape[2]), _by_head(k)[:, :, 0], _by_head(v)[:, :, 0]
    outputs, log_sums = [], []
    for block, spans in query_blocks(q.shape[1], shared):
        scores, visible = compute_scores(queries, keys, segment, kind, block, spans)
        R, K, G, B, S = scores.shape
        scores = jnp.where(visible, scores, UNSEEN)
        row_max = jnp.max(scores, axis=-1, keepdims=True)
        if sinks is not None:
            sink = sinks_by_head(sinks, K)
            row_max = jnp.maximum(row_max, sink)
        weights = jnp.exp(scores - row_max)
        denominator = jnp.sum(weights, axis=-1, keepdims=True)
        if sinks is not None:
            denominator += jnp.exp(sink - row_max)
        output = _dot("rkqs,rksa->rkqa", weights.astype(v.dtype).reshape(R, K, G * B, S), _take_spans(vals, spans, 2))
        outputs.append(output.reshape(R, K, G, B, -1) / denominator)
        log_sums.append(row_max + jnp.log(denominator))
    result = checkpoint_name(_by_token(jnp.concatenate(outputs, axis=3)).astype(q.dtype), NAME)
    return result, (q, k, v, segment, kind, sinks, checkpoint_name(jnp.concatenate(log_sums, axis=3), NAME))


def _backward(
    compute_scores: Callable[..., tuple[jax.Array, jax.Array]],
    shared: tuple[int, int] | None,
    residuals: Any,
    cotangent: jax.Array,
    *,
    scale: float,
    softcap: float | None,
) -> tuple[Any, ...]:
    """Computes the gradients of q, k and v: with w the softmax and c the cotangent, a score's is w (c·v - Σ w c·v).

    A sink's has no v: -w Σ w c·v, summed over queries.
    """
    q, k, v, segment, kind, sinks, log_sums = residuals
    K = k.shape[2]
    queries, keys, vals = _by_head(q, K), _by_head(k)[:, :, 0], _by_head(v)[:, :, 0]
    cotangent_by_head = _by_head(cotangent, K)
    grad_q_blocks, grad_sinks_sum = [], jnp.zeros(queries.shape[1:3], log_sums.dtype)  # [K, G]
    grad_k_sum, grad_v_sum = jnp.zeros(keys.shape, log_sums.dtype), jnp.zeros(vals.shape, log_sums.dtype)
    for block, spans in query_blocks(q.shape[1], shared):
        scores, visible = compute_scores(queries, keys, segment, kind, block, spans)
        R, _, G, B, S = scores.shape
        q_block, cotangent_block = (x[:, :, :, block].reshape(R, K, G * B, -1) for x in (queries, cotangent_by_head))
        weights = jnp.where(visible, jnp.exp(scores - log_sums[:, :, :, block]), 0.0)
        grad_weights = _dot("rkqa,rksa->rkqs", cotangent_block, _take_spans(vals, spans, 2)).reshape(weights.shape)
        mean_grad = jnp.sum(weights * grad_weights, axis=-1, keepdims=True)
        grad_scores = scale * weights * (grad_weights - mean_grad)
        if sinks is not None:
            sink_weight = jnp.exp(sinks_by_head(sinks, K) - log_sums[:, :, :, block])
            grad_sinks_sum -= jnp.sum(sink_weight * mean_grad, axis=(0, 3, 4))
        if softcap is not None:
            grad_scores *= 1.0 - jnp.square(scores / softcap)
        grad_scores = grad_scores.astype(q.dtype).reshape(R, K, G * B, S)
        grad_q_blocks.append(_dot("rkqs,rksa->rkqa", grad_scores, _take_spans(keys, spans, 2)).reshape(R, K, G, B, -1))
        grad_k_sum = _add_to_spans(grad_k_sum, spans, _dot("rkqs,rkqa->rksa", grad_scores, q_block))
        weights = weights.astype(v.dtype).reshape(grad_scores.shape)
        grad_v_sum = _add_to_spans(grad_v_sum, spans, _dot("rkqs,rkqa->rksa", weights, cotangent_block))
    grad_q = _by_token(jnp.concatenate(grad_q_blocks, axis=3)).astype(q.dtype)
    grad_k, grad_v = (_by_token(x[:, :, None]).astype(k.dtype) for x in (grad_k_sum, grad_v_sum))
    grad_sinks = None if sinks is None else grad_sinks_sum.reshape(-1).astype(sinks.dtype)
    return grad_q, grad_k, grad_v, None, None, grad_sinks


def query_blocks(length: int, shared: tuple[int, int] | None = None) -> list[tuple[slice, Spans]]:
    """Returns the blocks of queries in a row, each with the spans of its keys.

    A block is a quarter of a row, which halves the computation for later keys. If the longest prompt and sample are
    shorter, it is a quarter of these: blocks after these see the prompt's keys and the longest sample's.
    """
    longest = length if shared is None else min(length, sum(shared))
    size = min(max(-(-longest // (4 * 8)) * 8, SMALLEST_BLOCK), LARGEST_BLOCK)
    blocks: list[tuple[slice, Spans]] = []
    for start in range(0, length, size):
        block = slice(start, min(start + size, length))
        spans: Spans = (slice(block.stop),)
        if shared is not None and start > sum(shared):
            spans = (slice(shared[0]), slice(start - shared[1], block.stop))
        blocks.append((block, spans))
    return blocks


def count_score_pairs(length: int, shared: tuple[int, int] | None = None) -> int:
    """Counts the pairs of a query and a key whose scores are computed in a row."""
    blocks = query_blocks(length, shared)
    return sum((block.stop - block.start) * len(range(length)[span]) for block, spans in blocks for span in spans)


def _take_spans(x: jax.Array, spans: Spans, axis: int) -> jax.Array:
    """Returns the parts of x in `spans` of an axis, concatenated."""
    parts = [jax.lax.slice_in_dim(x, *span.indices(x.shape[axis])[:2], axis=axis) for span in spans]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=axis)


def _add_to_spans(total: jax.Array, spans: Spans, part: jax.Array) -> jax.Array:
    """Adds the results for the keys in `spans` to the total [R, K, S, A]."""
    start = 0
    for span in spans:
        stop = start + len(range(total.shape[2])[span])
        total = total.at[:, :, span].add(part[:, :, start:stop])
        start = stop
    return total


def _by_head(x: jax.Array, kv_heads: int | None = None) -> jax.Array:
    """Reshapes [R, T, H, A] to [R, K, H/K, T, A]."""
    R, T, H, A = x.shape
    K = H if kv_heads is None else kv_heads
    return x.reshape(R, T, K, H // K, A).transpose(0, 2, 3, 1, 4)


def _by_token(x: jax.Array) -> jax.Array:
    """Reshapes [R, K, H/K, T, A] back to [R, T, H, A]."""
    R, K, G, T, A = x.shape
    return x.transpose(0, 3, 1, 2, 4).reshape(R, T, K * G, A)


def sinks_by_head(sinks: jax.Array, kv_heads: int) -> jax.Array:
    """Reshapes [H] to f32 [1, K, H/K, 1, 1], as scores [R, K, H/K, T, S]."""
    return sinks.astype(jnp.float32).reshape(1, kv_heads, -1, 1, 1)


def _dot(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Multiplies two arrays by einsum, with an f32 result at least."""
    return einsum(equation, a, b, jnp.promote_types(a.dtype, jnp.float32))


def in_window(query: jax.Array, key: jax.Array, windows: Windows, kind: jax.Array | int) -> jax.Array:
    """Whether the key is in the window of the query's position."""
    visible = key <= query
    if all(window is None for window in windows):
        return visible
    no_limit = jnp.iinfo(jnp.int32).max
    sizes = jnp.asarray([no_limit if window is None else window for window in windows], jnp.int32)
    return visible & (query - key < sizes[kind])
