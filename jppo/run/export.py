"""Exports the trained policy: a model directory, and its adapters if any."""

import pathlib

from jppo.errors import RunEnded
from jppo.models import hf_write
from jppo.run.start import Run
from jppo.types import TrainState


class Unwritten(RunEnded):
    """A full disk at export; the last checkpoint has the model."""


def write_model(run: Run, path: pathlib.Path, now: TrainState) -> None:
    """Writes the policy as a model directory."""
    c, learner = run.c, run.learner
    dtype, write = c.model.param_dtype, run.hosts.first
    hf_write.save_model(path, learner.policy(now), learner.cfg, source=c.model.path, dtype=dtype, write=write)


def export_policy(run: Run, now: TrainState) -> None:
    """Writes hf/, and adapter/ for LoRA runs, to the run folder."""
    adapters, cfg = run.inputs.adapters, run.learner.cfg
    try:
        if adapters is not None:
            path, write = run.folder / "adapter", run.hosts.first
            hf_write.save_adapter(path, now.policy, cfg, adapters, base=run.c.model.path, write=write)
        write_model(run, run.folder / "hf", now)
    except OSError as e:
        remedy = "make room, and give the same command again"
        raise Unwritten(f"the model cannot be written to {run.folder}: {e}; {remedy}") from e
