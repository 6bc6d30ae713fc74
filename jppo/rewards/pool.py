"""A pool of worker processes for scoring code that may hang, crash, print, fork or exhaust memory.

Parts submit samples and get futures. Each worker has a thread here that sends it one job at a time and enforces the
time limit. A worker that overruns, dies or runs out of memory is killed with all its children and replaced. Its job
becomes an error; no other job is lost or run twice.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from jppo import child_process
from jppo.errors import UserError
from jppo.rewards.parts import Sample, failed, pending
from jppo.types import Reward

Target = tuple[str, ...]  # the module, file or name of a task, and its arguments
AnswerReader = Callable[[dict[str, Any]], Reward]  # an answer of a worker -> a reward; never raises

START_TIMEOUT_S = 120.0  # for a worker to start and import a target's modules


class NotReady(Exception):
    """No worker can prepare the target: the file is broken, a package is missing."""


class _NoReply(Exception):
    """The worker did not answer; the message has the reason."""


@dataclasses.dataclass(frozen=True)
class _Job:
    """A request to a worker: to prepare a target, or to score samples by it."""

    target: Target
    samples: list[dict[str, Any]] | None  # None: only prepare the target
    futures: list[Future[Any]]
    readers: Sequence[AnswerReader] = ()  # of the samples


def as_plain(sample: Sample) -> dict[str, Any]:
    """Returns a sample as a dict of plain values, the form in which workers get it."""
    prompt = sample.prompt
    extra = prompt.extra.get("extra_info", prompt.extra)  # verl's column, otherwise all further columns
    return {"data_source": prompt.data_source, "text": sample.text, "truth": prompt.ground_truth, "extra": extra}


class Pool:
    """`workers` processes, started with the first job.

    `timeout_s` is the limit per sample; a job with several samples has their total. `memory_bytes` limits the address
    space of every process, which exceeds its memory in use. Output of jobs goes to `log`, if given.
    """

    def __init__(
        self,
        workers: int,
        *,
        timeout_s: float,
        memory_bytes: int,
        log: pathlib.Path | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
    ):
        self.timeout_s, self.memory_bytes = timeout_s, memory_bytes
        self._workers, self._log, self._start_timeout_s = workers, log, start_timeout_s
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def submit(
        self, target: Target, sample: Mapping[str, Any], reader: AnswerReader = lambda answer: Reward(**answer)
    ) -> Future[Reward]:
        """Submits one sample; the future never raises."""
        return self.submit_batch(target, [sample], [reader])[0]

    def submit_batch(
        self, target: Target, samples: Sequence[Mapping[str, Any]], readers: Sequence[AnswerReader]
    ) -> list[Future[Reward]]:
        """Like `submit`, for samples that one worker gets at once."""
        futures: list[Future[Reward]] = [pending() for _ in samples]
        if samples:
            self._enqueue(_Job(target, [dict(sample) for sample in samples], futures, readers))
        return futures

    def prepare(self, target: Target) -> bool:
        """Waits until a worker has prepared the target; True if it wants whole batches. Raises NotReady."""
        future: Future[bool] = pending()
        self._enqueue(_Job(target, None, [future]))
        return future.result()

    def close(self) -> None:
        """Ends all processes; unfinished jobs become errors. May be called twice."""
        with self._lock:
            self._closed.set()
            threads = list(self._threads)
        for _ in threads:
            self._jobs.put(None)
        for thread in threads:
            thread.join()
        with contextlib.suppress(queue.Empty):
            while True:
                job = self._jobs.get_nowait()
                if job is not None:
                    _fail_job(job, "the pool was closed")

    def _enqueue(self, job: _Job) -> None:
        """Queues a job and starts the threads of all workers if necessary; fails the job if the pool is closed."""
        with self._lock:
            if not self._closed.is_set():
                while len(self._threads) < self._workers:
                    self._threads.append(threading.Thread(target=self._run_jobs, name="jppo-reward", daemon=True))
                    self._threads[-1].start()
                self._jobs.put(job)
                return
        _fail_job(job, "the pool was closed")

    def _run_jobs(self) -> None:
        """The loop of a worker's thread: sends queued jobs to its process and replaces a broken process."""
        worker: _Worker | None = None
        try:
            while (job := self._jobs.get()) is not None:
                if self._closed.is_set():
                    _fail_job(job, "the pool was closed")
                    continue
                if worker is not None and not worker.alive():  # it ended between two jobs
                    worker.kill()
                    worker = None
                try:
                    if worker is None:
                        worker = _Worker(self.memory_bytes, self._log, self._closed)
                    worker = self._run(worker, job)
                except Exception as e:  # such as unpicklable samples, or no process available
                    if worker is not None:
                        worker.kill()
                        worker = None
                    _fail_job(job, str(e) if isinstance(e, _NoReply) else f"{type(e).__name__}: {e}")
        finally:
            if worker is not None:
                worker.kill()

    def _run(self, worker: "_Worker", job: _Job) -> "_Worker | None":
        """Runs a job and resolves its futures; returns the worker if it can continue."""
        prepared = worker.ready.get(job.target)
        if prepared is None:
            prepared = worker.ask({"target": job.target, "samples": None}, self._start_timeout_s)
            if "error" not in prepared and "memory" not in prepared:
                worker.ready[job.target] = prepared
        reply = prepared
        if job.samples is not None and job.target in worker.ready:
            request, seconds = {"target": job.target, "samples": job.samples}, self.timeout_s * len(job.samples)
            reply = worker.ask(request, seconds, "; reward.timeout_s is the limit of a sample")
        if "memory" in reply or "error" in reply:
            remedy = "" if job.samples is None else "; raise reward.memory_bytes if it needs more"
            memory = f"it used more than {self.memory_bytes / 2**20:g} MiB of memory{remedy}"
            _fail_job(job, reply.get("error", memory))
        elif job.samples is None:
            job.futures[0].set_result(reply["batch"])
        else:
            for future, reader, answer in zip(job.futures, job.readers, reply["answers"], strict=True):
                future.set_result(reader(answer))
        if reply.get("retire"):
            worker.kill()
            return None
        return worker


def require_prepared(pool: Pool, target: Target, label: str) -> bool:
    """Prepares the target in a worker; UserError with `label` if that fails. True if it scores whole batches."""
    try:
        return pool.prepare(target)
    except NotReady as e:
        by_memory = any(sign in str(e) for sign in ("memory", "failed to map", "allocate", "signal 6", "signal 11"))
        remedy = "; raise reward.memory_bytes if it needs more" if by_memory else ""
        raise UserError(f"{label}: {e}{remedy}") from e


class _Worker:
    """One worker process with its guard and two pipes; used by one thread."""

    def __init__(self, memory_bytes: int, log: pathlib.Path | None, closed: threading.Event):
        """Starts the process, with its errors appended to `log`; `closed` is set when the pool closes."""
        defaults = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # every further thread takes address space
        with open(log or os.devnull, "ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "jppo.rewards.pool_worker", str(os.getpid()), str(memory_bytes)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=defaults | os.environ | {"PYTHONPATH": child_process.python_path()},
                start_new_session=True,
                bufsize=0,
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        self._closed = closed
        self.ready: dict[Target, dict[str, Any]] = {}

    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: dict[str, Any], timeout_s: float, limit: str = "") -> dict[str, Any]:
        """Sends a request and returns the worker's reply; raises _NoReply without one, which names the `limit`."""
        body = pickle.dumps(request)
        try:
            child_process.send(self._in.fileno(), body)
            reply: dict[str, Any] = json.loads(
                child_process.receive(self._out.fileno(), timeout_s, lambda: self.alive() and not self._closed.is_set())
            )
        except TimeoutError:
            raise _NoReply(f"it took longer than {timeout_s:g} s{limit}") from None
        except (BrokenPipeError, EOFError):
            raise _NoReply("the pool was closed" if self._closed.is_set() else self._describe_end()) from None
        return reply

    def _describe_end(self) -> str:
        """Returns how the process ended, for errors."""
        try:
            code = self._process.wait(10)
        except subprocess.TimeoutExpired:
            return "the process closed its pipe"
        if code < 0:
            return f"the process was ended by signal {-code} ({signal.Signals(-code).name})"
        return f"the process ended with exit code {code}"

    def kill(self) -> None:
        """Ends the worker and its children, through the guard."""
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._in.close()
        self._out.close()


def _fail_job(job: _Job, why: str) -> None:
    """Resolves a job's open futures with an error."""
    for future in job.futures:
        if future.done():
            continue
        if job.samples is None:
            future.set_exception(NotReady(why))
        else:
            future.set_result(failed(why))
