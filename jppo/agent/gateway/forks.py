"""Runs agents, each in a fork: `python -m jppo.agent.gateway.forks FD function SPEC` or `FD command WORD...`.

The gateway sends an id, variables and three files over the socket FD, and gets the process and then its exit code. A
fork calls PATH.py:FUNCTION with the task as a dict and prints what it returns as JSON, or it becomes the command. When
the socket closes, also because the trainer was killed, all forks are killed with their process groups.
"""

import asyncio
import contextlib
import functools
import inspect
import json
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from jppo.registry import resolve

CRASHED, NOT_FOUND = 70, 127  # exit codes: an uncaught exception of a function; a command that cannot be started


def main(channel: socket.socket, work: Callable[[], int]) -> None:
    """Forks until the socket is closed."""
    wakes, wake = os.pipe()
    for end in (wakes, wake):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    running: dict[int, int] = {}
    try:
        while True:
            ready, _, _ = select.select([channel.fileno(), wakes], [], [])
            if wakes in ready:
                os.read(wakes, 2**12)
                for pid, code in _ended(running):
                    channel.send(json.dumps({"id": running.pop(pid), "code": code}).encode())
            if channel.fileno() in ready:
                data, files, _, _ = socket.recv_fds(channel, 2**16, 3)
                if not data:
                    break
                said = json.loads(data)
                if (pid := os.fork()) == 0:
                    _become(work, said["env"], files, channel)
                running[pid] = said["id"]
                with contextlib.suppress(OSError):  # the fork does so, too
                    os.setpgid(pid, pid)
                for file in files:
                    os.close(file)
                channel.send(json.dumps({"id": said["id"], "pid": pid}).encode())
    finally:
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


def _ended(running: dict[int, int]) -> list[tuple[int, int]]:
    """Returns the forks that have ended, with their exit codes."""
    found = [os.waitpid(pid, os.WNOHANG) for pid in running]
    return [(pid, os.waitstatus_to_exitcode(status)) for pid, status in found if pid]


def _become(work: Callable[[], int], env: dict[str, str], files: list[int], channel: socket.socket) -> NoReturn:
    """Does the work in a fork, which ends with it."""
    code = CRASHED
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        channel.close()
        os.setpgid(0, 0)
        for i, file in enumerate(files):
            os.dup2(file, i)
            os.close(file)
        os.environ.update(env)
        code = work()
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else int(e.code is not None)
        if code and not isinstance(e.code, int):
            print(e.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):  # the function may have closed it
                    stream.flush()
        finally:  # else the fork would return to `main`, which kills the other forks
            os._exit(code & 255)


def call(function: Callable[..., Any]) -> int:
    """Runs the function with the task."""
    found = function(json.loads(sys.stdin.readline()))
    found = asyncio.run(found) if inspect.iscoroutine(found) else found
    if found is not None:
        print(f"\n{json.dumps(found, default=_plain)}")  # on a line of its own
    return 0


def _plain(value: Any) -> Any:
    """Returns a number of numpy or torch as Python's, and any other object as text."""
    return value.item() if hasattr(value, "item") else str(value)


def execute(command: list[str]) -> int:
    """Replaces the fork by the command."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as e:
        print(f"{command[0]} cannot be started: {e}", file=sys.stderr)
        return NOT_FOUND


if __name__ == "__main__":
    kind, *what = sys.argv[2:]
    work = functools.partial(execute, what)
    if kind == "function":
        work = functools.partial(call, resolve(what[0], "rollout.agent"))
    given = socket.socket(fileno=int(sys.argv[1]))
    given.send(json.dumps({"ready": True}).encode())
    main(given, work)
