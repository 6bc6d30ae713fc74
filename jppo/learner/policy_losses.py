"""Policy losses by name: `actor.loss_mode`. Their parameters are the settings of `actor` they read.

A user-defined loss is such a function in another file, named as 'path.py:name'. An unset `clip_ratio_low` or
`clip_ratio_high` is passed as `clip_ratio`.

`clip_cov` and `kl_cov` treat some tokens apart, chosen by the current policy over a whole mini-batch before its
gradient: one more forward pass, so that the choice does not depend on the cut into micro-batches.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jppo.algorithms import losses
from jppo.errors import UserError
from jppo.learner import batch
from jppo.learner.score import LogProb
from jppo.models import placing
from jppo.models.lora import Weights
from jppo.types import Array

_STREAM = 2  # of the key of a step, after the shuffles of actor and critic


@dataclasses.dataclass(frozen=True)
class Selection:
    """How a policy loss selects tokens: at most a share of the mini-batch's, and at least one."""

    choose: Callable[..., Array]  # (key, logp, old_logp, advantage, mask, count=) [B, L] -> [B, L] bool
    share: float


@dataclasses.dataclass(frozen=True)
class Select:
    """The compiled selection of a mini-batch's tokens."""

    share: float  # of the mini-batch's tokens, at most
    logprob: LogProb  # the policy's pass
    choose: Any  # of jax.jit: (key, step, number of the mini-batch, logp, old_logp, advantage, mask, count) -> [B, L]

    def __call__(self, model: Weights, mini: batch.Mini, key: Any, step: Any, number: int) -> batch.Mini:
        """Adds `selected` to the micro-batches; `number` is the mini-batch's in the step."""
        data = mini.batch
        rows = [dataclasses.replace(micro.rows, dropout=None) for micro in mini.micros]  # selected without dropout
        assert data is not None
        scores = [placing.fetch(self.logprob(model, placing.put(one, mini.place)).logprob) for one in rows]
        logp = batch.unpack_rows(data, list(zip(rows, scores, strict=True)))
        mask = batch.unpack_rows(data, [(one, np.asarray(one.mask)) for one in rows])
        arrays: tuple[Any, ...] = (logp, data.old_logprob, data.advantage, mask)
        count = np.int32(max(1, int(self.share * int(mask.sum()))))
        selected = np.asarray(self.choose(key, step, np.int32(number), *arrays, count))
        micros = [dataclasses.replace(m, selected=batch.pack_like(data, selected, m.rows)) for m in mini.micros]
        return dataclasses.replace(mini, micros=micros)


def make_select(selection: Selection, logprob: LogProb) -> Select:
    """Makes the selection of a mini-batch's tokens; `logprob` is a compiled pass."""

    @jax.jit
    def choose(key: Array, step: Array, number: Array, logp: Array, old_logp: Array, *others: Array) -> Array:
        advantage, mask, count = others
        for one in (step, _STREAM, number):
            key = jax.random.fold_in(key, one)
        return selection.choose(key, logp, old_logp, advantage, mask, count=count)

    return Select(selection.share, logprob, choose)


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
    choose = functools.partial(losses.drawn_by_covariance, low=clip_cov_lb, high=clip_cov_ub, **clips)
    return Objective(functools.partial(losses.clip_cov, **clips), selection=Selection(choose, clip_cov_ratio))


def kl_cov(*, kl_cov_ratio: float, ppo_kl_coef: float) -> Objective:
    def choose(_: Array, logp: Array, __: Array, advantage: Array, mask: Array, *, count: Array) -> Array:
        return losses.highest_covariance(logp, advantage, mask, count=count)

    loss = functools.partial(losses.kl_cov, ppo_kl_coef=ppo_kl_coef)
    return Objective(loss, selection=Selection(choose, kl_cov_ratio))


POLICY_LOSSES: dict[str, Callable[..., Objective]] = {
    f.__name__: f for f in (vanilla, gspo, geo_mean, cispo, sapo, gpg, dro, dppo_tv, dppo_kl, clip_cov, kl_cov)
}
