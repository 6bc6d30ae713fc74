"""The Weights & Biases logger; WANDB_MODE=offline needs neither account nor network.

The run's id is in RUN/wandb.json, so a resume continues the same run. wandb's steps only increase: a repeated step
keeps its first values. Offline, each start has its own folder in RUN/wandb/, with the same id.
"""

import pathlib
import uuid
from collections.abc import Mapping
from typing import Any

from jppo.runlog.diagnosis import Alert
from jppo.runlog.sinks import COLUMNS, About, Rows, Sent, cell, finite_metrics
from jppo.settings import UserError

GIVE_UP_S = 120.0  # at the end; unsent data is then in RUN/wandb/ for `wandb sync`


def require() -> None:
    """UserError if wandb or its login is missing."""
    try:
        import wandb
    except ImportError as e:
        raise UserError("trainer.logger has wandb, which is not installed; pip install 'jppo[wandb]'") from e
    if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False):
        raise UserError("trainer.logger has wandb, which has no key; run `wandb login`, or set WANDB_MODE=offline")


class Wandb:
    """A run in wandb."""

    def __init__(self, run_dir: pathlib.Path, about: About, *, resumed: bool) -> None:
        import wandb

        self._sent = Sent(run_dir, "wandb", resumed=resumed)
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
            self._run.log(finite_metrics(metrics), step=step, commit=True)
            self._sent.done(step)

    def generations(self, step: int, rows: Rows) -> None:
        """Sends a table of samples, in the step of the next metrics."""
        if rows and self._sent.new(step):
            data = [[cell(row.get(name)) for name in COLUMNS] for row in rows]
            self._run.log({"generations": self._table(columns=list(COLUMNS), data=data)}, step=step, commit=False)

    def warn(self, alert: Alert) -> None:
        """Adds a line to the run's summary."""
        self._run.summary[f"warnings/{alert.name}"] = f"step {alert.step}: {alert.found}; {alert.remedy}"

    def close(self, *, failed: bool) -> None:
        """Sends the rest, with a time limit."""
        self._run.finish(exit_code=int(failed))
