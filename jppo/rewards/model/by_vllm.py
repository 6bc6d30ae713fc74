"""A reward model served by vLLM as a classifier, in a separate process that listens on a socket file."""

import atexit
import contextlib
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
from collections.abc import Sequence

import httpx

from jppo.rewards.model.by_torch import STARTS, interpreter, last_lines, python_path
from jppo.rewards.model.part import Classifier, ScoringError, refused, without_padding

POLL_S = 0.2
STOP_S = 15.0  # longer than the launcher takes
NAME = "reward-model"


class VllmRewardModel:
    """Starts vLLM and calls its classification route; a crash fails the current batch, and one crash is survived.

    `build` is the platform of the interpreter's vLLM, 'cpu' or 'gpu'. vLLM scores the last token that `without_padding`
    leaves. The constructor does not wait; `wait_ready` does.
    """

    def __init__(
        self,
        what: Classifier,
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
        self._what, self._log, self._start_timeout_s = what, log, start_timeout_s
        self._folder = tempfile.mkdtemp(prefix="jppo-rm-")  # a socket path must be short
        self._socket = os.path.join(self._folder, "vllm.sock")
        arguments = [
            *("--model", what.directory, "--served-model-name", NAME, "--uds", self._socket),
            *("--runner", "pooling", "--convert", "classify"),
            *("--dtype", dtype, "--max-model-len", str(max_length), "--max-num-seqs", str(batch_size)),
            *("--max-num-batched-tokens", str(max(max_length, 4096))),
            *("--enforce-eager", "--disable-uvicorn-access-log", "--disable-log-stats"),
        ]
        self._env = {**os.environ, "PYTHONPATH": python_path(), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        if build == "gpu":
            arguments += ["--gpu-memory-utilization", str(gpu_memory_utilization)]
        else:
            arguments += ["--kv-cache-memory-bytes", str(2**27)]
            self._env |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": str(threads)}
            self._env.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would override the size above
        self._env.pop("VLLM_API_KEY", None)  # the socket's permissions protect it
        # Run by name, because the launcher is a separate program: it ends vLLM with us and removes the folder.
        launcher = [sys.executable, "-m", "jppo.rollout.servers.launch", str(os.getpid()), self._folder]
        self._command = [*launcher, interpreter(python), "-m", "vllm.entrypoints.openai.api_server", *arguments]
        self._client = httpx.Client(
            transport=httpx.HTTPTransport(uds=self._socket), base_url="http://reward-model", timeout=timeout_s
        )
        self._process: subprocess.Popen | None = None
        self._starts, self._ready, self._closed = 0, False, False
        self._state = threading.Lock()  # guards starting and closing
        self._turn = threading.Lock()  # one request at a time
        self._start()

    def wait_ready(self) -> None:
        """Waits until vLLM answers; UserError with its last log lines if it ends or is late."""
        try:
            with self._turn:
                self._wait()
        except ScoringError as e:
            raise refused(self._what.path, str(e)) from e

    def score(self, ids: Sequence[Sequence[int]]) -> list[float]:
        """Implements Scorer.score."""
        kept = [without_padding(one, self._what.pad_token_id) for one in ids]
        with self._turn:
            if self._process is None or (self._ready and self._process.poll() is not None):
                with self._state:
                    self._end()
                self._start()
            self._wait()
            try:
                body = {"model": NAME, "input": kept, "use_activation": False}  # the logit itself
                reply = self._client.post("/classify", json=body)
            except httpx.HTTPError as e:
                raise self._failed(f"broke off ({type(e).__name__} {e})") from e
            if reply.status_code >= 500:
                raise self._failed(f"answered {reply.status_code}: {reply.text[:300]}")
        if reply.status_code != 200:
            raise ScoringError(f"the reward model's vLLM answered {reply.status_code}: {reply.text[:300]}")
        found = {item["index"]: item["probs"] for item in reply.json()["data"]}
        if sorted(found) != list(range(len(kept))) or any(len(logits) != 1 for logits in found.values()):
            raise ScoringError("the reward model's vLLM did not answer with one score for each text")
        return [float(found[i][0]) for i in range(len(kept))]

    def close(self) -> None:
        """Implements Scorer.close."""
        with self._state:
            self._closed = True
            self._end()
        with self._turn:
            self._client.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> None:
        with self._state:
            if self._closed:
                raise ScoringError("the reward model is closed")
            if self._starts == STARTS:
                raise ScoringError(f"the reward model's vLLM failed {STARTS} times and is not restarted")
            self._starts, self._ready = self._starts + 1, False
            pathlib.Path(self._socket).unlink(missing_ok=True)
            self._log.parent.mkdir(parents=True, exist_ok=True)
            with open(self._log, "ab") as log:
                self._log_start = log.tell()
                self._process = subprocess.Popen(
                    self._command,
                    env=self._env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            atexit.register(self.close)

    def _wait(self) -> None:
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
                time.sleep(POLL_S)

    def _failed(self, what: str) -> ScoringError:
        """Ends the server, to be restarted for the next batch, and returns the error."""
        with self._state:
            self._end()
        lines = last_lines(self._log, self._log_start)
        return ScoringError("\n  ".join([f"the reward model's vLLM {what}; {self._log} says:", *lines]))

    def _end(self) -> None:
        process, self._process = self._process, None
        atexit.unregister(self.close)
        if process is None:
            return
        process.terminate()  # the launcher forwards it
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        with contextlib.suppress(ProcessLookupError):  # all have ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _listens(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(path) == 0
