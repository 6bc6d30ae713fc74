"""Checkpoints by orbax: train state and data position, written asynchronously and atomically.

A checkpoint is a directory named after its step. It gets that name when it is complete, so a kill during a save leaves
the previous one. Checksums of all arrays are saved and compared on reading: if storage corrupted an array, the previous
checkpoint is used. A failed save, as on a full disk, is reported and costs only that checkpoint.
"""

import dataclasses
import json
import pathlib
import shutil
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from jppo.distributed.hosts import ALONE, Hosts
from jppo.errors import UserError, escaped, first_line
from jppo.runlog import checkpoint_arrays, durable_files
from jppo.runlog.checkpoint_arrays import Damaged, Restored, checkpointer, restore, silence_orbax

BEST = "best.json"
EXPORT = ".hf-tmp"
WRITERS_END_SECONDS = 5
REPLACED = ".replaced"  # suffix of a checkpoint of the same step until the new one is complete


class NonFinite(Exception):
    """A state has NaN or infinities: it is not saved, because no run could resume from it."""


def steps_in(directory: pathlib.Path) -> list[int]:
    """Returns the steps of the complete checkpoints in a folder, in order: only these have a number as a name."""
    paths = directory.iterdir() if directory.is_dir() else ()
    return sorted(int(path.name) for path in paths if path.name.isdecimal())


def last_remains(directory: pathlib.Path) -> str:
    """Returns a clause on the last complete checkpoint in a folder, for a run that ends."""
    steps = steps_in(directory)
    return f"the checkpoint of step {steps[-1]} remains" if steps else "there is no checkpoint yet"


class Checkpoints:
    """The checkpoints of one run; a context manager."""

    def __init__(self, directory: pathlib.Path, *, keep: int, read_only: bool = False) -> None:
        """Writes to `directory`, unless `read_only`, and keeps the last `keep` complete checkpoints and the best."""
        if keep < 1:
            raise UserError(f"trainer.max_ckpt_to_keep={keep} must be 1 or more")
        silence_orbax()
        self._directory = directory.absolute()
        self._keep, self._read_only = keep, read_only
        self._writer = checkpointer()
        self._writing: _Save | None = None
        if read_only:
            return
        self._directory.mkdir(parents=True, exist_ok=True)
        if jax.process_index() == 0:
            self._remove_remains()

    def steps(self) -> list[int]:
        """Returns the steps of the complete checkpoints, in order."""
        return steps_in(self._directory)

    def latest(self) -> int | None:
        """Returns the step of the last complete checkpoint; None without one."""
        return max(self.steps(), default=None)

    def best(self) -> dict[str, Any] | None:
        """Returns `step`, `metric` and `value` of the best complete checkpoint; None without one."""
        record = durable_files.read_json(self._directory / BEST)
        return record if record.get("step") in self.steps() else None

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
        leaves = checkpoint_arrays.named_leaves(state)
        arrays = {name: checkpoint_arrays.as_numbers(leaf) for name, leaf in leaves}
        checks = checkpoint_arrays.examine(arrays)
        if faulty := [name for name, (finite, _) in checks.items() if not finite]:
            raise NonFinite(f"{faulty[0]} has values that are not finite numbers, one of {len(faulty)} such arrays")
        self._move_aside(step)
        table = {name: checkpoint_arrays.description(leaf, checks[name][1]) for name, leaf in leaves}
        content = {"step": step, "meta": meta, "arrays": table}
        content["checksum"] = checkpoint_arrays.text_checksum(content)
        copies = {name: checkpoint_arrays.one_copy(array) for name, array in arrays.items()}
        items = ocp.args.Composite(state=ocp.args.StandardSave(copies), about=ocp.args.JsonSave(content))
        export_folder = self._directory / f"{step}{EXPORT}"
        threads = frozenset(threading.enumerate())
        self._writing = _Save(step, score, None if export is None else export_folder, threads)
        try:
            if export is not None:
                export(export_folder)
            self._writer.save(self._directory / str(step), args=items)
        except Exception as e:  # orbax and tensorstore raise anything, even a plain Exception
            self._report_failure(e)

    def save_last(
        self,
        step: int,
        state: Any,
        save: Callable[[], None],
        note: Callable[[str], object],
        hosts: Hosts = ALONE,
    ) -> None:
        """Saves the state in which an error ends a run by calling `save`, unless the step is saved already.

        An update donates its models' buffers: from its first optimizer step to its end there is no complete state. A
        failure is noted and not raised, because it would hide that error.
        """
        try:
            self.wait()
            if hosts.gather(self.latest)[0] == step:
                return
            if any(hosts.gather(lambda: any(leaf.is_deleted() for leaf in jax.tree.leaves(state)))):
                note(f"step {step + 1} broke off in its update: nothing is saved, {last_remains(self._directory)}")
                return
            save()
        except Exception as e:
            note(f"step {step} is not saved: {escaped(str(e))}; {last_remains(self._directory)}")

    def restore_latest(self, like: Any, **options: Any) -> Restored | None:
        """Reads the last undamaged checkpoint by `restore` with `options`; None without one.

        A damaged one is reported and renamed to `<step>.damaged` (unless read-only), and the previous one is read.
        """
        self.wait()
        for step in reversed(self.steps()):
            path = self._directory / str(step)
            try:
                return restore(path, like, **options)
            except Damaged as e:
                damaged_path = path.with_name(f"{step}.damaged")
                note = "" if self._read_only else f", renamed to {damaged_path.name}"
                print(f"checkpoint {step} is damaged and skipped{note}: {e}", flush=True)
                if jax.process_index() == 0 and not self._read_only:
                    shutil.rmtree(damaged_path, ignore_errors=True)
                    path.rename(damaged_path)
        return None

    def discard_after(self, step: int) -> None:
        """Deletes the checkpoints after `step`, for a run that resumes there; -1 deletes all."""
        self.wait()
        later_steps = [] if self._read_only else [s for s in self.steps() if s > step]
        if later_steps and jax.process_index() == 0:
            print(f"checkpoints {later_steps} of an earlier run in {self._directory} are removed", flush=True)
            self._remove(later_steps)
        if self.best() is None and jax.process_index() == 0 and not self._read_only:
            (self._directory / BEST).unlink(missing_ok=True)  # of a checkpoint that is gone

    def wait(self) -> None:
        """Waits until the last save is on disk or has failed; then removes surplus checkpoints."""
        try:
            self._writer.wait_until_finished()
            if self._writing is not None and jax.process_index() == 0:
                self._finish(self._writing)
        except Exception as e:  # as above
            self._report_failure(e)
        self._writing = None

    def close(self) -> None:
        """Finishes the last save and closes."""
        self.wait()
        self._writer.close()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _move_aside(self, step: int) -> None:
        """Renames a checkpoint of the same step, on the first host, until the new one is complete."""
        path = self._directory / str(step)
        if jax.process_index() == 0 and path.is_dir():
            path.rename(path.with_name(f"{step}{REPLACED}"))
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices(f"checkpoint {step} may be written")

    def _finish(self, save: "_Save") -> None:
        """Completes a save whose arrays are on disk: its export, the best checkpoint, removal of surplus ones."""
        path = self._directory / str(save.step)
        durable_files.sync(self._directory)  # makes the checkpoint's name durable before older ones are removed
        shutil.rmtree(path.with_name(f"{save.step}{REPLACED}"), ignore_errors=True)
        if save.export is not None:
            save.export.rename(path / "hf")
        best = self.best()
        if save.score is not None:
            metric, value = save.score
            if best is None or best["metric"] != metric or value >= best["value"]:
                best = {"step": save.step, "metric": metric, "value": value}
                durable_files.write_text(self._directory / BEST, json.dumps(best))
        kept_steps = set(self.steps()[-self._keep :]) | ({best["step"]} if best is not None else set())
        self._remove([step for step in self.steps() if step not in kept_steps])

    def _report_failure(self, error: Exception) -> None:
        """Removes the remains of a failed save and reports it."""
        save, self._writing = self._writing, None
        if save is not None:
            _join_writers(save.threads_before)
        if jax.process_index() == 0:
            self._remove_remains()
        number, reason = "?" if save is None else save.step, first_line(error)[:200]
        print(
            f"checkpoint {number} could not be written to {self._directory} ({type(error).__name__}: {reason}); the run"
            f" continues, and {last_remains(self._directory)}; make room there",
            flush=True,
        )

    def _remove_remains(self) -> None:
        """Removes the remains of an interrupted save and restores the name of the one it was replacing."""
        for replaced in self._directory.glob(f"*{REPLACED}"):
            path = replaced.with_name(replaced.name.removesuffix(REPLACED))
            if path.exists():
                shutil.rmtree(replaced, ignore_errors=True)
            else:
                replaced.rename(path)
        for unfinished in (*self._directory.glob("*.orbax-checkpoint-tmp*"), *self._directory.glob(f"*{EXPORT}")):
            _remove_all(unfinished)

    def _remove(self, steps: list[int]) -> None:
        for step in steps:
            shutil.rmtree(self._directory / str(step))


def _join_writers(threads_before: frozenset[threading.Thread]) -> None:
    """Waits for the threads of a failed save, which would make its folder again.

    Those of its closed event loops end, too; new ones of other loops may not.
    """
    while writers := [thread for thread in threading.enumerate() if type(thread).__module__.startswith("orbax.")]:
        for thread in writers:
            if thread.ident is not None:  # it has started
                threading.Thread.join(thread)  # its own method raises the thread's error
    deadline = time.monotonic() + WRITERS_END_SECONDS
    for thread in threading.enumerate():
        if thread not in threads_before and thread.name.startswith("asyncio_") and thread.ident is not None:
            thread.join(max(0.0, deadline - time.monotonic()))


def _remove_all(path: pathlib.Path) -> None:
    """Removes a folder in which other threads of a failed save may still write for a moment."""
    for _ in range(WRITERS_END_SECONDS * 10):
        shutil.rmtree(path, ignore_errors=True)
        if not path.exists():
            return
        time.sleep(0.1)


@dataclasses.dataclass(frozen=True)
class _Save:
    """A save in progress."""

    step: int
    score: tuple[str, float] | None
    export: pathlib.Path | None
    threads_before: frozenset[threading.Thread]  # the threads of the process at its start
