"""The protocol of a run's loggers, and the one of them for Prometheus."""

import collections
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jppo.errors import UserError
from jppo.runlog.diagnosis import Alert

Rows = Sequence[Mapping[str, Any]]  # samples, as in evaluate.samples


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


class Exporter(Collector):
    """The metrics of the last step at `http://HOST:PORT/metrics`, in Prometheus' text format.

    The server has its own threads.
    """

    def __init__(self, host: str, port: int) -> None:
        self._metrics: Mapping[str, float] = {}
        self._warnings: collections.Counter[str] = collections.Counter()
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, _ = start_http_server(port, host, registry)
        except (OSError, OverflowError) as e:
            raise UserError(
                f"trainer.metrics_port={port} cannot be opened on trainer.metrics_host={host!r}: {e}; choose another"
            ) from e
        self.port = self._server.server_port

    def collect(self) -> Iterator[Metric]:
        """Yields `jppo_actor_entropy` for `actor/entropy`, and the counted warnings."""
        for name, value in self._metrics.items():
            yield GaugeMetricFamily("jppo_" + re.sub(r"[^a-zA-Z0-9_]", "_", name), name, value)
        if self._warnings:
            counted = CounterMetricFamily("jppo_warnings", "warnings of the run", labels=["name"])
            for name, count in list(self._warnings.items()):
                counted.add_metric([name], count)
            yield counted

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows this step."""
        self._metrics = {"step": step, **metrics}

    def generations(self, step: int, rows: Rows) -> None:
        """Does nothing: samples are not numbers."""

    def warn(self, alert: Alert) -> None:
        """Counts a warning."""
        self._warnings[alert.name] += 1

    def close(self, *, failed: bool) -> None:
        """Ends the server."""
        self._server.shutdown()
        self._server.server_close()
