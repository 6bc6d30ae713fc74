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

    k: jax.Array  # [R, S, K, A]
    v: jax.Array  # [R, S, K, A]


Cache = tuple[LayerCache, ...]  # one buffer per layer, each updated in place


def empty(cfg: ModelConfig, *, rows: int, length: int, dtype: Any) -> Cache:
    """Allocates a cache of `length` positions for so many rows."""
    shape = (rows, length, cfg.num_kv_heads, cfg.head_dim)
    return tuple(LayerCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(cfg.num_layers))


def row_bytes(cfg: ModelConfig, *, length: int, dtype: Any) -> int:
    """Returns the bytes of `length` positions of one row."""
    return 2 * cfg.num_layers * length * cfg.num_kv_heads * cfg.head_dim * int(jnp.dtype(dtype).itemsize)


def extend(held: LayerCache, k: jax.Array, v: jax.Array, position: jax.Array) -> LayerCache:
    """Writes k and v [R, P, K, A] at `position` [R, P]; entries beyond the cache's end are dropped."""
    chex.assert_rank([k, v, position], [4, 4, 2])
    chex.assert_equal_shape_prefix([k, v, position], 2)
    row = jnp.arange(position.shape[0], dtype=jnp.int32)[:, None]
    return LayerCache(
        held.k.at[row, position].set(k.astype(held.k.dtype), mode="drop"),
        held.v.at[row, position].set(v.astype(held.v.dtype), mode="drop"),
    )
