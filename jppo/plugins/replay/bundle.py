"""The files of a recorded step, RUN/replay/step_N: what the step read, and the numbers that it computed.

about.json    settings, versions, and what was computed beyond the batch
samples.json  prompts, trajectories and rewards
batch.npz     the batch of the step with its scores and advantages, a row for each sequence
state/        the train state before the step, a checkpoint
"""

import dataclasses
import json
import math
import os
import pathlib
import platform
import re
import shutil
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jppo.errors import UserError
from jppo.learner import batch, state
from jppo.learner.ppo import Learner, ModelConfigs
from jppo.runlog import checkpoint_arrays, trajectories
from jppo.runlog.checkpoint import Checkpoints
from jppo.types import Batch, Prompt, Reward, TrainState, Trajectory

VALUES = 8  # entries of each array of the updated weights that a bundle has
CHECKSUM_OF_FROZEN = ", checksum of the frozen weights"
SHAPELESS = "value_norm"  # the array of a batch without an entry for each sequence


@dataclasses.dataclass(frozen=True)
class Samples:
    """The samples of a step, graded."""

    prompts: list[Prompt]
    trajectories: list[Trajectory]  # n in turn for each prompt
    rewards: list[Reward]
    baseline: list[Reward] | None  # of greedy responses; None: none were sampled

    @property
    def sequences(self) -> list[Trajectory]:
        """Returns the sequences of the batch: the samples, then further branches of episodes."""
        return [*self.trajectories, *(branch for t in self.trajectories for branch in t.branches)]


@dataclasses.dataclass(frozen=True)
class Computed:
    """The numbers of a step, by stage."""

    models: dict[str, str]  # fields of the models' configs, and checksums of frozen weights
    rewards: dict[str, np.ndarray]  # [samples], as graded
    batch: dict[str, np.ndarray]  # [sequences, L] or [sequences], with advantages
    updates: list[dict[str, Any]]  # of each optimizer step: model, loss, gradient norm, learning rate
    metrics: dict[str, float]  # of the updates
    weights: dict[str, list[float]]  # of each array of the next state: checksum, and some entries


@dataclasses.dataclass(frozen=True)
class Bundle:
    """A recorded step."""

    folder: pathlib.Path
    number: int  # of the step, from 1
    settings: dict[str, Any]  # as in config.json
    total_steps: int
    sources: list[str]  # of all rows of the run
    tool_rewards: bool  # tools of the run's conversations give rewards
    machine: dict[str, str]
    samples: Samples
    computed: Computed


def describe_machine(mesh: jax.sharding.Mesh, versions: Mapping[str, str]) -> dict[str, str]:
    """Returns what decides how numbers are rounded: processor, devices, versions, XLA's flags."""
    file = pathlib.Path("/proc/cpuinfo")
    name = re.search(r"^model name\s*:\s*(.+)$", file.read_text() if file.is_file() else "", re.MULTILINE)
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in flag]
    return {
        "processor": name[1] if name else platform.processor() or platform.machine(),
        "mesh": ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1),
        **versions,
        "XLA_FLAGS": " ".join(sorted(flags)),
    }


def describe_models(models: ModelConfigs, frozen: Mapping[str, int]) -> dict[str, str]:
    """Returns the fields of the models' configs by name, and the checksums of weights that no step changes."""
    configs = {name: getattr(models, name) for name in ("policy", "critic", "reference")}
    fields = {f"{name}.{k}": repr(v) for name, cfg in configs.items() if cfg is not None for k, v in vars(cfg).items()}
    return fields | {f"{name}{CHECKSUM_OF_FROZEN}": str(checksum) for name, checksum in frozen.items()}


def reward_arrays(rewards: Sequence[Reward]) -> dict[str, np.ndarray]:
    """Returns the scores and parts of rewards, NaN where there is none, and which gradings failed."""
    parts = sorted({name for reward in rewards for name in reward.parts})
    arrays = {name: np.array([r.parts.get(name, math.nan) for r in rewards]) for name in parts}
    return {
        "score": np.array([r.score for r in rewards]),
        **arrays,
        "failed": np.array([r.error is not None for r in rewards]),
    }


def batch_arrays(data: Batch, sequences: Sequence[Trajectory]) -> dict[str, np.ndarray]:
    """Returns the arrays of a batch without its padding, with the tokens of the responses and checksums of all."""
    arrays = {name: np.asarray(x) for name, x in batch.arrays(data, sequences).items()}
    cut = {name: x if name == SHAPELESS else x[: len(sequences)] for name, x in arrays.items()}
    return cut | {"checksum": np.array([zlib.crc32(t.tokens.tobytes() + t.version.tobytes()) for t in sequences])}


def weight_values(learner: Learner, now: TrainState) -> dict[str, list[float]]:
    """Returns the checksum of every array of the state, and some entries of the weights."""
    arrays = dict(checkpoint_arrays.named_leaves(state.remove_padding(now, learner.spare())))
    checks = checkpoint_arrays.examine({name: checkpoint_arrays.as_numbers(x) for name, x in arrays.items()})
    values = dict[str, list[float]]()
    for name, (_, checksum) in checks.items():
        values[name] = [checksum]
        if re.match(r"\.(policy|value)\b", name):
            flat = np.asarray(jax.device_get(arrays[name])).reshape(-1)
            values[name] += flat[:: max(1, flat.size // VALUES)][:VALUES].astype(np.float32).tolist()
    return values


def begin_bundle(folder: pathlib.Path, learner: Learner, now: TrainState, samples: Samples) -> None:
    """Writes what a step read, to a folder `.new`."""
    new, baseline = _unfinished(folder), samples.baseline
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    content = {
        "prompts": [vars(prompt) | {"ids": prompt.ids.tolist()} for prompt in samples.prompts],
        "trajectories": trajectories.serialise(samples.trajectories),
        "rewards": list(map(dataclasses.asdict, samples.rewards)),
        "baseline": None if baseline is None else list(map(dataclasses.asdict, baseline)),
    }
    (new / "samples.json").write_text(json.dumps(content, default=_as_list))
    with Checkpoints(new / "state", keep=1) as checkpoints:
        checkpoints.save(int(now.step), state.remove_padding(now, learner.spare()), {})
        checkpoints.wait()
        if checkpoints.latest() is None:
            raise OSError("its state is not written")


def end_bundle(folder: pathlib.Path, about: dict[str, Any], computed: Computed) -> None:
    """Writes what the step computed, and gives the folder its name."""
    new = _unfinished(folder)
    np.savez_compressed(new / "batch.npz", **computed.batch)  # type: ignore[arg-type]
    fields = {name: value for name, value in vars(computed).items() if name != "batch"}
    (new / "about.json").write_text(json.dumps(about | {"computed": fields}, default=_as_list))
    shutil.rmtree(folder, ignore_errors=True)
    new.rename(folder)


def _unfinished(folder: pathlib.Path) -> pathlib.Path:
    return folder.with_name(f"{folder.name}.new")


def _as_list(x: Any) -> Any:
    """Returns a NumPy array or number for JSON; raises TypeError for anything else."""
    if isinstance(x, np.ndarray | np.generic):
        return x.tolist()
    raise TypeError(f"a {type(x).__name__} in a column of its prompts is no JSON")


def find_bundle(run: pathlib.Path, step: int | None) -> pathlib.Path:
    """Returns the folder of a recorded step; `step` may be None if there is one only."""
    folders = {path.name.removeprefix("step_"): path for path in (run / "replay").glob("step_*") if not path.suffix}
    names = sorted(folders, key=lambda name: (len(name), name))
    if not run.is_dir() or (run / "about.json").is_file():
        raise UserError(f"{run} is no folder of a run; name the run_dir that has replay/step_N, and N by --step")
    if not names:
        raise UserError(f"{run} has no recorded step; train with trainer.replay_steps=3, or other steps")
    if step is None and len(names) > 1:
        raise UserError(f"{run} has recorded the steps {', '.join(names)}; name one by --step")
    name = names[0] if step is None else str(step)
    if name not in folders:
        raise UserError(f"--step={step} is not recorded in {run}, which has {', '.join(names)}; name one of these")
    return folders[name]


def read_bundle(folder: pathlib.Path) -> Bundle:
    """Reads a recorded step but for its state; UserError for a file that cannot be read."""
    try:
        about, samples = (json.loads((folder / name).read_text()) for name in ("about.json", "samples.json"))
        with np.load(folder / "batch.npz") as file:
            arrays = {name: file[name] for name in file.files}
        computed = about.pop("computed")
        computed["rewards"] = {name: np.array(x) for name, x in computed["rewards"].items()}
        prompts = [Prompt(**row | {"ids": np.array(row["ids"], np.int32)}) for row in samples["prompts"]]
        rewards, baseline = (
            None if rows is None else [*map(trajectories.reward_of, rows)]
            for rows in (samples["rewards"], samples["baseline"])
        )
        graded = Samples(prompts, trajectories.deserialise(samples["trajectories"]), rewards or [], baseline)
        return Bundle(folder=folder, **about, samples=graded, computed=Computed(batch=arrays, **computed))
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as e:
        raise UserError(f"{folder} is no readable bundle ({type(e).__name__}: {e}); record the step again") from e
