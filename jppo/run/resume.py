"""Saving and resuming: the metadata of a checkpoint, and the check that this run may resume from it."""

import dataclasses
import importlib.metadata
import json
import math
import pathlib
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from jppo import __version__, settings
from jppo.data.prompts import PromptSet
from jppo.data.stream import Cursor
from jppo.errors import UserError, expanded
from jppo.learner import optim, state
from jppo.learner.state import Spare
from jppo.run.loop import Progress
from jppo.runlog import durable_files
from jppo.runlog.checkpoint import Checkpoints
from jppo.runlog.checkpoint_arrays import Restored, checksum_of_all, require_checkpoint, restore
from jppo.settings import Common, Settings, Training, parts, table
from jppo.types import TrainState

if TYPE_CHECKING:
    from jppo.learner.ppo import Learner

# Settings that a resume cannot change, and what of the checkpoint depends on them.
FIXED = dict.fromkeys(("trainer.seed", "data.shuffle", "data.sampler"), "place in the data")
FIXED |= dict.fromkeys(("critic.value_bins", "critic.value_range", "critic.value_head_std"), "critic's head")
FIXED |= dict.fromkeys(("actor.freeze", "critic.freeze", "optim.freeze"), "set of learned weights")
# Start-up settings, whose changes are not reported.
PASSING = (
    "trainer.run_dir",
    "trainer.resume_mode",
    "trainer.nnodes",
    "trainer.node_rank",
    "trainer.coordinator_address",
)
_AUTOMATIC = (-1, "auto", None)  # the file of settings has what the run made of them
PACKAGES = ("jax", "jaxlib", "flax", "optax")
OPTIMIZERS = ("policy_opt", "value_opt")


@dataclasses.dataclass(frozen=True)
class Begun:
    """The start of a run, new or from a checkpoint."""

    now: Progress
    step: int | None = None  # of the checkpoint; None: a new run
    queue: dict[str, Any] = dataclasses.field(default_factory=dict)  # prefetched samples
    console_lines: tuple[str, ...] = ()

    @property
    def logged(self) -> int | None:
        """Returns the last step in the metrics of the checkpoint's run; None: a new run."""
        return self.step if self.step is None or self.now.unlogged is None else self.step - 1

    @property
    def cursor(self) -> Cursor:
        return Cursor(**self.now.place["cursor"])


def run_identity(c: Common, mesh: Any, *, data: dict[str, int], frozen: dict[str, Any]) -> dict[str, Any]:
    """Returns the identity of a run for its checkpoints: settings, versions, data, frozen weights.

    `data` are checksums by source, `frozen` the weights read at every start, by setting.
    """
    devices = f"{mesh.size} x {mesh.devices.flat[0].device_kind}"
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {
        "config": _json_settings(c),
        "versions": {"jppo": __version__} | versions | {"devices": devices},
        "data": data,
        "frozen": {name: checksum_of_all(tree) for name, tree in frozen.items()},
    }


def _json_settings(c: Common) -> dict[str, Any]:
    return {name: list(v) if isinstance(v, tuple) else v for name, v in table.by_name(c).items()}


def data_checksums(train: PromptSet) -> dict[str, int]:
    """Returns a checksum of each source's tokens and truths, in their order."""
    out = {}
    for part in train.parts:
        prompts = [train.prompts[i] for i in part.indices]
        tokens = zlib.crc32(np.concatenate([p.ids for p in prompts]).tobytes() if prompts else b"")
        lengths = zlib.crc32(np.array([len(p.ids) for p in prompts], np.int64).tobytes(), tokens)
        out[part.name] = zlib.crc32("\0".join(p.ground_truth for p in prompts).encode(), lengths)
    return out


def checksum_of(arrays: Iterable[np.ndarray]) -> int:
    """Returns a checksum of arrays, their lengths and their order."""
    checksum = 0
    for array in arrays:
        checksum = zlib.crc32(array.tobytes(), zlib.crc32(str(len(array)).encode(), checksum))
    return checksum


def frozen_weights(learner: "Learner") -> dict[str, Any]:
    """Returns the weights read from files at every start: the reference, the bases of adapters, frozen parameters."""
    weights = {
        "ref.path": learner.reference,
        "model.path": None if learner.actor.base is None else learner.actor.base.params,
        "critic.path": None if learner.critic is None or learner.critic.base is None else learner.critic.base.params,
    }
    return {name: tree for name, tree in weights.items() if tree is not None}


def save_checkpoint(
    c: Settings,
    checkpoints: Checkpoints,
    learner: "Learner",
    now: TrainState,
    meta: dict[str, Any],
    *,
    score: float | None,
    export: Callable[[pathlib.Path], object],
) -> None:
    """Writes a checkpoint by `trainer.save_contents`; `score` is `trainer.best_metric`, where known."""
    contents = settings.save_contents(c.trainer.save_contents)
    saved = state.remove_padding(now, learner.spare())
    if "optimizer" not in contents:
        saved = dataclasses.replace(saved, policy_opt=None, value_opt=None)
    checkpoints.save(
        int(now.step),
        saved,
        meta,
        score=(c.trainer.best_metric, score) if score is not None and math.isfinite(score) else None,
        export=export if "hf_model" in contents else None,
    )


def resume_or_begin(
    c: Training, checkpoints: Checkpoints, spare: Spare, begin: TrainState, identity: dict[str, Any]
) -> Begun:
    """Resumes from a checkpoint, or begins with `begin`; `spare` is mesh padding, `identity` this run's."""
    restored = read_checkpoint(c, checkpoints, state.remove_padding(begin, spare), identity)
    if restored is None:
        return Begun(Progress(begin, {"cursor": dataclasses.asdict(Cursor())}))
    resumed = state.restore_padding(restored.state, spare, begin)
    fresh = {*restored.missing} & {*OPTIMIZERS}
    if fresh:  # their initial values came from the old model
        resumed = dataclasses.replace(
            resumed,
            policy_opt=optim.reset_optimizer(resumed.policy_opt, resumed.policy),
            value_opt=optim.reset_optimizer(resumed.value_opt, resumed.value),
        )
    if isinstance(c, Settings):
        if c.algorithm.kl_ctrl_type == "fixed":  # the config's, even if it changed before the resume
            resumed = dataclasses.replace(resumed, kl_coef=begin.kl_coef)
        if int(resumed.bad_steps) >= c.trainer.max_bad_steps:  # the run had stopped; resuming it is deliberate
            resumed = dataclasses.replace(resumed, bad_steps=begin.bad_steps)
    fresh_note = "the checkpoint has no optimizer state (trainer.save_contents): the optimizers start fresh"
    lines = (*_describe_changes(restored.meta, identity), *([fresh_note] if fresh else ()))
    place: dict[str, Any] = {name: restored.meta[name] for name in ("cursor", "reward") if name in restored.meta}
    return Begun(
        Progress(resumed, place, restored.meta.get("pending")), restored.step, restored.meta.get("queue", {}), lines
    )


def read_checkpoint(c: Training, checkpoints: Checkpoints, template: Any, identity: dict[str, Any]) -> Restored | None:
    """Reads the checkpoint of trainer.resume_mode and removes later ones; None for a new run."""
    mode = c.trainer.resume_mode
    if mode == "disable":
        checkpoints.discard_after(-1)
        return None
    options: dict[str, Any] = {"fits": lambda meta: require_same_run(meta, identity), "optional": OPTIMIZERS}
    if mode == "auto":
        restored = checkpoints.restore_latest(template, **options)
    else:
        restored = restore(expanded(mode), template, **options)
    checkpoints.discard_after(-1 if restored is None else restored.step)
    return restored


def require_same_run(saved: dict[str, Any], current: dict[str, Any]) -> None:
    """Raises UserError where a run cannot resume: its identity is `current`, that of the checkpoint `saved`."""
    remedy = "give the old value, or start a new run with another trainer.run_dir or trainer.resume_mode=disable"
    config = saved.get("config", {})

    def refuse(name: str, old: Any, new: Any, why: str) -> NoReturn:
        raise UserError(f"{name}={new!r} was {old!r} when the checkpoint was written, {why}; {remedy}")

    def values(name: str, default: Any = None) -> tuple[Any, Any]:
        """Returns the value of a setting in the checkpoint's run, and its value now."""
        return config.get(name, default), current["config"].get(name, default)

    for name, part in FIXED.items():
        old, new = values(name)
        if name in config and old != new:
            refuse(name, old, new, f"whose {part} belongs to it")
    if saved.get("cursor", {}).get("curriculum"):
        for name in ("algorithm.extension", "algorithm.adv_estimator"):
            old, new = values(name, "")
            by_name = name == "algorithm.adv_estimator" and (":" not in f"{old}{new}" or config.get("data.sampler"))
            if old != new and not by_name:
                refuse(name, old, new, "with its memory")
    name = "critic.value_norm_decay"
    old, new = values(name)
    if (old is None) != (new is None):
        refuse(name, old, new, "and its critic has values on that scale")
    if "optimizer" in config.get("trainer.save_contents", "optimizer"):
        for name in ("actor.optimizer", "critic.optimizer", "optim.optimizer"):
            old, new = config.get(name, "adamw"), current["config"].get(name)
            if new not in (None, old) and ":" not in old + new:
                refuse(name, old, new, "with its state")
        name = "model.compute_dtype"
        old, new = values(name)
        if old != new and "float16" in (old, new):
            refuse(name, old, new, "and in float16 alone optimizers have a loss scale")
    for kind, files in (("data", "data.train_files"), ("frozen", "")):
        old, new = saved.get(kind), current.get(kind)
        if old is None or new is None or old == new:
            continue
        name = next(name for name in (*old, *new) if old.get(name) != new.get(name))
        change = "is gone" if name not in new else "is new" if name not in old else "has changed"
        message = (
            f"{files}: source {name!r} {change}" if files else f"{name}: the checksum of its frozen weights {change}"
        )
        raise UserError(f"{message} since the checkpoint was written; {remedy}")


def _describe_changes(saved: dict[str, Any], current: dict[str, Any]) -> list[str]:
    """Returns lines for the console on the settings and package versions that have changed since the checkpoint."""
    lines = []
    for kind, label in (("config", "settings"), ("versions", "versions")):
        if changed := _changed(saved.get(kind, current[kind]), current[kind]):
            lines.append(f"{label} that differ from the checkpoint's: {', '.join(changed)}")
    return lines


def _changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    return [
        f"{name} {old.get(name)!r} → {new.get(name)!r}"
        for name in sorted({*old, *new})
        if old.get(name) != new.get(name) and name not in (*PASSING, *FIXED)
    ]


def finished(c: Training, checkpoints: Checkpoints, total_steps: int) -> bool:
    """Whether the same command has already finished in this folder and its model is of the last step."""
    run, last_step = expanded(c.trainer.run_dir), checkpoints.latest()
    if c.trainer.resume_mode != "auto" or last_step is None:
        return False
    require_own(c)
    model = run / "hf"
    if (isinstance(c, Settings) and c.trainer.val_only) or last_step < total_steps or not model.is_dir():
        return False
    written = max(path.stat().st_mtime_ns for path in (model, *model.iterdir()))
    return written >= (run / f"checkpoints/{last_step}").stat().st_mtime_ns


def describe_finished(c: Training, total_steps: int) -> str:
    """Returns the line of a run that was finished before."""
    line = f"all {total_steps} steps are done: nothing is left to train; trainer.resume_mode=disable restarts"
    former = durable_files.read_json(expanded(c.trainer.run_dir) / "config.json")
    chosen = {name: value for name, value in _json_settings(c).items() if value not in _AUTOMATIC}
    changed = _changed({name: value for name, value in table.by_name(former).items() if name in chosen}, chosen)
    return line + (f"; not tried: {', '.join(changed)}, for which take another trainer.run_dir" if changed else "")


def require_own(c: Training) -> None:
    """Raises UserError where the checkpoints of the run folder are of another command."""
    config = durable_files.read_json(expanded(c.trainer.run_dir) / "config.json")
    former, own = table.training_command(config), table.training_command(vars(c))
    if "data" in config and former != own:
        raise UserError(
            f"trainer.run_dir={c.trainer.run_dir} has a run of {former}, and this is {own}; give it another folder"
        )


def require_resumable(c: Training) -> None:
    """Raises UserError where the checkpoint of trainer.resume_mode is missing."""
    if c.trainer.resume_mode not in ("auto", "disable"):
        require_checkpoint(expanded(c.trainer.resume_mode))


def require_same_settings(c: Training, checkpoints: Checkpoints, data: dict[str, int]) -> None:
    """Raises UserError, before a model is read, where a readable checkpoint is of other settings or `data`."""
    mode, last_step = c.trainer.resume_mode, checkpoints.latest()
    if mode == "disable" or (mode == "auto" and last_step is None):
        return
    path = expanded(c.trainer.run_dir) / f"checkpoints/{last_step}" if mode == "auto" else expanded(mode)
    if mode == "auto":
        require_own(c)
    about, current = durable_files.read_json(path / "about/metadata"), json.loads(json.dumps(table.by_name(c)))
    saved = about.get("meta", {})
    if isinstance(c, Settings) and "algorithm.adv_estimator" in saved.get("config", ()):
        had_critic = any(name.startswith(".value[") for name in about["arrays"])
        if had_critic != bool(parts.estimator(c).critic):
            old, new = (x["algorithm.extension"] or x["algorithm.adv_estimator"] for x in (saved["config"], current))
            raise UserError(
                f"{path} is of a run by {old}, which has {'a' if had_critic else 'no'} critic, and this is one by"
                f" {new}; give it another trainer.run_dir, or remove the checkpoints by trainer.resume_mode=disable"
            )
    require_same_run(saved, {"config": current, "data": data})
