"""Checkpoints by orbax: train state and data position, written asynchronously and atomically.

A checkpoint is a directory named after its step. It gets that name when it is complete, so a kill during a save leaves
the previous one. Checksums of all arrays are saved and compared on reading: if storage corrupted an array, the previous
checkpoint is used. A failed save, as on a full disk, is reported and costs only that checkpoint.
"""

import collections
import dataclasses
import json
import logging
import pathlib
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from jppo.runlog import atomic_file
from jppo.settings import UserError

BEST = "best.json"
EXPORT = ".hf-tmp"
REPLACED = ".replaced"  # suffix of a checkpoint of the same step until the new one is complete
LARGE = 2**26  # bytes of an array that all devices should help to copy


@dataclasses.dataclass(frozen=True)
class Restored:
    """The contents of a checkpoint."""

    step: int
    state: Any  # like `like`, with its shardings
    meta: dict[str, Any]
    missing: tuple[str, ...] = ()  # optional fields that were not saved: they are `like`'s


class Damaged(UserError):
    """A checkpoint is unreadable, or its arrays differ from the saved ones."""


class NonFinite(Exception):
    """A state has NaN or infinities: it is not saved, because no run could resume from it."""


class Checkpoints:
    """The checkpoints of one run; a context manager."""

    def __init__(self, directory: pathlib.Path, *, keep: int, read_only: bool = False) -> None:
        """Writes to `directory` and keeps the last `keep` complete checkpoints and the best one.

        `read_only` changes nothing there.
        """
        if keep < 1:
            raise UserError(f"trainer.max_ckpt_to_keep={keep} must be 1 or more")
        _quiet()
        self._directory = directory.absolute()
        self._keep, self._read_only = keep, read_only
        self._writer = _checkpointer()
        self._writing: _Save | None = None
        if read_only:
            return
        self._directory.mkdir(parents=True, exist_ok=True)
        if jax.process_index() == 0:
            self._sweep()

    def steps(self) -> list[int]:
        """Returns the steps of the complete checkpoints, in order."""
        if not self._directory.is_dir():
            return []
        return sorted(int(path.name) for path in self._directory.iterdir() if path.name.isdecimal())

    def latest(self) -> int | None:
        """Returns the step of the last complete checkpoint; None without one."""
        return max(self.steps(), default=None)

    def best(self) -> dict[str, Any] | None:
        """Returns `step`, `metric` and `value` of the best complete checkpoint; None without one."""
        path = self._directory / BEST
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            return found if found["step"] in self.steps() else None
        except (OSError, ValueError, KeyError, TypeError):  # missing, or truncated by a kill
            return None

    def save(
        self,
        step: int,
        state: Any,
        meta: dict[str, Any],
        *,
        score: tuple[str, float] | None = None,
        export: Callable[[pathlib.Path], object] | None = None,
    ) -> None:
        """Starts writing `state` and `meta` (JSON types); returns once the arrays may be donated.

        Waits for the previous save; NonFinite if a value is not finite. `score`, a metric and its value, selects the
        best checkpoint; `export` writes a model directory, `<step>/hf`. A checkpoint of the same step, as of a run that
        stopped during the step's test, is replaced once this one is complete.
        """
        self.wait()
        named = _named(state)
        arrays = {name: _plain(leaf) for name, leaf in named}
        found = _examined(arrays)
        if odd := [name for name, (finite, _) in found.items() if not finite]:
            raise NonFinite(f"{odd[0]} has values that are not finite numbers, one of {len(odd)} such arrays")
        self._make_way(step)
        table = {name: _describe(leaf) | _impl(leaf) | {"checksum": found[name][1]} for name, leaf in named}
        content = {"step": step, "meta": meta, "arrays": table}
        copies = {name: _one_copy(array) for name, array in arrays.items()}
        items = ocp.args.Composite(state=ocp.args.StandardSave(copies), about=ocp.args.JsonSave(content))
        self._writing = _Save(step, score, None if export is None else self._directory / f"{step}{EXPORT}")
        try:
            if export is not None:
                export(self._directory / f"{step}{EXPORT}")
            self._writer.save(self._directory / str(step), args=items)
        except Exception as e:  # orbax and tensorstore raise anything, even a plain Exception
            self._failed(e)

    def restore_latest(self, like: Any, **how: Any) -> Restored | None:
        """The last checkpoint that is whole, as `restore` reads it with `how`; None where there is none.

        A damaged one is reported and renamed to `<step>.damaged` (unless read-only), and the previous one is read.
        """
        self.wait()
        for step in reversed(self.steps()):
            path = self._directory / str(step)
            try:
                return restore(path, like, **how)
            except Damaged as e:
                aside = path.with_name(f"{step}.damaged")
                renamed = "" if self._read_only else f", renamed to {aside.name}"
                print(f"checkpoint {step} is damaged and skipped{renamed}: {e}", flush=True)
                if jax.process_index() == 0 and not self._read_only:
                    shutil.rmtree(aside, ignore_errors=True)
                    path.rename(aside)
        return None

    def discard_after(self, step: int) -> None:
        """Deletes the checkpoints after `step`, for a run that resumes there; -1 deletes all."""
        self.wait()
        later = [] if self._read_only else [s for s in self.steps() if s > step]
        if later and jax.process_index() == 0:
            print(f"checkpoints {later} of an earlier run in {self._directory} are removed", flush=True)
            self._remove(later)

    def wait(self) -> None:
        """Returns when the last save is on disk or has failed; then removes surplus checkpoints."""
        try:
            self._writer.wait_until_finished()
            if self._writing is not None and jax.process_index() == 0:
                self._finish(self._writing)
        except Exception as e:  # as above
            self._failed(e)
        self._writing = None

    def close(self) -> None:
        """Finishes the last save and closes."""
        self.wait()
        self._writer.close()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make_way(self, step: int) -> None:
        path = self._directory / str(step)
        if jax.process_index() == 0 and path.is_dir():
            path.rename(path.with_name(f"{step}{REPLACED}"))
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices(f"checkpoint {step} may be written")

    def _finish(self, save: "_Save") -> None:
        path = self._directory / str(save.step)
        atomic_file.sync(self._directory)  # makes the checkpoint's name durable before older ones are removed
        shutil.rmtree(path.with_name(f"{save.step}{REPLACED}"), ignore_errors=True)
        if save.export is not None:
            save.export.rename(path / "hf")
        best = self.best()
        if save.score is not None:
            metric, value = save.score
            if best is None or best["metric"] != metric or value >= best["value"]:
                best = {"step": save.step, "metric": metric, "value": value}
                atomic_file.write_text(self._directory / BEST, json.dumps(best))
        kept = set(self.steps()[-self._keep :]) | ({best["step"]} if best is not None else set())
        self._remove([step for step in self.steps() if step not in kept])

    def _failed(self, error: Exception) -> None:
        """Reports a failed save and removes its remains."""
        step, self._writing = "?" if self._writing is None else self._writing.step, None
        why = str(error).strip().partition("\n")[0][:200]
        last = self.latest()
        print(
            f"checkpoint {step} could not be written to {self._directory} ({type(error).__name__}: {why}); the run"
            f" continues, and {'there is no checkpoint yet' if last is None else f'the last one is {last}'}; make room"
            " there",
            flush=True,
        )
        if jax.process_index() == 0:
            self._sweep()

    def _sweep(self) -> None:
        """Removes the remains of an interrupted save and restores the name of the one it was replacing."""
        for old in self._directory.glob(f"*{REPLACED}"):
            path = old.with_name(old.name.removesuffix(REPLACED))
            if path.exists():
                shutil.rmtree(old, ignore_errors=True)
            else:
                old.rename(path)
        for unfinished in (*self._directory.glob("*.orbax-checkpoint-tmp*"), *self._directory.glob(f"*{EXPORT}")):
            shutil.rmtree(unfinished, ignore_errors=True)

    def _remove(self, steps: list[int]) -> None:
        for step in steps:
            shutil.rmtree(self._directory / str(step))


@dataclasses.dataclass(frozen=True)
class _Save:
    """A save in progress."""

    step: int
    score: tuple[str, float] | None
    export: pathlib.Path | None


def require(path: pathlib.Path) -> None:
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
    require(path)
    _quiet()
    with _checkpointer() as reader:
        content = _read(reader, path.absolute(), about=ocp.args.JsonRestore())["about"]
        if fits is not None:
            fits(content["meta"])
        saved = content["arrays"]
        missing = tuple(field for field in optional if not any(_of_field(name, field) for name in saved))
        whole = dict(_named(like))
        there = [name for name in whole if not any(_of_field(name, field) for field in missing)]
        stored = {name: name if name in saved else former_name(name) for name in there}
        wanted = {stored[name]: whole[name] for name in there}
        _check_structure(path, saved, wanted)
        targets = {name: _target(leaf) for name, leaf in wanted.items()}
        arrays = _read(reader, path.absolute(), state=ocp.args.StandardRestore(targets))["state"]
    _check_sums(path, arrays, saved)
    times = collections.Counter(stored.values())

    def found(name: str) -> jax.Array:
        array = _rewrap(arrays[stored[name]], saved[stored[name]])
        return array if times[stored[name]] == 1 else array.copy()  # each leaf may be donated

    leaves = [found(name) if name in stored else leaf for name, leaf in whole.items()]
    state = jax.tree.unflatten(jax.tree.structure(like), leaves)
    present = tuple(field for field in missing if any(_of_field(name, field) for name in whole))
    return Restored(content["step"], state, content["meta"], present)


def restore_field(path: pathlib.Path, field: str, like: Callable[[dict[str, Any]], Any]) -> Restored:
    """Reads one field of the state, with the structure that `like` derives from the meta."""
    _quiet()
    with _checkpointer() as reader:
        content = _read(reader, path.absolute(), about=ocp.args.JsonRestore())["about"]
        tree = like(content["meta"])
        wanted = {f".{field}{name}": leaf for name, leaf in _named(tree)}
        saved = {name: item for name, item in content["arrays"].items() if _of_field(name, field)}
        if not saved:
            raise UserError(f"{path} has no {field}; name a run that trains one, or the model in its run's hf/")
        _check_structure(path, saved, wanted)
        targets = {name: _target(leaf) for name, leaf in wanted.items()}
        how = ocp.args.PyTreeRestore(
            targets, restore_args=ocp.checkpoint_utils.construct_restore_args(targets), partial_restore=True
        )
        arrays = _read(reader, path.absolute(), state=how)["state"]
    _check_sums(path, arrays, saved)
    return Restored(
        content["step"], jax.tree.unflatten(jax.tree.structure(tree), [arrays[n] for n in wanted]), content["meta"]
    )


def _check_sums(path: pathlib.Path, arrays: dict[str, jax.Array], saved: dict[str, Any]) -> None:
    found = _examined(arrays)
    changed = [name for name, (_, checksum) in found.items() if checksum != saved[name]["checksum"]]
    if changed:
        first = f"{len(changed)} arrays differ from the saved ones, {changed[0]} among them"
        raise Damaged(f"{path} is damaged: {first}; use another")
    if odd := [name for name, (finite, _) in found.items() if not finite]:
        raise Damaged(f"{path} holds values that are not finite numbers, in {odd[0]} first; use another")


def _of_field(name: str, field: str) -> bool:
    return name == f".{field}" or name.startswith((f".{field}.", f".{field}["))


def _checkpointer() -> ocp.AsyncCheckpointer:
    return ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler())


def _quiet() -> None:
    """Silences orbax, which logs a save in several lines and a failure with tracebacks of every thread."""
    logging.getLogger("absl").addFilter(_not_orbax)
    if sys.unraisablehook is not _unraisable:
        global _other_hook
        _other_hook, sys.unraisablehook = sys.unraisablehook, _unraisable


_other_hook = sys.unraisablehook


def _not_orbax(record: logging.LogRecord) -> bool:
    return "orbax" not in record.pathname


def _unraisable(what: Any) -> None:
    """Filters tensorstore's errors about an event loop of orbax that ended with a failed save."""
    if not (isinstance(what.exc_value, RuntimeError) and str(what.exc_value) == "Event loop is closed"):
        _other_hook(what)


def _read(reader: ocp.AsyncCheckpointer, path: pathlib.Path, **items: ocp.args.CheckpointArgs) -> Any:
    try:
        return reader.restore(path, args=ocp.args.Composite(**items))
    except Exception as e:  # orbax and tensorstore raise anything, even a plain Exception
        why = str(e).strip().partition("\n")[0][:200]
        raise Damaged(f"{path} is no readable checkpoint ({type(e).__name__}: {why}); use another") from e


def _named(tree: Any) -> list[tuple[str, Any]]:
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree.leaves_with_path(tree)]


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _plain(leaf: Any) -> jax.Array:
    """Returns the leaf as numbers: random keys as their data."""
    return jax.random.key_data(leaf) if _is_key(leaf) else jnp.asarray(leaf)


def _one_copy(array: jax.Array) -> jax.Array:
    """Returns a small replicated array as one device's copy; others unchanged.

    Otherwise orbax lets each device copy a part, which takes a program for each shape and device.
    """
    small = array.is_fully_addressable and array.is_fully_replicated and array.nbytes < LARGE
    return array.addressable_data(0) if small else array


def _rewrap(array: jax.Array, saved: dict[str, Any]) -> jax.Array:
    return jax.random.wrap_key_data(array, impl=saved["impl"]) if "impl" in saved else array


def _target(leaf: Any) -> jax.ShapeDtypeStruct:
    plain = jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf
    return jax.ShapeDtypeStruct(plain.shape, plain.dtype, sharding=leaf.sharding)


def _describe(leaf: Any) -> dict[str, Any]:
    return {"shape": list(leaf.shape), "dtype": str(leaf.dtype)}


def _impl(leaf: Any) -> dict[str, str]:
    """Returns how to rebuild a random key from its data."""
    return {"impl": str(jax.random.key_impl(leaf))} if _is_key(leaf) else {}


def _check_structure(path: pathlib.Path, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    remedy = "resume with the settings of that run, or start a new run with another trainer.run_dir"
    for name in sorted(saved.keys() ^ wanted.keys()):
        where = "the checkpoint only" if name in saved else "the model or optimizer of this run only"
        raise UserError(f"{path} does not fit this run: {name} is in {where}; {remedy}")
    for name, leaf in wanted.items():
        now, then = _describe(leaf), {key: saved[name][key] for key in ("shape", "dtype")}
        if now != then:
            raise UserError(f"{path} does not fit this run: {name} was saved as {then}, now it is {now}; {remedy}")


def checksum_of_all(tree: Any) -> int:
    """One checksum of all arrays of a tree."""
    arrays = {str(number): leaf for number, leaf in enumerate(jax.tree.leaves(tree))}
    return sum(checksum for _, checksum in _examined(arrays).values()) % 2**32


def nonfinite(arrays: Mapping[str, jax.Array]) -> list[str]:
    """The names of the arrays that hold NaN or an infinity."""
    return [name for name, (finite, _) in _examined(arrays).items() if not finite]


def _examined(arrays: Mapping[str, jax.Array]) -> dict[str, tuple[bool, int]]:
    """Of each array whether it is finite, and its checksum; offloaded ones come to the devices one at a time.

    The checksum is the sum of the array's bits, word by word, modulo 2^32: the same for any sharding.
    """
    together: dict[Any, list[str]] = {}  # names whose arrays one program can take
    for name, array in arrays.items():
        offloaded = "host" in (array.sharding.memory_kind or "")
        together.setdefault(name if offloaded else frozenset(array.sharding.device_set), []).append(name)
    found = dict[str, tuple[bool, int]]()
    for names in together.values():
        # One after another: exchanges of several programs at once can wait for each other on a CPU.
        verdicts = jax.device_get(_examine([_on_device(arrays[name]) for name in names]))
        found |= {name: (bool(finite), int(bits)) for name, (finite, bits) in zip(names, verdicts, strict=True)}
    return {name: found[name] for name in arrays}


def _on_device(array: jax.Array) -> jax.Array:
    if "host" in (array.sharding.memory_kind or ""):
        return jax.device_put(array, array.sharding.with_memory_kind("device"))
    return array


@jax.jit
def _examine(arrays: list[jax.Array]) -> list[tuple[jax.Array, jax.Array]]:
    def sum_of_bits(array: jax.Array) -> jax.Array:
        whole = array.astype(jnp.uint8) if array.dtype == jnp.bool_ else array
        bits = jax.lax.bitcast_convert_type(whole, jnp.dtype(f"uint{8 * whole.dtype.itemsize}"))
        return jnp.sum(bits, dtype=jnp.uint32)

    return [(jnp.isfinite(array).all(), sum_of_bits(array)) for array in arrays]
