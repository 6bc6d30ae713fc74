"""The MLflow logger: the server of MLFLOW_TRACKING_URI, or else the folder RUN/mlruns.

The run's id is in RUN/mlflow.json, so a resume continues the same run; a repeated step keeps its first values.
"""

import collections
import os
import pathlib
import time
from collections.abc import Mapping
from typing import Any

from jppo.runlog.diagnosis import Alert
from jppo.runlog.sinks import COLUMNS, About, Rows, Sent, cell, finite_metrics
from jppo.settings import UserError

AT_ONCE = 1000  # metrics per request
PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}  # not minutes


def require() -> None:
    """UserError if MLflow is missing."""
    try:
        import mlflow  # noqa: F401
    except ImportError as e:
        raise UserError("trainer.logger has mlflow, which is not installed; pip install 'jppo[mlflow]'") from e


class MLflow:
    """A run in MLflow."""

    def __init__(self, run_dir: pathlib.Path, about: About, *, resumed: bool) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric
        from mlflow.exceptions import MlflowException

        for name, value in PATIENCE.items():
            os.environ.setdefault(name, value)
        where = os.environ.get("MLFLOW_TRACKING_URI", "")
        if not where:
            where = (run_dir.resolve() / "mlruns").as_uri()
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # a folder is enough for one run
        self._sent, self._metric = Sent(run_dir, "mlflow", resumed=resumed), Metric
        self._waiting: collections.deque[list[Any]] = collections.deque()  # steps that the server has not taken yet
        try:
            self._client = MlflowClient(tracking_uri=where)
            if self._sent.id is None:
                found = self._client.get_experiment_by_name(about.project)
                experiment = found.experiment_id if found else self._client.create_experiment(about.project)
                made = self._client.create_run(experiment, run_name=about.experiment or run_dir.resolve().name)
                self._sent.begin(made.info.run_id)
                self._client.log_dict(self._id, dict(about.config), "config.json")
            else:
                self._client.update_run(self._id, status="RUNNING")
        except (MlflowException, OSError) as e:
            raise UserError(
                f"MLflow at {where} does not start: {' '.join(str(e).split())}; fix MLFLOW_TRACKING_URI, or remove"
                " mlflow from trainer.logger"
            ) from e

    @property
    def _id(self) -> str:
        assert self._sent.id is not None
        return self._sent.id

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends a step, unless it was sent before."""
        if self._sent.new(step):
            now = int(time.time() * 1000)
            found = finite_metrics(metrics).items()
            self._waiting.append([self._metric(name, value, now, step) for name, value in found])
        while self._waiting:
            values = self._waiting[0]
            for first in range(0, len(values), AT_ONCE):
                self._client.log_batch(self._id, metrics=values[first : first + AT_ONCE])
            self._sent.done(self._waiting.popleft()[0].step)

    def generations(self, step: int, rows: Rows) -> None:
        """Sends a file of samples."""
        if rows and self._sent.new(step):
            shown = [{name: cell(row.get(name)) for name in COLUMNS} for row in rows]
            self._client.log_dict(self._id, {"rows": shown}, f"generations/step_{step}.json")

    def warn(self, alert: Alert) -> None:
        """Sets a tag of the run."""
        said = f"step {alert.step}: {alert.found}; {alert.remedy}"
        self._client.set_tag(self._id, f"warnings.{alert.name}", said)

    def close(self, *, failed: bool) -> None:
        """Ends the run."""
        self._client.set_terminated(self._id, status="FAILED" if failed else "FINISHED")
