"""A reward model of any transformers family in a separate process, so the trainer does not import torch."""

import contextlib
import json
import os
import pathlib
import select
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import jppo
from jppo.rewards.model.part import Classifier, ScoringError, refused
from jppo.settings import UserError

LOG_LINES = 8
STARTS = 2  # of one process: after a crash it is restarted once


class _Gone(Exception):
    """The process no longer answers."""


class TransformersRewardModel:
    """Starts `torch_worker.py` and sends it batches; a crash fails the current batch, and one crash is survived.

    `python` is an interpreter with torch and transformers ('' is the trainer's own), `device` is a torch device,
    `threads` are torch threads. The constructor does not wait; `wait_ready` does.
    """

    def __init__(
        self,
        what: Classifier,
        *,
        log: pathlib.Path,
        python: str = "",
        device: str = "cpu",
        dtype: str = "float32",
        threads: int = 1,
        timeout_s: float = 600.0,
    ):
        self._path, self._log, self._timeout_s = what.path, log, timeout_s
        self._command = [interpreter(python), "-m", "jppo.rewards.model.torch_worker", what.directory, str(os.getpid())]
        self._command += [device, dtype, str(threads)]
        self._env = {**os.environ, "PYTHONPATH": python_path(), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)}
        self._process: subprocess.Popen | None = None
        self._starts, self._ready, self._closed, self._why = 0, False, False, ""
        self._state = threading.Lock()  # guards starting and closing
        self._turn = threading.Lock()  # one request at a time
        self._start()

    def wait_ready(self) -> None:
        """Waits until the model is loaded; UserError if that fails."""
        try:
            with self._turn:
                self._load()
        except ScoringError as e:
            raise refused(self._path, str(e)) from e

    def score(self, ids: Sequence[Sequence[int]]) -> list[float]:
        """Implements Scorer.score."""
        with self._turn:
            if self._process is None or (self._ready and self._process.poll() is not None):
                self._end()
                self._start()
            self._load()
            answer = self._ask({"ids": [list(one) for one in ids]})
        if "error" in answer:
            raise ScoringError(f"the reward model failed: {answer['error']}")
        return answer["scores"]

    def close(self) -> None:
        """Implements Scorer.close."""
        with self._state:
            self._closed, process, self._process = True, self._process, None
            if process is not None:
                process.kill()
                process.wait()
        if process is not None:
            with self._turn:  # waiting callers have seen the end
                _close_pipes(process)

    def _start(self) -> None:
        with self._state:
            if self._closed:
                raise ScoringError("the reward model is closed")
            if self._starts == STARTS:
                raise ScoringError(f"the reward model crashed {STARTS} times and is not restarted; {self._why}")
            self._starts, self._ready = self._starts + 1, False
            self._log.parent.mkdir(parents=True, exist_ok=True)
            with open(self._log, "ab") as log:
                self._log_start = log.tell()
                self._process = subprocess.Popen(
                    self._command,
                    env=self._env,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    bufsize=0,
                    start_new_session=True,  # Ctrl-C in the terminal reaches only the trainer
                )

    def _load(self) -> None:
        if self._ready:
            return
        answer = self._ask(None)
        if "refused" in answer:
            self._starts = STARTS  # it would be refused again
            self._end()
            self._why = answer["refused"]
            raise ScoringError(self._why)
        self._ready = True

    def _ask(self, message: Any) -> Any:
        """Sends `message`, if any, and returns the next reply."""
        process = self._process
        try:
            if process is None:
                raise _Gone("is closed")
            if message is not None:
                body = json.dumps(message).encode()
                _write(process, struct.pack("<Q", len(body)) + body)
            deadline = time.monotonic() + self._timeout_s
            (size,) = struct.unpack("<Q", self._read(process, 8, deadline))
            return json.loads(self._read(process, size, deadline))
        except _Gone as e:
            code = self._end()
            said = "is closed" if self._closed else str(e) or f"ended with code {code}"
            self._why = "\n  ".join([f"{self._log} says:", *last_lines(self._log, self._log_start)])
            raise ScoringError(f"the reward model's process {said}; {self._why}") from e

    def _read(self, process: subprocess.Popen, size: int, deadline: float) -> bytes:
        assert process.stdout is not None
        pieces: list[bytes] = []
        while size:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([process.stdout], [], [], left)[0]:
                raise _Gone(f"did not answer within {self._timeout_s:g} s")
            piece = os.read(process.stdout.fileno(), min(size, 1 << 20))
            if not piece:
                raise _Gone
            pieces.append(piece)
            size -= len(piece)
        return b"".join(pieces)

    def _end(self) -> int | None:
        """Ends the process and returns its exit code."""
        with self._state:
            process, self._process = self._process, None
        if process is None:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0)  # an ending process has its own exit code
        process.kill()
        _close_pipes(process)
        return process.wait()


def _close_pipes(process: subprocess.Popen) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _write(process: subprocess.Popen, data: bytes) -> None:
    assert process.stdin is not None
    view = memoryview(data)
    try:
        while view:
            view = view[process.stdin.write(view) :]
    except OSError as e:
        raise _Gone from e


def last_lines(log: pathlib.Path, start: int) -> list[str]:
    """Returns the last lines written to the log from byte `start` on."""
    with open(log, "rb") as file:
        file.seek(start)
        lines = file.read().decode(errors="replace").splitlines()
    return [line[:300] for line in lines if line.strip()][-LOG_LINES:]


def interpreter(python: str) -> str:
    """Resolves the interpreter; UserError if it does not exist."""
    found = shutil.which(os.path.expanduser(python)) if python else sys.executable
    if found is None:
        raise UserError(f"the reward model's interpreter {python!r} is not a program; give the path of a Python")
    return found


def python_path() -> str:
    """Returns a PYTHONPATH with which another interpreter finds jppo."""
    package, inherited = str(pathlib.Path(jppo.__file__).resolve().parents[1]), os.environ.get("PYTHONPATH")
    return package if not inherited else os.pathsep.join((package, inherited))
