"""Limits on a program: control groups for its memory and threads, and a quota for the files in its folder.

Groups are there where they can be made: version 2 needs a delegated group with the controllers memory and pids, version
1 writable hierarchies of the two.

The quota is for folders without a file system of their own: names, and bytes that the kernel counts. Names alone do not
bound a disk: a file without one takes space as long as it is open or mapped. So all bytes that the program ever writes
to files count, by write_bytes of /proc/PID/io: the kernel adds a page when it is first changed, by whatever call or
mapping. Only preallocation is not in it, which `seccomp.py` refuses.
"""

import contextlib
import itertools
import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from jppo.sandbox import kernel

FOLDER_BYTES = 2**26
FOLDER_FILES = 4096
TOO_MUCH = f"wrote more than {FOLDER_BYTES} bytes"
_MEMORY, _PIDS = ("memory.max", "memory.limit_in_bytes"), ("pids.max",)  # of either version
_NUMBERS = itertools.count()
_REMOVE_S = 1.0


def group_bases() -> tuple[str, ...]:
    """Returns the folders in which groups with a limit on memory or processes can be made, often none."""
    return tuple(base for base in _own() if _works(base))


def make_groups(bases: Iterable[str], *, memory: int, processes: int) -> list[str]:
    """Makes new groups, one in each base, with these limits. Raises OSError."""
    made = []
    for base in bases:
        group = f"{base}/jppo-{os.getpid()}-{next(_NUMBERS)}"
        os.mkdir(group)
        made.append(group)
        for names, value in ((_MEMORY, memory), (_PIDS, processes)):
            for name in names:
                if os.path.exists(f"{group}/{name}"):
                    _write(f"{group}/{name}", value)
    return made


def remove_groups(groups: Iterable[str]) -> None:
    """Kills remaining processes in groups and removes the groups; `group_bases` of a later run removes busy ones."""
    end = time.monotonic() + _REMOVE_S
    for group in groups:
        with contextlib.suppress(OSError):
            _write(f"{group}/cgroup.kill", 1)
        while os.path.isdir(group):
            try:
                os.rmdir(group)
            except OSError:
                if time.monotonic() > end:
                    break
                time.sleep(0.002)


def _write(path: str, value: int) -> None:
    with open(path, "w", encoding="ascii") as f:
        f.write(str(value))


def _own() -> list[str]:
    """Returns this process's groups: version 2's, and version 1's of memory and pids."""
    try:
        with open("/proc/self/cgroup", encoding="utf-8") as f:
            entries = [line.rstrip("\n").split(":", 2) for line in f]
        with open("/proc/self/mounts", encoding="utf-8") as f:
            mounts = [line.split() for line in f]
    except OSError:
        return []
    found = []
    for _, controllers, path in entries:
        wanted = set(controllers.split(",")) & {"memory", "pids"}
        for _, place, kind, options, *_ in mounts:
            first = kind == "cgroup" and wanted & set(options.split(","))
            if first or (kind == "cgroup2" and not controllers):
                found.append(f"{place}{path}".rstrip("/"))
    return list(dict.fromkeys(found))


def _works(base: str) -> bool:
    try:
        for name in os.listdir(base):  # of workers that were killed
            _, _, pid = name.partition("jppo-")
            if pid and not os.path.exists(f"/proc/{pid.partition('-')[0]}"):
                with contextlib.suppress(OSError):
                    os.rmdir(f"{base}/{name}")
        (group,) = make_groups([base], memory=2**28, processes=64)
    except OSError:
        return False
    try:
        return any(os.path.exists(f"{group}/{name}") for name in (*_MEMORY, *_PIDS))
    finally:
        remove_groups([group])


def excess(folder: str, pid: int, user: int | None, *, counted: bool) -> str:
    """Returns why process `pid`, of another `user` if not None, has too much in its folder, or ''."""
    size, files = 0, 0
    try:
        for where, folders, names in os.walk(folder, onerror=_raise):
            files += len(folders) + len(names)
            for name in (*folders, *names):
                with contextlib.suppress(FileNotFoundError):
                    size += os.lstat(os.path.join(where, name)).st_blocks * 512
            if size > FOLDER_BYTES or files > FOLDER_FILES:
                return f"{TOO_MUCH} or {FOLDER_FILES} files"
    except (OSError, RecursionError):
        return "made a folder that cannot be looked into"
    try:
        return TOO_MUCH if counted and _written(pid, user) > FOLDER_BYTES else ""
    except OSError:  # it starts or ends; in between it cannot hide the counter
        return ""


def _written(pid: int, user: int | None) -> int:
    try:
        return _counted(str(pid))
    except PermissionError:  # root without CAP_SYS_PTRACE
        if user is None:
            raise
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(_counted_for, str(pid), user).result()


def _counted_for(pid: str, user: int) -> int:
    """Reads the counter as `user`, which this thread stays; others keep theirs."""
    for call in (kernel.SETFSGID, kernel.SETFSUID):
        kernel.syscall(call[kernel.MACHINE], user)
    return _counted(pid)


def _counted(process: str) -> int:
    with open(f"/proc/{process}/io", encoding="ascii") as f:
        return int(f.read().partition("\nwrite_bytes:")[2].split()[0])


def _raise(e: OSError) -> None:
    if not isinstance(e, FileNotFoundError):  # removed meanwhile
        raise e
