"""Publishes of changes: only the elements that differ from the weights that a server proved to have.

    trainer: `Copy.changes` compares a bucket with the last publish and encodes the difference
    server:  `Base.check` verifies the checksums of the new tensors; `Base.apply` changes its copy once all are there

A tensor is cut into blocks. A block is `HEADER` (bytes of a gap, number of values), the new values, and the gaps
between their positions. A gap of 0 bytes: all values of the block follow. A gap that does not fit is split by unchanged
elements, which are sent again. Also imported in the server's interpreter, so it needs only the standard library and
numpy.
"""

import dataclasses
import itertools
import mmap
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from jppo.rollout.vllm import layout
from jppo.rollout.vllm.layout import Bucket, TensorEntry, WeightsRefused

BLOCK = 1 << 20  # bytes: compared and checksummed while in the processor's cache
HEADER = struct.Struct("<II")
GAPS: Mapping[int, Any] = {1: np.uint8, 2: np.uint16}
WORDS: Mapping[str, Any] = {"float32": np.uint32, "bfloat16": np.uint16, "float16": np.uint16}


def compare(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Returns the positions of the elements of a block that differ, in order."""
    step = 8 // old.itemsize  # compared by 8 bytes, which takes half the time
    even = len(old) // step * step
    words = np.flatnonzero(old[:even].view(np.uint64) != new[:even].view(np.uint64))
    near = np.concatenate([(words[:, None] * step + np.arange(step)).reshape(-1), np.arange(even, len(old))])
    positions: np.ndarray = near[old[near] != new[near]]
    return positions


def encode(new: np.ndarray, positions: np.ndarray) -> bytes:
    """Encodes one block of integers of which those at `positions`, in order, have changed."""
    gaps = np.diff(positions, prepend=-1) - 1

    def cost(width: int) -> int:
        return (len(gaps) + int((gaps >> 8 * width).sum())) * (new.itemsize + width)

    width = min(GAPS, key=cost)
    if cost(width) >= new.nbytes:
        return HEADER.pack(0, len(new)) + new.tobytes()
    fillers = gaps >> 8 * width
    codes = np.full(len(gaps) + int(fillers.sum()), (1 << 8 * width) - 1, GAPS[width])
    codes[np.cumsum(fillers + 1) - 1] = gaps & (1 << 8 * width) - 1
    values: bytes = new[_positions(codes)].tobytes()
    return HEADER.pack(width, len(codes)) + values + codes.tobytes()


def decode(old: np.ndarray, changes: memoryview) -> tuple[np.ndarray, int]:
    """Returns the new block and the bytes of `changes` that encode it; WeightsRefused if they are malformed."""
    try:
        width, count = HEADER.unpack_from(changes)
        at = HEADER.size
        values = np.frombuffer(changes, old.dtype, count, at) if count else old[:0]
        at += values.nbytes
        if width == 0 and count == len(old):
            return values, at
        codes = np.frombuffer(changes, GAPS[width], count, at) if count else np.zeros(0, GAPS[width])
        new = old.copy()
        new[_positions(codes)] = values
    except (struct.error, ValueError, KeyError, IndexError) as e:
        raise WeightsRefused(f"the changes of a block of {len(old)} elements cannot be decoded: {e}") from e
    return new, at + codes.nbytes


def decoded(old: np.ndarray, changes: memoryview) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields each old block of a tensor, and its new contents."""
    for block in blocks(old):
        new, used = decode(block, changes)
        changes = changes[used:]
        yield block, new
    if len(changes):
        raise WeightsRefused(f"{len(changes)} bytes follow the changes of the last block")


def blocks(words: np.ndarray) -> list[np.ndarray]:
    """Returns the blocks of a tensor's integers, as views."""
    step = BLOCK // words.itemsize
    return [words[start : start + step] for start in range(0, len(words), step)]


class Copy:
    """The trainer's copy of the weights that it published last."""

    def __init__(self) -> None:
        self.digest = ""  # of a complete publish
        self._words: dict[str, np.ndarray] = {}

    def replace(self, entries: Sequence[TensorEntry], tensors: Sequence[np.ndarray]) -> None:
        """Stores a bucket."""
        with ThreadPoolExecutor(layout.THREADS) as pool:
            for _ in pool.map(lambda pair: np.copyto(*pair), self._pairs(entries, tensors)):
                pass

    def changes(self, entries: Sequence[TensorEntry], tensors: Sequence[np.ndarray]) -> list[tuple[str, np.ndarray]]:
        """Stores a bucket and returns each tensor's changes as bytes."""
        pairs = [list(zip(blocks(old), blocks(new), strict=True)) for old, new in self._pairs(entries, tensors)]
        with ThreadPoolExecutor(layout.THREADS) as pool:
            encoded = pool.map(_encode_and_store, itertools.chain(*pairs))
            payloads = [b"".join(itertools.islice(encoded, len(of_tensor))) for of_tensor in pairs]
        return [(e.name, np.frombuffer(payload, np.uint8)) for e, payload in zip(entries, payloads, strict=True)]

    def _pairs(
        self, entries: Sequence[TensorEntry], tensors: Sequence[np.ndarray]
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns the integers of stored and new tensors; all of them differ where another tensor was stored."""
        self.digest = ""
        pairs = []
        for entry, tensor in zip(entries, tensors, strict=True):
            new = np.asarray(tensor, order="C").reshape(-1).view(WORDS[entry.dtype])
            old = self._words.get(entry.name)
            if old is None or (old.shape, old.dtype) != (new.shape, new.dtype):
                old = self._words[entry.name] = ~new
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
        """Keeps buckets in host memory that were loaded; forgets others."""
        whole = bool(loaded) and all(isinstance(data, mmap.mmap) for _, data in loaded)
        self._buckets = list(loaded) if whole else []
        self.digest = layout.digest([entry for entries, _ in loaded for entry in entries]) if whole else ""

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
        held = self._held()
        if odd := [e.name for e in entries if e.name not in by_name or held.get(e.name, ("",))[0] != _kind(e)]:
            raise WeightsRefused(f"{odd[0]} has no changes, or another dtype or shape than before")

        def check_one(entry: TensorEntry) -> None:
            crc32 = 0
            for _, new in decoded(held[entry.name][1], by_name[entry.name]):
                crc32 = zlib.crc32(new.data, crc32)
            layout.check_sum(entry, crc32)

        with ThreadPoolExecutor(layout.THREADS) as pool:
            for _ in pool.map(check_one, entries):
                pass
        return Changes(by_name)

    def apply(self, staged: Sequence[Bucket]) -> list[Bucket]:
        """Returns the whole weights of a checked publish; forgets which they are until `hold`."""
        if not any(isinstance(data, Changes) for _, data in staged):
            return list(staged)
        self.digest = ""
        held = self._held()
        for _, data in staged:
            for name, changes in data.by_name.items():
                for block, new in decoded(held[name][1], changes):
                    block[:] = new
        new_entries = {entry.name: entry for entries, _ in staged for entry in entries}
        return [
            ([dataclasses.replace(e, crc32=new_entries[e.name].crc32) for e in entries], data)
            for entries, data in self._buckets
        ]

    def _held(self) -> dict[str, tuple[Any, np.ndarray]]:
        """Returns kind and integers of each tensor; transient, since a view keeps memory in use."""
        found: dict[str, tuple[Any, np.ndarray]] = {}
        for entries, data in self._buckets:
            for e in entries:
                word = np.dtype(WORDS[e.dtype])
                found[e.name] = _kind(e), np.frombuffer(data, word, e.nbytes // word.itemsize, e.offset)
        return found


def _positions(codes: np.ndarray) -> np.ndarray:
    return np.cumsum(codes.astype(np.int64) + 1) - 1


def _encode_and_store(pair: tuple[np.ndarray, np.ndarray]) -> bytes:
    old, new = pair
    positions = compare(old, new)
    encoded = encode(new, positions)
    old[positions] = new[positions]  # a few cache lines, mostly
    return encoded


def _kind(entry: TensorEntry) -> tuple[str, tuple[int, ...]]:
    return entry.dtype, tuple(entry.shape)
