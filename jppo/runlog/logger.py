"""Logging of a run: metrics.jsonl, console, TensorBoard and remote loggers, warnings, samples.

metrics.jsonl is authoritative: it is written at every step and truncated to the resumed step after a resume, so it has
each step once. If a step is logged before it is saved, a killed run loses none. A logger that fails, as on a full disk,
is reported once; the run continues.
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
from typing import Any

import numpy as np
import rich.console

from jppo.runlog import durable_files
from jppo.runlog.console import PPO_COLUMNS, Columns, Terminal, make_screen
from jppo.runlog.diagnosis import Alert, Diagnosis
from jppo.runlog.durable_files import Appender, cut_lines, read_lines
from jppo.runlog.sinks import About, Board, Exporter, Rows, Sink
from jppo.runlog.timers import STAGES

FILE, WARNINGS = "metrics.jsonl", "warnings.jsonl"
DEFAULT = ("console", "jsonl", "tensorboard")
# Classes of `remote_loggers.py`.
REMOTE = {"wandb": "Wandb", "mlflow": "MLflow", "swanlab": "Swanlab", "clearml": "ClearML", "trackio": "Trackio"}
# The fate of records that a logger could not take: they wait in memory, with these exceptions.
LATER = "records wait in memory"
LOST = dict.fromkeys(("samples", "bad_steps"), "that file is skipped")
LOST |= dict.fromkeys(("wandb", "swanlab", "clearml", "trackio"), "it is skipped")


def find_remote(name: str) -> Any:
    """Returns the class of a logger outside the run folder."""
    from jppo.runlog import remote_loggers

    return getattr(remote_loggers, REMOTE[name])


class Logger:
    """Writes the metrics of each step to all loggers; a context manager."""

    def __init__(
        self,
        run_dir: pathlib.Path,
        *,
        total_steps: int,
        resumed_step: int | None = None,
        columns: Columns = PPO_COLUMNS,
        console: rich.console.Console | None = None,
        loggers: Sequence[str] = DEFAULT,
        about: About | None = None,
        muted: Sequence[str] = (),
        prometheus_address: tuple[str, int] | None = None,
        doing: rich.console.RenderableType = "",
    ) -> None:
        """Opens the files of `run_dir`; `resumed_step` is the checkpoint's, None for a new run.

        `muted` names warnings that are never reported; `doing` shows what the run does at the moment.
        """
        run_dir.mkdir(parents=True, exist_ok=True)
        self._run_dir = run_dir
        last_step = -1 if resumed_step is None else resumed_step
        past_rows = cut_lines(run_dir / FILE, lambda row: row["step"] <= last_step)
        past_warnings = cut_lines(run_dir / WARNINGS, lambda row: row["step"] <= last_step)
        self._diagnosis = Diagnosis([*muted, *(row["name"] for row in past_warnings)])
        for row in past_rows:
            self._diagnosis.recall(_metrics_of(row))
        self._failed: set[str] = set()
        self._recovered: set[str] = set()
        self._screen = None
        self._lines = _JsonLines(run_dir)
        self._sinks: dict[str, Sink] = {"jsonl": self._lines}
        if "tensorboard" in loggers:
            self._sinks["tensorboard"] = Board(run_dir / "tensorboard", first=last_step + 1)
        if prometheus_address is not None:
            self._sinks["prometheus"] = Exporter(*prometheus_address)
        for name in (name for name in REMOTE if name in loggers):
            sink = find_remote(name)(run_dir, about or About(), resumed=resumed_step is not None)
            self._sinks[name] = sink
            for row in past_rows:  # sends missed steps
                self._call_safely(name, functools.partial(sink.log, row["step"], _metrics_of(row)))
        if "console" in loggers:
            self._screen = make_screen(total_steps, max(last_step, 0), columns, console or Terminal(), doing)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Passes a step's metrics to all loggers and the console, and reports new warnings about them."""
        values = {name: _as_number(name, value) for name, value in metrics.items()}
        self._call_each(operator.methodcaller("log", int(step), values))
        if self._screen is not None:
            self._call_safely("console", functools.partial(self._screen.show, int(step), values))
        self._report(self._diagnosis.feed(int(step), values))

    def generations(self, step: int, rows: Rows) -> None:
        """Logs some samples of a step, before its metrics."""
        self._call_each(operator.methodcaller("generations", int(step), rows))

    def samples(self, name: str, rows: Rows) -> None:
        """Writes samples/NAME.jsonl."""
        self._call_safely("samples", lambda: write_samples_file(self._run_dir, name, rows))

    def arrays(self, name: str, arrays: Mapping[str, np.ndarray]) -> None:
        """Writes bad_steps/NAME.npz."""
        self._call_safely("bad_steps", lambda: _write_arrays(self._run_dir, name, arrays))

    def note(self, text: str) -> None:
        self._print_to_screen(text)

    def sync(self) -> None:
        """Returns when all lines are on disk, safe from a power cut: a checkpoint relies on them."""
        self._call_safely("jsonl", self._lines.sync)

    def warn(self, alert: Alert) -> None:
        """Reports a warning from before the first step, once per run."""
        self._report(self._diagnosis.once(alert))

    def close(self, *, failed: bool) -> None:
        """Closes the files and the console; remote loggers learn whether the run has failed."""
        for name, sink in self._sinks.items():
            self._call_safely(name, functools.partial(sink.close, failed=failed), at_end=True)
        if self._screen is not None:
            self._screen.close()

    def __enter__(self) -> "Logger":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(failed=kind is not None)

    def _report(self, alerts: Sequence[Alert]) -> None:
        """Passes warnings to all loggers and prints them."""
        for alert in alerts:
            self._call_each(operator.methodcaller("warn", alert))
            self._print_warning(f"warning: {alert.name}: {alert.found}; {alert.remedy}")

    def _call_each(self, action: Callable[[Sink], object]) -> None:
        for name, sink in self._sinks.items():
            self._call_safely(name, functools.partial(action, sink))

    def _call_safely(self, name: str, action: Callable[[], object], *, at_end: bool = False) -> None:
        """Runs an action of a logger; a failure is reported once, and again at the end if it persists."""
        try:
            action()
        except Exception as e:
            if name not in self._failed or at_end:
                fate = "it is incomplete" if at_end else f"{LOST.get(name, LATER)}, the run continues"
                self._print_warning(f"warning: {name} fails: {type(e).__name__}: {e}; {fate}")
            self._failed.add(name)
        else:
            if name in self._failed - self._recovered and name not in LOST:
                self._recovered.add(name)
                self.note(f"{name} works again, and has received the waiting records")

    def _print_warning(self, text: str) -> None:
        self._print_to_screen(text, "yellow")
        if self._screen is None:
            print(text, file=sys.stderr)

    def _print_to_screen(self, text: str, style: str = "") -> None:
        if self._screen is not None:
            with contextlib.suppress(OSError):  # a log on a full disk: there is nowhere to report it
                self._screen.note(text, style)


class Silent:
    """The logger of hosts that write and print nothing."""

    def _nothing(self, *_: object) -> None: ...

    log = generations = samples = arrays = note = warn = sync = __exit__ = _nothing

    def __enter__(self) -> "Silent":
        return self


class _JsonLines:
    """metrics.jsonl and warnings.jsonl: a line per step, a line per warning."""

    def __init__(self, run_dir: pathlib.Path) -> None:
        self._metrics, self._warnings = Appender(run_dir / FILE), Appender(run_dir / WARNINGS)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes a step's line; NaN and infinities are null and listed by name."""
        nonfinite = {name: str(value) for name, value in metrics.items() if not math.isfinite(value)}
        line: dict[str, Any] = {"step": step}
        line |= {name: None if name in nonfinite else value for name, value in metrics.items()}
        if nonfinite:
            line["nonfinite"] = nonfinite
        self._metrics.append(_json_line(line))

    def generations(self, step: int, rows: Rows) -> None:
        """Does nothing: samples have their own files."""

    def warn(self, alert: Alert) -> None:
        self._warnings.append(_json_line(dataclasses.asdict(alert)))

    def sync(self) -> None:
        """Flushes both to disk."""
        self._metrics.sync()
        self._warnings.sync()

    def close(self, *, failed: bool) -> None:
        """Writes the waiting records of both files."""
        try:
            self._metrics.close()
        finally:
            self._warnings.close()


def read_metrics(run_dir: pathlib.Path) -> list[dict[str, Any]]:
    """Reads a run's metrics.jsonl without a truncated last line; [] without a file."""
    return read_lines(run_dir / FILE)


def print_summary(run: pathlib.Path, report: str) -> None:
    """Prints test scores before and after, time by stage, and the paths of results."""
    lines = read_metrics(run)
    print()
    if test_scores := [(line["step"], line["val/score"]) for line in lines if line.get("val/score") is not None]:
        (first, before), (final, after) = test_scores[0], test_scores[-1]
        earlier = f"{before:.3f} at step {first}  →  " if first != final else ""
        print(f"test score        {earlier}{after:.3f} at step {final}")
    print(f"steps             {lines[-1]['step'] if lines else 0}, seconds by stage:")
    for stage in STAGES:
        seconds = sum(m.get(f"timing_s/{stage}", 0.0) for m in lines)
        if seconds:
            print(f"  {stage:<15} {seconds:8.1f}")
    print(f"report            {report}")
    print(f"samples           {run / 'samples'}, step_N.jsonl and test_N.jsonl")
    board = f", TensorBoard in {run / 'tensorboard'}" if (run / "tensorboard").is_dir() else ""
    print(f"metrics           {run / 'metrics.jsonl'}{board}")
    if warnings := read_lines(run / WARNINGS):
        print(f"warnings          {', '.join(w['name'] for w in warnings)}: {run / WARNINGS} has the remedies")
    print(f"model             {run / 'hf'}")


def write_samples_file(run_dir: pathlib.Path, name: str, rows: Rows) -> pathlib.Path:
    """Writes samples/NAME.jsonl: prompt, response, score and its parts, one sample per line."""
    text = "".join(json.dumps(_jsonable(row), ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
    return durable_files.write_text(run_dir / "samples" / f"{name}.jsonl", text)


def _write_arrays(run_dir: pathlib.Path, name: str, arrays: Mapping[str, np.ndarray]) -> pathlib.Path:
    """Writes bad_steps/NAME.npz: the scored batch of a skipped update."""

    def write(path: pathlib.Path) -> None:
        with path.open("wb") as file:
            np.savez_compressed(file, **dict(arrays))  # type: ignore[arg-type]  # its stubs take a name for an option

    return durable_files.write_file(run_dir / "bad_steps" / f"{name}.npz", write)


def _json_line(row: Mapping[str, Any]) -> bytes:
    return (json.dumps(row, allow_nan=False) + "\n").encode()


def _metrics_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Returns the finite metrics of a line."""
    return {name: value for name, value in row.items() if name != "step" and isinstance(value, int | float)}


def _as_number(name: str, value: Any) -> int | float:
    """Returns a metric, perhaps an array of one element, as a number; TypeError for others."""
    if isinstance(value, int):
        return int(value)
    try:
        return float(value)
    except (TypeError, ValueError) as e:
        raise TypeError(f"metric {name!r} is {value!r}; it must be one number") from e


def _jsonable(value: Any) -> Any:
    """Converts non-finite numbers to text, because JSON has none."""
    if isinstance(value, Mapping):
        return {key: _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
