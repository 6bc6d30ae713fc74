"""The rule that runs the program in a response against the row's tests, in child processes with limits.

This is no sandbox against an adversary. It stops what programs do by mistake: endless loops, memory, files,
processes and connections. The limits are the kernel's (CPU time, address space, file size, processes, and an own
network where `unshare` is permitted); what a program opens, starts or connects to is watched by an audit hook
inside its own interpreter, which native code can get around. It may read whatever the trainer's user may read.
Run models that you do not trust in a container. Runs in a worker process; standard library only.
"""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import IO

from jppo.rewards.rules import Verdict

FILE_BYTES = 2**24  # of each file that a program writes, its output too
NEW_PROCESSES = 64  # threads, that is; where the user is not root
_BLOCK = re.compile(r"```(?:python|py)[0-9.]*[ \t]*\r?\n(.*?)```", re.DOTALL | re.IGNORECASE)

# The first thing that the child runs: it binds itself, then runs the program, then the asserts.
_CHILD = r"""
import os, resource, sys
where, memory, cpu_s, file_bytes, processes, mode = sys.argv[1], *map(int, sys.argv[2:6]), sys.argv[6]
def limit(which, value):
    hard = resource.getrlimit(which)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (value, value))
limit(resource.RLIMIT_AS, memory)
limit(resource.RLIMIT_CPU, cpu_s)
limit(resource.RLIMIT_FSIZE, file_bytes)
limit(resource.RLIMIT_NPROC, processes)
limit(resource.RLIMIT_CORE, 0)
with open("program.py", encoding="utf-8") as f:
    program = compile(f.read(), "program.py", "exec")
tests = None
if mode == "asserts":
    token, _, tests = sys.stdin.read().partition("\n")
sys.argv = ["program.py"]
refused = ("socket.", "subprocess.", "os.fork", "os.exec", "os.posix_spawn", "os.spawn", "os.system", "os.kill",
           "pty.", "signal.pthread_kill", "resource.setrlimit", "resource.prlimit", "os.chroot")
changes = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod",
           "os.chown", "os.utime", "os.setxattr", "os.removexattr", "shutil.")
def watch(event, args, real=os.path.realpath, inside=where + os.sep, null=os.devnull, fs=os.fsdecode,
          bits=os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND):
    if event.startswith(refused):
        raise PermissionError(f"{event} is not allowed here")
    if event == "open":
        paths = args[:1] if args[2] & bits else ()
    elif event.startswith(changes):
        paths = args[:2]
    else:
        return
    for path in paths:
        if isinstance(path, (str, bytes, os.PathLike)) and fs(path) != null:
            if not (real(fs(path)) + os.sep).startswith(inside):
                raise PermissionError(f"{event} outside of the program's folder is not allowed here")
sys.addaudithook(watch)
names = {"__name__": "__main__" if tests is None else "program", "__builtins__": __builtins__}
exec(program, names)
if tests is not None:
    exec(compile(tests, "tests.py", "exec"), names)
    print("\n" + token, flush=True)
"""


@dataclasses.dataclass(frozen=True)
class Tests:
    """What a ground truth asks of a program: texts in and out, or asserts to be run after it."""

    io: tuple[tuple[str, str], ...] = ()
    asserts: str = ""


def code(response: str, ground_truth: str, *, time_s: float, memory_bytes: int) -> Verdict:
    """1 when the last ```python block of the response passes all tests; the first that fails ends it.

    The truth is assert statements, or JSON: a list of {input, output}, given on stdin and compared with stdout
    but for white space at the ends of lines; or a list of assert statements. A test may take half of `time_s`,
    then it has failed; where all tests together take longer than `time_s` the sample is an error.
    """
    tests = read_tests(ground_truth)
    blocks = _BLOCK.findall(response)
    if not blocks:
        return Verdict(0.0, {"exact": 0.0, "answered": 0.0})
    folder = tempfile.mkdtemp(prefix="jppo-code-")
    try:
        passed = _passes(blocks[-1], tests, os.path.realpath(folder), time_s, memory_bytes)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Verdict(float(passed), {"exact": float(passed), "answered": 1.0})


def read_tests(ground_truth: str) -> Tests:
    """The tests that a ground truth holds; raises ValueError where it holds none."""
    text = ground_truth.strip()
    shown = text if len(text) <= 60 else text[:60] + "..."
    if not text.startswith(("[", "{")):
        if "assert" not in text:
            raise ValueError(f"ground_truth={shown!r} has no tests: neither JSON nor assert statements")
        return Tests(asserts=text)
    try:
        rows = json.loads(text)
    except ValueError as e:
        raise ValueError(f"ground_truth={shown!r} is no JSON: {e}") from e
    if isinstance(rows, list) and rows and all(isinstance(row, str) for row in rows):
        return Tests(asserts="\n".join(rows))
    if (
        not isinstance(rows, list)
        or not rows
        or not all(isinstance(r, dict) and isinstance(r.get("input"), str) for r in rows)
        or not all(isinstance(r.get("output"), str) for r in rows)
    ):
        raise ValueError(
            f"ground_truth={shown!r} must be a list, not empty, of {{input, output}} texts or of assert statements"
        )
    return Tests(io=tuple((row["input"], row["output"]) for row in rows))


def _passes(program: str, tests: Tests, folder: str, time_s: float, memory_bytes: int) -> bool:
    pathlib.Path(folder, "program.py").write_text(program, encoding="utf-8", errors="replace")
    if tests.asserts:
        token = secrets.token_hex(16)  # told by a program that got to its end: exit(0) is no pass
        output = _run(f"{token}\n{tests.asserts}", "asserts", folder, time_s / 2, memory_bytes)
        return output is not None and output.rstrip("\n").endswith(f"\n{token}")
    deadline = time.monotonic() + time_s
    for given, wanted in tests.io:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"{len(tests.io)} tests did not end within {time_s:g} s; raise reward.timeout_s")
        output = _run(given, "stdin", folder, min(left, time_s / 2), memory_bytes)
        if output is None and deadline - time.monotonic() <= 0 and left < time_s / 2:
            raise TimeoutError(f"{len(tests.io)} tests did not end within {time_s:g} s; raise reward.timeout_s")
        if output is None or _lines(output) != _lines(wanted):
            return False
    return True


def run_program(program: str, *, time_s: float, memory_bytes: int) -> str:
    """What a program prints and, of one that fails, the last line that it says of that."""
    folder = tempfile.mkdtemp(prefix="jppo-code-")
    try:
        pathlib.Path(folder, "program.py").write_text(program, encoding="utf-8", errors="replace")
        with tempfile.TemporaryFile() as errors:
            status, printed = _status("", "stdin", os.path.realpath(folder), time_s, memory_bytes, errors=errors)
            errors.seek(max(0, errors.tell() - 2000))
            said = errors.read().decode("utf-8", "replace").strip().rpartition("\n")[2]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if status is None:
        return f"{printed}error: the program took longer than {time_s:g} s"
    return printed if status == 0 else f"{printed}error: {said or f'exit code {status}'}"


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _run(stdin: str, mode: str, folder: str, time_s: float, memory_bytes: int) -> str | None:
    """What the program prints; None where it fails or does not end in time."""
    status, printed = _status(stdin, mode, folder, time_s, memory_bytes, errors=subprocess.DEVNULL)
    return printed if status == 0 else None


def _status(
    stdin: str, mode: str, folder: str, time_s: float, memory_bytes: int, *, errors: int | IO[bytes]
) -> tuple[int | None, str]:
    """The program's exit status, None where it does not end in time, and what it prints."""
    limits = [memory_bytes, int(time_s) + 2, FILE_BYTES, _processes_of_user() + NEW_PROCESSES]
    command = [*_own_network(), sys.executable, "-I", "-B", "-c", _CHILD, folder, *map(str, limits), mode]
    environment = {"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "PYTHONUTF8": "1"}
    environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as printed:
        given.write(stdin.encode("utf-8", "replace"))
        given.seek(0)
        child = subprocess.Popen(
            command,
            stdin=given,
            stdout=printed,
            stderr=errors,
            cwd=folder,
            env=environment,
            start_new_session=True,
        )
        try:
            ended = child.wait(time_s)
        except subprocess.TimeoutExpired:
            ended = None
        finally:
            _kill(child)
        printed.seek(0)
        return ended, printed.read(FILE_BYTES).decode("utf-8", "replace")


def _kill(child: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)  # also what outlived the program
    child.wait()


@functools.cache
def _own_network() -> tuple[str, ...]:
    """The command that gives a child a network and processes of its own; nothing where it is not permitted."""
    unshare = shutil.which("unshare")
    for flags in (("-r", "-n", "-p", "-f", "--kill-child"), ("-r", "-n")):
        if unshare:
            tried = subprocess.run(
                [unshare, *flags, sys.executable, "-I", "-c", ""],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            if tried.returncode == 0:
                return (unshare, *flags)
    return ()


def _processes_of_user() -> int:
    """Threads of the user as the kernel counts them against RLIMIT_NPROC; 0 where there is no /proc."""
    total, me = 0, os.getuid()
    for process in pathlib.Path("/proc").glob("[0-9]*/task"):
        try:
            if process.stat().st_uid == me:
                total += len(os.listdir(process))
        except OSError:
            pass
    return total
