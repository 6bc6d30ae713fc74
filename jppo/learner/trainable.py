"""A model that learns: gradients of a loss over mini-batches, accumulated, and optimizer steps.

Weights and the optimizer's state go in and come out, so that one `Trainable` serves any number of sets of weights:
PPO's actor and critic, fine-tuning, reward models, DPO, and the loops of `jppo.open`.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from jppo.learner import batch, streams, update
from jppo.learner.algorithm import Algorithm
from jppo.learner.loss_scale import scale_of
from jppo.learner.optim import Hyperparameters
from jppo.learner.score import LogProb
from jppo.learner.stats import Outputs, Stat, average, join_parts
from jppo.learner.views import SHARE, BeforeView, names_of, view
from jppo.models import placing
from jppo.models.lora import Base, Weights, join
from jppo.types import Array, Batch, Params, Rows


@dataclasses.dataclass(frozen=True)
class Before:
    """The compiled `Algorithm.before`: what its loss reads of a whole mini-batch, however that is cut."""

    reads: tuple[str, ...]
    logprob: LogProb  # the policy's pass, compiled
    function: Any  # of jax.jit: (key, step, number of the mini-batch, arrays by name) -> [B, L]

    def __call__(self, model: Weights, mini: batch.Mini, key: Any, step: Any, number: int) -> batch.Mini:
        """Computes the function over a mini-batch, number `number` of the step, and adds the result as `before`."""
        data = mini.batch
        rows = [dataclasses.replace(micro.rows, dropout=None) for micro in mini.micros]  # it has no dropout
        assert data is not None
        mask = batch.unpack_rows(data, [(r, np.asarray(r.mask)) for r in rows])
        available: dict[str, Any] = {**data.arrays} | {"mask": mask}
        if "logprob" in self.reads:
            scores = [placing.fetch(self.logprob(model, placing.put(r, mini.place)).logprob) for r in rows]
            available["logprob"] = batch.unpack_rows(data, list(zip(rows, scores, strict=True)))
        for share in names_of(self.reads, SHARE):  # such as '0.1' of the tokens, rounded down
            available[f"{SHARE}{share}"] = np.int32(max(1, int(float(share) * int(mask.sum()))))
        arrays = {name: available[name] for name in self.reads if name in available}
        result = np.asarray(self.function(key, step, np.int32(number), arrays))
        micros = [batch.with_array(m, "before", batch.pack_like(data, result, m.rows)) for m in mini.micros]
        return dataclasses.replace(mini, micros=micros)

    def placeholders(self, data: Batch) -> dict[str, Any]:
        """Returns arrays of the shapes and dtypes that the function gets, to compile it."""
        available: dict[str, Any] = {**data.arrays} | {"mask": data.mask}
        available["logprob"] = np.zeros(data.mask.shape, np.float32)
        available |= {f"{SHARE}{share}": np.int32(0) for share in names_of(self.reads, SHARE)}
        return {name: available[name] for name in self.reads if name in available}


def make_before(algorithm: Algorithm, logprob: LogProb) -> Before | None:
    """Compiles `Algorithm.before`, if a term reads it; `logprob` is a compiled pass."""
    function = algorithm.before
    if function is None or "before" not in algorithm.loss_reads:
        return None

    @jax.jit
    def compute_before(key: Array, step: Array, number: Array, arrays: dict[str, Array]) -> Array:
        key = streams.fold(key, step, streams.Step.BEFORE, number)
        return function(view(BeforeView, algorithm.before_reads, arrays | {"key": key}))

    return Before(algorithm.before_reads, logprob, compute_before)


@dataclasses.dataclass(frozen=True)
class CompiledLoss:
    """The compiled gradient of a loss, and the passes over the whole mini-batch that it needs before."""

    accumulate: Callable[..., tuple[update.Carry, Outputs]]
    reads: tuple[str, ...] = ()  # the arrays of the batch that it reads
    load: Callable[[Weights, Rows], Array] | None = None  # tokens by expert, for the load-balancing loss
    before: Before | None = None

    @property
    def looks_ahead(self) -> bool:
        """Whether it needs a pass over the whole mini-batch before its gradient."""
        return self.load is not None or self.before is not None

    def look_ahead(
        self, model: Weights, mini: batch.Mini, key: Array | None, step: Array | None, number: int
    ) -> batch.Mini:
        """Adds what the loss needs of the whole mini-batch, as constants; `number` is the mini-batch's in the step."""
        if self.before is not None:
            mini = self.before(model, mini, key, step, number)
        if self.load is None:
            return mini
        load: Any = sum(placing.fetch(self.load(model, placing.put(m.rows, mini.place))) for m in mini.micros)
        return dataclasses.replace(mini, counts=dataclasses.replace(mini.counts, load=load))


@dataclasses.dataclass(frozen=True)
class Trainable:
    """The compiled training of one model: its loss, its optimizer step and its accumulator of gradients."""

    name: str  # 'actor', 'critic' or another training's, of its metrics
    loss: CompiledLoss
    apply: jax.stages.Wrapped
    zeros: Callable[[], update.Carry]
    exchange: Any  # of gradients, between groups of devices; None where there is one group
    base: Base | None = None  # frozen weights of a model with adapters
    spare: tuple[Any, Any] = ((), ())  # padding rows of the learned parameters and of the optimizer state
    apply_hyper: jax.stages.Wrapped | None = None  # `apply` with Hyperparameters in place of the step

    @property
    def drops(self) -> bool:
        """Whether the adapters have dropout."""
        return self.base is not None and self.base.dropout > 0

    def model(self, learned: Params) -> Weights:
        return join(learned, self.base)

    def learn(
        self, params: Params, opt: Any, step: Array, minis: Iterable[batch.Mini], *further: Any,
        key: Array | None = None,
    ) -> tuple[Params, Any, dict[str, float]]:  # fmt: skip
        """Takes one optimizer step per mini-batch, with gradients accumulated over its micro-batches.

        `further` are arguments of the loss, `key` is for dropout and for `Algorithm.before`. Offloaded
        arrays are moved to the devices: the models for the whole update, the optimizer state for its steps.
        """
        initial, history = params, list[tuple[list[Outputs], dict[str, Array]]]()
        base, further = placing.to_device((self.base, further))
        params = placing.take(params)
        for number, mini in enumerate(minis):
            if self.drops:
                mini = batch.with_dropout(mini, key, step, number)
            mini = self.loss.look_ahead(join(params, base), mini, key, step, number)
            carry, parts = self.forward_backward(params, base, self.zeros(), mini, scale_of(opt), *further)
            params, opt, stats = self.optim_step(params, opt, carry, step, learns=mini.learns)
            history.append((parts, stats))
            del carry  # frees it before the next one exists
        params = jax.block_until_ready(placing.put_back(params, initial))
        mini_metrics = [
            join_parts(parts) | {f"{self.name}/{key}": Stat(x) for key, x in stats.items()}
            for parts, stats in jax.device_get(history)
        ]
        return params, opt, average(mini_metrics)

    def forward_backward(
        self, params: Params, base: Base | None, carry: update.Carry, mini: batch.Mini, scale: Any, *further: Any
    ) -> tuple[update.Carry, list[Outputs]]:
        """Adds the gradient of a mini-batch to the sums in `carry`, which is donated; returns them and the outputs.

        `params`, `base` and `further` are on the devices, and the mini-batch is from `CompiledLoss.look_ahead`. `scale`
        is `scale_of` the optimizer's state.
        """
        parts, scale = list[Outputs](), placing.to_device(scale)
        for micro in mini.micros:
            rows = placing.put(micro, mini.place)
            carry, part = self.loss.accumulate(params, base, carry, rows, mini.counts, scale, *further)
            jax.block_until_ready(parts[-1:])  # else the rows of all micro-batches would be on the devices at once
            parts.append(part)
        return carry, parts

    def optim_step(
        self, params: Params, opt: Any, carry: update.Carry, step: Any, *, learns: bool
    ) -> tuple[Params, Any, dict[str, Any]]:
        """Takes an optimizer step with the gradient; donates parameters on the devices and the optimizer's state.

        Returns the parameters on the devices, the state where it was, and the statistics of the step. `step` is the
        number by which the rate follows its schedule, or the `Hyperparameters`. `learns` False, without a token
        to learn from, changes nothing.
        """
        apply = self.apply_hyper if isinstance(step, Hyperparameters) else self.apply
        assert apply is not None
        carry = carry if self.exchange is None else self.exchange(carry)
        params, stepped, stats = apply(params, placing.take(opt), carry, step, np.bool_(learns))
        return params, placing.put_back(stepped, opt), jax.block_until_ready(stats)
