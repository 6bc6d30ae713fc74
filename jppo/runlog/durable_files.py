"""Files that survive a kill, a full disk and a power cut: written atomically, or appended in whole records; and a lock.

The lock on a run folder belongs to the open file, so the kernel releases it however the process ends: the folder of a
killed run is free at once. The file remains; its content only names the current or last owner.
"""

import collections
import contextlib
import errno
import fcntl
import json
import os
import pathlib
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jppo.errors import UserError


class Appender:
    """An append-only file of whole records that survives a temporarily full disk.

    Records that do not fit wait in memory and are written first when there is room again: nothing is lost, the order
    stays, and no reader keeps half a record.
    """

    def __init__(self, path: pathlib.Path) -> None:
        """Opens the file for appending."""
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._end = os.fstat(self._file).st_size
        self._waiting: collections.deque[bytes] = collections.deque()

    def append(self, record: bytes) -> None:
        """Writes waiting records and then this one; OSError if it has to wait, as on a full disk."""
        self._waiting.append(record)
        self.flush()

    def flush(self) -> None:
        """Writes the waiting records; OSError if that fails."""
        while self._waiting:
            self._write(self._waiting[0])
            self._end += len(self._waiting.popleft())

    def sync(self) -> None:
        """Returns when all written records are on disk."""
        os.fsync(self._file)

    def close(self) -> None:
        """Writes waiting records; OSError if they are lost."""
        try:
            self.flush()
        finally:
            os.close(self._file)

    def _write(self, record: bytes) -> None:
        """Writes a whole record at the end of the file, or nothing of it."""
        written = 0
        try:
            while written < len(record):
                written += os.pwrite(self._file, record[written:], self._end + written)
        except OSError:
            os.ftruncate(self._file, self._end)  # needs no room
            raise


def read_lines(path: pathlib.Path) -> list[dict[str, Any]]:
    """Reads the objects of a JSON lines file with a step, up to the first unreadable one; [] without a file.

    A kill may have truncated the last line, and a power cut may have left NULs.
    """
    return [row for row, _ in _readable_rows(path)]


def cut_lines(path: pathlib.Path, keep: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """Truncates a JSON lines file, in place, before the first unwanted or unreadable line; returns the kept rows."""
    kept_rows: list[dict[str, Any]] = []
    end = 0
    if not path.exists():
        return kept_rows
    rows = _readable_rows(path)
    readable_bytes = rows[-1][1] if rows else 0
    if (lost := path.stat().st_size - readable_bytes) > 0:
        print(f"{path}: the last {lost} bytes, after {len(rows)} lines, cannot be read and are removed", flush=True)
    for row, row_end in rows:
        if not keep(row):
            break
        kept_rows.append(row)
        end = row_end
    os.truncate(path, end)
    return kept_rows


def _readable_rows(path: pathlib.Path) -> list[tuple[dict[str, Any], int]]:
    """Reads the rows of a JSON lines file up to the first unreadable one, each with the byte offset after it."""
    rows: list[tuple[dict[str, Any], int]] = []
    end = 0
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else []:
        end += len(line)
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not line.endswith(b"\n") or not isinstance(row, dict) or not isinstance(row.get("step"), int):
            break
        rows.append((row, end))
    return rows


def write_file(path: pathlib.Path, make: Callable[[pathlib.Path], object]) -> pathlib.Path:
    """Writes a file with `make`, then renames it to its name; readers see the old file until then."""
    if not path.name:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file() and not path.is_dir():
        make(path)  # writes to a device or a pipe directly: a rename would replace it by a file
        return path
    new_path = path.with_name(path.name + ".new")
    try:
        make(new_path)
        sync(new_path)
        os.replace(new_path, path)
    finally:
        new_path.unlink(missing_ok=True)  # a partial file would take room
    return path


def write_text(path: pathlib.Path, text: str) -> pathlib.Path:
    return write_file(path, lambda new_path: new_path.write_text(text, encoding="utf-8"))


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Returns the JSON object in a file; {} if it is missing, truncated or something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def sync(path: pathlib.Path) -> None:
    """Waits until a file, or the names in a folder, are on disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


FILE = "run.lock"


def missing_folders(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns those of a folder and its parents that do not exist, the folder first."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def remove_unused(created: Sequence[pathlib.Path]) -> None:
    """Removes folders that were missing and have been created, unless a file other than the lock has content."""
    with contextlib.suppress(OSError):
        files = (path for path in created[0].rglob("*") if path.is_file()) if created else ()
        if created and not any(path.name != FILE and path.stat().st_size for path in files):
            shutil.rmtree(created[0])
            for parent in created[1:]:
                parent.rmdir()


@contextlib.contextmanager
def own(folder: pathlib.Path, setting: str = "trainer.run_dir") -> Iterator[None]:
    """Creates and locks the folder during the block; UserError if that fails, naming the process that holds it.

    A block that writes nothing leaves no new folder.
    """
    created = missing_folders(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as e:
        raise UserError(f"{setting}={folder} cannot be written ({e.strerror}); choose another folder") from e
    try:
        _acquire_lock(lock, folder, setting)
        try:
            yield
        finally:
            remove_unused(created)  # while no other process can own it
    finally:
        os.close(lock)


def _acquire_lock(lock: int, folder: pathlib.Path, setting: str) -> None:
    """Locks the open file and writes this process into it; UserError if another process holds the lock."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as e:
        raise UserError(
            f"{setting}={folder} belongs to {_describe_holder(lock)}, which is still running; wait for its end, stop"
            " it, or choose another folder"
        ) from e
    except OSError as e:  # a file system without locks
        message = f"{folder} cannot be locked ({e.strerror}): a second run could write there, too"
        print(f"warning: {message}", file=sys.stderr, flush=True)
        return
    with contextlib.suppress(OSError):  # a full disk: the lock is held anyway
        os.ftruncate(lock, 0)
        os.pwrite(lock, (json.dumps({"pid": os.getpid(), "host": socket.gethostname()}) + "\n").encode(), 0)


def _describe_holder(lock: int) -> str:
    """Returns the process that holds the lock, as it is written in the file."""
    try:
        holder = json.loads(os.pread(lock, 1000, 0))
        return f"process {holder['pid']} on {holder['host']}"
    except (OSError, ValueError, KeyError, TypeError):  # the owner is about to write it
        return "another process"


def read_jsonl(path: pathlib.Path, notes: list[str], without: str | None) -> list[dict[str, Any]]:
    """Returns the objects of a jsonl file; counts invalid lines in `notes`.

    `without` names what a reader lacks without it; None: the file is optional.
    """
    if not path.is_file():
        if without is not None:
            notes.append(f"no {path.name}: {without}")
        return []
    rows, broken = [], 0
    # Only a newline ends a line: texts may contain other characters that splitlines splits at.
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict):
            rows.append(row)
        else:
            broken += 1
    if broken:
        notes.append(f"{path.name}: {broken} of {broken + len(rows)} lines cannot be read and are left out")
    elif not rows and without is not None:
        notes.append(f"{path.name} is empty: {without}")
    return rows
