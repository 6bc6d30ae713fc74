"""Checkpoints of a custom loop, in the form of jppo.train's."""

import dataclasses
import functools
import pathlib

from jppo.errors import UserError
from jppo.learner import state
from jppo.learner.make import begin_optimizer
from jppo.learner.model_configs import ModelConfigs
from jppo.learner.ppo import Learner
from jppo.run.resume import OPTIMIZERS, former_name, frozen_weights, require_same_run, run_identity
from jppo.run.trained_model import find, is_checkpoint
from jppo.runlog.checkpoint import Checkpoints
from jppo.runlog.checkpoint_arrays import restore
from jppo.settings import Settings
from jppo.types import TrainState


def save_state(c: Settings, learner: Learner, folder: pathlib.Path, now: TrainState) -> pathlib.Path:
    """Writes folder/checkpoints/STEP and returns it once it is on disk."""
    if is_checkpoint(folder):
        raise UserError(f"{folder} is a checkpoint; give the folder that has checkpoints/")
    meta = run_identity(c, learner.mesh, data={}, frozen=frozen_weights(learner))
    step = int(now.step)
    path = folder / "checkpoints" / str(step)
    with Checkpoints(folder / "checkpoints", keep=c.trainer.max_ckpt_to_keep) as checkpoints:
        before = path.stat().st_mtime_ns if path.is_dir() else None
        checkpoints.save(step, state.portable(now, learner.spare()), meta)
        checkpoints.wait()
        if not path.is_dir() or path.stat().st_mtime_ns == before:
            raise OSError(f"the checkpoint of step {step} could not be written to {folder}; make room there")
    return path


def load_state(
    c: Settings, inputs: ModelConfigs, learner: Learner, path: pathlib.Path, like: TrainState, *, optimizer: bool
) -> TrainState:
    """Reads a checkpoint, or the last one of a folder, into the shards of `like`."""
    now = run_identity(c, learner.mesh, data={}, frozen=frozen_weights(learner))
    checkpoint = find(path, step=None, best=False)
    if not is_checkpoint(checkpoint):
        raise UserError(f"{path} has no checkpoint, only a model; open that by jppo.open('{path}/hf')")
    spare = learner.spare()
    fits = functools.partial(_require_fitting, now)
    found = restore(checkpoint, state.portable(like, spare), fits=fits, optional=OPTIMIZERS, former_name=former_name)
    there = state.placed(found.state, spare, like)
    if optimizer and not {*found.missing} & {*OPTIMIZERS}:
        return there
    begin = functools.partial(begin_optimizer, c, inputs, learner)
    there = dataclasses.replace(there, policy_opt=begin("policy", there.policy))
    return there if there.value is None else dataclasses.replace(there, value_opt=begin("value", there.value))


def _require_fitting(now: dict[str, object], then: dict[str, object]) -> None:
    """Raises UserError for a checkpoint of another model; the data is the loop's own."""
    require_same_run(then, now | {"data": then.get("data")})
