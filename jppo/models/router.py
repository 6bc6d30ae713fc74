"""The router of a mixture: each token's experts and their weights, from its logits alone."""

import chex
import jax
import jax.numpy as jnp

from jppo.models.config_experts import Experts


def choose(
    logits: jax.Array, how: Experts, correction: jax.Array | None = None, given: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Chooses the experts of tokens with logits [..., E]; returns their weights, f32, and indices: [..., active] each.

    `correction` [E] is added to the scores for the choice alone. Experts that are `given` [..., active] replace
    the choice, but not where they are -1.
    """
    chex.assert_shape(logits, (..., how.count))
    of = how.routing
    score = jax.nn.sigmoid(logits) if of.scoring == "sigmoid" else jax.nn.softmax(logits)
    preferred = _of_best_groups(score if correction is None else score + jnp.broadcast_to(correction, score.shape), how)
    weight, chosen = jax.lax.top_k(preferred, how.active)
    if given is not None:
        chex.assert_equal_shape([given, chosen])
        chosen = jnp.where(given < 0, chosen, given)
    if of.scoring == "sigmoid" or given is not None:
        weight = jnp.take_along_axis(score, chosen, axis=-1)
    if how.normalized:
        weight /= jnp.sum(weight, axis=-1, keepdims=True) + (1e-20 if of.scoring == "sigmoid" else 0.0)
    return weight if of.scale == 1.0 else weight * of.scale, chosen


def _of_best_groups(score: jax.Array, how: Experts) -> jax.Array:
    """Masks the scores [..., E] of experts outside of each token's best groups."""
    of = how.routing
    if of.best_groups == of.groups:
        return score
    grouped = score.reshape(*score.shape[:-1], of.groups, how.count // of.groups)
    counted, outside = (2, -jnp.inf) if of.scoring == "sigmoid" else (1, 0.0)
    best = jax.lax.top_k(jnp.sum(jax.lax.top_k(grouped, counted)[0], axis=-1), of.best_groups)[1]  # [..., best]
    inside = jnp.any(jax.nn.one_hot(best, of.groups, dtype=bool), axis=-2)
    return jnp.where(inside[..., None], grouped, outside).reshape(score.shape)
