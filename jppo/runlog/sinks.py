"""The protocol of loggers, and the resume state of remote ones."""

import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from jppo.runlog import atomic_file
from jppo.runlog.diagnosis import Alert

Rows = Sequence[Mapping[str, Any]]  # samples, as in evaluate.samples
COLUMNS = ("prompt", "response", "ground_truth", "score", "error", "finish")  # shown of samples


class Sink(Protocol):
    """One logger. The Logger reports its failures once, and the run continues."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs a step."""

    def generations(self, step: int, rows: Rows) -> None:
        """Logs some samples of a step, before its metrics."""

    def warn(self, alert: Alert) -> None:
        """Logs a warning."""

    def close(self, *, failed: bool) -> None:
        """Writes the rest; `failed`: the run has not reached its end."""


@dataclasses.dataclass(frozen=True)
class About:
    """A run's names for remote loggers."""

    project: str = "jppo"
    experiment: str = ""  # '': the run folder's name
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class Sent:
    """NAME.json in the run folder: the run's id at a logger that cannot go back, and the last step it has.

    A step that runs again after a resume is not sent again; missed steps are sent from metrics.jsonl.
    """

    def __init__(self, run_dir: pathlib.Path, name: str, *, resumed: bool) -> None:
        """Reads the file when the run resumes; a new run has a new id."""
        self._path = run_dir / f"{name}.json"
        found = self._read() if resumed and self._path.exists() else {}
        self.id: str | None = found.get("id")
        self._step: int = found.get("step", -1)

    def new(self, step: int) -> bool:
        """Whether the step was not sent yet."""
        return step > self._step

    def begin(self, run_id: str) -> None:
        """Sets the run's id there."""
        self.id = run_id
        self._write()

    def done(self, step: int) -> None:
        """Records that the step was sent."""
        self._step = step
        self._write()

    def _read(self) -> dict[str, Any]:
        found = atomic_file.read_json(self._path)  # {} if truncated, or NULs after a power cut
        if isinstance(found.get("id", 0), str | None) and isinstance(found.get("step"), int):
            return found
        print(f"{self._path} cannot be read: the run gets a new id there and sends all of its steps again", flush=True)
        return {}

    def _write(self) -> None:
        atomic_file.write_text(self._path, json.dumps({"id": self.id, "step": self._step}) + "\n")


def finite_metrics(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """Returns the finite metrics."""
    return {name: value for name, value in metrics.items() if value is not None and math.isfinite(value)}


def cell(value: Any) -> str | float | None:
    """Returns a sample's field for a table; the last of chat messages."""
    if isinstance(value, list) and value:
        return str(value[-1].get("content", value[-1]) if isinstance(value[-1], Mapping) else value[-1])
    return value if value is None or isinstance(value, str | int | float) else str(value)
