"""What a run says of itself: a line of metrics.jsonl a step, TensorBoard files, the console, and samples.

Last stage of a step. metrics.jsonl is the truth: flushed at every step, cut back to the resumed step when a
run goes on from a checkpoint, so that no step stands in it twice. Log a step before saving it, and a killed
run loses none.
"""

import html
import json
import math
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import rich.console
import tensorboardX

from jppo.io.console import PPO_COLUMNS, Columns, make_screen

FILE = "metrics.jsonl"


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
    ) -> None:
        """Open the files of `run_dir`; `resumed_step` is the checkpoint's, None where the run starts anew."""
        run_dir.mkdir(parents=True, exist_ok=True)
        kept = [] if resumed_step is None else [m for m in read_metrics(run_dir) if m["step"] <= resumed_step]
        _replace(run_dir / FILE, kept)
        self._file = (run_dir / FILE).open("a", encoding="utf-8")
        first = 0 if resumed_step is None else resumed_step + 1
        # purge_step makes TensorBoard forget what a killed run wrote for this step and later.
        self._board = tensorboardX.SummaryWriter(str(run_dir / "tensorboard"), purge_step=first)
        done = 0 if resumed_step is None else resumed_step
        self._screen = make_screen(total_steps, done, columns, rich.console.Console() if console is None else console)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record one step's metrics; NaN and infinities are written as null and listed by name."""
        values = {name: _number(name, value) for name, value in metrics.items()}
        odd = {name: str(value) for name, value in values.items() if not math.isfinite(value)}
        line: dict[str, Any] = {"step": int(step)}
        line |= {name: None if name in odd else value for name, value in values.items()}
        if odd:
            line["nonfinite"] = odd
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()
        for name, value in values.items():
            if name not in odd:
                self._board.add_scalar(name, value, step)
        self._board.flush()
        self._screen.show(int(step), values)

    def generations(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Show some samples of the test of a step, rows as in its file, where text can be shown."""
        if rows:
            self._board.add_text("val_generations", _markdown(rows), step)

    def note(self, text: str) -> None:
        """Say something between the steps."""
        self._screen.note(text)

    def close(self) -> None:
        """Close the files and leave the console as it is."""
        self._screen.close()
        self._file.close()
        self._board.close()

    def __enter__(self) -> "Logger":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(run_dir: pathlib.Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl, but for a last one that a kill cut off; [] where there is none."""
    path = run_dir / FILE
    if not path.exists():
        return []
    whole = path.read_text(encoding="utf-8").rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines()]


def write_samples(run_dir: pathlib.Path, name: str, rows: Sequence[Mapping[str, Any]]) -> pathlib.Path:
    """Write samples/NAME.jsonl: prompt, response, score and its parts, one sample a line."""
    path = run_dir / "samples" / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    _replace(path, [_jsonable(row) for row in rows])
    return path


def write_arrays(run_dir: pathlib.Path, name: str, arrays: Mapping[str, np.ndarray]) -> pathlib.Path:
    """Write bad_steps/NAME.npz: a batch whose update was skipped, as it was scored, for inspection."""
    path = run_dir / "bad_steps" / f"{name}.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, **dict(arrays))  # type: ignore[arg-type]  # its stubs take each name for an option
    return path


def _replace(path: pathlib.Path, lines: Sequence[Mapping[str, Any]]) -> None:
    new = path.with_name(path.name + ".new")
    text = "".join(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n" for line in lines)
    new.write_text(text, encoding="utf-8")
    os.replace(new, path)


def _markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table of samples; nothing in them is taken for Markdown or HTML."""

    def cell(value: Any) -> str:
        text = "" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        marked = re.sub(r"([\\`*_{}\[\]()#+.!|~$-])", r"\\\1", text)
        return html.escape(marked, quote=False).replace("\n", "<br>").replace("\r", "")

    columns = ("prompt", "response", "ground_truth", "score", "error")
    lines = [columns, ["---"] * len(columns), *([cell(row[name]) for name in columns] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


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
