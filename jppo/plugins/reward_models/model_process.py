"""Reward models in processes of their own, so that the trainer imports no torch; restarted once after a crash.

`TransformersRewardModel` is a model of any transformers family (`torch_worker.py`). `VllmRewardModel` is one that vLLM
serves as a classifier, on a socket file.
"""

import atexit
import contextlib
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any

import httpx

from jppo import child_process
from jppo.child_process import executable, python_path
from jppo.plugins.reward_models.classifier import Classifier, model_error, without_padding
from jppo.plugins.reward_models.model import ScoringError
from jppo.rollout.servers import replies
from jppo.rollout.servers.endpoint import ServerFault

_LOG_LINES = 8
_MAX_STARTS = 2  # of one process: after a crash it is restarted once


class _ScorerProcess:
    """The start of a process and its log; a subclass waits for it, sends it batches and ends it."""

    def __init__(self, path: str, *, command: Sequence[str], env: Mapping[str, str], log: pathlib.Path):
        """Starts `command`; its output is appended to `log`, `path` is the model's in errors."""
        self._path, self._command, self._log = path, command, log
        self._env = {**os.environ, "PYTHONPATH": python_path(), "HF_HUB_OFFLINE": "1", **env}
        self._process: subprocess.Popen[bytes] | None = None
        self._starts, self._ready, self._closed, self._failure = 0, False, False, ""
        self._state_lock = threading.Lock()  # guards starting and closing
        self._request_lock = threading.Lock()  # one request at a time
        self._start()

    def wait_ready(self) -> None:
        """Waits until the model is loaded; UserError with the reason if that fails."""
        try:
            with self._request_lock:
                self._wait()
        except ScoringError as e:
            raise model_error(self._path, str(e)) from e

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
        """Starts the process and a new section of its log; ScoringError after the last restart or when closed."""
        with self._state_lock:
            if self._closed:
                raise ScoringError("the reward model is closed")
            if self._starts == _MAX_STARTS:
                reason = f"; {self._failure}" if self._failure else ""
                raise ScoringError(f"the reward model crashed {_MAX_STARTS} times and is not restarted{reason}")
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
        last_lines = [line[:300] for line in lines if line.strip()][-_LOG_LINES:]
        return "\n  ".join([f"{self._log} says:", *last_lines])


class TransformersRewardModel(_ScorerProcess):
    """Starts `torch_worker.py` and sends it batches; a crash fails the current batch, and one crash is survived.

    `python` is an interpreter with torch and transformers ('' is the trainer's own), `device` is a torch device,
    `threads` are torch threads. The constructor does not wait; `wait_ready` does.
    """

    def __init__(
        self,
        classifier: Classifier,
        *,
        log: pathlib.Path,
        python: str = "",
        device: str = "cpu",
        dtype: str = "float32",
        threads: int = 1,
        timeout_s: float = 600.0,
    ):
        """Starts the worker process with the model's directory, device, dtype and number of threads."""
        self._timeout_s = timeout_s
        program = [executable(python, "reward.model.python"), "-m", "jppo.plugins.reward_models.torch_worker"]
        kind = "token" if classifier.steps else "sequence"
        super().__init__(
            classifier.path,
            command=[*program, classifier.directory, str(os.getpid()), device, dtype, str(threads), kind],
            env={"OMP_NUM_THREADS": str(threads)},
            log=log,
        )

    def score(self, ids: Sequence[Sequence[int]]) -> list[float]:
        """Returns the score logit of each token sequence."""
        return self._request_scores(ids=ids)

    def score_at(self, ids: Sequence[Sequence[int]], positions: Sequence[Sequence[int]]) -> list[list[float]]:
        """Returns the log-odds of each text at its places, by a token classifier."""
        return self._request_scores(ids=ids, positions=positions)

    def _request_scores(self, **arrays: Sequence[Sequence[int]]) -> list[Any]:
        """Sends arrays of a batch by name and returns the scores; ScoringError if the process fails."""
        with self._request_lock:
            self._ensure()
            reply = self._ask({name: [list(row) for row in rows] for name, rows in arrays.items()})
        if "error" in reply:
            raise ScoringError(f"the reward model failed: {reply['error']}")
        scores: list[Any] = reply["scores"]
        return scores

    def close(self) -> None:
        """Kills the process; a waiting caller gets a ScoringError."""
        with self._state_lock:
            self._closed, process, self._process = True, self._process, None
            if process is not None:
                process.kill()
                process.wait()
        if process is not None:
            with self._request_lock:  # waiting callers have seen the end
                _close_pipes(process)

    def _popen(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        return subprocess.Popen(
            self._command, env=self._env, stdin=pipe, stdout=pipe, stderr=log, bufsize=0, start_new_session=True
        )

    def _wait(self) -> None:
        """Reads the first reply: the model is loaded, or refused for good."""
        if self._ready:
            return
        reply = self._ask(None)
        if "refused" in reply:
            self._starts = _MAX_STARTS  # it would be refused again
            self._end()
            self._failure = reply["refused"]
            raise ScoringError(self._failure)
        self._ready = True

    def _ask(self, message: Any) -> Any:
        """Sends `message`, if any, and returns the next reply."""
        process = self._process
        try:
            if process is None or process.stdin is None or process.stdout is None:
                raise EOFError
            if message is not None:
                child_process.send(process.stdin.fileno(), json.dumps(message).encode())
            output = process.stdout.fileno()
            return json.loads(child_process.receive(output, self._timeout_s, lambda: process.poll() is None))
        except (OSError, EOFError) as e:
            code = self._end()
            ending = "is closed" if self._closed or process is None else f"ended with code {code}"
            if isinstance(e, TimeoutError):
                ending = f"did not answer within {self._timeout_s:g} s"
            self._failure = self._log_end()
            raise ScoringError(f"the reward model's process {ending}; {self._failure}") from e

    def _end(self) -> int | None:
        """Ends the process and returns its exit code."""
        with self._state_lock:
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


_POLL_S = 0.2
_STOP_S = 15.0  # longer than the launcher takes
_NAME = "reward-model"
# Variables that would override the cache's size, and ask for a key on a socket that its permissions protect.
_DROPPED_VARIABLES = ("VLLM_CPU_KVCACHE_SPACE", "VLLM_API_KEY")


class VllmRewardModel(_ScorerProcess):
    """Starts vLLM and calls its classification route; a crash fails the current batch, and one crash is survived.

    `build` is the platform of the interpreter's vLLM, 'cpu' or 'gpu'. vLLM scores the last token that `without_padding`
    leaves. The constructor does not wait; `wait_ready` does.
    """

    def __init__(
        self,
        classifier: Classifier,
        *,
        build: str,
        batch_size: int,
        max_length: int,
        log: pathlib.Path,
        python: str = "",
        dtype: str = "float32",
        threads: int = 1,
        gpu_memory_utilization: float = 0.2,
        start_timeout_s: float = 300.0,
        timeout_s: float = 600.0,
    ):
        """Starts vLLM on a socket in a temporary folder, with a CPU's or a GPU's options by `build`."""
        self._classifier, self._start_timeout_s = classifier, start_timeout_s
        self._folder = tempfile.mkdtemp(prefix="jppo-rm-")  # a socket path must be short
        self._socket = os.path.join(self._folder, "vllm.sock")
        arguments = [
            *("--model", classifier.directory, "--served-model-name", _NAME, "--uds", self._socket),
            *("--runner", "pooling", "--convert", "classify"),
            *("--dtype", dtype, "--max-model-len", str(max_length), "--max-num-seqs", str(batch_size)),
            *("--max-num-batched-tokens", str(max(max_length, 4096))),
            *("--enforce-eager", "--disable-uvicorn-access-log", "--disable-log-stats"),
        ]
        env = {"VLLM_NO_USAGE_STATS": "1"}
        if build == "gpu":
            arguments += ["--gpu-memory-utilization", str(gpu_memory_utilization)]
        else:
            arguments += ["--kv-cache-memory-bytes", str(2**27)]
            env |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": str(threads)}
        # Run by name, because the launcher is a separate program: it ends vLLM with us and removes the folder.
        launcher = [sys.executable, "-m", "jppo.rollout.servers.launch", str(os.getpid()), self._folder]
        program = [executable(python, "reward.model.python"), "-m", "vllm.entrypoints.openai.api_server"]
        self._client = httpx.Client(
            transport=httpx.HTTPTransport(uds=self._socket), base_url="http://reward-model", timeout=timeout_s
        )
        super().__init__(classifier.path, command=[*launcher, *program, *arguments], env=env, log=log)

    def score(self, ids: Sequence[Sequence[int]]) -> list[float]:
        """Returns the score logit of each token sequence, by one request to the server."""
        stripped_ids = [without_padding(sequence, self._classifier.pad_token_id) for sequence in ids]
        with self._request_lock:
            self._ensure()
            try:
                body = {"model": _NAME, "input": stripped_ids, "use_activation": False}  # the logit itself
                reply = self._client.post("/classify", json=body)
            except httpx.HTTPError as e:
                raise self._failed(f"broke off ({type(e).__name__} {e})") from e
            if reply.status_code >= 500:
                raise self._failed(f"answered {reply.status_code}: {reply.text[:300]}")
        if reply.status_code != 200:
            raise ScoringError(f"the reward model's vLLM answered {reply.status_code}: {reply.text[:300]}")
        try:
            with replies.reading("the reward model's vLLM", reply.text[:300]):
                scores = {
                    replies.whole(item["index"], "index"): replies.number(replies.single_entry(item["probs"], "probs"))
                    for item in reply.json()["data"]
                }
        except ServerFault as e:
            raise ScoringError(str(e)) from e
        if sorted(scores) != list(range(len(stripped_ids))):
            raise ScoringError("the reward model's vLLM did not answer with one score for each text")
        return [scores[i] for i in range(len(stripped_ids))]

    def close(self) -> None:
        """Ends the server and removes its socket; a waiting caller gets a ScoringError."""
        with self._state_lock:
            self._closed = True
        self._end()
        with self._request_lock:
            self._client.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _popen(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        """Starts the launcher and vLLM on a new socket; both end when this program does."""
        pathlib.Path(self._socket).unlink(missing_ok=True)
        env = {name: value for name, value in self._env.items() if name not in _DROPPED_VARIABLES}
        atexit.register(self.close)
        return subprocess.Popen(
            self._command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )

    def _wait(self) -> None:
        """Polls the server's health until it is ready; ScoringError if it ends or takes too long."""
        deadline = time.monotonic() + self._start_timeout_s
        while not self._ready:
            process = self._process
            if process is None or process.poll() is not None:
                raise self._failed("did not start")
            if time.monotonic() > deadline:
                raise self._failed(f"was not ready after {self._start_timeout_s:g} s")
            with contextlib.suppress(httpx.HTTPError):
                self._ready = _listens(self._socket) and self._client.get("/health").status_code == 200
            if not self._ready:
                time.sleep(_POLL_S)

    def _failed(self, failure: str) -> ScoringError:
        """Ends the server, to be restarted for the next batch, and returns the error."""
        self._end()
        return ScoringError(f"the reward model's vLLM {failure}; {self._log_end()}")

    def _end(self) -> None:
        """Stops the server by its launcher, then kills what is left of its group."""
        with self._state_lock:
            process, self._process = self._process, None
        atexit.unregister(self.close)
        if process is None:
            return
        process.terminate()  # the launcher forwards it
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_S)
        with contextlib.suppress(ProcessLookupError):  # all have ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _listens(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(path) == 0
