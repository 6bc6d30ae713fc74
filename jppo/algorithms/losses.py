"""Losses of the policy and the value function, per token; the learner weighs and sums them."""

import jax.numpy as jnp

from jppo.structs import Array


def clipped_policy(logp: Array, old_logp: Array, advantage: Array, *, clip_ratio: float) -> tuple[Array, Array]:
    """PPO's clipped surrogate (Schulman et al., arXiv:1707.06347), and where the clip holds.

        L = max(-A ρ, -A clip(ρ, 1 - ε, 1 + ε)),     ρ = exp(logp - old_logp)

    The log-ratio is clipped to [-20, 20] before the exponential, as in verl: its gradient there is 0.
    """
    ratio = jnp.exp(jnp.clip(logp - old_logp, -20.0, 20.0))
    free = -advantage * ratio
    held = -advantage * jnp.clip(ratio, 1.0 - clip_ratio, 1.0 + clip_ratio)
    return jnp.maximum(free, held), held > free


def clipped_value(value: Array, old_value: Array, returns: Array, *, cliprange_value: float) -> tuple[Array, Array]:
    """Half the squared error, of the value or of the value clipped around the old one, whichever is larger.

    L = ½ max((V - R)², (clip(V, V_old - c, V_old + c) - R)²), and where the clip holds.
    """
    clipped = jnp.clip(value, old_value - cliprange_value, old_value + cliprange_value)
    free, held = jnp.square(value - returns), jnp.square(clipped - returns)
    return 0.5 * jnp.maximum(free, held), held > free
