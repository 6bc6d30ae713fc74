"""The quota of a program's folder that has no file system of its own: names, and bytes that the kernel counts.

Names alone do not bound a disk: a file without one takes space as long as it is open or mapped. So all bytes that the
program ever writes to files count, by write_bytes of /proc/PID/io: the kernel adds a page when it is first changed,
by whatever call or mapping. Only preallocation is not in it, which `seccomp.py` refuses.
"""

import contextlib
import os
from concurrent.futures import ThreadPoolExecutor

from jppo.rewards.sandbox import kernel

BYTES = 2**26
FILES = 4096
TOO_MUCH = f"wrote more than {BYTES} bytes"


def excess(folder: str, pid: int, user: int | None, *, counted: bool) -> str:
    """Returns why process `pid`, of another `user` if not None, has too much in its folder, or ''."""
    size, files = 0, 0
    try:
        for where, folders, names in os.walk(folder, onerror=_raise):
            files += len(folders) + len(names)
            for name in (*folders, *names):
                with contextlib.suppress(FileNotFoundError):
                    size += os.lstat(os.path.join(where, name)).st_blocks * 512
            if size > BYTES or files > FILES:
                return f"{TOO_MUCH} or {FILES} files"
    except (OSError, RecursionError):
        return "made a folder that cannot be looked into"
    try:
        return TOO_MUCH if counted and _written(pid, user) > BYTES else ""
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
