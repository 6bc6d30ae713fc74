"""Runs agents, each in a fork: `python -m jppo.plugins.agents.gateway.forks FD function SPEC` or `FD command WORD...`.

The gateway sends an id, variables and three files over the socket FD, and gets the id and then an exit code; the id
alone ends the episode. A program calls PATH.py:FUNCTION with the task as a dict and prints what it returns as JSON, or
it becomes the command. Its guard, a fork between it and this process, inherits the orphans of all sessions below it.
The guard kills them when the program ends, when it has to, or when this process ends. This process ends when the socket
closes, also because the trainer was killed.
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
import sysconfig
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from jppo import child_process
from jppo.errors import UserError
from jppo.registry import resolve

# Folders of libraries and files, whose frames a traceback leaves out.
_FOREIGN = (__file__, *{sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")})
CRASHED, NOT_FOUND = 70, 127  # exit codes: an uncaught exception, of a function or here; a command that cannot start


def main(channel: socket.socket, work: Callable[[], int]) -> None:
    """Forks a program for each episode, until the socket is closed."""
    child_process.inherit_orphans()
    wake_read, wake_write = os.pipe()
    for end in (wake_read, wake_write):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write)
    try:
        with contextlib.suppress(ConnectionError):  # the trainer has ended with messages unread: as at a closed socket
            _fork_for_each(channel, wake_read, work)
    finally:
        child_process.kill_all()


def _fork_for_each(channel: socket.socket, wake_read: int, work: Callable[[], int]) -> None:
    """Forks a guard for each episode that the gateway sends, {"id", "env"} with its files; {"id"} alone ends one.

    A guard runs `work` and ends what is left of it; after its end `wake_read` can be read, and {"id", "code"} is sent.
    """
    running: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([channel.fileno(), wake_read], [], [])
        if wake_read in ready:
            os.read(wake_read, 2**12)
            statuses = [os.waitpid(pid, os.WNOHANG) for pid in running]
            for pid, status in [ended for ended in statuses if ended[0]]:
                report = {"id": running.pop(pid), "code": os.waitstatus_to_exitcode(status)}  # of the guard's program
                channel.send(json.dumps(report).encode())
        if channel.fileno() in ready:
            data, files, _, _ = socket.recv_fds(channel, 2**16, 3)
            if not data:
                return
            message = json.loads(data)
            if "env" not in message:
                for pid in [pid for pid, number in running.items() if number == message["id"]]:
                    os.kill(pid, signal.SIGTERM)
                continue
            if (pid := os.fork()) == 0:
                _guard(work, message["env"], files, channel)
            running[pid] = message["id"]
            for file in files:
                os.close(file)
            channel.send(json.dumps({"id": message["id"]}).encode())


def _guard(work: Callable[[], int], env: dict[str, str], files: list[int], channel: socket.socket) -> NoReturn:
    """Forks the program of an episode; after its end, or at SIGTERM, kills its descendants and ends as it did."""
    code, guard, server = CRASHED, os.getpid(), os.getppid()
    try:
        signal.set_wakeup_fd(-1)
        channel.close()
        signal.pthread_sigmask(signal.SIG_BLOCK, child_process.GUARDED)
        child_process.inherit_orphans()
        child_process.end_with_parent(server, signal.SIGTERM)
        for i, file in enumerate(files):
            os.dup2(file, i)
            os.close(file)
        if (program := os.fork()) == 0:
            child_process.end_with_parent(guard, signal.SIGKILL)
            _run_program(work, env)
        code = child_process.guard(program)
        child_process.kill_all()
    except BaseException:
        traceback.print_exc()
    finally:
        child_process.exit_like(code)


def _run_program(work: Callable[[], int], env: dict[str, str]) -> NoReturn:
    """Does the work in a fork, which ends with the work's exit code."""
    code = CRASHED
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, child_process.GUARDED)
        os.setpgid(0, 0)
        os.environ.update(env)
        code = work()
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else int(e.code is not None)
        if code and not isinstance(e.code, int):
            print(e.code, file=sys.stderr)
    except BaseException as e:
        _print_traceback(e)
    finally:
        try:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):  # the function may have closed it
                    stream.flush()
        finally:  # else the fork would return to its guard's work
            os._exit(code & 255)


def _print_traceback(error: BaseException) -> None:
    """Prints an error of the agent with the lines that are its own, where it has some."""
    printed = traceback.TracebackException.from_exception(error)
    shown: traceback.TracebackException | None = printed
    while shown is not None:
        own = [frame for frame in shown.stack if not frame.filename.startswith(_FOREIGN)]
        shown.stack[:] = own or shown.stack
        shown = shown.__cause__ or shown.__context__
    print(*printed.format(), sep="", end="", file=sys.stderr)


def call_with_task(function: Callable[..., Any]) -> int:
    """Calls the function with the task from standard input, and prints its result as JSON."""
    returned = function(json.loads(sys.stdin.readline()))
    returned = asyncio.run(returned) if inspect.iscoroutine(returned) else returned
    if returned is not None:
        # On a separate line; numbers of numpy and torch as Python's.
        text = json.dumps(returned, default=lambda value: value.item() if hasattr(value, "item") else str(value))
        print(f"\n{text}")
    return 0


def _execute(command: list[str]) -> int:
    """Replaces the fork by the command."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as e:
        print(f"{command[0]} cannot be started: {e}", file=sys.stderr)
        return NOT_FOUND


if __name__ == "__main__":
    sys.path.append(os.getcwd())  # last: started with -P, a file json.py in it is not Python's own
    code = CRASHED
    try:
        fd, kind, *words = sys.argv[1:]
        channel = socket.socket(fileno=int(fd))
        work = functools.partial(_execute, words)
        if kind == "function":
            work = functools.partial(call_with_task, resolve(words[0], "rollout.agent"))
        channel.send(json.dumps({"ready": True}).encode())
        main(channel, work)
        code = 0
    except UserError as e:
        print(e, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)  # threads that the agent's file has started would hold the process
