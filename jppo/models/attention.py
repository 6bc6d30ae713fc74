"""Causal attention within segments, and against the cache of generated rows.

The cache also has the states of recurrent layers.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Protocol

import chex
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jppo.models.config import LayerModules, ModelConfig
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

Spans = tuple[slice, ...]  # of keys

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
    look = functools.partial(_scores, scale=scale, softcap=softcap, windows=windows, shared_prompts=shared is not None)

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
        return _forward(look, shared, q, k, v, segment, kind, sinks)[0]

    attend.defvjp(
        functools.partial(_forward, look, shared),
        functools.partial(_backward, look, shared, scale=scale, softcap=softcap),
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
    """Computes scores of a block's queries of [R, K, G, T, A] over the keys in `spans`, and the mask of seen keys."""
    queries = q[:, :, :, block]
    R, K, G, B, A = queries.shape
    keys = _take(k, spans, 2)
    scores = scale * _dot("rkqa,rksa->rkqs", queries.reshape(R, K, G * B, A), keys)
    scores = scores.reshape(R, K, G, B, keys.shape[2])
    here = jnp.arange(q.shape[3], dtype=jnp.int32)
    seen = _in_window(here[None, block, None], _take(here, spans, 0)[None, None, :], windows, kind)
    of_key = _take(segment, spans, 1)[:, None]
    same = segment[:, block, None] == of_key
    seen &= same | (of_key < 0) if shared_prompts else same
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap), seen[:, None, None]


def _forward(
    look: Callable[..., tuple[jax.Array, jax.Array]],
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
    mixed, logs = [], []
    for block, spans in query_blocks(q.shape[1], shared):
        scores, seen = look(queries, keys, segment, kind, block, spans)
        R, K, G, B, S = scores.shape
        scores = jnp.where(seen, scores, UNSEEN)
        top = jnp.max(scores, axis=-1, keepdims=True)
        if sinks is not None:
            sink = _of_heads(sinks, K)
            top = jnp.maximum(top, sink)
        weight = jnp.exp(scores - top)
        total = jnp.sum(weight, axis=-1, keepdims=True)
        if sinks is not None:
            total += jnp.exp(sink - top)
        out = _dot("rkqs,rksa->rkqa", weight.astype(v.dtype).reshape(R, K, G * B, S), _take(vals, spans, 2))
        mixed.append(out.reshape(R, K, G, B, -1) / total)
        logs.append(top + jnp.log(total))
    whole = checkpoint_name(_by_token(jnp.concatenate(mixed, axis=3)).astype(q.dtype), NAME)
    return whole, (q, k, v, segment, kind, sinks, checkpoint_name(jnp.concatenate(logs, axis=3), NAME))


def _backward(
    look: Callable[..., tuple[jax.Array, jax.Array]],
    shared: tuple[int, int] | None,
    held: Any,
    given: jax.Array,
    *,
    scale: float,
    softcap: float | None,
) -> tuple[Any, ...]:
    """Computes the gradients of q, k and v: with w the softmax, a score's is w (given·v - Σ w given·v).

    A sink's has no v: -w Σ w given·v, summed over queries.
    """
    q, k, v, segment, kind, sinks, logs = held
    K = k.shape[2]
    queries, keys, vals = _by_head(q, K), _by_head(k)[:, :, 0], _by_head(v)[:, :, 0]
    each = _by_head(given, K)
    by_q, by_sinks = [], jnp.zeros(queries.shape[1:3], logs.dtype)  # [K, G]
    by_k, by_v = jnp.zeros(keys.shape, logs.dtype), jnp.zeros(vals.shape, logs.dtype)
    for block, spans in query_blocks(q.shape[1], shared):
        scores, seen = look(queries, keys, segment, kind, block, spans)
        R, _, G, B, S = scores.shape
        here, flat = (x[:, :, :, block].reshape(R, K, G * B, -1) for x in (queries, each))
        weight = jnp.where(seen, jnp.exp(scores - logs[:, :, :, block]), 0.0)
        pull = _dot("rkqa,rksa->rkqs", flat, _take(vals, spans, 2)).reshape(weight.shape)
        mean = jnp.sum(weight * pull, axis=-1, keepdims=True)
        by_score = scale * weight * (pull - mean)
        if sinks is not None:
            of_sink = jnp.exp(_of_heads(sinks, K) - logs[:, :, :, block])
            by_sinks -= jnp.sum(of_sink * mean, axis=(0, 3, 4))
        if softcap is not None:
            by_score *= 1.0 - jnp.square(scores / softcap)
        by_score = by_score.astype(q.dtype).reshape(R, K, G * B, S)
        by_q.append(_dot("rkqs,rksa->rkqa", by_score, _take(keys, spans, 2)).reshape(R, K, G, B, -1))
        by_k = _add(by_k, spans, _dot("rkqs,rkqa->rksa", by_score, here))
        weight = weight.astype(v.dtype).reshape(by_score.shape)
        by_v = _add(by_v, spans, _dot("rkqs,rkqa->rksa", weight, flat))
    of_q = _by_token(jnp.concatenate(by_q, axis=3)).astype(q.dtype)
    of_k, of_v = (_by_token(x[:, :, None]).astype(k.dtype) for x in (by_k, by_v))
    of_sinks = None if sinks is None else by_sinks.reshape(-1).astype(sinks.dtype)
    return of_q, of_k, of_v, None, None, of_sinks


def query_blocks(length: int, shared: tuple[int, int] | None = None) -> list[tuple[slice, Spans]]:
    """Returns the blocks of queries in a row, each with the spans of its keys.

    A block is a quarter of a row, which halves the computation for later keys. If the longest prompt and sample are
    shorter, it is a quarter of these: blocks after these see the prompt's keys and the longest sample's.
    """
    longest = length if shared is None else min(length, sum(shared))
    size = min(max(-(-longest // (4 * 8)) * 8, SMALLEST_BLOCK), LARGEST_BLOCK)
    out: list[tuple[slice, Spans]] = []
    for start in range(0, length, size):
        block = slice(start, min(start + size, length))
        spans: Spans = (slice(block.stop),)
        if shared is not None and start > sum(shared):
            spans = (slice(shared[0]), slice(start - shared[1], block.stop))
        out.append((block, spans))
    return out


def computed(length: int, shared: tuple[int, int] | None = None) -> int:
    """Counts the pairs of a query and a key whose scores are computed in a row."""
    each = query_blocks(length, shared)
    return sum((block.stop - block.start) * len(range(length)[span]) for block, spans in each for span in spans)


def _take(x: jax.Array, spans: Spans, axis: int) -> jax.Array:
    parts = [jax.lax.slice_in_dim(x, *span.indices(x.shape[axis])[:2], axis=axis) for span in spans]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=axis)


def _add(total: jax.Array, spans: Spans, part: jax.Array) -> jax.Array:
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
    """Inverts `_by_head`."""
    R, K, G, T, A = x.shape
    return x.transpose(0, 3, 1, 2, 4).reshape(R, T, K * G, A)


def _of_heads(sinks: jax.Array, kv_heads: int) -> jax.Array:
    """Reshapes [H] to f32 [1, K, H/K, 1, 1], as scores [R, K, H/K, T, S]."""
    return sinks.astype(jnp.float32).reshape(1, kv_heads, -1, 1, 1)


def _dot(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return einsum(equation, a, b, jnp.promote_types(a.dtype, jnp.float32))


def attend_cached(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    position: jax.Array,
    kind: jax.Array | int,
    sinks: jax.Array | None = None,
    *,
    scale: float,
    softcap: float | None,
    windows: Windows,
) -> jax.Array:
    """Attends from queries at `position` [R, P] to a cache: entry s of k and v [R, S, K, A] is position s."""
    chex.assert_rank([q, k, v, position], [4, 4, 4, 2])
    slots = jnp.arange(k.shape[1], dtype=jnp.int32)
    seen = _in_window(position[:, :, None], slots[None, None, :], windows, kind)
    return _softmax_mix(q, k, v, seen, sinks, scale=scale, softcap=softcap)


def _in_window(query: jax.Array, key: jax.Array, windows: Windows, kind: jax.Array | int) -> jax.Array:
    """Whether the key is in the window of the query's position."""
    seen = key <= query
    if all(window is None for window in windows):
        return seen
    far = jnp.iinfo(jnp.int32).max
    reach = jnp.asarray([far if window is None else window for window in windows], jnp.int32)[kind]
    return seen & (query - key < reach)


def _softmax_mix(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    seen: jax.Array,
    sinks: jax.Array | None,
    *,
    scale: float,
    softcap: float | None,
) -> jax.Array:
    """Computes softmax(cap(q k^T scale)) v over `seen` [R or 1, T, S]; each kv head is shared by H/K query heads.

    Every query must see a key. Empty positions (segment 0) see each other, so that all is finite.
    """
    R, T, H, A = q.shape
    K = k.shape[2]
    # g: the query heads that share one kv head; t: queries, s: keys.
    grouped = q.reshape(R, T, K, H // K, A)
    scores = scale * jnp.einsum("rtkga,rska->rkgts", grouped, k, preferred_element_type=jnp.float32)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(seen[:, None, None], scores, jnp.finfo(jnp.float32).min)
    if sinks is not None:  # a further key, without a value
        sink = jnp.broadcast_to(_of_heads(sinks, K), (*scores.shape[:-1], 1))
        scores = jnp.concatenate([scores, sink], axis=-1)
    weight = jax.nn.softmax(scores, axis=-1)[..., : k.shape[1]].astype(v.dtype)  # [R, K, H/K, T, S]
    return jnp.einsum("rkgts,rska->rtkga", weight, v).reshape(R, T, H, v.shape[-1])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerCache:
    """The cache of one layer; entry s of a row is its position s."""

    k: jax.Array  # [R, S, K, A]; of latent attention the latents and rotary keys, [R, S, 1, J]
    v: jax.Array | None  # [R, S, K, A]; None with latent attention


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeltaCache:
    """The recurrent state of one layer with a gated delta net."""

    state: jax.Array  # [R, N, G, A, W] f32
    inputs: jax.Array  # [R, taps - 1, C], the last ones of its convolution


Held = LayerCache | DeltaCache
Cache = tuple[Held | None, ...]  # one per layer, each updated in place; None: it takes an earlier layer's


def empty_cache(cfg: ModelConfig, *, rows: int, length: int, dtype: Any) -> Cache:
    """Allocates a cache of `length` positions for so many rows."""

    def make(modules: LayerModules) -> Held | None:
        if not modules.keyed:
            return None
        if modules.mixer == "attention":
            K, A = cfg.heads_of(modules) if cfg.latent is None else (1, cfg.latent.cached_dim)
            k, v = (jnp.zeros((rows, length, K, A), dtype) for _ in range(2))
            return LayerCache(k, v if cfg.latent is None else None)
        assert cfg.delta is not None
        state, inputs = ((rows, *rest) for rest in cfg.delta.state_shapes)
        return DeltaCache(jnp.zeros(state, jnp.float32), jnp.zeros(inputs, dtype))

    return tuple(make(modules) for modules in cfg.layer_modules)


def cache_heads(cfg: ModelConfig) -> int:
    """Returns a number that divides the heads of every layer's cache."""
    return math.gcd(*(cfg.heads_of(modules).num_kv_heads for modules in cfg.layer_modules)) if cfg.latent is None else 1


def cache_dtype(cache: Cache) -> Any:
    """Returns the dtype that the cache was allocated with."""
    first = next(held for held in cache if held is not None)
    return first.k.dtype if isinstance(first, LayerCache) else first.inputs.dtype


def cache_row_bytes(cfg: ModelConfig, *, length: int, dtype: Any) -> int:
    """Returns the bytes of `length` positions of one row."""
    cache = jax.eval_shape(lambda: empty_cache(cfg, rows=1, length=length, dtype=dtype))
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(cache))


def extend_cache(held: LayerCache, k: jax.Array, v: jax.Array | None, position: jax.Array) -> LayerCache:
    """Writes k and v [R, P, K, A] at `position` [R, P]; entries beyond the cache's end are dropped."""
    new = LayerCache(k, v)
    for x in jax.tree.leaves(new):
        chex.assert_rank([x, position], [4, 2])
        chex.assert_equal_shape_prefix([x, position], 2)
    row = jnp.arange(position.shape[0], dtype=jnp.int32)[:, None]
    out: LayerCache = jax.tree.map(
        lambda old, x: old.at[row, position].set(x.astype(old.dtype), mode="drop"), held, new
    )
    return out
