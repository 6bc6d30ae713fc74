"""The runs of an algorithm and of its references: the same tasks, seeds and number of samples."""

import dataclasses
import json
import os
import pathlib
import platform
import re
import shutil
import sys
import zlib
from collections.abc import Mapping, Sequence

import jax
import numpy as np

import jppo
from jppo import settings, sweep
from jppo.configs import learning
from jppo.errors import UserError
from jppo.plugins.prove import tasks as task_files
from jppo.runlog.logger import read_metrics
from jppo.settings import parts
from jppo.settings.plan import PlannedRun

SAMPLES = 64  # of a step
SCORE = "critic/score/mean"
REFERENCES = {"PPO": "gae", "GRPO": "grpo"}  # their estimators
OWN = ("algorithm.", "actor.", "critic.", "rollout.n=")  # settings that an algorithm may change


class Crashed(UserError):
    """A run has failed; the text is its name and the last error of its log."""


@dataclasses.dataclass(frozen=True)
class Contestant:
    """An algorithm and its settings."""

    label: str
    overrides: Mapping[str, object]  # of the tasks' settings
    critic: bool
    folder: pathlib.Path  # named after all that its runs depend on

    def plan(self, task: str, seed: int) -> PlannedRun:
        """Returns a run, with the arguments of jppo.train."""
        folder, files = self.folder / f"{task}-seed{seed}", self.folder.parent / "tasks" / task
        critic = learning.CRITIC_FILES.get(task, {}) if self.critic else {}
        changes: dict[str, object] = {name: f"{files}/{path}" for name, path in critic.items()}
        changes |= {**self.overrides, "trainer.seed": seed, "trainer.run_dir": folder}
        arguments = (f"--config=jppo://learning:{files}", *(f"--config.{k}={v}" for k, v in changes.items()))
        return PlannedRun(f"{self.label} {task} seed {seed}", folder, {}, arguments, {})

    def plan_all(self, tasks: Sequence[str], seeds: int) -> list[PlannedRun]:
        """Returns all runs, seed by seed; raises a UserError for settings that a task does not allow."""
        for task in tasks:
            config, _ = settings.parse(list(self.plan(task, 1).arguments), "", settings.default())
            settings.check(config)
        return [self.plan(task, seed) for seed in range(1, seeds + 1) for task in tasks]

    def read_curves(self, task: str, seeds: int) -> np.ndarray:
        """Returns the score of each seed's steps, [S, T]."""
        folders = [self.plan(task, seed).folder for seed in range(1, seeds + 1)]
        return np.array([[line[SCORE] for line in read_metrics(folder) if SCORE in line] for folder in folders])


def enter(
    algorithm: str, base: pathlib.Path, changes: Sequence[str] = (), *, steps: int = 0, label: str = ""
) -> Contestant:
    """Returns a contestant: FILE.py:NAME or MODULE:NAME of `algorithm.extension`, or a name of an estimator.

    An algorithm that compares samples of a prompt gets 8 of each, any other one; one with a critic gets PPO's settings.
    """
    for change in changes:
        if not change.removeprefix("--config.").startswith(OWN) or "=" not in change:
            allowed = "algorithm, actor and critic, and rollout.n, as --config.SECTION.NAME=VALUE"
            raise UserError(f"{change}: an algorithm may change settings of {allowed}; all else is equal for all")
    file, colon, name = algorithm.rpartition(":")
    own: dict[str, object] = {"algorithm.extension" if colon else "algorithm.adv_estimator": algorithm}
    own |= dict(change.removeprefix("--config.").split("=", 1) for change in changes)
    words = [f"--config.{k}={v}" for k, v in ({"rollout.n": 8} | own).items()]
    config, _ = settings.parse([f"--config=jppo://learning:{base / 'tasks/chain'}", *words], "", settings.default())
    made = parts.algorithm(settings.typed(config))
    n = config.rollout.n if made.compares or "rollout.n" in own else 1
    if config.algorithm.filter_groups:
        raise UserError("algorithm.filter_groups samples until enough prompts differ; here all have as many samples")
    if SAMPLES % n:
        raise UserError(f"--config.rollout.n={n} must divide {SAMPLES}, the samples of a step")
    overrides = (learning.CRITIC if made.critic else {}) | own | {"rollout.n": n, "data.train_batch_size": SAMPLES // n}
    overrides |= {"trainer.total_training_steps": steps} if steps else {}
    key = zlib.crc32("".join([json.dumps(overrides), *read_files(overrides)]).encode())
    words = [f"{pathlib.Path(file).name}{colon}{name}", *(change.removeprefix("--config.") for change in changes)]
    return Contestant(label or " ".join(words), overrides, made.critic, base / f"{label or name}-{key:08x}")


def read_files(overrides: Mapping[str, object]) -> list[str]:
    """Returns the texts of the users' files and modules that settings name, and of what these loaded below them."""
    named = [name for value in overrides.values() if (name := str(value).rpartition(":")[0])]
    files = [name if name.endswith(".py") else getattr(sys.modules.get(name), "__file__", None) for name in named]
    folders = {pathlib.Path(file).resolve().parent for file in files if file}
    loaded = {pathlib.Path(getattr(module, "__file__", None) or "").resolve() for module in [*sys.modules.values()]}
    below = {path: path.relative_to(f) for path in loaded for f in folders if path.is_relative_to(f)}
    own = [path for path, inner in below.items() if path.suffix == ".py" and "site-packages" not in inner.parts]
    return [path.read_text() for path in sorted(own)]


def machine() -> str:
    """Returns processor and cores."""
    info = pathlib.Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", info.read_text()) if info.is_file() else None
    return f"{found[1] if found else platform.machine()}, {os.cpu_count()} cores"


def base_name() -> str:
    """Returns the name of a folder of runs: the version, and a key of jppo's source, of JAX and of the machine."""
    package = pathlib.Path(jppo.__file__).parent
    files = {*package.rglob("*.py"), *(package / "examples").glob("*.py"), *(package / "configs").glob("*.py")}
    crc = zlib.crc32(f"{jax.__version__} {machine()}".encode())
    for path in sorted(files):
        crc = zlib.crc32(path.read_bytes(), crc)
    return f"jppo-{jppo.__version__}-{crc:08x}"


def run_all(runs: Sequence[PlannedRun], jobs: int, module: str = "jppo.train") -> None:
    """Runs what has not finished, `jobs` at a time; raises Crashed at the first that fails."""

    def on_end(run: PlannedRun, code: int | None, seconds: float) -> None:
        sweep.print_line(f"{run.name}: {'interrupted' if code is None else f'exit code {code}'} after {seconds:.0f} s")
        if code:
            raise Crashed(f"{run.name}: {sweep.last_error(run.folder / sweep.LOG)}")
        if code == 0:
            shutil.rmtree(run.folder / "checkpoints", ignore_errors=True)

    missing = [run for run in runs if not (run.folder / "hf").is_dir()]
    command = lambda run: [sys.executable, "-m", module, *run.arguments]  # noqa: E731
    sweep.run_all(missing, command, jobs=jobs, on_start=lambda run: None, on_end=on_end)


def prepare_all(tasks: Sequence[str], base: pathlib.Path, model: pathlib.Path | None, jobs: int) -> None:
    """Makes the data and the starting models that are missing."""
    runs = []
    for task in tasks:
        folder = base / "tasks" / task
        if not task_files.is_ready(task, folder, model):
            words = (task, str(folder), *([str(model)] if model else []))
            runs.append(PlannedRun(f"starting model of {task}", base / "logs" / task, {}, words, {}))
    run_all(runs, jobs, task_files.__name__)
