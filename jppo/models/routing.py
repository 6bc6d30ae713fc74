"""Experts chosen by routers: read from a pass of the decoder, and compared with replayed ones."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jppo.models.config import ModelConfig
from jppo.models.params import get
from jppo.models.stacks import Group

Given = jax.Array | None  # experts in place of the routers' choices, -1 for none
Givens = tuple[Given, ...]
COLLECTION = "routing"  # of flax variables: `apply(..., mutable=[COLLECTION])` returns the routers' own choices
NAME = "chosen"  # [R, T, active] i16, of a layer


def by_layer(given: Given, group: Group) -> Givens:
    """Splits given experts [R, T, L, active] by the stacks of a scan: [layers, R, T, active] of those with experts."""
    if given is None:
        return (None,) * len(group)
    return tuple(jnp.moveaxis(given[:, :, one.layers], 2, 0) if one.sort.sparse else None for one in group)


def of_layer(left: Any) -> jax.Array | None:
    """Returns a layer's choice [R, T, active] from what its `apply` left; None for a layer without experts."""
    found = left.get(COLLECTION, {}).get("experts")
    return None if found is None else found[NAME]


def stacked(layers: Sequence[jax.Array | None]) -> jax.Array | None:
    """Stacks the layers' choices to [R, T, L, active], 0 in a layer without experts; None if no layer has any."""
    known = next((one for one in layers if one is not None), None)
    return None if known is None else jnp.stack([jnp.zeros_like(known) if x is None else x for x in layers], axis=2)


def differing(left: Any, given: jax.Array, cfg: ModelConfig) -> jax.Array:
    """Returns the share of a token's given experts [R, T, L, active] that the routers did not choose, [R, T] f32.

    `left` is what the decoder's `apply` left. Tokens without given experts have 0.
    """
    stacks = [stack for stack in cfg.stacks if stack.sort.sparse]
    found = [get(left[COLLECTION], (*stack.path, "experts", NAME)) for stack in stacks]
    own = jnp.concatenate(found)  # [layers, R, T, active]
    replayed = jnp.concatenate([given[:, :, stack.layers] for stack in stacks], axis=2)
    chosen = jnp.any(replayed[..., None] == jnp.moveaxis(own, 0, 2)[..., None, :], axis=-1)
    return jnp.mean(~chosen & (replayed >= 0), axis=(2, 3), dtype=jnp.float32)
