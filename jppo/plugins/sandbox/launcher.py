"""The trusted side of the sandbox: starts a program, watches it, and removes it. `child.py` is the other side.

The program is one process with threads. It gets its own text, its input, and the tests' requests. The only file
descriptors that it shares with its parent are pipes that are read here.

Control groups limit memory and threads, where they can be made: version 2 needs a delegated group with the controllers
memory and pids, version 1 writable hierarchies of the two.
"""

import contextlib
import dataclasses
import functools
import itertools
import marshal
import os
import pathlib
import selectors
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jppo.plugins.sandbox import confine
from jppo.plugins.sandbox.child import CLOSED

_FILE_BYTES = 2**24  # of each file that a program writes
_OUTPUT_BYTES = 2**24  # of its output, and of its replies
THREADS = 64  # where the user is not root
_OPEN_FILES = 128
NOBODY = 65534
_PYTHON_BYTES = 2**26  # memory of the process that waits for a program in namespaces
TOO_LONG = "took too long"
_PREFIX, _OLD_S = "jppo-code-", 3600.0  # folders of programs, and the minimum age of a leftover
_TICK_S = 0.05  # how often a folder without a quota is measured
_ROOT = str(pathlib.Path(__file__).resolve().parents[3])
_MAIN = "from jppo.plugins.sandbox.child import main; main(int(sys.argv[1]))"
# Packages without their __init__, which would import typing.
_BARE = f"p = sys.modules[n] = type(sys)(n); p.__path__ = [{_ROOT!r} + '/' + n.replace('.', '/')]"
_BOOT = f"import sys\nfor n in 'jppo', 'jppo.plugins': {_BARE}\n{_MAIN}"
_GROUP_MEMORY, _GROUP_PIDS = ("memory.max", "memory.limit_in_bytes"), ("pids.max",)  # of either version
_GROUP_NUMBERS = itertools.count()
_REMOVE_S = 1.0  # longest wait for a group whose processes end
_DEVICES = ["/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"]

_Excess = Callable[[int], str]  # why a process has too much in its folder, or ''


@dataclasses.dataclass(frozen=True)
class Guards:
    """The protections that the kernel supports here; `choice.py` finds out."""

    landlock: int = 0  # its ABI; 0: none
    seccomp: bool = False
    spaces: str = confine.NONE
    uid: int | None = None  # the user that programs become; None: the trainer's
    groups: tuple[str, ...] = ()  # folders for control groups
    counted: bool = False  # without namespaces: the kernel counts what programs write


@dataclasses.dataclass(frozen=True)
class Ran:
    """The end of a program: `status` is None if it was killed, for the reason `why`."""

    status: int | None
    printed: str
    errors: str
    replies: tuple[str, ...]
    why: str = ""
    retries: int = 0  # of a request to a sandbox service
    input_bytes: int = 0  # read from standard input


class NoSandbox(Exception):
    """The sandbox could not be made; no program was run."""


def run_program(
    text: str,
    *,
    guards: Guards,
    time_s: float,
    memory_bytes: int,
    stdin: str = "",
    tests: str | None = None,
) -> Ran:
    """Runs a program; with `tests` the reply is their verdict, one of `program.py`.

    Raises NoSandbox if the kernel refuses one of the `guards`.
    """
    job = {
        "program": text.encode("utf-8", "replace").decode("utf-8"),
        "path": [p for p in sys.path if any(_is_within(p, place) for place in readable_paths())],
    }
    return _run_confined(job, guards, time_s, memory_bytes, stdin, tests)


def run_command(
    command: list[str],
    *,
    files: dict[str, bytes],
    links: dict[str, str],
    environment: dict[str, str],
    read: list[str],
    guards: Guards,
    time_s: float,
    memory_bytes: int,
    stdin: str = "",
) -> Ran:
    """Runs a program that may start others, such as bash. The replies are the lines written to the REPLIES_FD.

    `files` and `links` fill its folder; `read` may be read and executed. Parts of the command and of the environment
    that start with a FOLDER are below the program's folder. Raises NoSandbox.
    """
    job = {"command": command, "files": files, "links": links, "environment": environment, "read": read}
    return _run_confined(job, guards, time_s, memory_bytes, stdin, None)


def _run_confined(
    job: dict[str, Any], guards: Guards, time_s: float, memory_bytes: int, stdin: str, tests: str | None
) -> Ran:
    """Runs a job in a new folder and new control groups, which are removed afterwards."""
    _remove_leftovers(tempfile.gettempdir())
    folder = os.path.realpath(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
    groups: list[str] = []
    try:
        if guards.groups:
            group_memory = memory_bytes + confine.FOLDER_BYTES + _PYTHON_BYTES
            groups = _make_groups(guards.groups, memory=group_memory, processes=THREADS + 2 + (tests is not None))
        if guards.uid is not None and guards.spaces == confine.NONE:
            os.chown(folder, guards.uid, guards.uid)
        limits = _make_limits(folder, guards, time_s, memory_bytes, job.get("read", []))
        if any(os.path.exists(f"{group}/{name}") for group in groups for name in _GROUP_PIDS):
            # It counts all of the user's, so one program would take another's share.
            del limits["rlimits"]["RLIMIT_NPROC"]
        job = job | {"limits": limits | {"groups": groups, "programs": "command" in job}}
        excess = functools.partial(confine.excess, folder, user=guards.uid, counted=guards.counted)
        ran = _run_child(job, stdin, tests, folder, time_s, excess if guards.spaces == confine.NONE else None)
    finally:
        _remove(folder)
        _remove_groups(groups)
    if ran.replies[:1] != (CLOSED,) and not ran.why:  # a program could fake an exit code
        raise NoSandbox(ran.errors.strip() or "the sandbox's process ended before it was closed")
    return dataclasses.replace(ran, replies=ran.replies[1:])


def readable_paths() -> list[str]:
    """Returns paths that programs may read besides their folder: Python, its packages, and system libraries."""
    prefixes = {sys.prefix, sys.base_prefix, sys.base_exec_prefix}
    paths = {f"{prefix}/{lib}" for prefix in prefixes for lib in ("lib", "lib64")}
    paths |= {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    paths |= {"/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo"}
    paths |= {"/etc/ld.so.cache", "/etc/localtime"}
    paths |= {os.path.realpath(path) for path in paths}
    return sorted(path for path in paths if os.path.lexists(path) and path.count(os.sep) > 0 and path != os.sep)


def _make_limits(folder: str, guards: Guards, time_s: float, memory_bytes: int, read: list[str]) -> dict[str, Any]:
    """Returns `limits` of a job, which `child.py` applies; `_run_confined` adds its control groups."""
    user = os.getuid() if guards.uid is None else guards.uid
    return {
        "folder": folder,
        "folder_bytes": confine.FOLDER_BYTES,
        "read": [*readable_paths(), *read],
        "devices": _DEVICES,
        "spaces": guards.spaces,
        "landlock": bool(guards.landlock),
        "seccomp": guards.seccomp,
        "counted": guards.counted,
        "uid": guards.uid,
        "rlimits": {
            "RLIMIT_AS": memory_bytes,
            "RLIMIT_CPU": int(time_s) + 2,  # of all its threads; `_run_child` ends it after `time_s` by the clock
            "RLIMIT_FSIZE": _FILE_BYTES,
            "RLIMIT_NPROC": _count_threads(user) + THREADS,  # the kernel counts all threads of the user
            "RLIMIT_NOFILE": _OPEN_FILES,
            "RLIMIT_MSGQUEUE": 0,
            "RLIMIT_CORE": 0,
        },
    }


def _run_child(
    job: dict[str, Any], stdin: str, tests: str | None, folder: str, time_s: float, excess: _Excess | None
) -> Ran:
    """Starts the child process with a job, and returns how the program ended."""
    environment = {"PATH": os.defpath, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    with contextlib.ExitStack() as stack:
        replies_fd, replies_out = os.pipe()
        stack.callback(os.close, replies_fd)
        stdin_fd = _memory_file(stack, stdin.encode("utf-8", "replace"))
        tests_fd = None if tests is None else _memory_file(stack, tests.encode("utf-8", "replace"))
        job_fd = _memory_file(stack, marshal.dumps(job | {"replies": replies_out, "tests": tests_fd}))
        try:
            child = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", "-X", "utf8", "-c", _BOOT, str(job_fd)],
                stdin=stdin_fd,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=folder,
                env=environment,
                start_new_session=True,
                pass_fds=(job_fd, replies_out, *([] if tests_fd is None else [tests_fd])),
                bufsize=0,
            )
        finally:
            os.close(replies_out)
        assert child.stdout is not None and child.stderr is not None
        stack.callback(child.stdout.close)
        stack.callback(child.stderr.close)
        pipes = [child.stdout.fileno(), child.stderr.fileno(), replies_fd]
        try:
            contents, why = _read_output(child, pipes, time.monotonic() + time_s, excess)
        finally:
            if child.poll() is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        printed, errors, reply_text = (data.decode("utf-8", "replace") for data in contents)
        status = None if why else child.returncode
        input_bytes = os.lseek(stdin_fd, 0, os.SEEK_CUR)
        return Ran(status, printed, errors, tuple(reply_text.split("\n")[:-1]), why, input_bytes=input_bytes)


def _read_output(
    child: subprocess.Popen[bytes], pipes: Sequence[int], deadline: float, excess: _Excess | None
) -> tuple[list[bytes], str]:
    """Reads a process's pipes until it ends or must be killed; returns their contents, and why it must, or ''."""

    def wait_s() -> float:
        seconds_left = max(0.0, deadline - time.monotonic())
        return seconds_left if excess is None else min(seconds_left, _TICK_S)

    def folder_reason() -> str:
        return excess(child.pid) if excess is not None else ""

    def kill_reason() -> str:
        return TOO_LONG if time.monotonic() >= deadline else folder_reason()

    contents = {fd: bytearray() for fd in pipes}
    reason = ""
    with selectors.DefaultSelector() as selector:
        for fd in pipes:
            selector.register(fd, selectors.EVENT_READ)
        while selector.get_map() and not reason:
            for key, _ in selector.select(wait_s()):
                chunk = os.read(key.fd, 2**16)
                contents[key.fd] += chunk
                if not chunk:
                    selector.unregister(key.fd)
                if len(contents[key.fd]) > _OUTPUT_BYTES:
                    reason = f"printed more than {_OUTPUT_BYTES} bytes"
            reason = reason or kill_reason()
    while not reason and child.poll() is None:  # it has closed its pipes
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(wait_s())
        reason = kill_reason() if child.poll() is None else ""
    return [bytes(contents[fd]) for fd in pipes], reason or folder_reason()


def _memory_file(stack: contextlib.ExitStack, data: bytes) -> int:
    """Makes a file descriptor to read the data from."""
    fd = os.memfd_create("jppo")
    stack.callback(os.close, fd)
    with os.fdopen(os.dup(fd), "wb") as f:
        f.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


@functools.cache
def _remove_leftovers(place: str) -> None:
    """Removes folders of killed workers: old ones of this user or NOBODY, whose process is gone."""
    for path in pathlib.Path(place).glob(f"{_PREFIX}*-*"):
        with contextlib.suppress(OSError):
            status = path.lstat()
            process_gone = not os.path.exists(f"/proc/{path.name.removeprefix(_PREFIX).partition('-')[0]}")
            if process_gone and status.st_uid in (os.geteuid(), NOBODY) and time.time() - status.st_mtime > _OLD_S:
                _remove(str(path))


def _remove(folder: str) -> None:
    """Removes a folder, whatever a program has made in it."""
    with contextlib.suppress(OSError, RecursionError):
        shutil.rmtree(folder)
    if os.path.lexists(folder):  # folders without rights, or thousands of nested ones
        for command in (["chmod", "-R", "u+rwx", folder], ["rm", "-rf", "--", folder]):
            subprocess.run(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)


def _is_within(path: str, place: str) -> bool:
    return path == place or path.startswith(place + os.sep)


def _count_threads(user: int) -> int:
    """Counts a user's threads as the kernel does for RLIMIT_NPROC; 0 without /proc."""
    total = 0
    for process in pathlib.Path("/proc").glob("[0-9]*/task"):
        with contextlib.suppress(OSError):
            if process.stat().st_uid == user:
                total += len(os.listdir(process))
    return total


def group_bases() -> tuple[str, ...]:
    """Returns the folders in which groups with a limit on memory or processes can be made, often none."""
    return tuple(base for base in _own_groups() if _can_limit(base))


def _make_groups(bases: Iterable[str], *, memory: int, processes: int) -> list[str]:
    """Makes new groups, one in each base, with these limits. Raises OSError."""
    groups = []
    for base in bases:
        group = f"{base}/jppo-{os.getpid()}-{next(_GROUP_NUMBERS)}"
        os.mkdir(group)
        groups.append(group)
        for names, value in ((_GROUP_MEMORY, memory), (_GROUP_PIDS, processes)):
            for name in names:
                if os.path.exists(f"{group}/{name}"):
                    _write_number(f"{group}/{name}", value)
    return groups


def _remove_groups(groups: Iterable[str]) -> None:
    """Kills remaining processes in groups and removes the groups; `group_bases` of a later run removes busy ones."""
    end = time.monotonic() + _REMOVE_S
    for group in groups:
        with contextlib.suppress(OSError):
            _write_number(f"{group}/cgroup.kill", 1)
        while os.path.isdir(group):
            try:
                os.rmdir(group)
            except OSError:
                if time.monotonic() > end:
                    break
                time.sleep(0.002)


def _write_number(path: str, value: int) -> None:
    with open(path, "w", encoding="ascii") as f:
        f.write(str(value))


def _own_groups() -> list[str]:
    """Returns this process's groups: version 2's, and version 1's of memory and pids."""
    try:
        with open("/proc/self/cgroup", encoding="utf-8") as f:
            entries = [line.rstrip("\n").split(":", 2) for line in f]
        with open("/proc/self/mounts", encoding="utf-8") as f:
            mounts = [line.split() for line in f]
    except OSError:
        return []
    groups = []
    for _, controllers, path in entries:
        limited_controllers = set(controllers.split(",")) & {"memory", "pids"}
        for _, mount, kind, options, *_ in mounts:
            is_version_1 = kind == "cgroup" and limited_controllers & set(options.split(","))
            if is_version_1 or (kind == "cgroup2" and not controllers):
                groups.append(f"{mount}{path}".rstrip("/"))
    return list(dict.fromkeys(groups))


def _can_limit(base: str) -> bool:
    """Whether groups with limits can be made in a folder; removes groups of killed workers."""
    try:
        for name in os.listdir(base):  # of workers that were killed
            _, _, pid = name.partition("jppo-")
            if pid and not os.path.exists(f"/proc/{pid.partition('-')[0]}"):
                with contextlib.suppress(OSError):
                    os.rmdir(f"{base}/{name}")
        (group,) = _make_groups([base], memory=2**28, processes=64)
    except OSError:
        return False
    try:
        return any(os.path.exists(f"{group}/{name}") for name in (*_GROUP_MEMORY, *_GROUP_PIDS))
    finally:
        _remove_groups([group])
