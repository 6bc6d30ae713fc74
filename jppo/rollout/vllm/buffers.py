"""The trainer's files of published weights, kept until every server has read them.

Two files are written alternately, so the trainer never writes one that a server may still read.
"""

import dataclasses
import os
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jppo.rollout.vllm import layout
from jppo.settings import UserError

SHARED_MEMORY = "/dev/shm"


@dataclasses.dataclass(frozen=True)
class Parcel:
    """One published set of weights."""

    entries: list[layout.TensorEntry]
    path: str  # of the file, as seen by other processes of this machine

    def check_args(self) -> dict[str, Any]:
        """Returns the arguments of `jppo_check` besides the version, as JSON."""
        return {"entries": layout.pack(self.entries), "path": self.path}


@dataclasses.dataclass(frozen=True)
class _File:
    fd: int
    path: str
    place: str  # for messages
    named: bool


def make_folder(publish_dir: str) -> str:
    """Creates a folder in `publish_dir`; '' uses the temporary folder."""
    try:
        return tempfile.mkdtemp(prefix="jppo-weights-", dir=publish_dir if publish_dir else None)
    except OSError as e:
        raise UserError(f"rollout.publish_dir={publish_dir!r}: {e}; use a writable folder") from e


class Buffers:
    """The two files, unnamed in shared memory, so the kernel frees them however the trainer ends.

    With a `publish_dir` they have names there, for servers that cannot see the trainer's open files, as in a container.
    Adapters, which vLLM reads by path, need a folder, too (`named`). The surviving process removes `folder`. If there
    is no room, an unnamed file in one of the `spare` folders replaces one; only servers that can read the trainer's
    open files can use it.
    """

    def __init__(self, publish_dir: str, *, named: bool = False, spare: Sequence[str] = ()):
        self._in_folder = bool(publish_dir) or not hasattr(os, "memfd_create")
        self._spare = [] if not hasattr(os, "memfd_create") else list(spare)
        self._files: list[_File] = []  # the last written one is first
        self.folder: str | None = None
        if named and not publish_dir and os.path.isdir(SHARED_MEMORY):
            publish_dir = SHARED_MEMORY
        if named or self._in_folder:
            self.folder = make_folder(publish_dir)

    def write(self, tensors: Iterable[tuple[str, np.ndarray]]) -> Parcel:
        """Writes a whole model into the file that was not written last."""
        file = self._files.pop() if len(self._files) == 2 else self._open()
        self._files.insert(0, file)
        try:
            entries = layout.write(file.fd, tensors, elsewhere=self._elsewhere)
        except OSError as e:
            raise UserError(
                f"the weights cannot be written to {file.place}: {e}; set rollout.publish_dir to a folder with"
                " room for two copies"
            ) from e
        now = self._files[0]
        if now is not file:
            said = f"no room for the weights in {file.place}: {now.place} is used from now on"
            print(said, file=sys.stderr, flush=True)
        return Parcel(entries, now.path)

    def renew(self) -> None:
        """Replaces the last written file, which a server may still read."""
        self._put_away(self._files.pop(0))

    def close(self) -> None:
        """Frees all files; may be called twice."""
        while self._files:
            self._put_away(self._files.pop())
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _open(self) -> _File:
        if self._in_folder:
            assert self.folder is not None  # created in the constructor
            return _File(*tempfile.mkstemp(dir=self.folder), place=self.folder, named=True)
        return _nameless(os.memfd_create("jppo-weights"), "shared memory")

    def _put_away(self, file: _File) -> None:
        os.close(file.fd)
        if file.named:
            pathlib.Path(file.path).unlink(missing_ok=True)

    def _elsewhere(self, done: int, why: OSError) -> int:
        """Opens a file in the next spare folder, copies the first `done` bytes to it, and replaces the current one."""
        place = self._files[0].place
        left = self._spare[self._spare.index(place) + 1 :] if place in self._spare else self._spare
        for folder in left:
            try:
                with tempfile.TemporaryFile(dir=folder, prefix="jppo-weights-") as opened:
                    _copy(self._files[0].fd, opened.fileno(), done)
                    fresh = _nameless(os.dup(opened.fileno()), folder)
            except OSError:
                continue
            self._put_away(self._files[0])
            self._files[0] = fresh
            return fresh.fd
        raise why


def _nameless(fd: int, place: str) -> _File:
    return _File(fd, f"/proc/{os.getpid()}/fd/{fd}", place, named=False)


def _copy(source: int, target: int, count: int) -> None:
    at = 0
    while at < count and (sent := os.sendfile(target, source, at, count - at)):  # the source may end in padding
        at += sent
