"""A worker process for scoring code that may hang, crash, print, fork or exhaust memory; `pool.py` starts it.

    python -m jppo.rewards.pool_worker PARENT_PID MEMORY_BYTES

It consists of two processes. The worker runs jobs: requests are pickled over stdin, replies are JSON over stdout, each
with a length prefix; output of jobs goes to stderr. The guard waits. When the worker or the trainer ends, or on
SIGTERM, the guard kills all of its descendants, including those outside the worker's group, and exits like the worker.
Standard library only: neither jax nor the trainer.
"""

import contextlib
import json
import os
import pathlib
import pickle
import resource
import select
import signal
import struct
import sys
from typing import Any, BinaryIO

from jppo import descendants
from jppo.rewards import pool_tasks

LENGTH = struct.Struct(">Q")
_POLL_S = 0.5  # how soon the guard detects the trainer's end


def main(parent: int, memory_bytes: int) -> None:
    """Guards a worker until it ends, or has to end; never returns."""
    requests, replies = os.dup(0), os.dup(1)  # not inherited by children across exec
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)
    descendants.inherit_orphans()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # out of memory, the kernel kills a worker before the trainer
        pathlib.Path("/proc/self/oom_score_adj").write_text("500")
    descendants.hide()
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    guard = os.getpid()
    worker = os.fork()
    if worker == 0:
        descendants.end_with_parent(guard, signal.SIGKILL)
        os.close(woken)
        os.close(wake)
        os.setsid()
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
        _work(requests, replies)
    os.close(requests)
    os.close(replies)
    status = _watch(worker, parent, woken, wake)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(worker, signal.SIGKILL)
    descendants.kill_all()
    descendants.end_like(0 if status is None else os.waitstatus_to_exitcode(status))


def _watch(worker: int, parent: int, woken: int, wake: int) -> int | None:
    """Returns the worker's exit status; None if it has to be killed."""
    stop = []
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
    while not stop and os.getppid() == parent:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)  # including orphans of the worker
                if pid == worker:
                    return status
                if pid == 0:
                    break
        if select.select([woken], [], [], _POLL_S)[0]:
            os.read(woken, 4096)
    return None


def _work(requests: int, replies: int) -> None:
    me = os.getpid()
    ready: dict[tuple[str, ...], pool_tasks.Prepared] = {}
    with os.fdopen(requests, "rb") as stream:
        while (request := _receive(stream)) is not None:
            reply = _reply(request, ready)
            if os.getpid() != me:  # a fork made by the job returned here: only the first may answer
                os._exit(0)
            _send(replies, reply)
            if reply.get("retire"):
                break
    os._exit(0)


def _reply(request: dict[str, Any], ready: dict[tuple[str, ...], pool_tasks.Prepared]) -> dict[str, Any]:
    try:
        target = tuple(request["target"])
        if request["samples"] is None:
            ready[target] = pool_tasks.prepare(target)
            return {"batch": ready[target].batch}
        return {"answers": ready[target].call(request["samples"])}
    except MemoryError:
        return {"memory": True, "retire": True}  # the memory may still be held
    except ValueError as e:
        return {"error": str(e) if request["samples"] is None else pool_tasks.explain(e)}
    except BaseException as e:  # exit() and any other exception of a job is an error of its sample
        return {"error": pool_tasks.explain(e)}


def _receive(stream: BinaryIO) -> dict[str, Any] | None:
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:  # the trainer is gone
        return None
    message: dict[str, Any] = pickle.loads(stream.read(*LENGTH.unpack(head)))
    return message


def _send(replies: int, reply: dict[str, Any]) -> None:
    body = json.dumps(reply).encode()
    left = memoryview(LENGTH.pack(len(body)) + body)
    while left:
        left = left[os.write(replies, left) :]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
