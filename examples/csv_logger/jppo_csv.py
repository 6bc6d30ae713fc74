"""A plugin of jppo, in a package of its own: `trainer.logger=console,jsonl,csv` writes RUN/metrics.csv.

    pip install ./examples/csv_logger

The entry point in pyproject.toml gives the class its name in `trainer.logger`.
"""

import csv
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from jppo.runlog.diagnosis import Alert
from jppo.runlog.sinks import About


class CsvLogger:
    """Writes each metric of a step as a line `step,name,value`: steps have different metrics."""

    @staticmethod
    def require() -> None:
        """Raises UserError if a package or a login is missing; the standard library has all that this needs."""

    def __init__(self, run_dir: pathlib.Path, about: About, *, resumed: bool) -> None:
        """Opens the file, which a resumed run continues."""
        path = run_dir / "metrics.csv"
        lines = path.read_text(encoding="utf-8").splitlines() if resumed and path.exists() else []
        self._last_step = max((int(row["step"]) for row in csv.DictReader(lines)), default=-1)
        self._file = path.open("a" if lines else "w", encoding="utf-8", newline="")
        self._rows = csv.writer(self._file)
        if not lines:
            self._rows.writerow(["step", "name", "value"])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes a step's metrics, once: a step that runs again after a resume keeps its first."""
        if step > self._last_step:
            self._last_step = step
            self._rows.writerows([step, name, value] for name, value in metrics.items())
            self._file.flush()

    def generations(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Samples are in the run's own files."""

    def warn(self, alert: Alert) -> None:
        """Warnings are in the run's own files."""

    def close(self, *, failed: bool) -> None:
        """Closes the file."""
        self._file.close()
