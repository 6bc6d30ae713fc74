"""How weights lie in a file on their way to the server: written by `weights.py`, read by `worker.py`.

The file holds the tensors' bytes and nothing else; the list of `Entry` travels with the request to load it.
Imported in the server's interpreter too, so it needs only the standard library and numpy.
"""

import dataclasses
import mmap
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

DTYPES = ("float32", "bfloat16", "float16")
ALIGN = 64  # bytes


@dataclasses.dataclass(frozen=True)
class Entry:
    """Where one tensor lies in the file, and what it must be."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    crc32: int


class Refused(Exception):
    """The file or its list of entries is not the model that was asked for; nothing was touched."""


def write(fd: int, tensors: Iterable[tuple[str, np.ndarray]], *, start: int = 0, align: int = ALIGN) -> list[Entry]:
    """Writes `tensors` one after another from byte `start` of the file and returns where each lies."""
    entries = []
    offset = start
    for name, tensor in tensors:
        data = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
        entry = Entry(name, tensor.dtype.name, tuple(tensor.shape), offset, data.nbytes, zlib.crc32(data.data))
        _write_all(fd, data.data, offset)
        entries.append(entry)
        offset += -(-data.nbytes // align) * align
    os.ftruncate(fd, offset)
    return entries


def check(path: str, entries: Sequence[Entry], expected: Mapping[str, tuple[int, ...]]) -> mmap.mmap:
    """Maps the file if its entries are the `expected` names and shapes and no byte is lost; else Refused."""
    _check_names(entries, expected)
    try:
        with open(path, "rb") as file:
            # private and writable: torch wants writable memory, and nothing written there reaches the file
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as e:
        raise Refused(f"{path} cannot be read: {e}; trainer and server must share it") from e
    for entry in entries:
        end = entry.offset + entry.nbytes
        if end > len(data):
            raise Refused(f"the file is cut: {entry.name} ends at byte {end}, the file at {len(data)}")
        if zlib.crc32(memoryview(data)[entry.offset : end]) != entry.crc32:
            raise Refused(f"{entry.name} has another checksum than when it was written")
    return data


def pack(entries: Sequence[Entry]) -> list[list[Any]]:
    """The entries as JSON."""
    return [list(dataclasses.astuple(entry)) for entry in entries]


def unpack(packed: Sequence[Sequence[Any]]) -> list[Entry]:
    """The inverse of `pack`."""
    return [Entry(name, dtype, tuple(shape), *rest) for name, dtype, shape, *rest in packed]


def _check_names(entries: Sequence[Entry], expected: Mapping[str, tuple[int, ...]]) -> None:
    names = [entry.name for entry in entries]
    if missing := [name for name in expected if name not in set(names)]:
        raise Refused(f"{_some(missing)} missing: every tensor of the model must come with every publish")
    if unknown := [name for name in names if name not in expected]:
        raise Refused(f"{_some(unknown)} not in the served model")
    if len(names) != len(set(names)):
        raise Refused(f"{_some([n for n in set(names) if names.count(n) > 1])} given twice")
    for entry in entries:
        if entry.shape != tuple(expected[entry.name]):
            served = list(expected[entry.name])
            raise Refused(f"{entry.name} has shape {list(entry.shape)}, the served model's is {served}")
        if entry.dtype not in DTYPES:
            raise Refused(f"{entry.name} has dtype {entry.dtype}, must be one of {', '.join(DTYPES)}")


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    while len(data):  # one call writes 2 GiB at most
        done = os.pwrite(fd, data, offset)
        data, offset = data[done:], offset + done
