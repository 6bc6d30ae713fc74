"""Policy losses by name: `actor.loss_mode`. Their parameters are the settings of `actor` they read.

A user-defined loss is such a function in another file, named as 'path.py:name'. An unset `clip_ratio_low` or
`clip_ratio_high` is passed as `clip_ratio`.
"""

import dataclasses
import functools
from collections.abc import Callable

from jppo.algorithms import losses


@dataclasses.dataclass(frozen=True)
class Objective:
    """A policy loss per token, and the required aggregation over tokens."""

    loss: Callable[..., losses.PolicyLoss]  # (logp, old_logp, advantage, mask, segment) [R, T]
    by_sequence: bool = False  # one number for a sequence, at each of its entries
    aggregation: str | None = None  # None: actor.loss_agg_mode


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
    return Objective(losses.gpg)


POLICY_LOSSES: dict[str, Callable[..., Objective]] = {
    f.__name__: f for f in (vanilla, gspo, geo_mean, cispo, sapo, gpg)
}
