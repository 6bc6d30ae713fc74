"""Runs a user's function as agents, each in a fork: `python -m jppo.agent.gateway.function PATH.py:FUNCTION FD`.

The gateway sends an id, variables and three files over the socket FD, and gets the process and then its exit code. The
function gets the task as a dict; what it returns, if anything, is printed as JSON. All forks end with the socket.
"""

import asyncio
import contextlib
import inspect
import json
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any

from jppo.registry import resolve


def main() -> None:
    """Forks until the socket is closed."""
    function = resolve(sys.argv[1], "rollout.agent")
    channel = socket.socket(fileno=int(sys.argv[2]))
    wakes, wake = os.pipe()
    for end in (wakes, wake):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    running: dict[int, int] = {}
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
                signal.set_wakeup_fd(-1)
                channel.close()
                _call(function, said["env"], files)
            with contextlib.suppress(OSError):  # the fork does so, too
                os.setpgid(pid, pid)
            for file in files:
                os.close(file)
            running[pid] = said["id"]
            channel.send(json.dumps({"id": said["id"], "pid": pid}).encode())
    for pid in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _ended(running: dict[int, int]) -> list[tuple[int, int]]:
    """Returns the forks that have ended, with their exit codes."""
    found = [os.waitpid(pid, os.WNOHANG) for pid in running]
    return [(pid, os.waitstatus_to_exitcode(status)) for pid, status in found if pid]


def _call(function: Callable[..., Any], env: dict[str, str], files: list[int]) -> None:
    """Runs the function in a fork, which ends with it."""
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setpgid(0, 0)
        for i, file in enumerate(files):
            os.dup2(file, i)
        os.environ.update(env)
        found = function(json.loads(sys.stdin.readline()))
        found = asyncio.run(found) if inspect.iscoroutine(found) else found
        if found is not None:
            print(json.dumps(found))
        code = 0
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else int(e.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
