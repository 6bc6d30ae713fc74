"""The weights that a loop on `jppo.open` trains, with their optimizers, and their checkpoints."""

import dataclasses
import functools
import math
import pathlib
import sys
from collections.abc import Callable
from typing import Any, cast

import jax
import numpy as np

from jppo.errors import UserError
from jppo.learner import optim, state
from jppo.learner.batch import Mini, with_counts_of_whole
from jppo.learner.loss_scale import scale_of
from jppo.learner.make import rate_schedule
from jppo.learner.ppo import Learner, ModelConfigs
from jppo.learner.stats import Outputs, average, join_parts
from jppo.learner.trainable import CompiledLoss, Trainable
from jppo.models import placing
from jppo.models.lora import Weights, join
from jppo.run.api.responses import Responses
from jppo.run.make import begin_optimizer
from jppo.run.resume import OPTIMIZERS, frozen_weights, require_same_run, run_identity
from jppo.run.trained_model import find_checkpoint, is_checkpoint
from jppo.runlog.checkpoint import Checkpoints
from jppo.runlog.checkpoint_arrays import restore
from jppo.settings import Loop, Optimizer
from jppo.types import Array, Params, TrainState


class TrainedWeights:
    """The policy or the critic of a loop: its weights and its optimizer's state, with the gradient so far."""

    def __init__(self, trainable: Trainable, params: Params, opt: Any, section: Optimizer, total_steps: int):
        """`section` has the optimizer's settings; its schedule is over `total_steps`."""
        self.trainable, self.params, self.opt = trainable, params, opt
        self._section, self._schedule = section, rate_schedule(section, total_steps)
        self._carry: Any = None  # the gradient so far
        self.accumulated = 0  # gradients since the last step
        self.stepped = 0  # optimizer steps in this step of the loop; each is of a mini-batch
        self._learns = False  # whether a token of the gradient so far counts
        self._whole: tuple[Responses, CompiledLoss, Mini] | None = None  # the last `of`, packed

    @property
    def model(self) -> Weights:
        """Returns the whole model, its frozen base included."""
        return self.trainable.model(self.params)

    def pack_mini(
        self,
        loss: CompiledLoss,
        batch: Responses,
        whole: Responses | None,
        pack: Callable[[Responses], Mini],
        now: TrainState,
    ) -> Mini:
        """Packs a batch for `forward_backward`, with what the loss needs of the `whole` batch that it is a part of."""
        mini = pack(batch)
        if whole is None:
            return self._look_ahead(loss, mini, now) if loss.looks_ahead else mini
        if not loss.looks_ahead:
            return dataclasses.replace(mini, counts=whole.counts())
        if loss.before is not None:
            batch.require_part(whole)
        if self._whole is None or self._whole[0] is not whole or self._whole[1] is not loss:
            self._whole = (whole, loss, self._look_ahead(loss, pack(whole), now))
        return with_counts_of_whole(mini, self._whole[2])

    def _look_ahead(self, loss: CompiledLoss, mini: Mini, now: TrainState) -> Mini:
        """Adds to a packed batch what the loss reads of the whole of it, by the current weights."""
        params, base = placing.to_device((self.params, self.trainable.base))
        return loss.look_ahead(join(params, base), mini, now.key, now.step, self.stepped)

    def forward_backward(self, loss: CompiledLoss, mini: Mini, *further: Any) -> tuple[dict[str, float], list[Outputs]]:
        """Adds the gradient of a mini-batch; returns its metrics, and the outputs of each micro-batch."""
        trainable = dataclasses.replace(self.trainable, loss=loss)
        params, base, further = placing.to_device((self.params, trainable.base, further))
        carry, self._carry = trainable.zeros() if self._carry is None else self._carry, None
        try:
            carry, parts = trainable.forward_backward(params, base, carry, mini, scale_of(self.opt), *further)
        except BaseException:
            self.discard()  # the carry was donated
            raise
        self._carry = carry
        self.accumulated += 1
        self._learns = self._learns or mini.learns
        fetched: list[Outputs] = jax.device_get(parts)
        return average([join_parts(fetched)]), fetched

    def optim_step(self, step: Array, overrides: dict[str, float | None]) -> dict[str, float]:
        """Takes an optimizer step with the accumulated gradient; `overrides` replace settings."""
        name, rate = self.trainable.name, cast(Any, step)
        if any(x is not None for x in overrides.values()):
            rate = self._merge_hyperparameters(step, overrides)
        former, carry, self._carry = self.params, self._carry, None
        params = placing.take(self.params)
        params, self.opt, stats = self.trainable.optim_step(params, self.opt, carry, rate, learns=self._learns)
        self.params = jax.block_until_ready(placing.put_back(params, former))
        self.stepped += 1
        self.discard()
        return {f"{name}/{key}": float(value) for key, value in jax.device_get(stats).items()}

    def _merge_hyperparameters(self, step: Array, step_overrides: dict[str, float | None]) -> optim.Hyperparameters:
        """Returns the settings' hyperparameters of a step with overrides; raises UserError for an invalid one."""
        s, name = self._section, self.trainable.name
        betas: Any = s.betas
        configured = dict(lr=float(self._schedule(step)), beta1=betas[0], beta2=betas[1], eps=optim.ADAM_EPS)
        configured |= dict(weight_decay=s.weight_decay, grad_clip=s.grad_clip)
        overrides = {key: value for key, value in step_overrides.items() if value is not None}
        for key, value in overrides.items():
            if s.optimizer != "adamw" and key not in ("lr", "grad_clip"):
                raise UserError(
                    f"optim_step({key}={value}) is of AdamW, and {name}.optimizer={s.optimizer!r}; leave {key} out"
                )
            in_range = 0 <= value < 1 if key.startswith("beta") else value >= 0
            if not in_range or not math.isfinite(value):
                rule = "from 0 to below 1" if key.startswith("beta") else "a finite number, at least 0"
                raise UserError(f"optim_step({key}={value}): {key} must be {rule}; correct it")
        hyperparameters = configured | overrides
        hyperparameters["grad_clip"] = hyperparameters["grad_clip"] or math.inf
        return optim.Hyperparameters(**{key: np.float32(value) for key, value in hyperparameters.items()})

    def discard(self) -> None:
        self._carry, self.accumulated, self._learns, self._whole = None, 0, False, None


def save_state(c: Loop, learner: Learner, folder: pathlib.Path, now: TrainState) -> pathlib.Path:
    """Writes folder/checkpoints/STEP and returns it once it is on disk."""
    if is_checkpoint(folder):
        raise UserError(f"{folder} is a checkpoint; give the folder that has checkpoints/")
    meta = run_identity(c, learner.mesh, data={}, frozen=frozen_weights(learner))
    step = int(now.step)
    path = folder / "checkpoints" / str(step)
    with Checkpoints(folder / "checkpoints", keep=sys.maxsize) as checkpoints:
        before = path.stat().st_mtime_ns if path.is_dir() else None
        checkpoints.save(step, state.remove_padding(now, learner.spare()), meta)
        checkpoints.wait()
        if not path.is_dir() or path.stat().st_mtime_ns == before:
            raise OSError(f"the checkpoint of step {step} could not be written to {folder}; make room there")
    return path


def load_state(
    c: Loop, inputs: ModelConfigs, learner: Learner, path: pathlib.Path, template: TrainState, *, optimizer: bool
) -> TrainState:
    """Reads a checkpoint, or the last one of a folder, into arrays sharded as `template`'s."""
    identity = run_identity(c, learner.mesh, data={}, frozen=frozen_weights(learner))
    checkpoint = find_checkpoint(path, step=None, best=False)
    if not is_checkpoint(checkpoint):
        raise UserError(f"{path} has no checkpoint, only a model; open that by jppo.open('{path}/hf')")
    spare = learner.spare()
    fits = functools.partial(_require_fitting, identity)
    restored = restore(checkpoint, state.remove_padding(template, spare), fits=fits, optional=OPTIMIZERS)
    loaded = state.restore_padding(restored.state, spare, template)
    if optimizer and not {*restored.missing} & {*OPTIMIZERS}:
        return loaded
    begin = functools.partial(begin_optimizer, c, inputs, learner)
    loaded = dataclasses.replace(loaded, policy_opt=begin("policy", loaded.policy))
    return loaded if loaded.value is None else dataclasses.replace(loaded, value_opt=begin("value", loaded.value))


def _require_fitting(identity: dict[str, Any], saved: dict[str, Any]) -> None:
    """Raises UserError for a checkpoint of another model; data and algorithm are the loop's own."""
    known = {*identity["config"], "trainer.save_contents"}
    config = {name: value for name, value in saved.get("config", {}).items() if name in known}
    require_same_run({"config": config, "frozen": saved.get("frozen")}, identity)
