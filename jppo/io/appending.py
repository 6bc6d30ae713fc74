"""A file that grows by whole records, also where the disk is full for a while.

What finds no room waits in memory and goes out first when there is room again: nothing is lost, the order stays, and
no reader ever meets the first half of a record for good.
"""

import collections
import json
import os
import pathlib
from collections.abc import Callable
from typing import Any


class Appender:
    """Writes at the end of the last whole record."""

    def __init__(self, path: pathlib.Path) -> None:
        """Open the file, to go on at its end."""
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._end = os.fstat(self._file).st_size
        self._waiting: collections.deque[bytes] = collections.deque()

    @property
    def waiting(self) -> int:
        """Records that found no room so far."""
        return len(self._waiting)

    def append(self, record: bytes) -> None:
        """Write what waits and then the record; OSError where it has to wait."""
        self._waiting.append(record)
        self.flush()

    def flush(self) -> None:
        """Write what waits; OSError where it cannot be."""
        while self._waiting:
            self._write(self._waiting[0])
            self._end += len(self._waiting.popleft())

    def sync(self) -> None:
        """Return when all that is written is on the disk."""
        os.fsync(self._file)

    def close(self) -> None:
        """Write what waits, or say by OSError that it is lost."""
        try:
            self.flush()
        finally:
            os.close(self._file)

    def _write(self, record: bytes) -> None:
        done = 0
        try:
            while done < len(record):
                done += os.pwrite(self._file, record[done:], self._end + done)
        except OSError:
            os.ftruncate(self._file, self._end)  # takes no room
            raise


def read_lines(path: pathlib.Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines, each with its step, up to the first that cannot be read; [] without a file.

    A kill may have cut the last one off, and a power cut left NULs.
    """
    return [row for row, _ in _readable(path)]


def cut_lines(path: pathlib.Path, keep: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """Cut a file of JSON lines, in place, before the first that is not to be kept or cannot be read; what is kept."""
    kept: list[dict[str, Any]] = []
    end = 0
    if not path.exists():
        return kept
    rows = _readable(path)
    whole = rows[-1][1] if rows else 0
    if (lost := path.stat().st_size - whole) > 0:
        print(f"{path}: the last {lost} bytes, after {len(rows)} lines, cannot be read and are cut off", flush=True)
    for row, after in rows:
        if not keep(row):
            break
        kept.append(row)
        end = after
    os.truncate(path, end)
    return kept


def _readable(path: pathlib.Path) -> list[tuple[dict[str, Any], int]]:
    """The rows from the beginning on, each with the byte at which the next one begins."""
    found: list[tuple[dict[str, Any], int]] = []
    end = 0
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else []:
        end += len(line)
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not line.endswith(b"\n") or not isinstance(row, dict) or not isinstance(row.get("step"), int):
            break
        found.append((row, end))
    return found
