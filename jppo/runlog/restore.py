"""Reading a checkpoint: a whole state, or one field of it, checked against what was saved."""

import collections
import dataclasses
import logging
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp

from jppo.runlog import checkpoint_arrays
from jppo.settings import UserError


@dataclasses.dataclass(frozen=True)
class Restored:
    """The contents of a checkpoint."""

    step: int
    state: Any  # like `like`, with its shardings
    meta: dict[str, Any]
    missing: tuple[str, ...] = ()  # optional fields that were not saved: they are `like`'s


class Damaged(UserError):
    """A checkpoint is unreadable, or its arrays differ from the saved ones."""


def require_checkpoint(path: pathlib.Path) -> None:
    """UserError if `path` is not a checkpoint that a run can resume from."""
    if not path.is_dir():
        raise UserError(f"trainer.resume_mode={path}: no such checkpoint; use auto, disable, or RUN/checkpoints/STEP")


def restore(
    path: pathlib.Path,
    like: Any,
    *,
    fits: Callable[[dict[str, Any]], None] | None = None,
    optional: Sequence[str] = (),
    former_name: Callable[[str], str] = str,
) -> Restored:
    """Reads the checkpoint at `path` into the structure, shapes, dtypes and shardings of `like`.

    `like` holds arrays or `jax.ShapeDtypeStruct`s with shardings; its `optional` fields hold arrays, which stay
    where the checkpoint has nothing for the field. `fits` sees the meta first and raises what speaks against it. An
    array that is not there is read by its `former_name`. A checkpoint of another structure is a user's error.
    """
    require_checkpoint(path)
    quiet()
    with checkpointer() as reader:
        content = _about(reader, path)
        if fits is not None:
            fits(content["meta"])
        saved = content["arrays"]
        missing = tuple(field for field in optional if not any(_of_field(name, field) for name in saved))
        whole = dict(checkpoint_arrays.named(like))
        there = [name for name in whole if not any(_of_field(name, field) for field in missing)]
        stored = {name: name if name in saved else former_name(name) for name in there}
        wanted = {stored[name]: whole[name] for name in there}
        checkpoint_arrays.check_structure(path, saved, wanted)
        targets = {name: checkpoint_arrays.target(leaf) for name, leaf in wanted.items()}
        arrays = _read(reader, path.absolute(), state=ocp.args.StandardRestore(targets))["state"]
    _check_sums(path, arrays, saved)
    times = collections.Counter(stored.values())

    def found(name: str) -> jax.Array:
        array = checkpoint_arrays.rewrapped(arrays[stored[name]], saved[stored[name]])
        return array if times[stored[name]] == 1 else array.copy()  # each leaf may be donated

    leaves = [found(name) if name in stored else leaf for name, leaf in whole.items()]
    state = jax.tree.unflatten(jax.tree.structure(like), leaves)
    present = tuple(field for field in missing if any(_of_field(name, field) for name in whole))
    return Restored(content["step"], state, content["meta"], present)


def restore_field(path: pathlib.Path, field: str, like: Callable[[dict[str, Any]], Any]) -> Restored:
    """Reads one field of the state, with the structure that `like` derives from the meta."""
    quiet()
    with checkpointer() as reader:
        content = _about(reader, path)
        tree = like(content["meta"])
        wanted = {f".{field}{name}": leaf for name, leaf in checkpoint_arrays.named(tree)}
        saved = {name: item for name, item in content["arrays"].items() if _of_field(name, field)}
        if not saved:
            raise UserError(f"{path} has no {field}; name a run that trains one, or the model in its run's hf/")
        checkpoint_arrays.check_structure(path, saved, wanted)
        targets = {name: checkpoint_arrays.target(leaf) for name, leaf in wanted.items()}
        how = ocp.args.PyTreeRestore(
            targets, restore_args=ocp.checkpoint_utils.construct_restore_args(targets), partial_restore=True
        )
        arrays = _read(reader, path.absolute(), state=how)["state"]
    _check_sums(path, arrays, saved)
    return Restored(
        content["step"], jax.tree.unflatten(jax.tree.structure(tree), [arrays[n] for n in wanted]), content["meta"]
    )


def _about(reader: ocp.AsyncCheckpointer, path: pathlib.Path) -> dict[str, Any]:
    """Reads step, meta and the table of arrays; Damaged if they are not what was saved."""
    content = _read(reader, path.absolute(), about=ocp.args.JsonRestore())["about"]
    if not isinstance(content, dict) or not {"step", "meta", "arrays"} <= content.keys():
        raise Damaged(f"{path} is damaged: its about/ lacks step, meta or arrays; use another")
    checksum = content.pop("checksum", None)  # former checkpoints have none
    if checksum is not None and checksum != checkpoint_arrays.text_checksum(content):
        raise Damaged(f"{path} is damaged: its about/ differs from what was saved; use another")
    return content


def _check_sums(path: pathlib.Path, arrays: dict[str, jax.Array], saved: dict[str, Any]) -> None:
    found = checkpoint_arrays.examined(arrays)
    changed = [name for name, (_, checksum) in found.items() if checksum != saved[name]["checksum"]]
    if changed:
        first = f"{len(changed)} arrays differ from the saved ones, {changed[0]} among them"
        raise Damaged(f"{path} is damaged: {first}; use another")
    if odd := [name for name, (finite, _) in found.items() if not finite]:
        raise Damaged(f"{path} holds values that are not finite numbers, in {odd[0]} first; use another")


def _of_field(name: str, field: str) -> bool:
    return name == f".{field}" or name.startswith((f".{field}.", f".{field}["))


def checkpointer() -> ocp.AsyncCheckpointer:
    """Returns orbax's reader and writer."""
    return ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler())


def quiet() -> None:
    """Silences orbax, which logs a save in several lines and a failure with tracebacks of every thread."""
    logging.getLogger("absl").addFilter(_not_orbax)
    if sys.unraisablehook is not _unraisable:
        global _other_hook
        _other_hook, sys.unraisablehook = sys.unraisablehook, _unraisable


_other_hook = sys.unraisablehook


def _not_orbax(record: logging.LogRecord) -> bool:
    return "orbax" not in record.pathname


def _unraisable(what: Any) -> None:
    """Filters errors of orbax's coroutines and of its closed event loop; the save or read that failed has reported."""
    closed = isinstance(what.exc_value, RuntimeError) and str(what.exc_value) == "Event loop is closed"
    code = getattr(what.object, "cr_code", None)
    if not closed and not (code is not None and "orbax" in code.co_filename):
        _other_hook(what)


def _read(reader: ocp.AsyncCheckpointer, path: pathlib.Path, **items: ocp.args.CheckpointArgs) -> Any:
    try:
        return reader.restore(path, args=ocp.args.Composite(**items))
    except Exception as e:  # orbax and tensorstore raise anything, even a plain Exception
        why = str(e).strip().partition("\n")[0][:200]
        raise Damaged(f"{path} is no readable checkpoint ({type(e).__name__}: {why}); use another") from e
