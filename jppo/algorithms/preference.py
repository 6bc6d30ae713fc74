"""The Bradley-Terry loss of a reward model on preference pairs."""

import chex
import jax
import jax.numpy as jnp

from jppo.types import Array


def bradley_terry(chosen: Array, rejected: Array, margin: Array, *, center: float) -> Array:
    """-log σ(r_chosen - r_rejected - margin) + center (r_chosen + r_rejected)², of each pair [N] f32.

    By Bradley and Terry's model a response wins with probability σ of the scores' difference. The margin is from
    Llama 2 (arXiv 2307.09288), the centring term from Eisenstein et al. (arXiv 2312.09244).
    """
    chex.assert_equal_shape([chosen, rejected, margin])
    chex.assert_rank(chosen, 1)
    return -jax.nn.log_sigmoid(chosen - rejected - margin) + center * jnp.square(chosen + rejected)
