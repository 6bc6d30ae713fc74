"""Loggers outside the run folder: Weights & Biases, MLflow, SwanLab, ClearML and Trackio."""

import collections
import importlib
import json
import math
import os
import pathlib
import time
import uuid
from collections.abc import Mapping
from typing import Any

from jppo.errors import UserError
from jppo.runlog import durable_files
from jppo.runlog.diagnosis import Alert
from jppo.runlog.sinks import About, Rows

COLUMNS = ("prompt", "response", "ground_truth", "score", "error", "finish")  # shown of samples
GIVE_UP_S = 120.0  # at the end; unsent data is then in RUN/wandb/ for `wandb sync`
AT_ONCE = 1000  # metrics per request to MLflow
PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}  # not minutes


class SentSteps:
    """NAME.json in the run folder: the run's id at a logger that cannot go back, and the last step it has.

    A step that runs again after a resume is not sent again; missed steps are sent from metrics.jsonl.
    """

    def __init__(self, run_dir: pathlib.Path, name: str, *, resumed: bool) -> None:
        """Reads the file if the run resumes; a new run gets a new id by `begin`."""
        self._path = run_dir / f"{name}.json"
        saved = self._read() if resumed and self._path.exists() else {}
        self.id: str | None = saved.get("id")
        self._step: int = saved.get("step", -1)

    def new(self, step: int) -> bool:
        """Whether the step was not sent yet."""
        return step > self._step

    def begin(self, run_id: str) -> None:
        """Records the id that the logger has given the run."""
        self.id = run_id
        self._write()

    def done(self, step: int) -> None:
        """Records that the step was sent."""
        self._step = step
        self._write()

    def _read(self) -> dict[str, Any]:
        """Returns the run's saved id and last step; {} if the file is damaged."""
        saved = durable_files.read_json(self._path)  # {} if truncated, or NULs after a power cut
        if isinstance(saved.get("id", 0), str | None) and isinstance(saved.get("step"), int):
            return saved
        print(f"{self._path} cannot be read: the run gets a new id there and sends all of its steps again", flush=True)
        return {}

    def _write(self) -> None:
        durable_files.write_text(self._path, json.dumps({"id": self.id, "step": self._step}) + "\n")


def _import_package(name: str) -> Any:
    """Imports a logger's package; UserError with the install command if it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as e:
        raise UserError(f"trainer.logger has {name}, which is not installed; pip install 'jppo[{name}]'") from e


class Wandb:
    """A run in Weights & Biases; WANDB_MODE=offline needs neither account nor network.

    The run's id is in RUN/wandb.json, so a resume continues the same run. wandb's steps only increase: a repeated step
    keeps its first values. Offline, each start has its own folder in RUN/wandb/, with the same id.
    """

    @staticmethod
    def require() -> None:
        """UserError if wandb or its login is missing."""
        wandb = _import_package("wandb")
        if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False):
            raise UserError("trainer.logger has wandb, which has no key; run `wandb login`, or set WANDB_MODE=offline")

    def __init__(self, run_dir: pathlib.Path, about: About, *, resumed: bool) -> None:
        """Starts the run in Weights & Biases, or continues the one of RUN/wandb.json; UserError if that fails."""
        import wandb

        self._sent = SentSteps(run_dir, "wandb", resumed=resumed)
        try:
            self._run: Any = wandb.init(
                project=about.project,
                name=about.experiment or run_dir.resolve().name,
                id=self._sent.id or uuid.uuid4().hex[:12],
                resume=None if self._sent.id is None or wandb.setup().settings.mode == "offline" else "allow",
                dir=str(run_dir.resolve()),
                config=dict(about.config),
                reinit="create_new",
                settings=wandb.Settings(console="off", silent=True, finish_timeout=GIVE_UP_S),
            )
        except (wandb.Error, OSError) as e:
            raise UserError(
                f"wandb does not start: {' '.join(str(e).split())}; fix that, set WANDB_MODE=offline, or remove"
                " wandb from trainer.logger"
            ) from e
        self._sent.begin(self._run.id)
        self._table = wandb.Table

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends a step, unless it was sent before."""
        if self._sent.new(step):
            self._run.log(_finite_metrics(metrics), step=step, commit=True)
            self._sent.done(step)

    def generations(self, step: int, rows: Rows) -> None:
        """Sends a table of samples, in the step of the next metrics."""
        if rows and self._sent.new(step):
            data = [[cell(row.get(name)) for name in COLUMNS] for row in rows]
            self._run.log({"generations": self._table(columns=list(COLUMNS), data=data)}, step=step, commit=False)

    def warn(self, alert: Alert) -> None:
        self._run.summary[f"warnings/{alert.name}"] = f"step {alert.step}: {alert.found}; {alert.remedy}"

    def close(self, *, failed: bool) -> None:
        """Sends the rest, with a time limit."""
        self._run.finish(exit_code=int(failed))


class MLflow:
    """A run in MLflow: at the server of MLFLOW_TRACKING_URI, or else in the folder RUN/mlruns.

    The run's id is in RUN/mlflow.json, so a resume continues the same run; a repeated step keeps its first values.
    """

    @staticmethod
    def require() -> None:
        _import_package("mlflow")

    def __init__(self, run_dir: pathlib.Path, about: About, *, resumed: bool) -> None:
        """Starts the run in MLflow, or continues the one of RUN/mlflow.json; UserError if that fails."""
        from mlflow import MlflowClient
        from mlflow.entities import Metric
        from mlflow.exceptions import MlflowException

        for name, value in PATIENCE.items():
            os.environ.setdefault(name, value)
        uri = os.environ.get("MLFLOW_TRACKING_URI", "")
        if not uri:
            uri = (run_dir.resolve() / "mlruns").as_uri()
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # a folder is enough for one run
        self._sent, self._metric = SentSteps(run_dir, "mlflow", resumed=resumed), Metric
        self._waiting: collections.deque[list[Any]] = collections.deque()  # steps that the server has not taken yet
        try:
            self._client = MlflowClient(tracking_uri=uri)
            if self._sent.id is None:
                existing = self._client.get_experiment_by_name(about.project)
                experiment = existing.experiment_id if existing else self._client.create_experiment(about.project)
                run = self._client.create_run(experiment, run_name=about.experiment or run_dir.resolve().name)
                self._sent.begin(run.info.run_id)
                self._client.log_dict(self._id, dict(about.config), "config.json")
            else:
                self._client.update_run(self._id, status="RUNNING")
        except (MlflowException, OSError) as e:
            raise UserError(
                f"MLflow at {uri} does not start: {' '.join(str(e).split())}; fix MLFLOW_TRACKING_URI, or remove"
                " mlflow from trainer.logger"
            ) from e

    @property
    def _id(self) -> str:
        assert self._sent.id is not None
        return self._sent.id

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends a step, unless it was sent before, and earlier ones that the server has not taken."""
        if self._sent.new(step):
            now = int(time.time() * 1000)
            finite = _finite_metrics(metrics).items()
            self._waiting.append([self._metric(name, value, now, step) for name, value in finite])
        while self._waiting:
            values = self._waiting[0]
            for start in range(0, len(values), AT_ONCE):
                self._client.log_batch(self._id, metrics=values[start : start + AT_ONCE])
            self._sent.done(self._waiting.popleft()[0].step)

    def generations(self, step: int, rows: Rows) -> None:
        """Sends a file of samples."""
        if rows and self._sent.new(step):
            cells = [{name: cell(row.get(name)) for name in COLUMNS} for row in rows]
            self._client.log_dict(self._id, {"rows": cells}, f"generations/step_{step}.json")

    def warn(self, alert: Alert) -> None:
        """Sets a tag of the run."""
        text = f"step {alert.step}: {alert.found}; {alert.remedy}"
        self._client.set_tag(self._id, f"warnings.{alert.name}", text)

    def close(self, *, failed: bool) -> None:
        self._client.set_terminated(self._id, status="FAILED" if failed else "FINISHED")


class Swanlab:
    """A run in SwanLab; SWANLAB_MODE=offline needs neither account nor network, and writes to RUN/swanlog.

    The run's id is in RUN/swanlab.json, so a resume continues the same run; a repeated step keeps its first values.
    """

    @staticmethod
    def require() -> None:
        """UserError if SwanLab or its key is missing."""
        _import_package("swanlab")
        if os.environ.get("SWANLAB_MODE", "online") == "online" and not os.environ.get("SWANLAB_API_KEY"):
            raise UserError(
                "trainer.logger has swanlab, which has no key; set SWANLAB_API_KEY, or SWANLAB_MODE=offline"
            )

    def __init__(self, run_dir: pathlib.Path, about: About, *, resumed: bool) -> None:
        """Starts the run in SwanLab, or continues the one of RUN/swanlab.json; UserError if that fails."""
        import swanlab

        mode, self._sent = os.environ.get("SWANLAB_MODE", "online"), SentSteps(run_dir, "swanlab", resumed=resumed)
        run_id = self._sent.id or uuid.uuid4().hex[:21]
        resume_options: dict[str, Any] = {"id": run_id, "resume": "allow"} if mode == "online" else {}
        try:
            self._run: Any = swanlab.init(
                project=about.project,
                name=about.experiment or run_dir.resolve().name,
                log_dir=str(run_dir.resolve() / "swanlog"),
                mode=mode,
                config=dict(about.config),
                reinit=True,
                **resume_options,
            )
        except Exception as e:  # swanlab has no exception class
            raise UserError(
                f"SwanLab does not start: {' '.join(str(e).split())}; fix that, set SWANLAB_MODE=offline, or remove"
                " swanlab from trainer.logger"
            ) from e
        self._sent.begin(run_id)
        self._text = swanlab.Text

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends a step, unless it was sent before."""
        if self._sent.new(step):
            self._run.log(_finite_metrics(metrics), step=step)
            self._sent.done(step)

    def generations(self, step: int, rows: Rows) -> None:
        """Sends samples as texts, in the step of the next metrics."""
        if rows and self._sent.new(step):
            texts = [json.dumps({name: cell(row.get(name)) for name in COLUMNS}, ensure_ascii=False) for row in rows]
            self._run.log({"generations": [self._text(text) for text in texts]}, step=step)

    def warn(self, alert: Alert) -> None:
        self._run.log({f"warnings/{alert.name}": self._text(f"{alert.found}; {alert.remedy}")}, step=alert.step)

    def close(self, *, failed: bool) -> None:
        self._run.finish(**({"state": "crashed", "error": "the run ended early"} if failed else {}))


class ClearML:
    """A task in ClearML; CLEARML_OFFLINE_MODE=1 needs neither account nor network.

    The task's id is in RUN/clearml.json, so a resume continues the same task; a repeated step keeps its first values.
    """

    @staticmethod
    def require() -> None:
        _import_package("clearml")

    def __init__(self, run_dir: pathlib.Path, about: About, *, resumed: bool) -> None:
        """Starts the task in ClearML, or continues the one of RUN/clearml.json; UserError if that fails."""
        import clearml

        self._sent = SentSteps(run_dir, "clearml", resumed=resumed)
        try:
            self._task: Any = clearml.Task.init(
                project_name=about.project,
                task_name=about.experiment or run_dir.resolve().name,
                reuse_last_task_id=False,
                continue_last_task=self._sent.id or False,
                output_uri=False,
                auto_connect_arg_parser=False,
                auto_connect_frameworks=False,
                auto_connect_streams=False,
                auto_resource_monitoring=False,
            )
            self._task.set_initial_iteration(0)  # else the steps of a continued task follow its last one
            self._task.connect_configuration(json.loads(json.dumps(dict(about.config), default=str)), name="config")
        except Exception as e:  # clearml has no exception class
            raise UserError(
                f"ClearML does not start: {' '.join(str(e).split())}; fix that, set CLEARML_OFFLINE_MODE=1, or remove"
                " clearml from trainer.logger"
            ) from e
        self._sent.begin(self._task.id)
        self._log = self._task.get_logger()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends a step, unless it was sent before."""
        if self._sent.new(step):
            for name, value in _finite_metrics(metrics).items():
                self._log.report_scalar(title=name, series=name, value=value, iteration=step)
            self._sent.done(step)

    def generations(self, step: int, rows: Rows) -> None:
        """Sends a table of samples."""
        if rows and self._sent.new(step):
            table = [list(COLUMNS), *([cell(row.get(name)) for name in COLUMNS] for row in rows)]
            self._log.report_table("generations", "samples", iteration=step, table_plot=table)

    def warn(self, alert: Alert) -> None:
        self._log.report_text(f"warning: step {alert.step}: {alert.name}: {alert.found}; {alert.remedy}")

    def close(self, *, failed: bool) -> None:
        """Sends the rest and ends the task."""
        if failed:
            self._task.flush(wait_for_uploads=True)
            self._task.mark_failed(status_reason="the run ended early")
        self._task.close()


class Trackio:
    """A run in Trackio: in the folder TRACKIO_DIR, or at TRACKIO_SPACE_ID or TRACKIO_SERVER_URL.

    RUN/trackio.json has the last step, and a resume continues the run of the same name; a repeated step keeps its first
    values.
    """

    @staticmethod
    def require() -> None:
        _import_package("trackio")

    def __init__(self, run_dir: pathlib.Path, about: About, *, resumed: bool) -> None:
        """Starts the run in Trackio, or continues the one of RUN/trackio.json; UserError if that fails."""
        import trackio

        self._sent = SentSteps(run_dir, "trackio", resumed=resumed)
        name = self._sent.id or about.experiment or run_dir.resolve().name
        try:
            self._run: Any = trackio.init(
                project=about.project,
                name=name,
                config=dict(about.config),
                resume="never" if self._sent.id is None else "allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        except Exception as e:  # trackio has no exception class
            raise UserError(
                f"Trackio does not start: {' '.join(str(e).split())}; fix that, or remove trackio from trainer.logger"
            ) from e
        self._sent.begin(self._run.name)
        self._table = trackio.Table

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends a step, unless it was sent before."""
        if self._sent.new(step):
            self._run.log(_finite_metrics(metrics), step=step)
            self._sent.done(step)

    def generations(self, step: int, rows: Rows) -> None:
        """Sends a table of samples."""
        if rows and self._sent.new(step):
            data = [[cell(row.get(name)) for name in COLUMNS] for row in rows]
            self._run.log({"generations": self._table(columns=list(COLUMNS), data=data)}, step=step)

    def warn(self, alert: Alert) -> None:
        self._run.alert(title=alert.name, text=f"step {alert.step}: {alert.found}; {alert.remedy}")

    def close(self, *, failed: bool) -> None:
        self._run.finish()


def _finite_metrics(metrics: Mapping[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if value is not None and math.isfinite(value)}


def cell(value: Any) -> str | float | None:
    """Returns a sample's field as a table's cell; of chat messages the last one's text."""
    if isinstance(value, list) and value:
        return str(value[-1].get("content", value[-1]) if isinstance(value[-1], Mapping) else value[-1])
    return value if value is None or isinstance(value, str | int | float) else str(value)
