"""Processes below this one: other Python interpreters, with the PYTHONPATH by which they find jppo; and their ends.

A process inherits orphans of any session, and kills all that are left: on Linux; elsewhere orphans are not inherited.
Standard library only: forks and workers without jax import it.
"""

import contextlib
import ctypes
import os
import pathlib
import select
import shutil
import signal
import struct
import sys
import time
from collections.abc import Callable
from typing import NoReturn

import jppo
from jppo.errors import UserError


def executable(python: str, setting: str = "rollout.python") -> str:
    """Returns the path of an interpreter, '' for this one; UserError if `setting` names none."""
    path = shutil.which(os.path.expanduser(python)) if python else sys.executable
    if path is None:
        raise UserError(f"{setting}={python!r} is not a program; set it to the path of a Python")
    return path


def python_path() -> str:
    """Returns a PYTHONPATH with which another interpreter finds jppo."""
    package = str(pathlib.Path(jppo.__file__).resolve().parents[1])
    return os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))


def unwind_on_signals() -> None:
    """Makes SIGTERM and SIGHUP raise SystemExit, so that `with` blocks end the processes that they have started."""

    def raise_exit(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, raise_exit)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # ignored under nohup
        signal.signal(signal.SIGHUP, raise_exit)


LENGTH = struct.Struct(">Q")  # the head of a message between two processes
KILL_S = 5.0  # for killed processes to end
_TICK_S = 0.05  # how often a process without an answer is looked at
GUARDED = {signal.SIGCHLD, signal.SIGTERM}  # blocked while a guard waits for its child
_PARENT_S = 0.5  # how soon a guard detects its parent's end
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 1, 4, 36


def send(fd: int, body: bytes) -> None:
    """Writes a message to a pipe, behind its length."""
    unsent = memoryview(LENGTH.pack(len(body)) + body)
    while unsent:
        unsent = unsent[os.write(fd, unsent) :]


def receive(fd: int, timeout_s: float, is_alive: Callable[[], bool]) -> bytes:
    """Reads a message from a pipe; TimeoutError without one, EOFError if the writer ends, by `is_alive` or the pipe."""
    deadline = time.monotonic() + timeout_s
    poll = select.poll()
    poll.register(fd, select.POLLIN)

    def read(count: int) -> bytes:
        received = bytearray()
        while len(received) < count:
            if (left_s := deadline - time.monotonic()) <= 0:
                raise TimeoutError
            if poll.poll(1000 * min(left_s, _TICK_S)):
                piece = os.read(fd, min(count - len(received), 2**20))
                if not piece:
                    raise EOFError
                received += piece
            elif not is_alive() and not poll.poll(0):
                raise EOFError
        return bytes(received)

    return read(*LENGTH.unpack(read(LENGTH.size)))


def inherit_orphans() -> None:
    """Makes this process the parent of descendants whose parent has ended; children do not inherit the attribute."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent(parent: int, number: int) -> None:
    """Makes the kernel send the signal `number` when the process `parent` ends; exits if it has already."""
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


def hide() -> None:
    """Hides pipes, memory and environment of this process in /proc from other processes of the user."""
    _prctl(_PR_SET_DUMPABLE, 0)


def guard(child: int, parent: int | None = None) -> int:
    """Waits for a child and returns its exit code, after SIGTERM or the end of `parent` that of a killed one.

    The signals of `GUARDED` must be blocked. Other children, as inherited orphans, are reaped.
    """
    while parent in (None, os.getppid()):
        arrived = signal.sigtimedwait(GUARDED, _PARENT_S)
        if arrived is not None and arrived.si_signo == signal.SIGTERM:
            break
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                return os.waitstatus_to_exitcode(ended[1])
    return -signal.SIGKILL


def kill_all() -> None:
    """Kills children until none is left; as their reaper, this process inherits and kills their children."""
    end = time.monotonic() + KILL_S
    while time.monotonic() < end:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        for child in _children():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
        time.sleep(0.005)


def exit_like(code: int) -> NoReturn:
    """Ends this process with an exit code, or by the signal -`code`."""
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL cannot be reset
            signal.signal(-code, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    os._exit(code & 255)


def _children() -> list[int]:
    """Returns the process ids of this process's children."""
    children, own_pid = [], os.getpid()
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            fields = stat.read_text().rpartition(")")[2].split()  # state, ppid, ...
            if int(fields[1]) == own_pid:
                children.append(int(stat.parent.name))
    return children


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
