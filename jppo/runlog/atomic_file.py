"""Atomic file writes that also survive a power cut, and a reader of what remains of a file after one."""

import errno
import json
import os
import pathlib
from collections.abc import Callable
from typing import Any


def write(path: pathlib.Path, make: Callable[[pathlib.Path], object]) -> pathlib.Path:
    """Writes a file with `make`, then renames it to its name; readers see the old file until then."""
    if not path.name:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file() and not path.is_dir():
        make(path)  # writes to a device or a pipe directly: a rename would replace it by a file
        return path
    new = path.with_name(path.name + ".new")
    try:
        make(new)
        sync(new)
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)  # a partial file would take room
    return path


def write_text(path: pathlib.Path, text: str) -> pathlib.Path:
    """Writes a text atomically."""
    return write(path, lambda new: new.write_text(text, encoding="utf-8"))


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Returns the JSON object in a file; {} if it is missing, truncated or something else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def sync(path: pathlib.Path) -> None:
    """Returns when a file, or the names in a folder, are on disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
