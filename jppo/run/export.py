"""The trained policy as files for others: a model directory, and its adapters where it has some."""

import pathlib

from jppo.models import hf
from jppo.run.opened import Run
from jppo.types import TrainState


class Unwritten(Exception):
    """There is no room for the trained model; the last checkpoint has it."""


def write_model(run: Run, path: pathlib.Path, now: TrainState) -> None:
    """The policy as a model directory."""
    c, learner = run.c, run.learner
    dtype, write = c.model.param_dtype, run.hosts.first
    hf.save(path, learner.policy(now), learner.cfg, source=c.model.path, dtype=dtype, write=write)


def export(run: Run, now: TrainState) -> None:
    """Writes hf/, and adapter/ where only adapters were trained, to the run's folder."""
    adapters, cfg = run.inputs.adapters, run.learner.cfg
    try:
        if adapters is not None:
            path, write = run.folder / "adapter", run.hosts.first
            hf.save_adapter(path, now.policy, cfg, adapters, base=run.c.model.path, write=write)
        write_model(run, run.folder / "hf", now)
    except OSError as e:
        remedy = "make room, and give the same command again"
        raise Unwritten(f"the model cannot be written to {run.folder}: {e}; {remedy}") from e
