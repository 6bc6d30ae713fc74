"""Advantage estimators as algorithms; `catalogue.py` names them and gives them the values of settings."""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from jppo.algorithms import advantage, masked
from jppo.learner.algorithm import Algorithm
from jppo.learner.views import EpisodeView, TokenView
from jppo.models import heads
from jppo.types import Array


def gae(
    *, gamma: float, lam: float, lam_alpha: float | None, critic_lam: float | None, gamma_by: str = "token"
) -> Algorithm:
    """Makes GAE; the returns have a λ of their own if `critic_lam` is set (VC-PPO, Yuan et al., arXiv:2503.01491)."""

    def estimate(view: TokenView) -> tuple[Array, Array]:
        discount = _discount(gamma, gamma_by, view)
        gae_at = functools.partial(advantage.gae, view.reward, view.value, view.mask, gamma=discount)
        advantages, returns = gae_at(
            lam=lam if lam_alpha is None else advantage.adaptive_lam(view.mask, alpha=lam_alpha)
        )
        if critic_lam is not None and (lam_alpha is not None or critic_lam != lam):
            returns = gae_at(lam=critic_lam)[1]
        return advantages, returns

    return Algorithm(estimate, transforms=(masked.whiten,))


def reinforce_plus_plus(*, gamma: float, gamma_by: str = "token") -> Algorithm:
    """Makes REINFORCE++: whitened returns, discounted by token or, with gamma_by='turn', from turn to turn."""

    def estimate(view: TokenView) -> Array:
        return advantage.reinforce_plus_plus(view.reward, view.mask, gamma=_discount(gamma, gamma_by, view))

    return Algorithm(estimate, transforms=(masked.whiten,))


def _discount(gamma: float, gamma_by: str, view: TokenView) -> float | Array:
    """Returns the discount γ of every token; with gamma_by='turn' γ after the last token of a turn, 1 elsewhere."""
    return jnp.where(view.turn_ends, gamma, 1.0) if gamma_by == "turn" else gamma


def distill(*, gamma: float) -> Algorithm:
    """Makes the return of -β KL to a teacher, without score or whitening: at γ = 0 on-policy distillation by token."""
    return Algorithm(lambda view: advantage.reinforce_plus_plus(view.kl_reward, view.mask, gamma=gamma))


def remax() -> Algorithm:
    return Algorithm(lambda view: advantage.remax(view.reward, view.greedy, view.mask))


def by_group(
    estimate: Callable[..., Array], transforms: tuple[Callable[[Array, Array], Array], ...] = (), **options: Any
) -> Algorithm:
    """Makes an estimator of a function (score, group, **options), as in `algorithms/advantage.py`."""
    return Algorithm(outcome=lambda view: estimate(view.score, view.group, **options), transforms=transforms)


def gpg() -> Algorithm:
    """Makes GPG: a score less its group's mean, divided by the share of graded scores that are not 0."""

    def outcome(view: EpisodeView) -> Array:
        group = view.group
        graded = jnp.bincount(group, length=len(group))[group] > 1  # alone is padding, or was not graded
        return advantage.gpg(view.score, group, graded)

    return Algorithm(outcome=outcome)


def gdpo(*, norm_adv_by_std: bool, keys: str, weights: str) -> Algorithm:
    """Makes GDPO (arXiv:2601.05242): parts of the reward are normalised apart, then added."""
    parts, factors = ([entry.strip() for entry in text.split(",") if entry] for text in (keys, weights))
    numbers = tuple(map(float, factors)) or (1.0,) * len(parts)
    options = dict[str, Any](weights=numbers, norm_adv_by_std=norm_adv_by_std)

    def outcome(view: EpisodeView) -> Array:
        return advantage.gdpo(jnp.stack([view.part(name) for name in parts], axis=1), view.group, **options)

    return Algorithm(outcome=outcome, transforms=(masked.whiten,))


def token_baseline(*, by_kept: bool) -> Algorithm:
    """Makes the optimal token baseline; `by_kept`: a place is the number of trained tokens before it, not of all."""

    def estimate(view: TokenView) -> tuple[Array, Array]:
        energy = advantage.energy(view.old_logprob, view.statistic("sum_pi_squared"), view.weight)
        return advantage.optimal_token_baseline(view.reward, energy, view.mask, view.group, by_kept=by_kept)

    return Algorithm(estimate, statistics={"sum_pi_squared": heads.sum_pi_squared_of})


def reinforce_no_baseline() -> Algorithm:
    """Makes A = s, without a baseline (Williams, 1992): what grpo, rloo and opo of one sample a prompt are in verl."""
    return Algorithm(outcome=lambda view: view.score)


def opo() -> Algorithm:
    return Algorithm(outcome=lambda view: advantage.opo(view.score, view.length, view.group))
