"""Routers of mixtures: each token's experts and weights from its logits; losses and metrics from sums over tokens.

The layers leave sums and choices in flax collections, which `apply(..., mutable=[...])` returns. Experts that a rollout
engine has chosen may be replayed in place of the router's.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jppo.models.config import Experts, ModelConfig
from jppo.models.params import leaf_at
from jppo.types import Array

SUMS, SUMS_NAME = "router", "sums"  # the collection of `RouterSums`, and their name in a layer
CHOICES, CHOICES_NAME = "routing", "chosen"  # of the routers' own choices, and their name: [R, T, active] i16
Replayed = jax.Array | None  # experts in place of the routers' choices, -1 for none


def choose_experts(
    logits: jax.Array, spec: Experts, correction: jax.Array | None = None, replayed: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Chooses the experts of tokens with logits [..., E]; returns their weights, f32, and indices: [..., active] each.

    `correction` [E] is added to the scores for the choice alone. Experts that are `replayed` [..., active] replace
    the choice, but not where they are -1.
    """
    chex.assert_shape(logits, (..., spec.count))
    routing = spec.routing
    score = jax.nn.sigmoid(logits) if routing.scoring == "sigmoid" else jax.nn.softmax(logits)
    preferred = _mask_other_groups(
        score if correction is None else score + jnp.broadcast_to(correction, score.shape), spec
    )
    weight, chosen = jax.lax.top_k(preferred, spec.active)
    if replayed is not None:
        chex.assert_equal_shape([replayed, chosen])
        chosen = jnp.where(replayed < 0, chosen, replayed)
    if routing.scoring == "sigmoid" or replayed is not None:
        weight = jnp.take_along_axis(score, chosen, axis=-1)
    if spec.normalized:
        weight /= jnp.sum(weight, axis=-1, keepdims=True) + (1e-20 if routing.scoring == "sigmoid" else 0.0)
    return weight if routing.scale == 1.0 else weight * routing.scale, chosen


def _mask_other_groups(score: jax.Array, spec: Experts) -> jax.Array:
    """Masks the scores [..., E] of experts outside of each token's best groups."""
    routing = spec.routing
    if routing.best_groups == routing.groups:
        return score
    grouped = score.reshape(*score.shape[:-1], routing.groups, spec.count // routing.groups)
    num_scored, masked_score = (2, -jnp.inf) if routing.scoring == "sigmoid" else (1, 0.0)
    best = jax.lax.top_k(jnp.sum(jax.lax.top_k(grouped, num_scored)[0], axis=-1), routing.best_groups)[1]  # [..., best]
    in_best_group = jnp.any(jax.nn.one_hot(best, routing.groups, dtype=bool), axis=-2)
    return jnp.where(in_best_group[..., None], grouped, masked_score).reshape(score.shape)


class RouterSums(NamedTuple):
    """Sums over counted tokens, for each layer with experts."""

    load: jax.Array  # [..., E], tokens of each expert
    prob: jax.Array  # [..., E], probabilities of each expert
    z: jax.Array  # [...], squares of log Σ exp(logits)
    entropy: jax.Array  # [...]


def sums_by_row(logits: jax.Array, spec: Experts, chosen: jax.Array, counted: jax.Array) -> RouterSums:
    """Sums load, probabilities and entropy over the counted tokens of each row, for losses and metrics.

    An expert's probability is its share of the token's scores, which for a softmax is the score.
    """
    chex.assert_rank([logits, chosen, counted], [3, 3, 2])
    E = logits.shape[-1]
    log_prob = jax.nn.log_softmax(jax.nn.log_sigmoid(logits) if spec.routing.scoring == "sigmoid" else logits)
    prob, counts = jnp.exp(log_prob), counted.astype(logits.dtype)

    def sum_counted(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(counted.reshape(*counted.shape, *(1,) * (x.ndim - 2)), x, 0), axis=1)

    is_used = jnp.sum(chosen[..., None] == jnp.arange(E)[None, None, None], axis=2, dtype=counts.dtype)  # [R, T, E]
    return RouterSums(
        load=sum_counted(is_used),
        prob=sum_counted(prob),
        z=sum_counted(jax.nn.logsumexp(logits, axis=-1) ** 2),
        entropy=-sum_counted(jnp.sum(prob * log_prob, axis=-1)),
    )


def collected_sums(variables: Any, cfg: ModelConfig) -> RouterSums:
    """Joins the sums of a decoder's layers, [layers with experts, ...] by stack, over all rows."""
    paths = [stack.path for stack in cfg.stacks if stack.modules.sparse]
    stacks = [leaf_at(variables[SUMS], (*path, "experts", SUMS_NAME)) for path in paths]
    sums: RouterSums = jax.tree.map(lambda *parts: jnp.concatenate([jnp.sum(x, axis=1) for x in parts]), *stacks)
    return sums


def balance_loss(sums: RouterSums, load: Array, tokens: Array) -> jax.Array:
    """Computes a micro-batch's part of the load-balancing loss (Fedus et al., arXiv:2101.03961), mean over layers.

    A layer's loss is E Σ_e F_e P_e with F_e the share of tokens that use expert e and P_e its mean probability; with
    an even load it is the number of active experts. `load` [layers, E] and `tokens` are of the whole mini-batch, so
    that the parts of its micro-batches add up.
    """
    chex.assert_equal_shape([sums.load, load])
    E = load.shape[-1]
    return E * jnp.mean(jnp.sum(jax.lax.stop_gradient(load) * sums.prob, axis=-1)) / tokens**2


def z_loss(sums: RouterSums, tokens: Array) -> jax.Array:
    """Computes a micro-batch's part of the router's z-loss (Zoph et al., arXiv:2202.08906), mean over layers."""
    return jnp.mean(sums.z) / tokens


def load_extremes(load: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the largest and the smallest load [layers, E] of an expert, relative to an even one."""
    relative = load / np.maximum(np.mean(load, axis=1, keepdims=True), 1e-30)
    return np.max(relative), np.min(relative)


def layer_choice(collections: Any) -> jax.Array | None:
    """Returns the experts that a layer's router chose, [R, T, active], from its flax collections; None without any."""
    choice = collections.get(CHOICES, {}).get("experts")
    return None if choice is None else choice[CHOICES_NAME]


def stacked_choices(layers: Sequence[jax.Array | None]) -> jax.Array | None:
    """Stacks the layers' choices to [R, T, L, active], 0 in a layer without experts; None if no layer has any."""
    example = next((choice for choice in layers if choice is not None), None)
    return None if example is None else jnp.stack([jnp.zeros_like(example) if x is None else x for x in layers], axis=2)


def differing_share(collections: Any, replayed: jax.Array, cfg: ModelConfig) -> jax.Array:
    """Returns the share of a token's replayed experts [R, T, L, active] that routers did not choose, [R, T] f32.

    `collections` is what the decoder's `apply` left. Tokens without given experts have 0.
    """
    stacks = [stack for stack in cfg.stacks if stack.modules.sparse]
    choices = [leaf_at(collections[CHOICES], (*stack.path, "experts", CHOICES_NAME)) for stack in stacks]
    router_choices = jnp.concatenate(choices)  # [layers, R, T, active]
    by_layer = jnp.concatenate([replayed[:, :, stack.layers] for stack in stacks], axis=2)
    chosen = jnp.any(by_layer[..., None] == jnp.moveaxis(router_choices, 0, 2)[..., None, :], axis=-1)
    return jnp.mean(~chosen & (by_layer >= 0), axis=(2, 3), dtype=jnp.float32)
