"""Where a run's metrics can go: what every such place does, and how one that remembers goes on after a resume."""

import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from jppo.io import whole
from jppo.io.diagnosis import Finding

Rows = Sequence[Mapping[str, Any]]  # samples, as evaluate.samples has them
COLUMNS = ("prompt", "response", "ground_truth", "score", "error", "finish")  # of what is shown of them


class Sink(Protocol):
    """One place. Whatever fails in it is its own affair: the Logger says so once, and the run goes on."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record a step."""

    def generations(self, step: int, rows: Rows) -> None:
        """Record some samples of a step, before its metrics."""

    def warn(self, finding: Finding) -> None:
        """Record a warning."""

    def close(self, *, failed: bool) -> None:
        """Write what is left, of a run that has reached its end or, `failed`, has not."""


@dataclasses.dataclass(frozen=True)
class About:
    """What a run tells of itself to the places outside its folder."""

    project: str = "jppo"
    experiment: str = ""  # '': the name of the run's folder
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class Sent:
    """NAME.json in the run's folder: a run's id in a place that takes no step back, and the last step it has.

    A step that runs again after a resume is not sent again; one that it missed is sent from metrics.jsonl.
    """

    def __init__(self, run_dir: pathlib.Path, name: str, *, resumed: bool) -> None:
        """Read the file where the run goes on; a new run has a new id."""
        self._path = run_dir / f"{name}.json"
        found = self._read() if resumed and self._path.exists() else {}
        self.id: str | None = found.get("id")
        self._step: int = found.get("step", -1)

    def new(self, step: int) -> bool:
        """Whether the step was not sent yet."""
        return step > self._step

    def begin(self, run_id: str) -> None:
        """The id that the run has there."""
        self.id = run_id
        self._write()

    def done(self, step: int) -> None:
        """The step was sent."""
        self._step = step
        self._write()

    def _read(self) -> dict[str, Any]:
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
            if isinstance(found["id"], str | None) and isinstance(found["step"], int):
                return found
        except (ValueError, KeyError, TypeError):  # cut off, or NULs after a power cut
            pass
        print(f"{self._path} cannot be read: the run has a new id there, and sends all of its steps again", flush=True)
        return {}

    def _write(self) -> None:
        whole.write_text(self._path, json.dumps({"id": self.id, "step": self._step}) + "\n")


def finite(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """Those of the metrics that are finite numbers."""
    return {name: value for name, value in metrics.items() if value is not None and math.isfinite(value)}


def cell(value: Any) -> str | float | None:
    """One field of a sample as a table can show it; of chat messages the last."""
    if isinstance(value, list) and value:
        return str(value[-1].get("content", value[-1]) if isinstance(value[-1], Mapping) else value[-1])
    return value if value is None or isinstance(value, str | int | float) else str(value)
