"""Publishing to vLLM: a whole policy by one file that all servers of a host map, or adapters by path.

    write the file -> every server checks it (offer) -> pause -> load and label it (take) -> resume

`servers/delivery.py` runs these steps; pause and resume are vLLM's routes of these names. `require_ok` calls a
method of `worker.py` in every worker of a server, by vLLM's `/collective_rpc`; a file that any worker refuses changes
nothing on any server. The plugin `carriers` publishes without a file.
"""

import dataclasses
import errno
import os
import pathlib
import shutil
import sys
import tempfile
import uuid
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import numpy as np

from jppo.errors import UserError
from jppo.rollout.protocol import RolloutError
from jppo.rollout.servers.delivery import Delivery, Offers, Publisher
from jppo.rollout.servers.endpoint import Endpoint, ServerFault
from jppo.rollout.servers.http_client import brief, quoted
from jppo.rollout.servers.replies import reading
from jppo.rollout.vllm import layout

SHARED_MEMORY = "/dev/shm"
UNDER_WAY = 1 << 26  # bytes of tensors being written while the next ones are made
PIECE = 1 << 20  # bytes per read: checksummed and written while in the processor's cache
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Whole(Delivery):
    """A whole policy in one of the two files."""

    entries: Sequence[layout.TensorEntry]
    path: str  # of the file, as seen by other processes of this machine

    def offers(self) -> Offers:
        """Yields one step: the server compares the file with its model; its weights stay."""
        where = {"entries": layout.pack_bytes(self.entries), "path": self.path}
        yield lambda endpoint: require_ok(endpoint, self.version, "jppo_check", version=self.version, **where)

    def take(self, endpoint: Endpoint) -> None:
        require_ok(endpoint, self.version, "jppo_load", version=self.version, path=self.path)
        endpoint.post("/update_weight_version", {"new_version": str(self.version)})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adapter(Delivery):
    """Adapters for the previously delivered policy.

    Each version has its own path and name, so a name on a server never changes its meaning.
    """

    model: str
    path: pathlib.Path
    before: str | None  # the adapters that these replace
    whole: bool = False

    def offers(self) -> Offers:
        """Yields one step: the server loads the adapters; no request uses them yet."""
        yield self._load

    def take(self, endpoint: Endpoint) -> None:
        """Removes the previous adapters from the server."""
        endpoint.post("/update_weight_version", {"new_version": str(self.version)})
        if self.before is not None:  # a restarted server has none
            _unload(endpoint, self.before)

    def _load(self, endpoint: Endpoint) -> None:
        _unload(endpoint, self.model)  # an attached server that broke off has them, and vLLM refuses them then
        endpoint.post_for_text("/v1/load_lora_adapter", {"lora_name": self.model, "lora_path": str(self.path)})


class Parcel(NamedTuple):
    """The entries of one published set of weights, and the path of its file."""

    entries: list[layout.TensorEntry]
    path: str


@dataclasses.dataclass(frozen=True)
class _File:
    fd: int
    path: str
    place: str  # for messages
    named: bool


class Buffers:
    """The two files, written alternately, so that none is written that a server may still read.

    They are unnamed in shared memory, so the kernel frees them however the trainer ends.

    With a `publish_dir` they have names there, for servers that cannot see the trainer's open files, as in a container.
    Adapters, which vLLM reads by path, need a folder, too (`named`). The surviving process removes `folder`. If there
    is no room, an unnamed file in one of the `spare` folders replaces one; only servers that can read the trainer's
    open files can use it.
    """

    def __init__(self, publish_dir: str, *, named: bool = False, spare: Sequence[str] = ()):
        self._named_files = bool(publish_dir) or not hasattr(os, "memfd_create")
        self._spare = [] if not hasattr(os, "memfd_create") else list(spare)
        self._files: list[_File] = []  # the last written one is first
        self.folder: str | None = None
        if named and not publish_dir and os.path.isdir(SHARED_MEMORY):
            publish_dir = SHARED_MEMORY
        if named or self._named_files:
            self.folder = make_folder(publish_dir)

    def write(self, tensors: Iterable[tuple[str, np.ndarray]]) -> Parcel:
        """Writes a whole model into the file that was not written last."""
        file = self._files.pop() if len(self._files) == 2 else self._open()
        self._files.insert(0, file)
        try:
            entries = write_tensors(file.fd, tensors, move_elsewhere=self._move_elsewhere)
        except OSError as e:
            raise UserError(
                f"the weights cannot be written to {file.place}: {e}; set rollout.publish_dir to a folder with"
                " room for two copies"
            ) from e
        current = self._files[0]
        if current is not file:
            message = f"no room for the weights in {file.place}: {current.place} is used from now on"
            print(message, file=sys.stderr, flush=True)
        return Parcel(entries, current.path)

    def renew(self) -> None:
        """Frees the last written file, which a server may still read; the next write makes a new one."""
        if self._files:
            self._free(self._files.pop(0))

    def close(self) -> None:
        """Frees all files; may be called twice."""
        while self._files:
            self._free(self._files.pop())
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _open(self) -> _File:
        if self._named_files:
            assert self.folder is not None  # created in the constructor
            return _File(*tempfile.mkstemp(dir=self.folder), place=self.folder, named=True)
        return _unnamed_file(os.memfd_create("jppo-weights"), "shared memory")

    def _free(self, file: _File) -> None:
        os.close(file.fd)
        if file.named:
            pathlib.Path(file.path).unlink(missing_ok=True)

    def _move_elsewhere(self, written_bytes: int, error: OSError) -> int:
        """Replaces the current file by one in the next spare folder, with a copy of its first `written_bytes`."""
        place = self._files[0].place
        folders = self._spare[self._spare.index(place) + 1 :] if place in self._spare else self._spare
        for folder in folders:
            try:
                with tempfile.TemporaryFile(dir=folder, prefix="jppo-weights-") as temporary:
                    _copy(self._files[0].fd, temporary.fileno(), written_bytes)
                    new_file = _unnamed_file(os.dup(temporary.fileno()), folder)
            except OSError:
                continue
            self._free(self._files[0])
            self._files[0] = new_file
            return new_file.fd
        raise error


def write_tensors(
    fd: int,
    tensors: Iterable[tuple[str, np.ndarray]],
    *,
    start: int = 0,
    align: int = layout.ALIGN,
    move_elsewhere: Callable[[int, OSError], int] | None = None,
) -> list[layout.TensorEntry]:
    """Writes `tensors` consecutively from byte `start` of the file and returns their entries.

    Threads write while the next tensors are made; at most `UNDER_WAY` bytes, or the largest tensor, wait. If there is
    no room, `move_elsewhere(written bytes, error)` returns another file with these bytes, and writing continues there.
    """
    entries: list[layout.TensorEntry] = []
    writes: deque[tuple[layout.TensorEntry, memoryview, Future[int]]] = deque()
    offset = start
    with ThreadPoolExecutor(layout.THREADS) as pool:

        def begin(entry: layout.TensorEntry, data: memoryview) -> None:
            writes.append((entry, data, pool.submit(_write_at, fd, data, entry.offset)))

        def settle() -> None:
            """Waits for the oldest write; if there is no room, continues in another file."""
            nonlocal fd
            entry, _, checksum = writes[0]
            try:
                entries.append(dataclasses.replace(entry, crc32=checksum.result()))
                writes.popleft()
            except OSError as e:
                if move_elsewhere is None or e.errno not in FULL:
                    raise
                pending = list(writes)
                wait([future for _, _, future in pending])
                fd = move_elsewhere(entry.offset, e)
                writes.clear()
                for entry, data, _ in pending:
                    begin(entry, data)

        for name, tensor in tensors:
            data = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data
            begin(layout.TensorEntry(name, tensor.dtype.name, tuple(tensor.shape), offset, data.nbytes, 0), data)
            offset += -(-data.nbytes // align) * align
            while len(writes) > 1 and sum(entry.nbytes for entry, _, _ in writes) > UNDER_WAY:
                settle()
        while writes:
            settle()
    os.ftruncate(fd, offset)
    return entries


def _write_at(fd: int, data: memoryview, offset: int) -> int:
    """Writes `data` and returns its checksum."""
    crc32 = 0
    for start in range(0, len(data), PIECE):
        piece = data[start : start + PIECE]
        crc32 = zlib.crc32(piece, crc32)
        position = offset + start
        while len(piece):  # a call may write less than requested
            count = os.pwrite(fd, piece, position)
            piece, position = piece[count:], position + count
    return crc32


class FilePublisher(Publisher):
    """Writes files for the servers."""

    def __init__(self, buffers: Buffers):
        self._buffers = buffers
        self._run = uuid.uuid4().hex[:8]  # an attached server may still have another run's adapters
        self._adapters: list[pathlib.Path] = []  # the last ones, for the last written model

    def whole(self, tensors: Iterable[tuple[str, np.ndarray]], version: int) -> Delivery:
        self._remove_adapters(0)  # they belonged to another model
        entries, path = self._buffers.write(tensors)
        return Whole(version=version, entries=entries, path=path)

    def adapter(self, save: Callable[[pathlib.Path], object], version: int) -> Adapter:
        """Writes adapters by `save`; removes those before the last."""
        assert self._buffers.folder is not None  # Buffers was created with `named`
        path = pathlib.Path(self._buffers.folder) / f"adapter-{self._run}-{version}"
        try:
            save(path)
        except OSError as e:
            raise UserError(
                f"the adapters cannot be written to {path}: {e}; set rollout.publish_dir to a folder with room"
            ) from e
        self._remove_adapters(1)
        last = self._adapters[-1].name if self._adapters else None
        self._adapters.append(path)
        return Adapter(version=version, model=path.name, path=path, before=last)

    def refused(self) -> None:
        """Abandons the last written file, which a server may still read."""
        self._buffers.renew()

    def close(self) -> None:
        self._buffers.close()

    def _remove_adapters(self, keep: int) -> None:
        while len(self._adapters) > keep:
            shutil.rmtree(self._adapters.pop(0), ignore_errors=True)


def require_ok(endpoint: Endpoint, version: int, method: str, /, **kwargs: Any) -> None:
    """Calls a method of the worker extension on a server; RolloutError if one of its workers refuses these weights."""
    for result in call_workers(endpoint, method, **kwargs):
        if not isinstance(result.get("ok"), bool):
            raise ServerFault(f"the server at {endpoint.url} answered {method} with {brief(result)}")
        if not result["ok"]:
            why = quoted(str(result.get("error")), 2000)
            raise RolloutError(f"the vLLM server at {endpoint.url} refused version {version} of the weights: {why}")


def call_workers(endpoint: Endpoint, method: str, /, **kwargs: Any) -> list[dict[str, Any]]:
    """Calls a method of the worker extension by its name; returns one result per worker."""
    body = {"method": method, "kwargs": kwargs, "timeout": endpoint.timeout_s}
    answered = endpoint.post("/collective_rpc", body)
    results = answered.get("results") if isinstance(answered, dict) else None
    if not isinstance(results, list) or not results or not all(isinstance(result, dict) for result in results):
        raise endpoint.fault(f"answered {method} with {brief(answered)}")
    return results


def _unload(endpoint: Endpoint, adapter: str) -> None:
    """Removes adapters if the server has them."""
    models = endpoint.get_field("/v1/models", "data", list)
    with reading(f"the server at {endpoint.url}", models):
        served = [model["id"] for model in models]
    if adapter in served:
        endpoint.post_for_text("/v1/unload_lora_adapter", {"lora_name": adapter})


def make_folder(publish_dir: str) -> str:
    """Creates a folder in `publish_dir`; '' uses the temporary folder."""
    try:
        return tempfile.mkdtemp(prefix="jppo-weights-", dir=publish_dir if publish_dir else None)
    except OSError as e:
        raise UserError(f"rollout.publish_dir={publish_dir!r}: {e}; use a writable folder") from e


def _unnamed_file(fd: int, place: str) -> _File:
    return _File(fd, f"/proc/{os.getpid()}/fd/{fd}", place, named=False)


def _copy(source: int, target: int, count: int) -> None:
    at = 0
    while at < count and (sent := os.sendfile(target, source, at, count - at)):  # the source may end in padding
        at += sent
