"""Control groups: limits on a program's memory and threads, counted by the kernel, where groups can be made.

Version 2 needs a delegated group with the controllers memory and pids; version 1 needs writable hierarchies of the two.
"""

import contextlib
import itertools
import os
import time
from collections.abc import Iterable

_MEMORY, _PIDS = ("memory.max", "memory.limit_in_bytes"), ("pids.max",)  # of either version
_NUMBERS = itertools.count()
_REMOVE_S = 1.0


def bases() -> tuple[str, ...]:
    """Returns the folders in which groups with a limit on memory or processes can be made, often none."""
    return tuple(base for base in _own() if _works(base))


def make(bases: Iterable[str], *, memory: int, processes: int) -> list[str]:
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


def remove(groups: Iterable[str]) -> None:
    """Kills remaining processes in groups and removes the groups; `bases` of a later run removes busy ones."""
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
        (group,) = make([base], memory=2**28, processes=64)
    except OSError:
        return False
    try:
        return any(os.path.exists(f"{group}/{name}") for name in (*_MEMORY, *_PIDS))
    finally:
        remove([group])
