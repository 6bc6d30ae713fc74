"""What a run says of itself: a line of metrics.jsonl a step, the console, TensorBoard and others, warnings, samples.

Last stage of a step. metrics.jsonl is the truth: written at every step, cut back to the resumed step when a
run goes on from a checkpoint, so that no step stands in it twice. Log a step before saving it, and a killed
run loses none. A place that fails in mid-run, as where the disk is full, is said to fail once; the run goes on.
"""

import contextlib
import dataclasses
import functools
import json
import math
import operator
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import rich.console

from jppo.io import to_mlflow, to_wandb, whole
from jppo.io.appending import Appender, cut_lines, read_lines
from jppo.io.console import PPO_COLUMNS, Columns, Terminal, make_screen
from jppo.io.diagnosis import Diagnosis, Finding
from jppo.io.sinks import About, Rows, Sink


class Remote(NamedTuple):
    """A place outside the run's folder."""

    require: Callable[[], None]  # UserError where it cannot be used
    make: Callable[..., Sink]  # (run_dir, about, resumed=)


FILE, WARNINGS = "metrics.jsonl", "warnings.jsonl"
DEFAULT = ("console", "jsonl", "tensorboard")
REMOTE = {
    "wandb": Remote(to_wandb.require, to_wandb.Wandb),
    "mlflow": Remote(to_mlflow.require, to_mlflow.MLflow),
}
# What becomes of what a place could not take: it waits in memory, but for these.
LATER = "what it could not take waits in memory"
LOST = {"samples": "that file is left out", "bad_steps": "that file is left out", "wandb": "it is left out there"}


class Logger:
    """Writes the metrics of each step to all places; use it as a context manager."""

    def __init__(
        self,
        run_dir: pathlib.Path,
        *,
        total_steps: int,
        resumed_step: int | None = None,
        columns: Columns = PPO_COLUMNS,
        console: rich.console.Console | None = None,
        places: Sequence[str] = DEFAULT,
        about: About | None = None,
    ) -> None:
        """Open the files of `run_dir`; `resumed_step` is the checkpoint's, None where the run starts anew."""
        run_dir.mkdir(parents=True, exist_ok=True)
        self._run_dir = run_dir
        done = -1 if resumed_step is None else resumed_step
        kept = cut_lines(run_dir / FILE, lambda row: row["step"] <= done)
        told = cut_lines(run_dir / WARNINGS, lambda row: row["step"] <= done)
        self._diagnosis = Diagnosis(row["name"] for row in told)
        for row in kept:
            self._diagnosis.recall(_metrics_of(row))
        self._failed: set[str] = set()
        self._mended: set[str] = set()
        self._screen = None
        self._lines = JsonLines(run_dir)
        self._sinks: dict[str, Sink] = {"jsonl": self._lines}
        if "tensorboard" in places:
            from jppo.io.tensorboard import Board  # tensorboardX imports torch where there is one, which takes seconds

            self._sinks["tensorboard"] = Board(run_dir / "tensorboard", first=done + 1)
        for name in (name for name in REMOTE if name in places):
            sink = REMOTE[name].make(run_dir, about or About(), resumed=resumed_step is not None)
            self._sinks[name] = sink
            for row in kept:  # what it missed, if anything
                self._safely(name, functools.partial(sink.log, row["step"], _metrics_of(row)))
        if "console" in places:
            self._screen = make_screen(total_steps, max(done, 0), columns, console or Terminal())

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record one step's metrics, and warn of what they show for the first time."""
        values = {name: _number(name, value) for name, value in metrics.items()}
        self._each(operator.methodcaller("log", int(step), values))
        if self._screen is not None:
            self._safely("console", functools.partial(self._screen.show, int(step), values))
        self._tell(self._diagnosis.feed(int(step), values))

    def generations(self, step: int, rows: Rows) -> None:
        """Record some samples of a step, before its metrics."""
        self._each(operator.methodcaller("generations", int(step), rows))

    def samples(self, name: str, rows: Rows) -> None:
        """Write samples/NAME.jsonl."""
        self._safely("samples", lambda: write_samples(self._run_dir, name, rows))

    def arrays(self, name: str, arrays: Mapping[str, np.ndarray]) -> None:
        """Write bad_steps/NAME.npz."""
        self._safely("bad_steps", lambda: write_arrays(self._run_dir, name, arrays))

    def note(self, text: str) -> None:
        """Say something between the steps."""
        self._say(text)

    def sync(self) -> None:
        """Returns when all lines are on the disk, also after a power cut: a checkpoint counts on them."""
        self._safely("jsonl", self._lines.sync)

    def warn(self, finding: Finding) -> None:
        """Warn of what shows before any step; once a run."""
        self._tell(self._diagnosis.once(finding))

    def close(self, *, failed: bool) -> None:
        """Close the files and leave the console as it is; places outside learn whether the run has failed."""
        for name, sink in self._sinks.items():
            self._safely(name, functools.partial(sink.close, failed=failed), again=True)
        if self._screen is not None:
            self._screen.close()

    def __enter__(self) -> "Logger":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(failed=kind is not None)

    def _tell(self, findings: Sequence[Finding]) -> None:
        for finding in findings:
            self._each(operator.methodcaller("warn", finding))
            self._warn(f"warning: {finding.name}: {finding.found}; {finding.remedy}")

    def _each(self, act: Callable[[Sink], object]) -> None:
        for name, sink in self._sinks.items():
            self._safely(name, functools.partial(act, sink))

    def _safely(self, name: str, act: Callable[[], object], *, again: bool = False) -> None:
        """Whatever a place raises, a training of days is worth more: said once, and at the end where it lasts."""
        try:
            act()
        except Exception as e:
            if name not in self._failed or again:
                fate = "it is not complete" if again else f"{LOST.get(name, LATER)}, the run goes on"
                self._warn(f"warning: {name} fails: {type(e).__name__}: {e}; {fate}")
            self._failed.add(name)
        else:
            if name in self._failed - self._mended and name not in LOST:
                self._mended.add(name)
                self.note(f"{name} works again, and has what it could not take")

    def _warn(self, text: str) -> None:
        self._say(text, "yellow")
        if self._screen is None:
            print(text, file=sys.stderr)

    def _say(self, text: str, style: str = "") -> None:
        if self._screen is not None:
            with contextlib.suppress(OSError):  # a log on a full disk: there is nowhere to say so
                self._screen.note(text, style)


class Silent:
    """The logger of a host that leaves writing and speaking to another one."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Nothing."""

    def generations(self, step: int, rows: Rows) -> None:
        """Nothing."""

    def samples(self, name: str, rows: Rows) -> None:
        """Nothing."""

    def arrays(self, name: str, arrays: Mapping[str, np.ndarray]) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""

    def warn(self, finding: Finding) -> None:
        """Nothing."""

    def sync(self) -> None:
        """Nothing."""

    def __enter__(self) -> "Silent":
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing."""


class JsonLines:
    """metrics.jsonl and warnings.jsonl: a line a step, a line a warning."""

    def __init__(self, run_dir: pathlib.Path) -> None:
        self._metrics, self._warnings = Appender(run_dir / FILE), Appender(run_dir / WARNINGS)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step; NaN and infinities are written as null and listed by name."""
        odd = {name: str(value) for name, value in metrics.items() if not math.isfinite(value)}
        line: dict[str, Any] = {"step": step}
        line |= {name: None if name in odd else value for name, value in metrics.items()}
        if odd:
            line["nonfinite"] = odd
        self._metrics.append(_line(line))

    def generations(self, step: int, rows: Rows) -> None:
        """They have files of their own."""

    def warn(self, finding: Finding) -> None:
        """A warning."""
        self._warnings.append(_line(dataclasses.asdict(finding)))

    def sync(self) -> None:
        """Both on the disk."""
        self._metrics.sync()
        self._warnings.sync()

    def close(self, *, failed: bool) -> None:
        """Write what waits."""
        try:
            self._metrics.close()
        finally:
            self._warnings.close()


def read_metrics(run_dir: pathlib.Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl, but for a last one that a kill cut off; [] where there is none."""
    return read_lines(run_dir / FILE)


def write_samples(run_dir: pathlib.Path, name: str, rows: Rows) -> pathlib.Path:
    """Write samples/NAME.jsonl: prompt, response, score and its parts, one sample a line."""
    text = "".join(json.dumps(_jsonable(row), ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
    return whole.write_text(run_dir / "samples" / f"{name}.jsonl", text)


def write_arrays(run_dir: pathlib.Path, name: str, arrays: Mapping[str, np.ndarray]) -> pathlib.Path:
    """Write bad_steps/NAME.npz: a batch whose update was skipped, as it was scored, for inspection."""

    def write(path: pathlib.Path) -> None:
        with path.open("wb") as file:
            np.savez_compressed(file, **dict(arrays))  # type: ignore[arg-type]  # its stubs take a name for an option

    return whole.write(run_dir / "bad_steps" / f"{name}.npz", write)


def _line(row: Mapping[str, Any]) -> bytes:
    return (json.dumps(row, allow_nan=False) + "\n").encode()


def _metrics_of(row: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of a line that are finite numbers."""
    return {name: value for name, value in row.items() if name != "step" and isinstance(value, int | float)}


def _number(name: str, value: Any) -> int | float:
    if isinstance(value, int):
        return int(value)
    try:
        return float(value)
    except (TypeError, ValueError) as e:
        raise TypeError(f"metric {name!r} is {value!r}; it must be one number") from e


def _jsonable(value: Any) -> Any:
    """The value with its non-finite numbers as text, which JSON has no other way to write."""
    if isinstance(value, Mapping):
        return {key: _jsonable(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
