"""The cache of generated rows: keys and values, or the states of recurrent layers."""

import dataclasses
import math
from typing import Any

import chex
import jax
import jax.numpy as jnp

from jppo.models.config import LayerModules, ModelConfig


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


def empty(cfg: ModelConfig, *, rows: int, length: int, dtype: Any) -> Cache:
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


def heads(cfg: ModelConfig) -> int:
    """Returns a number that divides the heads of every layer's cache."""
    return math.gcd(*(cfg.heads_of(modules).num_kv_heads for modules in cfg.layer_modules)) if cfg.latent is None else 1


def dtype_of(cache: Cache) -> Any:
    """Returns the dtype that the cache was allocated with."""
    first = next(held for held in cache if held is not None)
    return first.k.dtype if isinstance(first, LayerCache) else first.inputs.dtype


def row_bytes(cfg: ModelConfig, *, length: int, dtype: Any) -> int:
    """Returns the bytes of `length` positions of one row."""
    made = jax.eval_shape(lambda: empty(cfg, rows=1, length=length, dtype=dtype))
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(made))


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
