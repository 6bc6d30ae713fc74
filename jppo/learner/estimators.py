"""Advantage estimators by name: `algorithm.adv_estimator`. Their parameters are the settings of `algorithm` they read.

A user-defined estimator is such a function in another file, named as 'path.py:name'.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from jppo.algorithms import advantage
from jppo.learner.estimate import Estimator, spread
from jppo.types import Array


def gae(
    *, gamma: float, lam: float, lam_alpha: float | None, critic_lam: float | None, gamma_by: str = "token"
) -> Estimator:
    """Makes GAE; the returns have a λ of their own if `critic_lam` is set (VC-PPO, Yuan et al., arXiv:2503.01491)."""

    def estimate(reward: Array, value: Array, _: Array, mask: Array, *turn_ends: Array) -> tuple[Array, Array]:
        gae_at = functools.partial(advantage.gae, reward, value, mask, gamma=_discount(gamma, *turn_ends))
        advantages, returns = gae_at(lam=lam if lam_alpha is None else advantage.adaptive_lam(mask, alpha=lam_alpha))
        if critic_lam is not None and (lam_alpha is not None or critic_lam != lam):
            returns = gae_at(lam=critic_lam)[1]
        return advantages, returns

    return Estimator(estimate, whiten=True, critic=True, by_turn=gamma_by == "turn")


def reinforce_plus_plus(*, gamma: float, gamma_by: str = "token") -> Estimator:
    def estimate(reward: Array, _: Array, __: Array, mask: Array, *turn_ends: Array) -> tuple[Array, Array]:
        return _as_returns_too(advantage.reinforce_plus_plus(reward, mask, gamma=_discount(gamma, *turn_ends)))

    return Estimator(estimate, whiten=True, by_turn=gamma_by == "turn")


def _discount(gamma: float, *turn_ends: Array) -> float | Array:
    """Returns γ, or with the last tokens of turns γ after each of them and 1 elsewhere."""
    return jnp.where(turn_ends[0], gamma, 1.0) if turn_ends else gamma


def distill(*, gamma: float) -> Estimator:
    """Makes the return of -β KL to a teacher, without score or whitening: at γ = 0 on-policy distillation by token."""
    estimate = functools.partial(advantage.reinforce_plus_plus, gamma=gamma)
    return Estimator(lambda reward, _, __, mask: _as_returns_too(estimate(reward, mask)), scored=False)


def remax() -> Estimator:
    return Estimator(
        lambda reward, _, greedy, mask: _as_returns_too(advantage.remax(reward, greedy, mask)), greedy=True
    )


def grpo(*, norm_adv_by_std_in_grpo: bool) -> Estimator:
    estimate = functools.partial(advantage.grpo, norm_adv_by_std=norm_adv_by_std_in_grpo)
    return Estimator(spread, lambda score, _, group: estimate(score, group))


def grpo_passk(*, norm_adv_by_std_in_grpo: bool) -> Estimator:
    estimate = functools.partial(advantage.grpo_passk, norm_adv_by_std=norm_adv_by_std_in_grpo)
    return Estimator(spread, lambda score, _, group: estimate(score, group))


def grpo_vectorized(*, norm_adv_by_std_in_grpo: bool) -> Estimator:
    return grpo(norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo)


def gpg() -> Estimator:
    def sequences(score: Array, _: Array, group: Array) -> Array:
        graded = jnp.bincount(group, length=len(group))[group] > 1  # alone is padding, or was not graded
        return advantage.gpg(score, group, graded)

    return Estimator(spread, sequences)


def gdpo(*, norm_adv_by_std_in_grpo: bool, gdpo_reward_keys: str, gdpo_reward_weights: str) -> Estimator:
    keys, weights = (
        [entry.strip() for entry in text.split(",") if entry] for text in (gdpo_reward_keys, gdpo_reward_weights)
    )
    numbers = tuple(map(float, weights)) or (1.0,) * len(keys)
    options = dict[str, Any](weights=numbers, norm_adv_by_std=norm_adv_by_std_in_grpo)

    def estimate(parts: Array, group: Array) -> Array:
        return advantage.gdpo(parts, group, **options)

    return Estimator(spread, lambda parts, _, group: estimate(parts, group), whiten=True, parts=tuple(keys))


def optimal_token_baseline() -> Estimator:
    return _token_baseline(by_kept=False)


def tir_optimal_token_baseline() -> Estimator:
    return _token_baseline(by_kept=True)


def _token_baseline(*, by_kept: bool) -> Estimator:
    def estimate(reward: Array, _: Array, __: Array, mask: Array, energy: Array, group: Array) -> tuple[Array, Array]:
        return advantage.optimal_token_baseline(reward, energy, mask, group, by_kept=by_kept)

    return Estimator(estimate, lambda score, _, __: score, energy=True)


def rloo() -> Estimator:
    return Estimator(spread, lambda score, _, group: advantage.rloo(score, group))


def rloo_vectorized() -> Estimator:
    return Estimator(spread, lambda score, _, group: advantage.rloo_vectorized(score, group))


def reinforce_plus_plus_baseline() -> Estimator:
    return Estimator(spread, lambda score, _, group: advantage.reinforce_plus_plus_baseline(score, group), whiten=True)


def reinforce_no_baseline() -> Estimator:
    """Makes A = s, without a baseline (Williams, 1992): what grpo, rloo and opo of one sample a prompt are in verl."""
    return Estimator(spread, lambda score, _, __: score, alone=True)


def opo() -> Estimator:
    return Estimator(spread, advantage.opo)


def _as_returns_too(x: Array) -> tuple[Array, Array]:
    return x, x  # no critic reads the returns


_BY_TOKEN = (gae, reinforce_plus_plus, distill, remax)
_BY_SEQUENCE = (reinforce_no_baseline,)
_BY_GROUP = (grpo, grpo_vectorized, grpo_passk, rloo, rloo_vectorized, reinforce_plus_plus_baseline, opo, gpg, gdpo)
_BY_BOTH = (optimal_token_baseline, tir_optimal_token_baseline)
ESTIMATORS: dict[str, Callable[..., Estimator]] = {
    f.__name__: f for f in (*_BY_TOKEN, *_BY_SEQUENCE, *_BY_GROUP, *_BY_BOTH)
}
