"""Many hosts as one run: who they are, what they tell each other, and that none ends or waits alone.

Each host runs the same program on its own devices, which JAX joins to one mesh, and on its own share of the samples.
Beside JAX's collectives they agree by a store that JAX's coordinator keeps on host 0:

    gather(work)      the results of all hosts' work; what fails on one fails on all, by the same error
    together(work)    the same, of which each keeps its own
    alike(work)       the same for what may fail without ending the run
    heard()           another host is ending: this one should, at its next agreement

A host that does not sign for `timeout_s` is lost. What waits for it would wait for ever, so the others end by force.
"""

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from jppo.config import UserError

T = TypeVar("T")
POLL_S = 0.5
INLINE = 2**16  # bytes that go by the store; more go by a collective, which is faster
CHUNK = 2**20  # bytes of each host in one collective, which is so compiled once
BY_LOSS = ("Gloo", "NCCL", "UNAVAILABLE", "ABORTED")  # what a collective says whose other side is gone
GOES_ON = "what was saved stands, and the same command goes on from there"
LOST = 1  # the exit code of a host whose run another one ended by force


class Elsewhere(Exception):
    """Another host failed by something that no host expects; the message says what."""


class Stopped(SystemExit):  # of the kind that asyncio passes on
    """The run was asked to stop, or is stuck: `status` is the process's exit code, `why` the sentence."""

    def __init__(self, status: int, why: str, *, heard: bool = False) -> None:
        """`heard`: it is another host that was."""
        super().__init__(status)
        self.status = status
        self.why = why
        self.heard = heard


class Hosts:
    """All hosts of a run as one of them sees them; use it as a context manager, around all that the run does."""

    def __init__(
        self,
        rank: int = 0,
        count: int = 1,
        *,
        store: Any = None,
        faults: Sequence[type[Exception]] = (),
        timeout_s: float = 60.0,
        end_timeout_s: float = 120.0,
    ) -> None:
        """Of one host by itself. `faults`: errors that end every host in the way that they end one."""
        self.rank = rank
        self.count = count
        self.working = count == 1  # a stop may break off what is done now
        self._store = store
        known: tuple[type[Exception], ...] = (UserError, *faults)
        self._faults = {fault.__name__: fault for fault in known}
        self._timeout_s = timeout_s
        self._end_timeout_s = end_timeout_s
        self._turn = 0
        self._heard: Stopped | None = None
        self._over = threading.Event()

    @property
    def first(self) -> bool:
        """Whether this is the host that writes and speaks for all."""
        return self.rank == 0

    def share(self, count: int) -> range:
        """Which of so many things are this host's; all hosts' shares, in their order, are all of them."""
        return range(count * self.rank // self.count, count * (self.rank + 1) // self.count)

    def together(self, work: Callable[[], T]) -> T:
        """What `work` returns, once it has succeeded on every host; else the error of the first that failed."""
        if self.count == 1:
            return work()
        found: list[T] = []
        self._agree(lambda: found.append(work()))
        return found[0]

    def gather(self, work: Callable[[], Any]) -> list[Any]:
        """What `work` returned on each host, of JSON types, in the order of the hosts; errors as in `together`."""
        return [work()] if self.count == 1 else self._agree(work)

    def alike(self, work: Callable[[], object]) -> None:
        """Does the work on every host; an error of one is raised on all, and ends none: the caller may go on."""
        own: list[Exception] = []

        def tried() -> str | None:
            try:
                work()
            except Exception as e:
                own.append(e)
                return _short(e)
            return None

        said = [f"host {rank}: {text}" for rank, text in enumerate(self.gather(tried)) if text is not None]
        if said:
            raise own[0] if own else Elsewhere(said[0])

    def heard(self) -> Stopped | None:
        """That another host is ending, where one is."""
        return self._heard

    def tell(self, why: BaseException) -> None:
        """Lets the others know that this host is ending, so that they break off what they wait for."""
        if self.count > 1:
            self._put(f"ending/{self.rank}", json.dumps(_described(why)), again=True)

    def __enter__(self) -> "Hosts":
        if self.count > 1:
            threading.Thread(target=self._sign, name="hosts", daemon=True).start()
        return self

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> None:
        if self.count == 1:
            return
        if error is not None and not self._expected(error):
            self._crash(error)
        if error is not None:
            self.tell(error)
        try:
            self._store.wait_at_barrier("jppo/end", int(self._end_timeout_s * 1000))
        except jax.errors.JaxRuntimeError as e:
            self.leave(LOST, f"not every host came to the end within {self._end_timeout_s:g} s: {_short(e)}")
        self._over.set()
        jax.distributed.shutdown()

    def leave(self, status: int, why: str) -> None:
        """Ends this process at once; nothing that waits for another host is waited for."""
        print(f"error: {why}; {GOES_ON}", file=sys.stderr)
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(status)

    def _agree(self, work: Callable[[], Any]) -> list[Any]:
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
        said: dict[str, Any] = {"error": None if error is None else _described(error), "bytes": len(data)}
        if len(data) <= INLINE:
            said["text"] = text
        self._put(f"said/{self._turn}/{self.rank}", json.dumps(said))
        all_said = [json.loads(self._get(f"said/{self._turn}/{rank}")) for rank in range(self.count)]
        if self._turn:  # everybody has read what was said before
            self._store.key_value_delete(f"jppo/said/{self._turn - 1}/{self.rank}")
        self._turn += 1
        self._require_none([one["error"] for one in all_said], error)
        longest = max(one["bytes"] for one in all_said)
        if longest <= INLINE:
            return [json.loads(one["text"]) for one in all_said]
        return [json.loads(one) for one in _exchange(data, [one["bytes"] for one in all_said])]

    def _require_none(self, errors: Sequence[dict[str, Any] | None], own: BaseException | None) -> None:
        """Raises the error that all hosts take for theirs: the first of those that did not only hear of another."""
        there = [(error["heard"], rank) for rank, error in enumerate(errors) if error is not None]
        if not there:
            return
        _, rank = min(there)
        error = errors[rank]
        assert error is not None
        if rank == self.rank and own is not None:
            raise own
        said = f"host {rank}: {error['said']}"
        if error["kind"] == Stopped.__name__:
            raise Stopped(error["status"], error["said"] if error["heard"] else said) from own
        raise self._faults.get(error["kind"], Elsewhere)(said) from own

    def _expected(self, error: BaseException) -> bool:
        """Whether every host ends by it."""
        return isinstance(error, (Stopped, Elsewhere, *self._faults.values()))

    def _crash(self, error: BaseException) -> None:
        """Ends this host alone, and has the others know; a collective whose other side is gone is that side's fault."""
        if any(word in str(error) for word in BY_LOSS):
            self._over.wait(self._timeout_s + 2 * POLL_S)  # within which it is known who is lost, and this host ends
        traceback.print_exception(error)
        self._put(f"gone/{self.rank}", _short(error))
        if self.first:
            time.sleep(2 * POLL_S)  # the store is gone with it; within this the others have heard
        sys.stderr.flush()
        os._exit(130 if isinstance(error, KeyboardInterrupt) else LOST)

    def _sign(self) -> None:
        """Signs, and looks for the signs of the others, until the end."""
        number, seen = 0, dict.fromkeys(range(self.count), ("", time.monotonic()))
        while not self._over.is_set():
            try:
                self._put(f"alive/{self.rank}", str(number), again=True)
                alive, ending, gone = (self._all(what) for what in ("alive", "ending", "gone"))
            except jax.errors.JaxRuntimeError:  # the coordinator is away: XLA ends the process (`joining.py` says why)
                self._over.wait(POLL_S)
                continue
            number, now = number + 1, time.monotonic()
            for rank, text in gone.items():
                if rank != self.rank:
                    self.leave(LOST, f"host {rank} has ended by an error of its own: {text}")
            for rank, sign in alive.items():
                if seen[rank][0] != sign:
                    seen[rank] = sign, now
            for rank, (_, since) in seen.items():
                if rank != self.rank and now - since > self._timeout_s:
                    self.leave(
                        LOST, f"host {rank} is lost: no sign of it within trainer.host_timeout_s={self._timeout_s:g}"
                    )
            for rank, text in ending.items():
                if rank != self.rank and self._heard is None:
                    error = json.loads(text)
                    self._heard = Stopped(error["status"], f"host {rank}: {error['said']}", heard=True)
            self._over.wait(POLL_S)

    def _put(self, key: str, text: str, *, again: bool = False) -> None:
        self._store.key_value_set(f"jppo/{key}", text, allow_overwrite=again)

    def _get(self, key: str) -> str:
        """What a host has said, once it has; between two looks a signal is heard."""
        while True:
            try:
                return str(self._store.blocking_key_value_get(f"jppo/{key}", int(POLL_S * 1000)))
            except jax.errors.JaxRuntimeError as e:
                if "DEADLINE_EXCEEDED" not in str(e):
                    raise

    def _all(self, what: str) -> dict[int, str]:
        """What each host that said it says of this, by rank."""
        found = self._store.key_value_dir_get(f"jppo/{what}/")
        return {int(key.rsplit("/", 1)[1]): text for key, text in found}


def _described(error: BaseException) -> dict[str, Any]:
    """An error as the other hosts hear of it."""
    said = {"kind": type(error).__name__, "said": _short(error), "status": LOST, "heard": False}
    if isinstance(error, Stopped):
        said |= {"said": error.why, "status": error.status, "heard": error.heard}
    return said


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:1000] or type(error).__name__


def _exchange(data: bytes, sizes: Sequence[int]) -> list[bytes]:
    """The bytes of every host, by collectives of one shape."""
    own = np.frombuffer(data, np.uint8)
    pieces = []
    for begin in range(0, max(sizes), CHUNK):
        piece = np.zeros(CHUNK, np.uint8)
        there = own[begin : begin + CHUNK]
        piece[: len(there)] = there
        pieces.append(multihost_utils.process_allgather(piece))
    whole = np.concatenate(pieces, axis=1)
    return [whole[rank, :size].tobytes() for rank, size in enumerate(sizes)]


ALONE = Hosts()
