"""The streams of JAX random numbers: every number that is folded into the key of `trainer.seed`, and for what.

A stream's number never changes: it decides the draws, and a resumed run must repeat them.
"""

import enum
import functools
from typing import Any

import jax


class Start(enum.IntEnum):
    """Streams of the run's key: random first weights."""

    POLICY = 0
    CRITIC = 1
    REFERENCE = 2


class Step(enum.IntEnum):
    """Streams of the key of a step, into which its number is folded first."""

    ACTOR_ORDER = 0  # of the trajectories in an epoch, which is folded in next
    CRITIC_ORDER = 1
    BEFORE = 2  # `Algorithm.before` of a mini-batch, whose number in the step is folded in next
    DROPOUT = 3  # of adapters in a mini-batch, likewise


def fold(key: Any, *numbers: Any) -> jax.Array:
    """Folds numbers into a key, one after another."""
    folded: jax.Array = functools.reduce(jax.random.fold_in, numbers, key)
    return folded
