"""Several hosts as one run: agreement on results and errors, lost hosts, common shutdown.

Each host runs the same program on its own devices, which JAX joins into one mesh, and on its share of the samples.
Besides JAX's collectives, hosts communicate through the store of JAX's coordinator on host 0:

    gather(work)      the results of all hosts' work; an error of one is raised on all
    together(work)    the same, but each host keeps its own result
    alike(work)       the same for work that may fail without ending the run
    heard()           another host is ending: this one should, at its next agreement

A host that does not sign for `timeout_s` is lost. Waiting for it would never end, so the others exit by force.
"""

import dataclasses
import json
import os
import pathlib
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from jppo.errors import INTERRUPTED, RunEnded, UserError

T = TypeVar("T")
_POLL_S = 0.5
INLINE = 2**16  # bytes sent through the store; larger data uses a collective, which is faster
_CHUNK = 2**20  # bytes per host in one collective, so it is compiled once
BY_LOSS = ("Gloo", "NCCL", "UNAVAILABLE", "ABORTED")  # in errors of collectives whose peer is gone
RESUMES = "saved checkpoints remain, and the same command resumes from them"
LOST = 1  # exit code of a host in a run that another host ended by force


class Elsewhere(Exception):
    """Another host failed unexpectedly; the message has the reason. Not every host raises it, unlike `RunEnded`."""


class Stopped(SystemExit):  # a SystemExit, which asyncio passes on
    """The run was asked to stop, or is stuck: `status` is the exit code, `why` the reason."""

    def __init__(self, status: int, why: str, *, heard: bool = False) -> None:
        """`heard`: another host was asked."""
        super().__init__(status)
        self.status = status
        self.why = why
        self.heard = heard


@dataclasses.dataclass(eq=False)
class Hosts:
    """All hosts of a run as seen by one of them; a context manager around the whole run. By default one host alone."""

    rank: int = 0
    count: int = 1
    _: dataclasses.KW_ONLY
    store: Any = None  # where they meet: JAX's key-value store
    timeout_s: float = 60.0  # without a sign, after which a host is lost
    end_timeout_s: float = 120.0  # in which all come to the end

    def __post_init__(self) -> None:
        self.working = self.count == 1  # a stop may interrupt the current work
        self._round = 0
        self._other_stop: Stopped | None = None
        self._shared: BaseException | None = None  # the last error that was raised on every host
        self._ended = threading.Event()

    @property
    def first(self) -> bool:
        """Whether this host writes files and logs."""
        return self.rank == 0

    def share(self, count: int) -> range:
        """Returns this host's share of `count` items; all shares in order are all items."""
        return range(count * self.rank // self.count, count * (self.rank + 1) // self.count)

    def together(self, work: Callable[[], T]) -> T:
        """Returns the result of `work` once it succeeded on every host; otherwise raises the first host's error."""
        if self.count == 1:
            return work()
        results: list[T] = []
        self._agree(lambda: results.append(work()))
        return results[0]

    def gather(self, work: Callable[[], Any]) -> list[Any]:
        """Returns the results of `work` on all hosts (JSON types), in host order; errors as in `together`."""
        return [work()] if self.count == 1 else self._agree(work)

    def summed(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Returns the sums of all hosts' counts."""
        counts_by_host = self.gather(lambda: metrics)
        return {name: float(sum(counts[name] for counts in counts_by_host)) for name in metrics}

    def alike(self, work: Callable[[], object]) -> None:
        """Runs the work on every host; an error of one host is raised on all of them."""
        own_errors: list[Exception] = []

        def run_work() -> str | None:
            try:
                work()
            except Exception as e:
                own_errors.append(e)
                return _one_line(e)
            return None

        failures = [f"host {rank}: {text}" for rank, text in enumerate(self.gather(run_work)) if text is not None]
        if failures:
            raise own_errors[0] if own_errors else Elsewhere(failures[0])

    def shared(self, error: BaseException) -> bool:
        """Whether every host has raised this error or its counterpart, at the same place."""
        return self.count == 1 or error is self._shared

    def heard(self) -> Stopped | None:
        """Returns the stop of another host that is ending, if any."""
        return self._other_stop

    def tell(self, error: BaseException) -> None:
        """Announces that this host is ending, so the others stop waiting."""
        if self.count > 1:
            self._put(f"ending/{self.rank}", json.dumps(_describe_error(error)), overwrite=True)

    def __enter__(self) -> "Hosts":
        if self.count > 1:
            threading.Thread(target=self._watch_hosts, name="hosts", daemon=True).start()
        return self

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> None:
        if self.count == 1:
            return
        if error is not None and not isinstance(error, Stopped | Elsewhere | UserError | RunEnded):
            self._crash(error)
        if error is not None:
            self.tell(error)
        try:
            self.store.wait_at_barrier("jppo/end", int(self.end_timeout_s * 1000))
        except jax.errors.JaxRuntimeError as e:
            self.leave(LOST, f"not every host came to the end within {self.end_timeout_s:g} s: {_one_line(e)}")
        self._ended.set()
        jax.distributed.shutdown()

    def leave(self, status: int, why: str) -> None:
        """Ends this process at once, without waiting for other hosts."""
        print(f"error: {why}; {RESUMES}", file=sys.stderr)
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(status)

    def _agree(self, work: Callable[[], Any]) -> list[Any]:
        """Runs the work; returns the results of all hosts, or raises the error that they agree on."""
        value, error = None, None
        try:
            self.working = True
            value = work()
        except (Exception, Stopped) as e:
            error = e
        finally:
            self.working = False
        if error is not None:
            self.tell(error)
        text = "" if error is not None else json.dumps(value, default=float)
        data = text.encode()
        message: dict[str, Any] = {"error": None if error is None else _describe_error(error), "bytes": len(data)}
        if len(data) <= INLINE:
            message["text"] = text
        self._put(f"said/{self._round}/{self.rank}", json.dumps(message))
        messages = [json.loads(self._get(f"said/{self._round}/{rank}")) for rank in range(self.count)]
        if self._round:  # everybody has read the earlier messages
            self.store.key_value_delete(f"jppo/said/{self._round - 1}/{self.rank}")
        self._round += 1
        self._raise_common_error([sent["error"] for sent in messages], error)
        longest = max(sent["bytes"] for sent in messages)
        if longest <= INLINE:
            return [json.loads(sent["text"]) for sent in messages]
        return [json.loads(sent) for sent in _exchange_bytes(data, [sent["bytes"] for sent in messages])]

    def _raise_common_error(self, errors: Sequence[dict[str, Any] | None], own_error: BaseException | None) -> None:
        """Raises the common error of all hosts: the first that was not caused by another host."""
        failed = [(error["heard"], rank) for rank, error in enumerate(errors) if error is not None]
        if not failed:
            return
        _, rank = min(failed)
        error = errors[rank]
        assert error is not None
        message = f"host {rank}: {error['said']}"
        if rank == self.rank and own_error is not None:
            self._shared = own_error
            raise own_error
        if error["kind"] == Stopped.__name__:
            self._shared = Stopped(error["status"], error["said"] if error["heard"] else message)
        else:
            self._shared = _common_errors().get(error["kind"], Elsewhere)(message)
        raise self._shared from own_error

    def _crash(self, error: BaseException) -> None:
        """Ends this host and tells the others; a collective whose peer is gone is the peer's fault."""
        if any(word in str(error) for word in BY_LOSS):
            self._ended.wait(self.timeout_s + 2 * _POLL_S)  # meanwhile the lost host is identified, and this host ends
        traceback.print_exception(error)
        self._put(f"gone/{self.rank}", _one_line(error))
        if self.first:
            time.sleep(2 * _POLL_S)  # the store goes with this process; the others have read it by then
        sys.stderr.flush()
        os._exit(INTERRUPTED if isinstance(error, KeyboardInterrupt) else LOST)

    def _watch_hosts(self) -> None:
        """Signs in the store, and checks the signs of the other hosts, until the end."""
        number, last_signs = 0, dict.fromkeys(range(self.count), ("", time.monotonic()))
        while not self._ended.is_set():
            try:
                self._put(f"alive/{self.rank}", str(number), overwrite=True)
                alive, ending, gone = (self._get_all(prefix) for prefix in ("alive", "ending", "gone"))
            except jax.errors.JaxRuntimeError:  # the coordinator is gone: XLA ends the process (see `launchers.py`)
                self._ended.wait(_POLL_S)
                continue
            number, now = number + 1, time.monotonic()
            for rank, text in gone.items():
                if rank != self.rank:
                    self.leave(LOST, f"host {rank} failed: {text}")
            for rank, sign in alive.items():
                if last_signs[rank][0] != sign:
                    last_signs[rank] = sign, now
            for rank, (_, since) in last_signs.items():
                if rank != self.rank and now - since > self.timeout_s:
                    self.leave(
                        LOST, f"host {rank} is lost: no sign of it within trainer.host_timeout_s={self.timeout_s:g}"
                    )
            for rank, text in ending.items():
                if rank != self.rank and self._other_stop is None:
                    error = json.loads(text)
                    self._other_stop = Stopped(error["status"], f"host {rank}: {error['said']}", heard=True)
            self._ended.wait(_POLL_S)

    def _put(self, key: str, text: str, *, overwrite: bool = False) -> None:
        self.store.key_value_set(f"jppo/{key}", text, allow_overwrite=overwrite)

    def _get(self, key: str) -> str:
        """Waits for a host's message; checks for signals in between."""
        while True:
            try:
                return str(self.store.blocking_key_value_get(f"jppo/{key}", int(_POLL_S * 1000)))
            except jax.errors.JaxRuntimeError as e:
                if "DEADLINE_EXCEEDED" not in str(e):
                    raise

    def _get_all(self, prefix: str) -> dict[int, str]:
        """Returns the messages under this key, by rank."""
        messages = self.store.key_value_dir_get(f"jppo/{prefix}/")
        return {int(key.rsplit("/", 1)[1]): text for key, text in messages}


def _common_errors() -> dict[str, type[Exception]]:
    """Returns the errors that every host raises where one does, by name."""
    kinds: list[type[Exception]] = [UserError, RunEnded, *RunEnded.__subclasses__()]
    return {kind.__name__: kind for kind in kinds}


def _describe_error(error: BaseException) -> dict[str, Any]:
    """Describes an error for the other hosts."""
    names = [kind.__name__ for kind in type(error).__mro__]
    kind = next((name for name in names if name in _common_errors()), names[0])
    description = {"kind": kind, "said": _one_line(error), "status": LOST, "heard": False}
    if isinstance(error, Stopped):
        description |= {"said": error.why, "status": error.status, "heard": error.heard}
    return description


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:1000] or type(error).__name__


def _exchange_bytes(data: bytes, sizes: Sequence[int]) -> list[bytes]:
    """Exchanges bytes between all hosts, by collectives of one shape."""
    own_bytes = np.frombuffer(data, np.uint8)
    pieces = []
    for begin in range(0, max(sizes), _CHUNK):
        piece = np.zeros(_CHUNK, np.uint8)
        own_piece = own_bytes[begin : begin + _CHUNK]
        piece[: len(own_piece)] = own_piece
        pieces.append(multihost_utils.process_allgather(piece))
    gathered = np.concatenate(pieces, axis=1)
    return [gathered[rank, :size].tobytes() for rank, size in enumerate(sizes)]


ALONE = Hosts()


def own_folder(hosts: Hosts, run: pathlib.Path) -> pathlib.Path:
    """Returns the folder of a host's logs: the run folder for host 0, else a subfolder."""
    return run if hosts.first else run / f"host-{hosts.rank}"
