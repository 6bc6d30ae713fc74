"""The key/value cache of generated rows."""

import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp

from jppo.models.config import ModelConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerCache:
    """The cache of one layer; entry s of a row is its position s."""

    k: jax.Array  # [R, S, K, A]; of latent attention the latents and rotary keys, [R, S, 1, J]
    v: jax.Array | None  # [R, S, K, A]; None with latent attention


Cache = tuple[LayerCache, ...]  # one buffer per layer, each updated in place


def empty(cfg: ModelConfig, *, rows: int, length: int, dtype: Any) -> Cache:
    """Allocates a cache of `length` positions for so many rows."""
    shape = (rows, length, heads(cfg), cfg.head_dim if cfg.latent is None else cfg.latent.cached_dim)

    def zeros() -> jax.Array:
        return jnp.zeros(shape, dtype)

    return tuple(LayerCache(zeros(), zeros() if cfg.latent is None else None) for _ in range(cfg.num_layers))


def heads(cfg: ModelConfig) -> int:
    """Returns the heads of the cache."""
    return cfg.num_kv_heads if cfg.latent is None else 1


def row_bytes(cfg: ModelConfig, *, length: int, dtype: Any) -> int:
    """Returns the bytes of `length` positions of one row."""
    of_token = 2 * cfg.num_kv_heads * cfg.head_dim if cfg.latent is None else cfg.latent.cached_dim
    return cfg.num_layers * length * of_token * int(jnp.dtype(dtype).itemsize)


def extend(held: LayerCache, k: jax.Array, v: jax.Array | None, position: jax.Array) -> LayerCache:
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
