"""One owner of a folder: the process that writes there, for as long as it lives.

The lock belongs to the open file, so that the kernel gives it back however the process ends: what a killed run has
left is free at once. The file stays; what is in it only says who has the lock, or had it last.
"""

import contextlib
import fcntl
import json
import os
import pathlib
import socket
import sys
from collections.abc import Iterator

from jppo.config import UserError

FILE = "run.lock"


@contextlib.contextmanager
def own(folder: pathlib.Path, setting: str = "trainer.run_dir") -> Iterator[None]:
    """Makes the folder and holds it; UserError where it cannot be, or names the process that has it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as e:
        raise UserError(f"{setting}={folder} cannot be written ({e.strerror}); name another folder") from e
    try:
        _take(lock, folder, setting)
        yield
    finally:
        os.close(lock)


def _take(lock: int, folder: pathlib.Path, setting: str) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as e:
        raise UserError(
            f"{setting}={folder} belongs to {_holder(lock)}, which is still running; wait for its end, stop it, or name"
            " another folder"
        ) from e
    except OSError as e:  # a file system without locks
        said = f"{folder} cannot be locked ({e.strerror}): nothing keeps a second run from writing there"
        print(f"warning: {said}", file=sys.stderr, flush=True)
        return
    with contextlib.suppress(OSError):  # a full disk: the lock is held all the same
        os.ftruncate(lock, 0)
        os.pwrite(lock, (json.dumps({"pid": os.getpid(), "host": socket.gethostname()}) + "\n").encode(), 0)


def _holder(lock: int) -> str:
    try:
        found = json.loads(os.pread(lock, 1000, 0))
        return f"process {found['pid']} on {found['host']}"
    except (OSError, ValueError, KeyError, TypeError):  # it is about to write it
        return "another process"
