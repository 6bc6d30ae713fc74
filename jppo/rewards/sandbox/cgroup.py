"""Control groups: bounds on a program's memory and threads as the kernel counts them, where groups may be made.

Version 2 needs a delegated group with the controllers memory and pids; version 1 writable hierarchies of the two.
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
    """The folders in which groups with a bound on memory or processes can be made; none is usual."""
    return tuple(base for base in _own() if _works(base))


def make(bases: Iterable[str], *, memory: int, processes: int) -> list[str]:
    """New groups, one in each base, with these bounds. Raises OSError."""
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
    """Kills what is left in groups and removes them; a group that stays busy is left to `bases` of a later run."""
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
    """This process's groups: that of version 2, and those of memory and pids of version 1."""
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
