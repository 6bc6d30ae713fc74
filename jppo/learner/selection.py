"""Tokens that a policy loss treats apart, chosen over a whole mini-batch before its gradient: `clip_cov`, `kl_cov`.

One more forward pass per mini-batch: the choice is by the current policy, and by all tokens of the mini-batch, so that
it does not depend on the cut into micro-batches.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jppo.learner import batch
from jppo.learner.score import LogProb
from jppo.models import placing
from jppo.models.lora import Weights
from jppo.types import Array

_STREAM = 2  # of the key of a step, after the shuffles of actor and critic

Select = Callable[..., batch.Mini]  # (model, mini-batch, key, step, number of the mini-batch) -> with `selected`


@dataclasses.dataclass(frozen=True)
class Selection:
    """How a policy loss selects tokens: at most a share of the mini-batch's, and at least one."""

    choose: Callable[..., Array]  # (key, logp, old_logp, advantage, mask, count=) [B, L] -> [B, L] bool
    share: float


def make_select(selection: Selection, logprob: LogProb) -> Select:
    """Makes the selection of a mini-batch's tokens; `logprob` is a compiled pass."""

    @jax.jit
    def choose(key: Array, step: Array, number: Array, *arrays: Array, count: Array) -> Array:
        for one in (step, _STREAM, number):
            key = jax.random.fold_in(key, one)
        return selection.choose(key, *arrays, count=count)

    def select(model: Weights, mini: batch.Mini, key: Array, step: Array, number: int) -> batch.Mini:
        data, rows = mini.batch, [micro.rows for micro in mini.micros]
        assert data is not None
        scores = [placing.fetch(logprob(model, placing.put(one, mini.place)).logprob) for one in rows]
        logp = batch.unpack(data, list(zip(rows, scores, strict=True)))
        mask = batch.unpack(data, [(one, np.asarray(one.mask)) for one in rows])
        arrays: tuple[Any, ...] = (logp, data.old_logprob, data.advantage, mask)
        count = np.int32(max(1, int(selection.share * int(mask.sum()))))
        found = np.asarray(choose(key, step, np.int32(number), *arrays, count=count))
        micros = [dataclasses.replace(m, selected=batch.at(data, found, m.rows)) for m in mini.micros]
        return dataclasses.replace(mini, micros=micros)

    return select
