"""Checkpoints by orbax: train state and data cursor, written beside the training, all or nothing.

A checkpoint is a directory named after its step. It has that name only once it is complete, so that a kill in
the middle of a save leaves the one before. Each array's checksum is kept with it and compared when it is
read: storage that changed a bit is found, and the checkpoint before is used instead.
"""

import dataclasses
import logging
import pathlib
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from jppo.config import UserError


@dataclasses.dataclass(frozen=True)
class Restored:
    """What a checkpoint held."""

    step: int
    state: Any  # as `like`, with its shardings
    meta: dict[str, Any]


class Damaged(UserError):
    """A checkpoint that cannot be read, or whose arrays are not what was saved."""


class Checkpoints:
    """The checkpoints of one run; use it as a context manager."""

    def __init__(self, directory: pathlib.Path, *, keep: int, read_only: bool = False) -> None:
        """Write to `directory`, of which the last `keep` complete checkpoints are kept; `read_only` changes nothing."""
        if keep < 1:
            raise UserError(f"trainer.max_ckpt_to_keep={keep} must be 1 or more")
        _quiet()
        self._directory = directory.absolute()
        self._keep, self._read_only = keep, read_only
        self._writer = _checkpointer()
        if read_only:
            return
        self._directory.mkdir(parents=True, exist_ok=True)
        if jax.process_index() == 0:
            for unfinished in self._directory.glob("*.orbax-checkpoint-tmp*"):
                shutil.rmtree(unfinished)

    def steps(self) -> list[int]:
        """The steps of the complete checkpoints, in order."""
        if not self._directory.is_dir():
            return []
        return sorted(int(path.name) for path in self._directory.iterdir() if path.name.isdecimal())

    def latest(self) -> int | None:
        """The step of the last complete checkpoint; None where there is none."""
        return max(self.steps(), default=None)

    def save(self, step: int, state: Any, meta: dict[str, Any]) -> None:
        """Start writing `state` and `meta` (of JSON types); returns once the arrays may be donated.

        Waits for the save before, whose failure is raised here.
        """
        self.wait()
        named = _named(state)
        arrays = {name: _plain(leaf) for name, leaf in named}
        table = {name: _describe(leaf) | _impl(leaf) | {"checksum": _checksum(arrays[name])} for name, leaf in named}
        content = {"step": step, "meta": meta, "arrays": table}
        items = ocp.args.Composite(state=ocp.args.StandardSave(arrays), about=ocp.args.JsonSave(content))
        self._writer.save(self._directory / str(step), args=items)

    def restore_latest(self, like: Any) -> Restored | None:
        """The last checkpoint that is whole, as `restore` reads it; None where there is none.

        A damaged one is reported and, unless nothing may be changed, renamed to `<step>.damaged`; the one before is
        read.
        """
        self.wait()
        for step in reversed(self.steps()):
            path = self._directory / str(step)
            try:
                return restore(path, like)
            except Damaged as e:
                aside = path.with_name(f"{step}.damaged")
                renamed = "" if self._read_only else f", renamed to {aside.name}"
                print(f"checkpoint {step} is damaged and skipped{renamed}: {e}", flush=True)
                if jax.process_index() == 0 and not self._read_only:
                    shutil.rmtree(aside, ignore_errors=True)
                    path.rename(aside)
        return None

    def discard_after(self, step: int) -> None:
        """Delete the checkpoints after `step`, for a run that goes on from there, or anew from -1."""
        self.wait()
        later = [] if self._read_only else [s for s in self.steps() if s > step]
        if later and jax.process_index() == 0:
            print(f"checkpoints {later} of an earlier run in {self._directory} are removed", flush=True)
            self._remove(later)

    def wait(self) -> None:
        """Return when the last save is on disk; then remove the checkpoints that are too many."""
        self._writer.wait_until_finished()
        if jax.process_index() == 0 and not self._read_only:
            self._remove(self.steps()[: -self._keep])

    def close(self) -> None:
        """Finish the last save and stop."""
        self.wait()
        self._writer.close()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _remove(self, steps: list[int]) -> None:
        for step in steps:
            shutil.rmtree(self._directory / str(step))


def require(path: pathlib.Path) -> None:
    """UserError where `path` is no checkpoint that a run could go on from."""
    if not path.is_dir():
        raise UserError(f"trainer.resume_mode={path}: no such checkpoint; give auto, disable, or RUN/checkpoints/STEP")


def restore(path: pathlib.Path, like: Any) -> Restored:
    """Read the checkpoint at `path` into the structure, shapes, dtypes and shardings of `like`.

    `like` holds arrays or `jax.ShapeDtypeStruct`s with shardings. A checkpoint of another structure is a
    user's error.
    """
    require(path)
    _quiet()
    wanted = dict(_named(like))
    targets = {name: _target(leaf) for name, leaf in wanted.items()}
    with _checkpointer() as reader:
        content = _read(reader, path.absolute(), about=ocp.args.JsonRestore())["about"]
        saved = content["arrays"]
        _check_structure(path, saved, wanted)
        arrays = _read(reader, path.absolute(), state=ocp.args.StandardRestore(targets))["state"]
    changed = [name for name, array in arrays.items() if _checksum(array) != saved[name]["checksum"]]
    if changed:
        first = f"{len(changed)} arrays are not what was saved, {changed[0]} among them"
        raise Damaged(f"{path} is damaged: {first}; use another")
    leaves = [_rewrap(arrays[name], saved[name]) for name in wanted]
    state = jax.tree.unflatten(jax.tree.structure(like), leaves)
    return Restored(content["step"], state, content["meta"])


def _checkpointer() -> ocp.AsyncCheckpointer:
    return ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler())


def _quiet() -> None:
    """Orbax reports each save in several lines; only its errors are shown."""
    logging.getLogger("absl").addFilter(_not_orbax)


def _not_orbax(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR or "orbax" not in record.pathname


def _read(reader: ocp.AsyncCheckpointer, path: pathlib.Path, **items: ocp.args.CheckpointArgs) -> Any:
    try:
        return reader.restore(path, args=ocp.args.Composite(**items))
    except Exception as e:  # orbax and tensorstore raise anything, down to a plain Exception
        why = str(e).strip().partition("\n")[0][:200]
        raise Damaged(f"{path} is no readable checkpoint ({type(e).__name__}: {why}); use another") from e


def _named(tree: Any) -> list[tuple[str, Any]]:
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree.leaves_with_path(tree)]


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _plain(leaf: Any) -> jax.Array:
    """The leaf as numbers: random keys are stored as their data."""
    return jax.random.key_data(leaf) if _is_key(leaf) else jnp.asarray(leaf)


def _rewrap(array: jax.Array, saved: dict[str, Any]) -> jax.Array:
    return jax.random.wrap_key_data(array, impl=saved["impl"]) if "impl" in saved else array


def _target(leaf: Any) -> jax.ShapeDtypeStruct:
    plain = jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf
    return jax.ShapeDtypeStruct(plain.shape, plain.dtype, sharding=leaf.sharding)


def _describe(leaf: Any) -> dict[str, Any]:
    return {"shape": list(leaf.shape), "dtype": str(leaf.dtype)}


def _impl(leaf: Any) -> dict[str, str]:
    """How a random key is to be made of its data again."""
    return {"impl": str(jax.random.key_impl(leaf))} if _is_key(leaf) else {}


def _check_structure(path: pathlib.Path, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    remedy = "resume with the settings of that run, or start anew with another trainer.run_dir"
    for name in sorted(saved.keys() ^ wanted.keys()):
        where = "the checkpoint only" if name in saved else "the model or optimizer of this run only"
        raise UserError(f"{path} does not fit this run: {name} is in {where}; {remedy}")
    for name, leaf in wanted.items():
        now, then = _describe(leaf), {key: saved[name][key] for key in ("shape", "dtype")}
        if now != then:
            raise UserError(f"{path} does not fit this run: {name} was saved as {then}, now it is {now}; {remedy}")


def _checksum(array: jax.Array) -> int:
    """The sum of the array's bits, word by word, modulo 2^32: the same for any sharding."""
    if array.sharding.memory_kind == "pinned_host":
        array = jax.device_put(array, array.sharding.with_memory_kind("device"))
    return int(_sum_of_bits(array))


@jax.jit
def _sum_of_bits(array: jax.Array) -> jax.Array:
    whole = array.astype(jnp.uint8) if array.dtype == jnp.bool_ else array
    bits = jax.lax.bitcast_convert_type(whole, jnp.dtype(f"uint{8 * whole.dtype.itemsize}"))
    return jnp.sum(bits, dtype=jnp.uint32)
