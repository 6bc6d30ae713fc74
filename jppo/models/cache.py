"""The cache of rows that are generated together: keys and values in a ring, recurrent states, attention to them.

All rows write their newest token to the same slot, so a step is one update in place on every backend. Position p of a
row whose last token is at position q is q - p slots before that slot, and the first slot follows the last one.
"""

import dataclasses
import math
from typing import Any, Protocol

import chex
import jax
import jax.numpy as jnp

from jppo.models.attention import UNSEEN, Windows, in_window, sinks_by_head
from jppo.models.config import LayerModules, ModelConfig
from jppo.models.rotary import LayerPositions


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerCache:
    """The keys and values of one layer in S slots."""

    k: jax.Array  # [R, K, S, A]; of latent attention the latents and rotary keys, [R, 1, S, J]
    v: jax.Array | None  # [R, K, S, A]; None with latent attention


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeltaCache:
    """The recurrent state of one layer with a gated delta net."""

    state: jax.Array  # [R, N, G, A, W] f32
    inputs: jax.Array  # [R, taps - 1, C], the last ones of its convolution


State = LayerCache | DeltaCache  # of one layer
Cache = tuple[State | None, ...]  # one per layer; None: it takes an earlier layer's


class AttendCached(Protocol):
    """Attention of one token a row, q [R, H, A], to k and v [R, K, S, A] of `visible` [R, S] slots: [R, H, A of v].

    `sinks` [H] are as in `attention.Attend`.
    """

    def __call__(
        self, q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array, sinks: jax.Array | None = None, /
    ) -> jax.Array: ...


class ToCache(Protocol):
    """Attention of each row's newest token, q [R, 1, H, A], to a layer's cache: [R, 1, H, A of v]."""

    def __call__(
        self, q: jax.Array, k: jax.Array, v: jax.Array, positions: LayerPositions, sinks: jax.Array | None = None, /
    ) -> jax.Array: ...


def empty_cache(cfg: ModelConfig, *, rows: int, length: int, dtype: Any) -> Cache:
    """Allocates a cache of `length` slots for so many rows."""

    def make(modules: LayerModules) -> State | None:
        if not modules.keyed:
            return None
        if modules.mixer == "attention":
            K, A = cfg.heads_of(modules) if cfg.latent is None else (1, cfg.latent.cached_dim)
            k, v = (jnp.zeros((rows, K, length, A), dtype) for _ in range(2))
            return LayerCache(k, v if cfg.latent is None else None)
        assert cfg.delta is not None
        state, inputs = ((rows, *rest) for rest in cfg.delta.state_shapes)
        return DeltaCache(jnp.zeros(state, jnp.float32), jnp.zeros(inputs, dtype))

    return tuple(make(modules) for modules in cfg.layer_modules)


def cache_heads(cfg: ModelConfig) -> int:
    """Returns a number that divides the heads of every layer's cache."""
    return math.gcd(*(cfg.heads_of(modules).num_kv_heads for modules in cfg.layer_modules)) if cfg.latent is None else 1


def cache_row_bytes(cfg: ModelConfig, *, length: int, dtype: Any) -> int:
    """Returns the bytes of `length` slots of one row."""
    cache = jax.eval_shape(lambda: empty_cache(cfg, rows=1, length=length, dtype=dtype))
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(cache))


def count_slots(cache: Cache) -> int | None:
    """Returns the number of slots; None if all layers are recurrent."""
    return next((one.k.shape[2] for one in cache if isinstance(one, LayerCache)), None)


def make_layer_cache(k: jax.Array, v: jax.Array | None) -> LayerCache:
    """Makes the cache of prompts from their keys and values [N, P, K, A]: entry p is position p."""
    return LayerCache(k.swapaxes(1, 2), None if v is None else v.swapaxes(1, 2))


def write_token(cache: LayerCache, k: jax.Array, v: jax.Array | None, slot: jax.Array) -> LayerCache:
    """Writes each row's newest k and v [R, 1, K, A] to the slot."""
    written: LayerCache = jax.tree.map(
        lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), slot, axis=2),
        cache,
        make_layer_cache(k, v),
    )
    return written


def write_prompts(cache: Cache, prompts: Cache, source: jax.Array, length: jax.Array, slot: jax.Array) -> Cache:
    """Writes the first `length` [N] positions of prompt `source` [R] to each row; -1 leaves a row unchanged.

    `slot` is the one of the next token, before which they end.
    """
    is_new, prompt_index = source >= 0, jnp.maximum(source, 0)

    def select(old: jax.Array, new: jax.Array) -> jax.Array:
        chosen = is_new.reshape(-1, *[1] * (old.ndim - 1))
        return jnp.where(chosen, new[prompt_index].astype(old.dtype), old)

    def to_ring(old: jax.Array, new: jax.Array) -> jax.Array:
        S = old.shape[2]
        position = jnp.mod(jnp.arange(S, dtype=jnp.int32)[None] - slot + length[:, None], S)  # of each slot, [N, S]
        padded = jnp.pad(new, ((0, 0), (0, 0), (0, S - new.shape[2]), (0, 0)))
        return select(old, jnp.take_along_axis(padded, position[:, None, :, None], axis=2))

    def write(old: State | None, new: State | None) -> State | None:
        written: State | None = jax.tree.map(to_ring if isinstance(old, LayerCache) else select, old, new)
        return written

    return tuple(write(old, new) for old, new in zip(cache, prompts, strict=True))


def grow_cache(cache: Cache, slots: int, slot: jax.Array) -> Cache:
    """Returns the cache with so many slots, the next of which is slot 0; `slot` is the next one now."""

    def extend(x: jax.Array) -> jax.Array:
        oldest_first = jnp.roll(x, -slot, axis=2)
        return jnp.pad(oldest_first, ((0, 0), (0, 0), (slots - x.shape[2], 0), (0, 0)))

    return tuple(jax.tree.map(extend, one) if isinstance(one, LayerCache) else one for one in cache)


def find_visible(
    position: jax.Array, slot: jax.Array, slots: int, windows: Windows, kind: jax.Array | int
) -> jax.Array:
    """Returns which slots [R, S] the token at `position` [R] sees; its own is `slot`."""
    chex.assert_rank([position, slot], [1, 0])
    age = jnp.mod(slot - jnp.arange(slots, dtype=jnp.int32), slots)
    return (age[None] <= position[:, None]) & in_window(age, jnp.zeros_like(age), windows, kind)[None]


def make_to_cache(attend: AttendCached, windows: Windows) -> ToCache:
    """Makes the attention of a layer to its cache, within its window."""

    def to_cache(
        q: jax.Array, k: jax.Array, v: jax.Array, positions: LayerPositions, sinks: jax.Array | None = None
    ) -> jax.Array:
        assert positions.slot is not None
        visible = find_visible(positions.position[:, 0], positions.slot, k.shape[2], windows, positions.kind)
        return attend(q[:, 0], k, v, visible, sinks)[:, None]

    return to_cache


def make_attend_cached(*, scale: float, softcap: float | None) -> AttendCached:
    """Makes attention to a cache by XLA."""

    def attend(
        q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array, sinks: jax.Array | None = None
    ) -> jax.Array:
        chex.assert_rank([q, k, v, visible], [3, 4, 4, 2])
        (R, H, A), K = q.shape, k.shape[1]
        grouped = q.reshape(R, K, H // K, A).astype(k.dtype)
        scores = scale * jnp.einsum("rkga,rksa->rkgs", grouped, k, preferred_element_type=jnp.float32)
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        scores = jnp.where(visible[:, None, None], scores, UNSEEN)
        if sinks is not None:  # a further key, without a value
            sink = jnp.broadcast_to(sinks_by_head(sinks, K)[..., 0], (*scores.shape[:-1], 1))
            scores = jnp.concatenate([scores, sink], axis=-1)
        weights = jax.nn.softmax(scores, axis=-1)[..., : k.shape[2]].astype(q.dtype)
        return jnp.einsum("rkgs,rksa->rkga", weights.astype(v.dtype), v).reshape(R, H, -1).astype(q.dtype)

    return attend
