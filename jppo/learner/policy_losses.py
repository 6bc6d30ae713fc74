"""Policy losses as objects: the loss of each token, and its selection of tokens over a mini-batch.

`clip_cov` and `kl_cov` treat some tokens apart, chosen by the current policy over a whole mini-batch before its
gradient: one more forward pass, so that the choice does not depend on the cut into micro-batches.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jppo.algorithms import losses
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
