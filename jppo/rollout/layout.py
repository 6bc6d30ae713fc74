"""How weights lie in a file on their way to the server: written by `buffers.py`, read by `worker.py`.

The file holds the tensors' bytes and nothing else; the list of `Entry` travels with the request to load it.
Imported in the server's interpreter too, so it needs only the standard library and numpy.
"""

import dataclasses
import errno
import mmap
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np

DTYPES = ("float32", "bfloat16", "float16")
ALIGN = 64  # bytes
THREADS = 4  # that take checksums side by side
UNDER_WAY = 1 << 26  # bytes of tensors that are written while the next ones are asked for
PIECE = 1 << 20  # bytes that are read once: summed and written while the processor's cache has them
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM)


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


def write(
    fd: int,
    tensors: Iterable[tuple[str, np.ndarray]],
    *,
    start: int = 0,
    align: int = ALIGN,
    elsewhere: Callable[[int, OSError], int] | None = None,
) -> list[Entry]:
    """Writes `tensors` one after another from byte `start` of the file and returns where each lies.

    Threads write while the next tensors are made; only `UNDER_WAY` bytes of them, or the largest one, wait here. Where
    there is no room, `elsewhere(done, why)` gives another file with the first `done` bytes, in which the rest goes on.
    """
    entries: list[Entry] = []
    waiting: deque[tuple[Entry, memoryview, Future[int]]] = deque()
    offset = start
    with ThreadPoolExecutor(THREADS) as pool:

        def begin(entry: Entry, data: memoryview) -> None:
            waiting.append((entry, data, pool.submit(_put, fd, data, entry.offset)))

        def settle() -> None:
            nonlocal fd
            entry, _, crc32 = waiting[0]
            try:
                entries.append(dataclasses.replace(entry, crc32=crc32.result()))
                waiting.popleft()
            except OSError as e:
                if elsewhere is None or e.errno not in FULL:
                    raise
                again = list(waiting)
                wait([future for _, _, future in again])
                fd = elsewhere(entry.offset, e)
                waiting.clear()
                for entry, data, _ in again:
                    begin(entry, data)

        for name, tensor in tensors:
            data = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data
            begin(Entry(name, tensor.dtype.name, tuple(tensor.shape), offset, data.nbytes, 0), data)
            offset += -(-data.nbytes // align) * align
            while len(waiting) > 1 and sum(entry.nbytes for entry, _, _ in waiting) > UNDER_WAY:
                settle()
        while waiting:
            settle()
    os.ftruncate(fd, offset)
    return entries


def check(path: str, entries: Sequence[Entry], expected: Mapping[str, tuple[int, ...]]) -> mmap.mmap:
    """Maps the file if its entries are the `expected` names and shapes and no byte is lost; else Refused."""
    check_names(entries, expected)
    try:
        with open(path, "rb") as file:
            # private and writable: torch wants writable memory, and nothing written there reaches the file
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as e:
        raise Refused(f"{path} cannot be read: {e}; trainer and server must share it") from e
    for entry in entries:
        if (end := entry.offset + entry.nbytes) > len(data):
            raise Refused(f"the file is cut: {entry.name} ends at byte {end}, the file at {len(data)}")
    with memoryview(data) as view, ThreadPoolExecutor(THREADS) as pool:
        sums = pool.map(lambda e: zlib.crc32(view[e.offset : e.offset + e.nbytes]), entries)
        for entry, crc32 in zip(entries, sums, strict=True):
            check_sum(entry, crc32)
    return data


def check_sum(entry: Entry, crc32: int) -> None:
    """Refused if the bytes that have this checksum are not those that were written."""
    if crc32 != entry.crc32:
        raise Refused(f"{entry.name} has another checksum than when it was written")


def size(entries: Sequence[Entry]) -> int:
    """The bytes that reach from the first tensor's begin to the last one's end."""
    return max((entry.offset + entry.nbytes for entry in entries), default=0)


def pack(entries: Sequence[Entry]) -> list[list[Any]]:
    """The entries as JSON."""
    return [list(dataclasses.astuple(entry)) for entry in entries]


def unpack(packed: Sequence[Sequence[Any]]) -> list[Entry]:
    """The inverse of `pack`."""
    return [Entry(name, dtype, tuple(shape), *rest) for name, dtype, shape, *rest in packed]


def check_names(entries: Sequence[Entry], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Refused if the entries are not the `expected` names and shapes."""
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


def _put(fd: int, data: memoryview, offset: int) -> int:
    """Writes `data` and returns its checksum."""
    crc32 = 0
    for start in range(0, len(data), PIECE):
        piece = data[start : start + PIECE]
        crc32 = zlib.crc32(piece, crc32)
        at = offset + start
        while len(piece):  # a call may write less than it was given
            done = os.pwrite(fd, piece, at)
            piece, at = piece[done:], at + done
    return crc32
