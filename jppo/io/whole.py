"""Atomic file writes that also survive a power cut."""

import os
import pathlib
from collections.abc import Callable


def write(path: pathlib.Path, make: Callable[[pathlib.Path], object]) -> pathlib.Path:
    """Lets `make` write a temporary file, then renames it; readers see the old file until then."""
    path.parent.mkdir(parents=True, exist_ok=True)
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


def sync(path: pathlib.Path) -> None:
    """Returns when a file, or the names in a folder, are on disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
