"""The router of a mixture: each token's experts and their weights, from its logits alone."""

import chex
import jax
import jax.numpy as jnp

from jppo.models.config_experts import Experts


def choose(logits: jax.Array, how: Experts) -> tuple[jax.Array, jax.Array]:
    """Chooses the experts of tokens with logits [N, E]; returns their weights, f32, and indices: [N, active] each."""
    chex.assert_shape(logits, (None, how.count))
    weight, chosen = jax.lax.top_k(jax.nn.softmax(logits), how.active)
    if how.normalized:
        weight /= jnp.sum(weight, axis=-1, keepdims=True)
    return weight, chosen
