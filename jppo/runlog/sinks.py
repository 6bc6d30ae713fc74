"""The protocol of a run's loggers, and those for Prometheus and TensorBoard."""

import collections
import contextlib
import dataclasses
import html
import json
import math
import os
import pathlib
import re
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jppo.errors import UserError
from jppo.runlog.diagnosis import Alert
from jppo.runlog.durable_files import Appender

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
    """Serves the metrics of the last step at `http://HOST:PORT/metrics`, in Prometheus' text format."""

    def __init__(self, host: str, port: int) -> None:
        """Starts the HTTP server; UserError if the port cannot be opened."""
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
        """Yields the last step's metrics, `jppo_actor_entropy` for `actor/entropy`, and the counted warnings."""
        for name, value in self._metrics.items():
            yield GaugeMetricFamily("jppo_" + re.sub(r"[^a-zA-Z0-9_]", "_", name), name, value)
        if self._warnings:
            counter = CounterMetricFamily("jppo_warnings", "warnings of the run", labels=["name"])
            for name, count in list(self._warnings.items()):
                counter.add_metric([name], count)
            yield counter

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._metrics = {"step": step, **metrics}

    def generations(self, step: int, rows: Rows) -> None:
        """Does nothing: samples are not numbers."""

    def warn(self, alert: Alert) -> None:
        self._warnings[alert.name] += 1

    def close(self, *, failed: bool) -> None:
        """Ends the server that Prometheus reads."""
        self._server.shutdown()
        self._server.server_close()


class Board:
    """One event file of a run's `tensorboard/`, written without a writer thread, which a full disk would end."""

    def __init__(self, folder: pathlib.Path, *, first: int) -> None:
        """Starts an event file of TensorBoard at step `first`, which drops what a killed run wrote from there on."""
        from tensorboardX import record_writer, summary  # imports torch if present, which takes seconds
        from tensorboardX.proto import event_pb2

        self._checksum, self._summary, self._events = record_writer.masked_crc32c, summary, event_pb2
        folder.mkdir(parents=True, exist_ok=True)
        self._file = Appender(folder / f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}")
        with contextlib.suppress(OSError):  # it waits, and the first step reports it
            self._write(first, file_version="brain.Event:2")
        with contextlib.suppress(OSError):
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._write(first, session_log=start)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes a step's finite metrics as scalars of TensorBoard."""
        scalars = [self._summary.scalar(name, value) for name, value in metrics.items() if math.isfinite(value)]
        merged = self._summary.Summary(value=[value for scalar in scalars for value in scalar.value])
        self._write(step, summary=merged)

    def generations(self, step: int, rows: Rows) -> None:
        """Writes samples as a table in the step's text."""
        if rows:
            self._write(step, summary=self._summary.text("val_generations", _markdown(rows)))

    def warn(self, alert: Alert) -> None:
        """Writes a warning as text."""
        text = f"{alert.found}; {alert.remedy}"
        self._write(alert.step, summary=self._summary.text(f"warnings/{alert.name}", text))

    def close(self, *, failed: bool) -> None:
        self._file.close()

    def _write(self, step: int, **content: Any) -> None:
        """Appends an event as a record: its length, the event, and a checksum of both."""
        data = self._events.Event(step=step, wall_time=time.time(), **content).SerializeToString()
        length = struct.pack("<Q", len(data))
        checksums = [struct.pack("<I", self._checksum(part)) for part in (length, data)]
        self._file.append(length + checksums[0] + data + checksums[1])


def _markdown(rows: Rows) -> str:
    """Formats samples as a Markdown table, with Markdown and HTML in them escaped."""

    def cell(value: Any) -> str:
        text = "" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        escaped = re.sub(r"([\\`*_{}\[\]()#+.!|~$-])", r"\\\1", text)
        return html.escape(escaped, quote=False).replace("\n", "<br>").replace("\r", "")

    columns = ("prompt", "response", "ground_truth", "score", "error")
    lines = [columns, ["---"] * len(columns), *([cell(row[name]) for name in columns] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
