"""A reward model in a process: it starts in the background, and is restarted once after a crash."""

import os
import pathlib
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import IO

from jppo.interpreter import python_path
from jppo.rewards.model.classifier import refused
from jppo.rewards.model.part import ScoringError

_LOG_LINES = 8
STARTS = 2  # of one process: after a crash it is restarted once


class ScorerProcess:
    """The start of a process and its log; a subclass waits for it, sends it batches and ends it."""

    def __init__(self, path: str, *, command: Sequence[str], env: Mapping[str, str], log: pathlib.Path):
        self._path, self._command, self._log = path, command, log
        self._env = {**os.environ, "PYTHONPATH": python_path(), "HF_HUB_OFFLINE": "1", **env}
        self._process: subprocess.Popen[bytes] | None = None
        self._starts, self._ready, self._closed, self._why = 0, False, False, ""
        self._state = threading.Lock()  # guards starting and closing
        self._turn = threading.Lock()  # one request at a time
        self._start()

    def wait_ready(self) -> None:
        """Waits until the model is loaded; UserError with the reason if that fails."""
        try:
            with self._turn:
                self._wait()
        except ScoringError as e:
            raise refused(self._path, str(e)) from e

    def _wait(self) -> None:
        """Waits until the model is loaded; ScoringError if that fails."""
        raise NotImplementedError

    def _end(self) -> object:
        """Ends the process, if there is one."""
        raise NotImplementedError

    def _popen(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        """Starts the process, whose errors go to `log`, in its own session: Ctrl-C reaches only the trainer."""
        raise NotImplementedError

    def _ensure(self) -> None:
        """Restarts a process that has ended since it was ready, and waits for it."""
        if self._process is None or (self._ready and self._process.poll() is not None):
            self._end()
            self._start()
        self._wait()

    def _start(self) -> None:
        with self._state:
            if self._closed:
                raise ScoringError("the reward model is closed")
            if self._starts == STARTS:
                why = f"; {self._why}" if self._why else ""
                raise ScoringError(f"the reward model crashed {STARTS} times and is not restarted{why}")
            self._starts, self._ready = self._starts + 1, False
            self._log.parent.mkdir(parents=True, exist_ok=True)
            with open(self._log, "ab") as log:
                self._log_start = log.tell()
                self._process = self._popen(log)

    def _log_end(self) -> str:
        """Formats the last lines that the process has logged since its start."""
        with open(self._log, "rb") as file:
            file.seek(self._log_start)
            lines = file.read().decode(errors="replace").splitlines()
        last = [line[:300] for line in lines if line.strip()][-_LOG_LINES:]
        return "\n  ".join([f"{self._log} says:", *last])
