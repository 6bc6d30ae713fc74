"""The format of published weights: what the trainer writes, and what a server checks before it takes any of them.

A file or bucket holds only the tensors' bytes; the list of `TensorEntry` is in the request that offers it. `write` is
the trainer's; `check`, for a file, and `Staging`, for buckets, are the server's. Also imported in the server's
interpreter, so it needs only the standard library and numpy.
"""

import dataclasses
import errno
import json
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
THREADS = min(16, max(4, os.cpu_count() or 1))  # for checksums and comparisons
UNDER_WAY = 1 << 26  # bytes of tensors being written while the next ones are made
PIECE = 1 << 20  # bytes per read: checksummed and written while in the processor's cache
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM)


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """The place, shape and checksum of one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    crc32: int


Bucket = tuple[Sequence[TensorEntry], Any]  # tensors, and the bytes that hold them


class WeightsRefused(Exception):
    """The file or its entries do not match the model; nothing was changed."""


def write(
    fd: int,
    tensors: Iterable[tuple[str, np.ndarray]],
    *,
    start: int = 0,
    align: int = ALIGN,
    elsewhere: Callable[[int, OSError], int] | None = None,
) -> list[TensorEntry]:
    """Writes `tensors` consecutively from byte `start` of the file and returns their entries.

    Threads write while the next tensors are made; at most `UNDER_WAY` bytes, or the largest tensor, wait. If there is
    no room, `elsewhere(done, why)` returns another file with the first `done` bytes, and writing continues there.
    """
    entries: list[TensorEntry] = []
    waiting: deque[tuple[TensorEntry, memoryview, Future[int]]] = deque()
    offset = start
    with ThreadPoolExecutor(THREADS) as pool:

        def begin(entry: TensorEntry, data: memoryview) -> None:
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
            begin(TensorEntry(name, tensor.dtype.name, tuple(tensor.shape), offset, data.nbytes, 0), data)
            offset += -(-data.nbytes // align) * align
            while len(waiting) > 1 and sum(entry.nbytes for entry, _, _ in waiting) > UNDER_WAY:
                settle()
        while waiting:
            settle()
    os.ftruncate(fd, offset)
    return entries


def check(path: str, entries: Sequence[TensorEntry], expected: Mapping[str, tuple[int, ...]]) -> mmap.mmap:
    """Maps the file; WeightsRefused unless its entries have the `expected` names and shapes and all bytes exist."""
    check_names(entries, expected)
    try:
        with open(path, "rb") as file:
            # private and writable: torch wants writable memory, and writes do not reach the file
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as e:
        raise WeightsRefused(f"{path} cannot be read: {e}; trainer and server must share it") from e
    for entry in entries:
        if (end := entry.offset + entry.nbytes) > len(data):
            raise WeightsRefused(f"the file is truncated: {entry.name} ends at byte {end}, the file at {len(data)}")
    with memoryview(data) as view, ThreadPoolExecutor(THREADS) as pool:
        sums = pool.map(lambda e: zlib.crc32(view[e.offset : e.offset + e.nbytes]), entries)
        for entry, crc32 in zip(entries, sums, strict=True):
            check_sum(entry, crc32)
    return data


def check_sum(entry: TensorEntry, crc32: int) -> None:
    """Raises WeightsRefused if the checksum differs from the written one."""
    if crc32 != entry.crc32:
        raise WeightsRefused(f"{entry.name} has a different checksum than when it was written")


class Staging:
    """The buckets of one publish for a model with the `expected` names and shapes, until all are there and checked.

    The served model is not touched before, so a publish that is cut, incomplete or wrong leaves the old weights in use.
    """

    def __init__(self, expected: Mapping[str, tuple[int, ...]], version: int | None = None):
        self.version = version
        self.buckets: list[Bucket] = []
        self.complete = False
        self.error: str | None = None  # the first refusal: nothing after it counts
        self._expected = expected

    def add(self, version: int, entries: Sequence[TensorEntry], fetch: Callable[[], Any]) -> None:
        """Fetches a bucket, in any case: another process may be sending it to several servers."""
        try:
            self._require_open(version)
            before = [entry for bucket, _ in self.buckets for entry in bucket]
            check_names([*before, *entries], self._expected, whole=False)
        except WeightsRefused as e:
            self._refuse(e)
        try:
            data = fetch()
            if self.error is None:
                self.buckets.append((entries, data))
        except WeightsRefused as e:
            self._refuse(e)

    def finish(self, version: int, sent: str) -> None:
        """Completes the publish if it has every tensor of the model, and their digest is the one that was sent."""
        try:
            self._require_open(version)
            entries = [entry for bucket, _ in self.buckets for entry in bucket]
            check_names(entries, self._expected)
            if self.error is None and (found := digest(entries)) != sent:
                raise WeightsRefused(f"the tensors have the digest {found}, but {sent} was sent")
            self.complete = self.error is None
        except WeightsRefused as e:
            self._refuse(e)

    def take(self) -> list[Bucket]:
        """Returns the buckets of a complete publish, once; none of another."""
        if not self.complete:
            self._refuse("it is not complete")
            return []
        buckets, self.buckets, self.complete = self.buckets, [], False
        return buckets

    def _require_open(self, version: int) -> None:
        self.version = version if self.version is None else self.version
        if version != self.version or self.complete:
            raise WeightsRefused(f"a bucket of version {version} came into the publish of version {self.version}")

    def _refuse(self, why: Exception | str) -> None:
        self.error = self.error or str(why)
        self.buckets, self.complete = [], False


def size_of(entries: Sequence[TensorEntry]) -> int:
    """Returns the bytes from the first tensor's start to the last one's end."""
    return max((entry.offset + entry.nbytes for entry in entries), default=0)


def pack_bytes(entries: Sequence[TensorEntry]) -> list[list[Any]]:
    """Returns the entries as JSON."""
    return [list(dataclasses.astuple(entry)) for entry in entries]


def unpack(packed: Sequence[Sequence[Any]]) -> list[TensorEntry]:
    """Restores packed entries."""
    return [TensorEntry(name, dtype, tuple(shape), *rest) for name, dtype, shape, *rest in packed]


def in_order(tensors: Iterable[tuple[str, str, tuple[int, ...], int, int]]) -> list[TensorEntry]:
    """Returns the entries of consecutive tensors, given name, dtype, shape, bytes and checksum of each."""
    entries, offset = [], 0
    for name, dtype, shape, nbytes, crc32 in tensors:
        entries.append(TensorEntry(name, dtype, tuple(shape), offset, nbytes, crc32))
        offset += -(-nbytes // ALIGN) * ALIGN
    return entries


def digest(entries: Sequence[TensorEntry]) -> str:
    """Returns a checksum of the tensors: their names, dtypes, shapes and contents, in order."""
    said = [[entry.name, entry.dtype, list(entry.shape), entry.crc32] for entry in entries]
    return f"{zlib.crc32(json.dumps(said).encode()):08x}"


def check_names(entries: Sequence[TensorEntry], expected: Mapping[str, tuple[int, ...]], *, whole: bool = True) -> None:
    """Raises WeightsRefused if the entries do not have the `expected` names and shapes; all of them, if `whole`."""
    names = [entry.name for entry in entries]
    have = set(names)
    if missing := [name for name in expected if whole and name not in have]:
        raise WeightsRefused(f"{_some(missing)} missing: every publish must have every tensor of the model")
    if unknown := [name for name in names if name not in expected]:
        raise WeightsRefused(f"{_some(unknown)} not in the served model")
    if len(names) != len(set(names)):
        raise WeightsRefused(f"{_some([n for n in set(names) if names.count(n) > 1])} given twice")
    for entry in entries:
        if entry.shape != tuple(expected[entry.name]):
            served = list(expected[entry.name])
            raise WeightsRefused(f"{entry.name} has shape {list(entry.shape)}, the served model's is {served}")
        if entry.dtype not in DTYPES:
            raise WeightsRefused(f"{entry.name} has dtype {entry.dtype}, must be one of {', '.join(DTYPES)}")


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
        while len(piece):  # a call may write less than requested
            done = os.pwrite(fd, piece, at)
            piece, at = piece[done:], at + done
    return crc32
