"""Losses on preference pairs: of a reward model by Bradley and Terry, and of a policy by DPO and IPO."""

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


def dpo(chosen: Array, rejected: Array, *, beta: float) -> Array:
    """-log σ(β (chosen - rejected)), of each pair [N] f32 (arXiv 2305.18290).

    `chosen` and `rejected` are log π(y|x) - log π_ref(y|x) of whole responses.
    """
    chex.assert_equal_shape([chosen, rejected])
    chex.assert_rank(chosen, 1)
    return -jax.nn.log_sigmoid(beta * (chosen - rejected))


def ipo(chosen: Array, rejected: Array, *, beta: float) -> Array:
    """(chosen - rejected - 1 / (2 β))², of each pair [N] f32 (arXiv 2310.12036, equation 17).

    `chosen` and `rejected` are as for `dpo`, but means over the response's tokens, as in the paper's experiments.
    """
    chex.assert_equal_shape([chosen, rejected])
    chex.assert_rank(chosen, 1)
    return jnp.square(chosen - rejected - 1.0 / (2.0 * beta))
