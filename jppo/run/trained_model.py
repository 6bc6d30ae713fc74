"""The trained policy as a model directory: as a run writes it, or of a run folder or checkpoint for an export.

From a checkpoint, only the policy is read, with the checkpoint's settings. From a run without checkpoints, such as
fine-tuning, the source is the final model.
"""

import dataclasses
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import jax

from jppo.errors import RunEnded, UserError
from jppo.learner import sharding, state, streams
from jppo.learner.ppo import Learner, ModelConfigs
from jppo.models import freeze, hf, hf_write, lora, tensorfile
from jppo.models.config import ModelConfig
from jppo.models.freeze import ALL_LEARN, Frozen
from jppo.models.lora import Lora
from jppo.runlog import durable_files
from jppo.runlog.checkpoint import Checkpoints
from jppo.runlog.checkpoint_arrays import checksum_of_all, restore_field
from jppo.settings import Settings, by_name
from jppo.types import Params, TrainState

SettingsByName = dict[str, Any]  # by dotted names


class Unwritten(RunEnded):
    """A full disk at export; the last checkpoint has the model."""


def write_model(c: Settings, learner: Learner, path: pathlib.Path, now: TrainState, *, write: bool) -> None:
    """Writes the policy of a run as a model directory, on the host that does `write`."""
    model, dtype = learner.policy(now), c.model.param_dtype
    hf_write.save_model(path, model, learner.cfg, source=c.model.path, dtype=dtype, write=write)


def export_policy(
    c: Settings, inputs: ModelConfigs, learner: Learner, folder: pathlib.Path, now: TrainState, *, write: bool
) -> None:
    """Writes hf/, and adapter/ for LoRA runs, to the run folder."""
    try:
        if inputs.adapters is not None:
            path, base = folder / "adapter", c.model.path
            hf_write.save_adapter(path, now.policy, learner.cfg, inputs.adapters, base=base, write=write)
        write_model(c, learner, folder / "hf", now, write=write)
    except OSError as e:
        remedy = "make room, and give the same command again"
        raise Unwritten(f"the model cannot be written to {folder}: {e}; {remedy}") from e


@dataclasses.dataclass(frozen=True)
class TrainedPolicy:
    """A policy as a run left it."""

    kind: str  # 'model', or 'adapter': needs its base
    step: int | None  # of its checkpoint; None: the final model
    dtype: str  # of its weights
    settings: SettingsByName  # of the run
    versions: dict[str, str]  # of the training software, if known
    write: Callable[[pathlib.Path], object]  # as a directory, atomically


def find_checkpoint(path: pathlib.Path, *, step: int | None, best: bool) -> pathlib.Path:
    """Finds the checkpoint of a run folder or checkpoint path; the run folder itself if it has none."""
    if not path.is_dir():
        raise UserError(f"{path}: no such folder; name a run's folder, or RUN_DIR/checkpoints/STEP")
    if is_checkpoint(path):
        if best or step is not None:
            raise UserError(f"{path} is one checkpoint: --step and --best select a checkpoint of a run folder")
        return path
    folder = path / "checkpoints"
    with Checkpoints(folder, keep=1, read_only=True) as checkpoints:
        steps, newest, marked = checkpoints.steps(), checkpoints.latest(), checkpoints.best()
    if best:
        if marked is None:
            raise UserError(
                f"{folder} has no best.json that names a checkpoint; name one by --step, or leave --best out"
            )
        return folder / str(marked["step"])
    if step is not None:
        if step not in steps:
            there = ", ".join(map(str, steps)) or "no step"
            raise UserError(f"--step={step}: {folder} has checkpoints of {there}; name one of these")
        return folder / str(step)
    if newest is not None:
        return folder / str(newest)
    if not (path / "hf").is_dir():
        raise UserError(
            f"{path} has neither checkpoints nor hf/: nothing is trained there yet; name the folder of a run"
            " with a checkpoint (trainer.save_freq) or of a finished run"
        )
    return path


def is_checkpoint(path: pathlib.Path) -> bool:
    """Whether a folder is one checkpoint, complete or not, and no run."""
    return path.absolute().parent.name == "checkpoints" or (path / "about").is_dir()


def run_of(path: pathlib.Path) -> pathlib.Path | None:
    """Returns the run folder of a result of `find_checkpoint`; None for a checkpoint moved out of its run."""
    if not is_checkpoint(path):
        return path
    folder = path.absolute().parent
    return path.parent.parent if folder.name == "checkpoints" else None


def policy_of_checkpoint(path: pathlib.Path, *, base: str | None, merge: bool, dtype: str | None) -> TrainedPolicy:
    """Makes the policy of a checkpoint; `base` replaces the run's model.path, `merge` merges adapters.

    `dtype` None: the dtype of the parameters in training.
    """
    mesh = sharding.mesh_of_shape((1,))
    parts: dict[str, Any] = {}

    def make_template(meta: dict[str, Any]) -> Params:
        """Returns the shapes of the policy in a checkpoint by its metadata, and puts what else it finds in `parts`."""
        settings = meta.get("config", {})
        source = settings.get("model.path") if base is None else base
        if not source:
            raise UserError(f"{path} does not name its base model; give it by --base DIR")
        try:
            _, cfg = hf.read_config(source)
        except UserError as e:
            raise UserError(f"the run's model.path: {e}, or name another place of it by --base DIR") from e
        adapters = _make_adapters(settings)
        frozen = _find_frozen(settings, cfg)
        param_dtype = settings["model.param_dtype"]
        weights = state.model_weights(cfg, mesh, head="lm", param_dtype=param_dtype, adapters=adapters)
        parts.update(settings=settings, source=source, cfg=cfg, how=adapters, weights=weights, kind=param_dtype)
        parts.update(frozen=frozen)
        if adapters is not None:
            return state.abstract(state.adapters(cfg, mesh, adapters, head="lm"))
        return state.abstract(state.model_weights(cfg, mesh, head="lm", param_dtype=param_dtype, frozen=frozen))

    restored = restore_field(path, "policy", make_template)
    cfg, adapters, settings = parts["cfg"], parts["how"], parts["settings"]
    facts: dict[str, Any] = dict(step=restored.step, settings=settings, versions=restored.meta.get("versions", {}))
    if adapters is not None and not merge:

        def write_adapter(out: pathlib.Path) -> None:
            hf_write.save_adapter(out, restored.state, cfg, adapters, base=parts["source"])

        return TrainedPolicy("adapter", dtype="float32", write=write_adapter, **facts)
    dtype = parts["kind"] if dtype is None else dtype
    model = restored.state
    if adapters is not None:
        base_params = _load_base(parts["weights"], parts["source"], settings, restored.meta)
        model = lora.join(model, lora.Base(base_params, adapters.scale))
    if parts["frozen"]:
        frozen_params = _load_base(parts["weights"], parts["source"], settings, restored.meta, parts["frozen"])
        model = lora.join(model, lora.Base(frozen_params))

    def write(out: pathlib.Path) -> None:
        hf_write.save_model(out, model, cfg, source=parts["source"], dtype=dtype)

    return TrainedPolicy("model", dtype=dtype, write=write, **facts)


def policy_of_folder(run: pathlib.Path, *, merge: bool, dtype: str | None) -> TrainedPolicy:
    """Makes the policy of a run without checkpoints: hf/, or its adapter/ unless merged; `dtype` None: as stored."""
    facts: dict[str, Any] = dict(step=None, settings=by_name(durable_files.read_json(run / "config.json")), versions={})
    if (run / "adapter").is_dir() and not merge:
        return TrainedPolicy(
            "adapter", dtype="float32", write=lambda out: shutil.copytree(run / "adapter", out), **facts
        )
    config, cfg = hf.read_config(run / "hf")
    hf.check_weights(run / "hf", cfg, head="lm")
    dtype = _stored_dtype(config) if dtype is None else dtype

    def write(out: pathlib.Path) -> None:
        model = hf.load_params(run / "hf", cfg, head="lm", param_dtype=dtype)
        hf_write.save_model(out, model, cfg, source=run / "hf", dtype=dtype)

    return TrainedPolicy("model", dtype=dtype, write=write, **facts)


def _make_adapters(settings: SettingsByName) -> Lora | None:
    """Makes the LoRA settings of a run; None for full fine-tuning."""
    rank = settings["model.lora_rank"]
    targets = lora.parse_targets(settings["model.target_modules"])
    base = settings.get("model.base_quantization", "none")  # absent from runs of older versions
    return None if rank == 0 else Lora(rank, settings["model.lora_alpha"], targets, base=base)


def _find_frozen(settings: SettingsByName, cfg: ModelConfig) -> Frozen:
    """Finds the parameters of a run's policy that were not learned."""
    for name in ("actor.freeze", "optim.freeze"):
        if settings.get(name):  # a run has one of them
            return freeze.find_frozen(cfg, settings[name], name, head="lm")
    return ALL_LEARN


def _load_base(
    layout: state.ModelLayout, source: str, settings: SettingsByName, meta: dict[str, Any], frozen: Frozen = ALL_LEARN
) -> Params:
    """Loads the base of adapters, or `frozen` parameters; raises UserError if they are not those of the training."""
    key = streams.fold(jax.random.key(settings["trainer.seed"]), streams.Start.POLICY)
    params = state.load_sharded(layout, source, init=settings["model.init"], key=key)
    if frozen:
        _, params = freeze.divide(layout.cfg, params, frozen, head="lm")
    checksum = meta.get("frozen", {}).get("model.path")
    if checksum is not None and checksum != checksum_of_all(params):
        raise UserError(
            f"{source}: its weights differ from those that were frozen in training; name their directory by --base DIR"
        )
    return params


def _stored_dtype(config: dict[str, Any]) -> str:
    dtype = str(config.get("dtype", config.get("torch_dtype", "float32")))
    return dtype if dtype in {kind.name for kind in tensorfile.DTYPES.values()} else "float32"
