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


class _RemoteRun:
    """A run at one of the services.

    RUN/NAME.json has its id, so a resume continues the same run. A step that is sent again keeps its first values.
    """

    name: str  # of the package, as in trainer.logger
    title: str  # in errors
    remedy: str  # of a start that fails

    @classmethod
    def require(cls) -> None:
        """UserError if the package or its login is missing."""
        _import_package(cls.name)

    def __init__(self, run_dir: pathlib.Path, about: About, *, resumed: bool) -> None:
        """Starts the run, or continues the one of RUN/NAME.json; UserError if that fails."""
        self._sent = SentSteps(run_dir, self.name, resumed=resumed)
        folder = run_dir.resolve()
        try:
            self._sent.begin(self._start(folder, about, about.experiment or folder.name))
        except Exception as e:  # most of the packages have no exception class
            raise UserError(
                f"{self.title} does not start: {' '.join(str(e).split())}; {self.remedy}, or remove {self.name} from"
                " trainer.logger"
            ) from e

    def _start(self, folder: pathlib.Path, about: About, run_name: str) -> str:
        """Starts or continues the run of the run folder; returns its id."""
        raise NotImplementedError

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends the finite metrics of a step, unless it was sent before."""
        if self._sent.new(step):
            self._send(step, _finite_metrics(metrics))
            self._sent.done(step)

    def _send(self, step: int, metrics: dict[str, float]) -> None:
        raise NotImplementedError

    def generations(self, step: int, rows: Rows) -> None:
        """Sends samples of a step, unless it was sent before."""
        if rows and self._sent.new(step):
            self._send_samples(step, [{name: cell(row.get(name)) for name in COLUMNS} for row in rows])

    def _send_samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        raise NotImplementedError


class Wandb(_RemoteRun):
    """A run in Weights & Biases; WANDB_MODE=offline needs neither account nor network.

    Steps of wandb only increase. Offline, each start has its own folder in RUN/wandb/, with the same id.
    """

    name, title, remedy = "wandb", "wandb", "fix that, set WANDB_MODE=offline"

    @classmethod
    def require(cls) -> None:
        wandb = _import_package("wandb")
        if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False):
            raise UserError("trainer.logger has wandb, which has no key; run `wandb login`, or set WANDB_MODE=offline")

    def _start(self, folder: pathlib.Path, about: About, run_name: str) -> str:
        import wandb

        self._run: Any = wandb.init(
            project=about.project,
            name=run_name,
            id=self._sent.id or uuid.uuid4().hex[:12],
            resume=None if self._sent.id is None or wandb.setup().settings.mode == "offline" else "allow",
            dir=str(folder),
            config=dict(about.config),
            reinit="create_new",
            settings=wandb.Settings(console="off", silent=True, finish_timeout=GIVE_UP_S),
        )
        self._table = wandb.Table
        return str(self._run.id)

    def _send(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step, commit=True)

    def _send_samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        """Sends a table, in the step of the next metrics."""
        table = self._table(columns=list(COLUMNS), data=[list(sample.values()) for sample in samples])
        self._run.log({"generations": table}, step=step, commit=False)

    def warn(self, alert: Alert) -> None:
        self._run.summary[f"warnings/{alert.name}"] = _describe(alert)

    def close(self, *, failed: bool) -> None:
        """Sends the rest, with a time limit."""
        self._run.finish(exit_code=int(failed))


class MLflow(_RemoteRun):
    """A run in MLflow: at the server of MLFLOW_TRACKING_URI, or else in the folder RUN/mlruns."""

    name, title, remedy = "mlflow", "MLflow", "fix MLFLOW_TRACKING_URI"

    def _start(self, folder: pathlib.Path, about: About, run_name: str) -> str:
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        for name, value in PATIENCE.items():
            os.environ.setdefault(name, value)
        uri = os.environ.get("MLFLOW_TRACKING_URI", "")
        if not uri:
            uri = (folder / "mlruns").as_uri()
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # a folder is enough for one run
        self.title = f"MLflow at {uri}"
        self._metric = Metric
        self._waiting: collections.deque[list[Any]] = collections.deque()  # steps that the server has not taken yet
        self._client = MlflowClient(tracking_uri=uri)
        if self._sent.id is not None:
            self._client.update_run(self._id, status="RUNNING")
            return self._id
        existing = self._client.get_experiment_by_name(about.project)
        experiment = existing.experiment_id if existing else self._client.create_experiment(about.project)
        self._sent.begin(self._client.create_run(experiment, run_name=run_name).info.run_id)
        self._client.log_dict(self._id, dict(about.config), "config.json")
        return self._id

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

    def _send_samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        self._client.log_dict(self._id, {"rows": samples}, f"generations/step_{step}.json")

    def warn(self, alert: Alert) -> None:
        self._client.set_tag(self._id, f"warnings.{alert.name}", _describe(alert))

    def close(self, *, failed: bool) -> None:
        self._client.set_terminated(self._id, status="FAILED" if failed else "FINISHED")


class Swanlab(_RemoteRun):
    """A run in SwanLab; SWANLAB_MODE=offline needs neither account nor network, and writes to RUN/swanlog."""

    name, title, remedy = "swanlab", "SwanLab", "fix that, set SWANLAB_MODE=offline"

    @classmethod
    def require(cls) -> None:
        _import_package("swanlab")
        if os.environ.get("SWANLAB_MODE", "online") == "online" and not os.environ.get("SWANLAB_API_KEY"):
            raise UserError(
                "trainer.logger has swanlab, which has no key; set SWANLAB_API_KEY, or SWANLAB_MODE=offline"
            )

    def _start(self, folder: pathlib.Path, about: About, run_name: str) -> str:
        import swanlab

        mode, run_id = os.environ.get("SWANLAB_MODE", "online"), self._sent.id or uuid.uuid4().hex[:21]
        resume_options: dict[str, Any] = {"id": run_id, "resume": "allow"} if mode == "online" else {}
        self._run: Any = swanlab.init(
            project=about.project,
            name=run_name,
            log_dir=str(folder / "swanlog"),
            mode=mode,
            config=dict(about.config),
            reinit=True,
            **resume_options,
        )
        self._text = swanlab.Text
        return run_id

    def _send(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step)

    def _send_samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        """Sends texts, in the step of the next metrics."""
        texts = [self._text(json.dumps(sample, ensure_ascii=False)) for sample in samples]
        self._run.log({"generations": texts}, step=step)

    def warn(self, alert: Alert) -> None:
        self._run.log({f"warnings/{alert.name}": self._text(f"{alert.found}; {alert.remedy}")}, step=alert.step)

    def close(self, *, failed: bool) -> None:
        self._run.finish(**({"state": "crashed", "error": "the run ended early"} if failed else {}))


class ClearML(_RemoteRun):
    """A task in ClearML; CLEARML_OFFLINE_MODE=1 needs neither account nor network."""

    name, title, remedy = "clearml", "ClearML", "fix that, set CLEARML_OFFLINE_MODE=1"

    def _start(self, folder: pathlib.Path, about: About, run_name: str) -> str:
        import clearml

        self._task: Any = clearml.Task.init(
            project_name=about.project,
            task_name=run_name,
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
        self._log = self._task.get_logger()
        return str(self._task.id)

    def _send(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._log.report_scalar(title=name, series=name, value=value, iteration=step)

    def _send_samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        table = [list(COLUMNS), *(list(sample.values()) for sample in samples)]
        self._log.report_table("generations", "samples", iteration=step, table_plot=table)

    def warn(self, alert: Alert) -> None:
        self._log.report_text(f"warning: step {alert.step}: {alert.name}: {alert.found}; {alert.remedy}")

    def close(self, *, failed: bool) -> None:
        if failed:
            self._task.flush(wait_for_uploads=True)
            self._task.mark_failed(status_reason="the run ended early")
        self._task.close()


class Trackio(_RemoteRun):
    """A run in Trackio: in the folder TRACKIO_DIR, or at TRACKIO_SPACE_ID or TRACKIO_SERVER_URL.

    Its id is its name.
    """

    name, title, remedy = "trackio", "Trackio", "fix that"

    def _start(self, folder: pathlib.Path, about: About, run_name: str) -> str:
        import trackio

        self._run: Any = trackio.init(
            project=about.project,
            name=self._sent.id or run_name,
            config=dict(about.config),
            resume="never" if self._sent.id is None else "allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        self._table = trackio.Table
        return str(self._run.name)

    def _send(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step)

    def _send_samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        table = self._table(columns=list(COLUMNS), data=[list(sample.values()) for sample in samples])
        self._run.log({"generations": table}, step=step)

    def warn(self, alert: Alert) -> None:
        self._run.alert(title=alert.name, text=_describe(alert))

    def close(self, *, failed: bool) -> None:
        self._run.finish()


def _describe(alert: Alert) -> str:
    return f"step {alert.step}: {alert.found}; {alert.remedy}"


def _finite_metrics(metrics: Mapping[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if value is not None and math.isfinite(value)}


def cell(value: Any) -> str | float | None:
    """Returns a sample's field as a table's cell; of chat messages the last one's text."""
    if isinstance(value, list) and value:
        return str(value[-1].get("content", value[-1]) if isinstance(value[-1], Mapping) else value[-1])
    return value if value is None or isinstance(value, str | int | float) else str(value)
