"""The format of published weights: what the trainer sends, and what a server checks before it takes any of them.

A file or bucket holds only the tensors' bytes; the list of `TensorEntry` is in the request that offers it. The server
checks a file by `map_checked` and collects buckets in `Staging`.

A publish of changes has only the elements that differ from the weights that a server proved to have:

    trainer: `Copy.changes` compares a bucket with the last publish and encodes the difference
    server:  `LoadedWeights.check` verifies the new tensors' checksums; `apply` changes its copy once all are there

A tensor is cut into blocks. The changes of a block are its header, the new values, and the gaps between their
positions. A gap of 0 bytes: all values of the block follow. A gap that does not fit is split by unchanged elements,
which are sent again. Also imported in the server's interpreter, so it needs only the standard library and numpy.
"""

import dataclasses
import itertools
import json
import mmap
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

DTYPES = ("float32", "bfloat16", "float16")
ALIGN = 64  # bytes
THREADS = min(16, max(4, os.cpu_count() or 1))  # for checksums and comparisons


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


def map_checked(path: str, entries: Sequence[TensorEntry], expected: Mapping[str, tuple[int, ...]]) -> mmap.mmap:
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
        checksums = pool.map(lambda e: zlib.crc32(view[e.offset : e.offset + e.nbytes]), entries)
        for entry, crc32 in zip(entries, checksums, strict=True):
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
        """Fetches and stages a bucket; fetches it in any case: another process may be sending it to several servers."""
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

    def finish(self, version: int, sent_digest: str) -> None:
        """Completes the publish if it has every tensor of the model, and their digest is the one that was sent."""
        try:
            self._require_open(version)
            entries = [entry for bucket, _ in self.buckets for entry in bucket]
            check_names(entries, self._expected)
            if self.error is None and (received_digest := digest(entries)) != sent_digest:
                raise WeightsRefused(f"the tensors have the digest {received_digest}, but {sent_digest} was sent")
            self.complete = self.error is None
        except WeightsRefused as e:
            self._refuse(e)

    def take_buckets(self) -> list[Bucket]:
        """Returns the buckets of a complete publish, once; none of another."""
        if not self.complete:
            self._refuse("it is not complete")
            return []
        buckets, self.buckets, self.complete = self.buckets, [], False
        return buckets

    def _require_open(self, version: int) -> None:
        """Raises WeightsRefused for a bucket of another version, or after the publish is complete."""
        self.version = version if self.version is None else self.version
        if version != self.version or self.complete:
            raise WeightsRefused(f"a bucket of version {version} came into the publish of version {self.version}")

    def _refuse(self, reason: Exception | str) -> None:
        self.error = self.error or str(reason)
        self.buckets, self.complete = [], False


def size_of(entries: Sequence[TensorEntry]) -> int:
    """Returns the bytes from the first tensor's start to the last one's end."""
    return max((entry.offset + entry.nbytes for entry in entries), default=0)


def pack_bytes(entries: Sequence[TensorEntry]) -> list[list[Any]]:
    return [list(dataclasses.astuple(entry)) for entry in entries]


def unpack_entries(packed: Sequence[Sequence[Any]]) -> list[TensorEntry]:
    return [TensorEntry(name, dtype, tuple(shape), *rest) for name, dtype, shape, *rest in packed]


def lay_out(tensors: Iterable[tuple[str, str, tuple[int, ...], int, int]]) -> list[TensorEntry]:
    """Returns the entries of consecutive tensors, given name, dtype, shape, bytes and checksum of each."""
    entries, offset = [], 0
    for name, dtype, shape, nbytes, crc32 in tensors:
        entries.append(TensorEntry(name, dtype, tuple(shape), offset, nbytes, crc32))
        offset += -(-nbytes // ALIGN) * ALIGN
    return entries


def digest(entries: Sequence[TensorEntry]) -> str:
    """Returns a checksum of the tensors: their names, dtypes, shapes and contents, in order."""
    rows = [[entry.name, entry.dtype, list(entry.shape), entry.crc32] for entry in entries]
    return f"{zlib.crc32(json.dumps(rows).encode()):08x}"


def check_names(entries: Sequence[TensorEntry], expected: Mapping[str, tuple[int, ...]], *, whole: bool = True) -> None:
    """Raises WeightsRefused if the entries do not have the `expected` names and shapes; all of them, if `whole`."""
    names = [entry.name for entry in entries]
    have = set(names)
    if missing := [name for name in expected if whole and name not in have]:
        raise WeightsRefused(f"{_name_some(missing)} missing: every publish must have every tensor of the model")
    if unknown := [name for name in names if name not in expected]:
        raise WeightsRefused(f"{_name_some(unknown)} not in the served model")
    if len(names) != len(set(names)):
        raise WeightsRefused(f"{_name_some([n for n in set(names) if names.count(n) > 1])} given twice")
    for entry in entries:
        if entry.shape != tuple(expected[entry.name]):
            served = list(expected[entry.name])
            raise WeightsRefused(f"{entry.name} has shape {list(entry.shape)}, the served model's is {served}")
        if entry.dtype not in DTYPES:
            raise WeightsRefused(f"{entry.name} has dtype {entry.dtype}, must be one of {', '.join(DTYPES)}")


def _name_some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


BLOCK = 1 << 20  # bytes of a tensor: compared and checksummed while in the processor's cache
_HEADER = struct.Struct("<II")  # of the changes of a block: bytes of a gap, number of values
_GAPS: Mapping[int, Any] = {1: np.uint8, 2: np.uint16}
_WORDS: Mapping[str, Any] = {"float32": np.uint32, "bfloat16": np.uint16, "float16": np.uint16}


def changed_positions(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Returns the positions of the elements that differ, in order, between two versions of a block of `_WORDS`."""
    width = 8 // old.itemsize  # bits are compared, not floats: by 8 bytes, which takes half the time
    limit = len(old) // width * width
    words = np.flatnonzero(old[:limit].view(np.uint64) != new[:limit].view(np.uint64))
    candidates = np.concatenate([(words[:, None] * width + np.arange(width)).reshape(-1), np.arange(limit, len(old))])
    positions: np.ndarray = candidates[old[candidates] != new[candidates]]
    return positions


def encode_block(new: np.ndarray, positions: np.ndarray) -> bytes:
    """Encodes one block of integers of which those at `positions`, in order, have changed."""
    gaps = np.diff(positions, prepend=-1) - 1

    def encoded_bytes(width: int) -> int:
        return (len(gaps) + int((gaps >> 8 * width).sum())) * (new.itemsize + width)

    width = min(_GAPS, key=encoded_bytes)
    if encoded_bytes(width) >= new.nbytes:
        return _HEADER.pack(0, len(new)) + new.tobytes()
    filler_counts = gaps >> 8 * width
    gap_codes = np.full(len(gaps) + int(filler_counts.sum()), (1 << 8 * width) - 1, _GAPS[width])
    gap_codes[np.cumsum(filler_counts + 1) - 1] = gaps & (1 << 8 * width) - 1
    values: bytes = new[_positions(gap_codes)].tobytes()
    return _HEADER.pack(width, len(gap_codes)) + values + gap_codes.tobytes()


def decode_block(old: np.ndarray, changes: memoryview) -> tuple[np.ndarray, int]:
    """Returns the new block and the bytes of `changes` that encode it; WeightsRefused if they are malformed."""
    try:
        width, count = _HEADER.unpack_from(changes)
        offset = _HEADER.size
        values = np.frombuffer(changes, old.dtype, count, offset) if count else old[:0]
        offset += values.nbytes
        if width == 0 and count == len(old):
            return values, offset
        gaps = np.frombuffer(changes, _GAPS[width], count, offset) if count else np.zeros(0, _GAPS[width])
        new = old.copy()
        new[_positions(gaps)] = values
    except (struct.error, ValueError, KeyError, IndexError) as e:
        raise WeightsRefused(f"the changes of a block of {len(old)} elements cannot be decoded: {e}") from e
    return new, offset + gaps.nbytes


def _decode_blocks(old: np.ndarray, changes: memoryview) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields each old block of a tensor, and its new contents."""
    for block in _split(old):
        new, used = decode_block(block, changes)
        changes = changes[used:]
        yield block, new
    if len(changes):
        raise WeightsRefused(f"{len(changes)} bytes follow the changes of the last block")


def _split(words: np.ndarray) -> list[np.ndarray]:
    """Returns the blocks of a tensor's integers, as views."""
    step = BLOCK // words.itemsize
    return [words[start : start + step] for start in range(0, len(words), step)]


class Copy:
    """The trainer's copy of the weights that it published last."""

    def __init__(self) -> None:
        self.digest = ""  # of a complete publish
        self._stored_words: dict[str, np.ndarray] = {}

    def replace(self, entries: Sequence[TensorEntry], tensors: Sequence[np.ndarray]) -> None:
        """Stores the tensors of a bucket."""
        with ThreadPoolExecutor(THREADS) as pool:
            for _ in pool.map(lambda pair: np.copyto(*pair), self._word_pairs(entries, tensors)):
                pass

    def changes(self, entries: Sequence[TensorEntry], tensors: Sequence[np.ndarray]) -> list[tuple[str, np.ndarray]]:
        """Stores the tensors of a bucket and returns the changes of each as bytes."""
        pairs = [list(zip(_split(old), _split(new), strict=True)) for old, new in self._word_pairs(entries, tensors)]
        with ThreadPoolExecutor(THREADS) as pool:
            encoded = pool.map(_encode_and_store, itertools.chain(*pairs))
            payloads = [b"".join(itertools.islice(encoded, len(blocks))) for blocks in pairs]
        return [(e.name, np.frombuffer(payload, np.uint8)) for e, payload in zip(entries, payloads, strict=True)]

    def _word_pairs(
        self, entries: Sequence[TensorEntry], tensors: Sequence[np.ndarray]
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns the integers of stored and new tensors; all of them differ where another tensor was stored."""
        self.digest = ""  # the copy is of no version until all tensors are stored
        pairs = []
        for entry, tensor in zip(entries, tensors, strict=True):
            new = np.asarray(tensor, order="C").reshape(-1).view(_WORDS[entry.dtype])
            old = self._stored_words.get(entry.name)
            if old is None or (old.shape, old.dtype) != (new.shape, new.dtype):
                old = self._stored_words[entry.name] = ~new  # differs in every element
            pairs.append((old, new))
        return pairs


@dataclasses.dataclass(frozen=True)
class Changes:
    """The verified changes of a bucket, by tensor."""

    by_name: Mapping[str, memoryview]


class LoadedWeights:
    """A server's copy of the weights that it loaded last; unknown after anything else was loaded."""

    def __init__(self) -> None:
        self.digest = ""  # '': unknown
        self._buckets: list[Bucket] = []

    def hold(self, loaded: Sequence[Bucket]) -> None:
        """Keeps loaded buckets that are in host memory, for later changes of them; forgets others."""
        on_host = bool(loaded) and all(isinstance(data, mmap.mmap) for _, data in loaded)
        self._buckets = list(loaded) if on_host else []
        self.digest = digest([entry for entries, _ in loaded for entry in entries]) if on_host else ""

    def release(self) -> list[mmap.mmap]:
        """Forgets the weights and returns their memory."""
        released, self._buckets, self.digest = [data for _, data in self._buckets], [], ""
        return released

    def check(
        self, base: str, entries: Sequence[TensorEntry], changes: Sequence[TensorEntry], data: memoryview
    ) -> Changes:
        """Verifies that the weights with the digest `base`, changed, have the checksums of `entries`."""
        if base != self.digest:
            raise WeightsRefused(f"the changes are of weights with the digest {base}, here are {self.digest or 'none'}")
        by_name = {entry.name: data[entry.offset : entry.offset + entry.nbytes] for entry in changes}
        tensors = self._tensors()
        if mismatched := [
            e.name for e in entries if e.name not in by_name or tensors.get(e.name, ("",))[0] != _dtype_and_shape(e)
        ]:
            raise WeightsRefused(f"{mismatched[0]} has no changes, or another dtype or shape than before")

        def check_one(entry: TensorEntry) -> None:
            crc32 = 0
            for _, new in _decode_blocks(tensors[entry.name][1], by_name[entry.name]):
                crc32 = zlib.crc32(new.data, crc32)
            check_sum(entry, crc32)

        with ThreadPoolExecutor(THREADS) as pool:
            for _ in pool.map(check_one, entries):
                pass
        return Changes(by_name)

    def apply(self, staged: Sequence[Bucket]) -> list[Bucket]:
        """Returns the whole weights of a checked publish; forgets which they are until `hold`."""
        if not any(isinstance(data, Changes) for _, data in staged):
            return list(staged)
        self.digest = ""
        tensors = self._tensors()
        for _, data in staged:
            for name, changes in data.by_name.items():
                for block, new in _decode_blocks(tensors[name][1], changes):
                    block[:] = new
        new_entries = {entry.name: entry for entries, _ in staged for entry in entries}
        return [
            ([dataclasses.replace(e, crc32=new_entries[e.name].crc32) for e in entries], data)
            for entries, data in self._buckets
        ]

    def _tensors(self) -> dict[str, tuple[Any, np.ndarray]]:
        """Returns kind and integers of each tensor; transient, since a view keeps memory in use."""
        tensors: dict[str, tuple[Any, np.ndarray]] = {}
        for entries, data in self._buckets:
            for e in entries:
                word = np.dtype(_WORDS[e.dtype])
                tensors[e.name] = _dtype_and_shape(e), np.frombuffer(data, word, e.nbytes // word.itemsize, e.offset)
        return tensors


def _positions(gaps: np.ndarray) -> np.ndarray:
    """Returns the positions of the elements that follow these gaps."""
    return np.cumsum(gaps.astype(np.int64) + 1) - 1


def _encode_and_store(pair: tuple[np.ndarray, np.ndarray]) -> bytes:
    """Returns the changes from the old to the new block, and writes them to the old one."""
    old, new = pair
    positions = changed_positions(old, new)
    encoded = encode_block(new, positions)
    old[positions] = new[positions]  # a few cache lines, mostly
    return encoded


def _dtype_and_shape(entry: TensorEntry) -> tuple[str, tuple[int, ...]]:
    return entry.dtype, tuple(entry.shape)
