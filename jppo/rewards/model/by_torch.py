"""A reward model of any transformers family in a separate process, so the trainer does not import torch."""

import contextlib
import json
import os
import pathlib
import select
import struct
import subprocess
import time
from collections.abc import Sequence
from typing import IO, Any

from jppo.interpreter import executable
from jppo.rewards.model.classifier import Classifier
from jppo.rewards.model.part import ScoringError
from jppo.rewards.model.process import STARTS, ScorerProcess


class _Gone(Exception):
    """The process no longer answers."""


class TransformersRewardModel(ScorerProcess):
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
        self._timeout_s = timeout_s
        program = [executable(python, "reward.model.python"), "-m", "jppo.rewards.model.torch_worker"]
        kind = "token" if what.steps else "sequence"
        super().__init__(
            what.path,
            command=[*program, what.directory, str(os.getpid()), device, dtype, str(threads), kind],
            env={"OMP_NUM_THREADS": str(threads)},
            log=log,
        )

    def score(self, ids: Sequence[Sequence[int]]) -> list[float]:
        """Implements Scorer.score."""
        return self._scores(ids=ids)

    def score_at(self, ids: Sequence[Sequence[int]], places: Sequence[Sequence[int]]) -> list[list[float]]:
        """Returns the log-odds of each text at its places, by a token classifier."""
        return self._scores(ids=ids, places=places)

    def _scores(self, **asked: Sequence[Sequence[int]]) -> list[Any]:
        with self._turn:
            self._ensure()
            answer = self._ask({name: [list(one) for one in some] for name, some in asked.items()})
        if "error" in answer:
            raise ScoringError(f"the reward model failed: {answer['error']}")
        scores: list[Any] = answer["scores"]
        return scores

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

    def _popen(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        return subprocess.Popen(
            self._command, env=self._env, stdin=pipe, stdout=pipe, stderr=log, bufsize=0, start_new_session=True
        )

    def _wait(self) -> None:
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
            self._why = self._log_end()
            raise ScoringError(f"the reward model's process {said}; {self._why}") from e

    def _read(self, process: subprocess.Popen[bytes], size: int, deadline: float) -> bytes:
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


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _write(process: subprocess.Popen[bytes], data: bytes) -> None:
    assert process.stdin is not None
    view = memoryview(data)
    try:
        while view:
            view = view[process.stdin.write(view) :]
    except OSError as e:
        raise _Gone from e
