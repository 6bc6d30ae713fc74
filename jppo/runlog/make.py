"""Metrics loggers from the settings."""

import contextlib
import pathlib
from typing import Any

from jppo import settings, traces
from jppo.distributed.hosts import ALONE, Hosts
from jppo.registry import REMOTE_LOGGERS
from jppo.runlog.console import Display
from jppo.runlog.logger import Logger, Silent
from jppo.runlog.sinks import About
from jppo.runlog.timers import Timers
from jppo.settings import Settings, Training


def require_loggers(c: Training) -> None:
    """Raises UserError if a logger's package or login is missing, before anything starts."""
    for name in settings.loggers(c.trainer.logger):
        if name in REMOTE_LOGGERS:
            REMOTE_LOGGERS[name].require()
    if isinstance(c, Settings) and c.trainer.traces:
        traces.require()


def open_display(stack: contextlib.ExitStack, c: Training, timer: Timers, hosts: Hosts = ALONE) -> Display:
    """Shows the running stage until the run's logger is open, on the first host and if the console is logged to."""
    display = Display(timer)
    if hosts.first and "console" in settings.loggers(c.trainer.logger):
        stack.enter_context(display)
    return display


def make_logger(c: Training, run: pathlib.Path, hosts: Hosts = ALONE, **options: Any) -> Logger | Silent:
    """Makes the logger of a run; `options` are the Logger's. With several hosts, only the first logs."""
    if not hosts.first:
        return Silent()
    about = About(c.trainer.project_name, c.trainer.experiment_name, settings.as_dict(c))
    host, port = c.trainer.metrics_host, c.trainer.metrics_port
    address = (host, port) if port else None
    loggers = settings.loggers(c.trainer.logger)
    return Logger(run, loggers=loggers, about=about, prometheus_address=address, **options)
