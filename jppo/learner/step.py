"""The step's state besides the models: its number, the KL coefficient, the count of skipped steps; and its shuffles."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from jppo.learner.ppo import Recipe
from jppo.models import placing
from jppo.types import Array, TrainState


def advance(
    recipe: Recipe, now: TrainState, kl: float, *, bad: bool, learned: bool, value_norm: Any = None
) -> TrainState:
    """Returns the state after a step with KL `kl` in the reward and new statistics of returns.

    `bad`: an update was skipped, and its statistics may be non-finite.

    A step without a token to learn from (`learned` is False) changes only its number.
    """
    step = scalar(int(now.step) + 1, now.step)
    if not learned:
        return dataclasses.replace(now, step=step)
    kl_coef = now.kl_coef
    if recipe.adapt_kl is not None and not bad:  # a non-finite KL would stay in the coefficient
        kl_coef = scalar(recipe.adapt_kl(now.kl_coef, np.asarray(kl, np.float32)), now.kl_coef)
    bad_steps = scalar((int(now.bad_steps) + 1) * bad, now.bad_steps)
    if now.value_norm is not None and not bad:
        now = dataclasses.replace(now, value_norm=scalar(value_norm, now.value_norm))
    return dataclasses.replace(now, step=step, kl_coef=kl_coef, bad_steps=bad_steps)


def scalar(x: Any, like: Array) -> Any:
    """Puts a host number or array in another array's dtype on its devices, without compiling."""
    assert isinstance(like, jax.Array)
    return placing.put(np.asarray(x, like.dtype), like.sharding)


def order(now: TrainState, model: int, epoch: int, count: int, *, shuffle: bool, most: int = 0) -> np.ndarray:
    """Returns the order of the step's trajectories in one epoch of a model's update.

    `most` is the largest count of the run: one program orders so many, and each step takes its own of them.
    """
    if not shuffle:
        return np.arange(count)
    drawn = np.asarray(_shuffled(now.key, now.step, np.int32(model), np.int32(epoch), count=max(most, count)))
    return drawn[drawn < count]


@functools.partial(jax.jit, static_argnames="count")
def _shuffled(key: Array, step: Array, model: Array, epoch: Array, *, count: int) -> jax.Array:
    for number in (step, model, epoch):
        key = jax.random.fold_in(key, number)
    return jax.random.permutation(key, count)
