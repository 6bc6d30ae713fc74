"""Algorithms that cannot learn, each with one fault; `jppo prove` must fail them."""

import jax.numpy as jnp

from jppo.algorithms import advantage
from jppo.learner.algorithm import Algorithm
from jppo.learner.views import EpisodeView
from jppo.types import Array


def _grpo(view: EpisodeView) -> Array:
    return advantage.grpo(view.score, view.group, norm_adv_by_std=True)


def sign_flipped() -> Algorithm:
    """GRPO that descends."""
    return Algorithm(outcome=lambda view: -_grpo(view))


def other_sample() -> Algorithm:
    """GRPO that gives each sample the advantage of the one before it."""
    return Algorithm(outcome=lambda view: jnp.roll(_grpo(view), 1))


def constant_reward() -> Algorithm:
    """REINFORCE that rewards every sample alike."""
    return Algorithm(outcome=lambda view: jnp.ones_like(view.score))
