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
import time
from collections.abc import Sequence
from typing import IO

import httpx

from jppo.interpreter import executable
from jppo.rewards.model.classifier import Classifier, without_padding
from jppo.rewards.model.part import ScoringError
from jppo.rewards.model.process import ScorerProcess

_POLL_S = 0.2
_STOP_S = 15.0  # longer than the launcher takes
_NAME = "reward-model"
# Variables that would override the cache's size, and ask for a key on a socket that its permissions protect.
DROPPED = ("VLLM_CPU_KVCACHE_SPACE", "VLLM_API_KEY")


class VllmRewardModel(ScorerProcess):
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
        self._what, self._start_timeout_s = what, start_timeout_s
        self._folder = tempfile.mkdtemp(prefix="jppo-rm-")  # a socket path must be short
        self._socket = os.path.join(self._folder, "vllm.sock")
        arguments = [
            *("--model", what.directory, "--served-model-name", _NAME, "--uds", self._socket),
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
        super().__init__(what.path, command=[*launcher, *program, *arguments], env=env, log=log)

    def score(self, ids: Sequence[Sequence[int]]) -> list[float]:
        """Implements Scorer.score."""
        kept = [without_padding(one, self._what.pad_token_id) for one in ids]
        with self._turn:
            self._ensure()
            try:
                body = {"model": _NAME, "input": kept, "use_activation": False}  # the logit itself
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

    def _popen(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        pathlib.Path(self._socket).unlink(missing_ok=True)
        env = {name: value for name, value in self._env.items() if name not in DROPPED}
        atexit.register(self.close)
        return subprocess.Popen(
            self._command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )

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
                time.sleep(_POLL_S)

    def _failed(self, what: str) -> ScoringError:
        """Ends the server, to be restarted for the next batch, and returns the error."""
        self._end()
        return ScoringError(f"the reward model's vLLM {what}; {self._log_end()}")

    def _end(self) -> None:
        with self._state:
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
