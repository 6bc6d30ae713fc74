"""Causal attention inside segments, and against a cache of what came before. Used by `decoder.py`."""

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp

# (q [R, T, H, A], k and v [R, T, K, A], segment [R, T], kind []) -> [R, T, H, A]; kind: which of the layers' windows
Attend = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array | int], jax.Array]

Windows = tuple[int | None, ...]  # of each kind of layer; None sees all


def make_plain(*, scale: float, softcap: float | None, windows: Windows) -> Attend:
    """Attention by XLA alone, on any backend: it holds a row's T^2 scores."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, segment: jax.Array, kind: jax.Array | int) -> jax.Array:
        chex.assert_rank([q, k, v, segment], [4, 4, 4, 2])
        here = jnp.arange(q.shape[1], dtype=jnp.int32)
        seen = _in_window(here[None, :, None], here[None, None, :], windows, kind)  # [1, T, T]
        seen &= segment[:, :, None] == segment[:, None, :]
        return _softmax_mix(q, k, v, seen, scale=scale, softcap=softcap)

    return attend


def attend_cached(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    position: jax.Array,
    kind: jax.Array | int,
    *,
    scale: float,
    softcap: float | None,
    windows: Windows,
) -> jax.Array:
    """The same for queries at `position` [R, P] over a cache: entry s of k and v [R, S, K, A] is position s."""
    chex.assert_rank([q, k, v, position], [4, 4, 4, 2])
    slots = jnp.arange(k.shape[1], dtype=jnp.int32)
    seen = _in_window(position[:, :, None], slots[None, None, :], windows, kind)
    return _softmax_mix(q, k, v, seen, scale=scale, softcap=softcap)


def _in_window(query: jax.Array, key: jax.Array, windows: Windows, kind: jax.Array | int) -> jax.Array:
    """Whether the query's position sees the key's."""
    seen = key <= query
    if all(window is None for window in windows):
        return seen
    far = jnp.iinfo(jnp.int32).max
    reach = jnp.asarray([far if window is None else window for window in windows], jnp.int32)[kind]
    return seen & (query - key < reach)


def _softmax_mix(
    q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array, *, scale: float, softcap: float | None
) -> jax.Array:
    """softmax(cap(q k^T scale)) v over what is `seen` [R or 1, T, S]; each kv head is shared by H/K query heads.

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
    weight = jax.nn.softmax(scores, axis=-1).astype(v.dtype)  # [R, K, H/K, T, S]
    return jnp.einsum("rkgts,rska->rtkga", weight, v).reshape(R, T, H, A)
