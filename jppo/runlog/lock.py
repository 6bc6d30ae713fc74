"""A lock on a run folder, held by the process that writes there.

The lock belongs to the open file, so the kernel releases it however the process ends: the folder of a killed run is
free at once. The file remains; its content only names the current or last owner.
"""

import contextlib
import fcntl
import json
import os
import pathlib
import socket
import sys
from collections.abc import Iterator

from jppo.settings import UserError

FILE = "run.lock"


@contextlib.contextmanager
def own(folder: pathlib.Path, setting: str = "trainer.run_dir") -> Iterator[None]:
    """Creates and locks the folder; UserError if that fails, naming the process that holds it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as e:
        raise UserError(f"{setting}={folder} cannot be written ({e.strerror}); choose another folder") from e
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
            f"{setting}={folder} belongs to {_holder(lock)}, which is still running; wait for its end, stop it, or"
            " choose another folder"
        ) from e
    except OSError as e:  # a file system without locks
        said = f"{folder} cannot be locked ({e.strerror}): a second run could write there, too"
        print(f"warning: {said}", file=sys.stderr, flush=True)
        return
    with contextlib.suppress(OSError):  # a full disk: the lock is held anyway
        os.ftruncate(lock, 0)
        os.pwrite(lock, (json.dumps({"pid": os.getpid(), "host": socket.gethostname()}) + "\n").encode(), 0)


def _holder(lock: int) -> str:
    try:
        found = json.loads(os.pread(lock, 1000, 0))
        return f"process {found['pid']} on {found['host']}"
    except (OSError, ValueError, KeyError, TypeError):  # the owner is about to write it
        return "another process"
