"""TensorBoard's event files, written without a writer thread, which a full disk would end."""

import contextlib
import html
import json
import math
import os
import pathlib
import re
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tensorboardX import record_writer, summary
from tensorboardX.proto.event_pb2 import Event, SessionLog

from jppo.runlog.diagnosis import Alert
from jppo.runlog.durable_files import Appender


class Board:
    """One event file of a run's `tensorboard/`."""

    def __init__(self, folder: pathlib.Path, *, first: int) -> None:
        """Starts a file at step `first`: TensorBoard drops what a killed run wrote for it and later."""
        folder.mkdir(parents=True, exist_ok=True)
        self._file = Appender(folder / f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}")
        with contextlib.suppress(OSError):  # it waits, and the first step reports it
            self._write(Event(file_version="brain.Event:2"), first)
        with contextlib.suppress(OSError):
            self._write(Event(session_log=SessionLog(status=SessionLog.START)), first)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes a step's finite metrics."""
        scalars = [summary.scalar(name, value) for name, value in metrics.items() if math.isfinite(value)]
        merged = summary.Summary(value=[value for one in scalars for value in one.value])
        self._write(Event(summary=merged), step)

    def generations(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Writes samples as a table in the step's text."""
        if rows:
            self._write(Event(summary=summary.text("val_generations", _markdown(rows))), step)

    def warn(self, alert: Alert) -> None:
        """Writes a warning as text."""
        said = f"{alert.found}; {alert.remedy}"
        self._write(Event(summary=summary.text(f"warnings/{alert.name}", said)), alert.step)

    def close(self, *, failed: bool) -> None:
        """Writes waiting records."""
        self._file.close()

    def _write(self, event: Event, step: int) -> None:
        event.step, event.wall_time = step, time.time()
        data = event.SerializeToString()
        head = struct.pack("<Q", len(data))
        checks = [struct.pack("<I", record_writer.masked_crc32c(part)) for part in (head, data)]
        self._file.append(head + checks[0] + data + checks[1])


def _markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns a table of samples, with Markdown and HTML escaped."""

    def cell(value: Any) -> str:
        text = "" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        marked = re.sub(r"([\\`*_{}\[\]()#+.!|~$-])", r"\\\1", text)
        return html.escape(marked, quote=False).replace("\n", "<br>").replace("\r", "")

    columns = ("prompt", "response", "ground_truth", "score", "error")
    lines = [columns, ["---"] * len(columns), *([cell(row[name]) for name in columns] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
