"""Policy losses by name: `actor.loss_mode`. Their parameters are the settings of `actor` they read.

A user-defined loss is such a function in another file, named as 'path.py:name'. An unset `clip_ratio_low` or
`clip_ratio_high` is passed as `clip_ratio`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from jppo.algorithms import covariance, losses
from jppo.errors import UserError
from jppo.learner.selection import Selection
from jppo.types import Array


@dataclasses.dataclass(frozen=True)
class Objective:
    """A policy loss per token, and the required aggregation over tokens."""

    loss: Callable[..., losses.PolicyLoss]  # (logp, old_logp, advantage, mask, segment[, selected]) [R, T]
    by_sequence: bool = False  # one number for a sequence, at each of its entries
    aggregation: str | None = None  # None: actor.loss_agg_mode
    ratio: bool = True  # False: the loss has no probability ratio, so bypass may weight it by importance
    selection: Selection | None = None  # of the tokens that the loss gets as `selected`


def vanilla(*, clip_ratio_low: float, clip_ratio_high: float, clip_ratio_c: float) -> Objective:
    return Objective(
        functools.partial(losses.clipped, clip_low=clip_ratio_low, clip_high=clip_ratio_high, clip_c=clip_ratio_c)
    )


def gspo(*, clip_ratio_low: float, clip_ratio_high: float) -> Objective:
    return Objective(functools.partial(losses.gspo, clip_low=clip_ratio_low, clip_high=clip_ratio_high))


def geo_mean(*, clip_ratio_low: float, clip_ratio_high: float) -> Objective:
    loss = functools.partial(losses.geo_mean, clip_low=clip_ratio_low, clip_high=clip_ratio_high)
    return Objective(loss, by_sequence=True, aggregation="seq-mean-token-mean")


def cispo(*, clip_ratio_low: float, clip_ratio_high: float) -> Objective:
    return Objective(functools.partial(losses.cispo, clip_low=clip_ratio_low, clip_high=clip_ratio_high))


def sapo(*, tau_pos: float, tau_neg: float) -> Objective:
    loss = functools.partial(losses.sapo, tau_pos=tau_pos, tau_neg=tau_neg)
    return Objective(loss, aggregation="seq-mean-token-mean")


def gpg() -> Objective:
    return Objective(losses.gpg, ratio=False)


def dro(*, dro_beta: float | None) -> Objective:
    if dro_beta is None:
        raise UserError("actor.dro_beta=None: actor.loss_mode='dro' needs a number above 0; set it, as in 0.1")
    return Objective(functools.partial(losses.dro, dro_beta=dro_beta))


def dppo_tv(*, clip_ratio_low: float, clip_ratio_high: float, clip_ratio_c: float) -> Objective:
    return Objective(
        functools.partial(losses.dppo_tv, clip_low=clip_ratio_low, clip_high=clip_ratio_high, clip_c=clip_ratio_c)
    )


def dppo_kl(*, clip_ratio_low: float, clip_ratio_high: float, clip_ratio_c: float) -> Objective:
    return Objective(
        functools.partial(losses.dppo_kl, clip_low=clip_ratio_low, clip_high=clip_ratio_high, clip_c=clip_ratio_c)
    )


def clip_cov(
    *, clip_ratio_low: float, clip_ratio_high: float, clip_cov_ratio: float, clip_cov_lb: float, clip_cov_ub: float
) -> Objective:
    clips = dict[str, Any](clip_low=clip_ratio_low, clip_high=clip_ratio_high)
    choose = functools.partial(covariance.drawn, low=clip_cov_lb, high=clip_cov_ub, **clips)
    return Objective(functools.partial(losses.clip_cov, **clips), selection=Selection(choose, clip_cov_ratio))


def kl_cov(*, kl_cov_ratio: float, ppo_kl_coef: float) -> Objective:
    def choose(_: Array, logp: Array, __: Array, advantage: Array, mask: Array, *, count: Array) -> Array:
        return covariance.largest(logp, advantage, mask, count=count)

    loss = functools.partial(losses.kl_cov, ppo_kl_coef=ppo_kl_coef)
    return Objective(loss, selection=Selection(choose, kl_cov_ratio))


POLICY_LOSSES: dict[str, Callable[..., Objective]] = {
    f.__name__: f for f in (vanilla, gspo, geo_mean, cispo, sapo, gpg, dro, dppo_tv, dppo_kl, clip_cov, kl_cov)
}
