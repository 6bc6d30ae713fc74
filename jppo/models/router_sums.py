"""Losses and metrics of routers, from sums over tokens."""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jppo.models import params
from jppo.models.config import ModelConfig
from jppo.models.config_experts import Experts
from jppo.types import Array

COLLECTION = "router"  # of flax variables: `apply(..., mutable=[COLLECTION])` returns the sums
NAME = "sums"
LOAD = "expert_load"  # the sum, [layers, E], of which metrics are made


class RouterSums(NamedTuple):
    """Sums over counted tokens, for each layer with experts."""

    load: jax.Array  # [..., E], tokens of each expert
    prob: jax.Array  # [..., E], probabilities of each expert
    z: jax.Array  # [...], squares of log Σ exp(logits)
    entropy: jax.Array  # [...]


def by_row(logits: jax.Array, how: Experts, chosen: jax.Array, counted: jax.Array) -> RouterSums:
    """Sums over the counted tokens of each row, from logits [R, T, E], experts [R, T, active], counted [R, T].

    An expert's probability is its share of the token's scores, which for a softmax is the score.
    """
    chex.assert_rank([logits, chosen, counted], [3, 3, 2])
    E = logits.shape[-1]
    log_prob = jax.nn.log_softmax(jax.nn.log_sigmoid(logits) if how.routing.scoring == "sigmoid" else logits)
    prob, counts = jnp.exp(log_prob), counted.astype(logits.dtype)

    def total(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(counted.reshape(*counted.shape, *(1,) * (x.ndim - 2)), x, 0), axis=1)

    used = jnp.sum(chosen[..., None] == jnp.arange(E)[None, None, None], axis=2, dtype=counts.dtype)  # [R, T, E]
    return RouterSums(
        load=total(used),
        prob=total(prob),
        z=total(jax.nn.logsumexp(logits, axis=-1) ** 2),
        entropy=-total(jnp.sum(prob * log_prob, axis=-1)),
    )


def collected(variables: Any, cfg: ModelConfig) -> RouterSums:
    """Joins the sums of a decoder's layers, [layers with experts, ...] by stack, over all rows."""
    paths = [stack.path for stack in cfg.stacks if stack.sort.sparse]
    stacks = [params.get(variables[COLLECTION], (*path, "experts", NAME)) for path in paths]
    found: RouterSums = jax.tree.map(lambda *parts: jnp.concatenate([jnp.sum(x, axis=1) for x in parts]), *stacks)
    return found


def balance(sums: RouterSums, load: Array, tokens: Array) -> jax.Array:
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


def metrics(sums: RouterSums, tokens: Array) -> dict[str, Array]:
    """Returns a micro-batch's part of the metrics: the load of each expert, and the entropy."""
    return {
        LOAD: sums.load / tokens,
        "actor/router_entropy": jnp.mean(sums.entropy) / tokens,
    }


def of_load(load: np.ndarray) -> dict[str, float]:
    """Returns the largest and smallest load [layers, E] of an expert, relative to an even one.

    And the share of dropped tokens, which is 0 by construction (`dispatch.py`).
    """
    relative = load / np.maximum(np.mean(load, axis=1, keepdims=True), 1e-30)
    return {
        "actor/expert_load_max": float(np.max(relative)),
        "actor/expert_load_min": float(np.min(relative)),
        "actor/experts_dropped": 0.0,
    }


def shape(cfg: ModelConfig) -> tuple[int, int]:
    """Returns the number of layers with experts, and of experts."""
    return (0, 0) if cfg.experts is None else (sum(cfg.experts.sparse), cfg.experts.count)
