"""Where published weights lie on the trainer's side, until every server has them.

Two files are written in turn: the one that a server may still be reading is never the one being written.
"""

import dataclasses
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jppo.config import UserError
from jppo.rollout import layout, transfer

SHARED_MEMORY = "/dev/shm"
LOCAL = "127.0.0.1"
IN_TIME = 0.8  # of the time that a request may take: a transfer that takes longer is refused, with the reason


@dataclasses.dataclass(frozen=True)
class Parcel:
    """One set of weights on its way."""

    entries: list[layout.Entry]
    path: str  # of the file, as another process of this machine sees it
    address: transfer.Address | None  # where a server on another machine gets it

    def check_args(self) -> dict[str, Any]:
        """What `jppo_check` must be told beside the version, as JSON."""
        where = {"path": self.path} if self.address is None else {"address": dataclasses.asdict(self.address)}
        return {"entries": layout.pack(self.entries), **where}


@dataclasses.dataclass(frozen=True)
class _File:
    fd: int
    path: str
    place: str  # for messages
    named: bool


def make_folder(publish_dir: str) -> str:
    """A folder of our own in `publish_dir`; '' is where temporary files go."""
    try:
        return tempfile.mkdtemp(prefix="jppo-weights-", dir=publish_dir if publish_dir else None)
    except OSError as e:
        raise UserError(f"rollout.publish_dir={publish_dir!r}: {e}; give a folder that can be written") from e


def make_buffers(
    publish_dir: str, *, named: bool, spare: Sequence[str], publish_via: str, publish_host: str, timeout_s: float
) -> "Buffers":
    """The buffers as the settings of `rollout` want them; a request to a server may take `timeout_s`."""
    sender = None
    if publish_via == "tcp":
        host = publish_host if publish_host else LOCAL
        try:
            sender = transfer.Sender(host, timeout_s=IN_TIME * timeout_s)
        except OSError as e:
            raise UserError(
                f"rollout.publish_host={publish_host!r}: the trainer cannot listen at {host} ({e}); give an address of"
                " this machine that the servers reach"
            ) from e
    return Buffers(publish_dir, named=named, spare=spare, sender=sender)


class Buffers:
    """The two files. Without names in shared memory, so that the kernel frees them however the trainer ends.

    With a `publish_dir` they have names there, for servers that cannot see the trainer's own files, as in a container.
    Adapters, which vLLM itself reads by path, need a folder too (`named`). `folder` is removed by whoever survives.
    Where there is no room, a file without a name in one of the `spare` folders takes a place: only servers that see
    the trainer's own files can read it, or those that a `sender` gives the bytes to.
    """

    def __init__(
        self,
        publish_dir: str,
        *,
        named: bool = False,
        spare: Sequence[str] = (),
        sender: transfer.Sender | None = None,
    ):
        self._in_folder = bool(publish_dir) or not hasattr(os, "memfd_create")
        self._spare = [] if not hasattr(os, "memfd_create") else list(spare)
        self._sender = sender
        self._files: list[_File] = []  # the one written last is the first
        self.folder: str | None = None
        if named and not publish_dir and os.path.isdir(SHARED_MEMORY):
            publish_dir = SHARED_MEMORY
        if named or self._in_folder:
            self.folder = make_folder(publish_dir)

    def write(self, tensors: Iterable[tuple[str, np.ndarray]]) -> Parcel:
        """Writes a whole model into the file that was not written last."""
        file = self._files.pop() if len(self._files) == 2 else self._open()
        self._files.insert(0, file)
        if self._sender is not None:
            self._sender.withdraw(file.fd)
        try:
            entries = layout.write(file.fd, tensors, elsewhere=self._elsewhere)
        except OSError as e:
            raise UserError(
                f"the weights cannot be written to {file.place}: {e}; rollout.publish_dir must name a folder with"
                " room for them twice"
            ) from e
        now = self._files[0]
        if now is not file:
            said = f"no room for the weights in {file.place}: they are handed over in {now.place} from now on"
            print(said, file=sys.stderr, flush=True)
        address = None if self._sender is None else self._sender.offer(now.fd, entries)
        return Parcel(entries, now.path, address)

    def renew(self) -> None:
        """Gives up the file written last: a server may still be reading it."""
        self._put_away(self._files.pop(0))

    def close(self) -> None:
        """Frees all of it; may be called twice."""
        if self._sender is not None:
            self._sender.close()
        while self._files:
            self._put_away(self._files.pop())
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _open(self) -> _File:
        if self._in_folder:
            assert self.folder is not None  # it was made
            return _File(*tempfile.mkstemp(dir=self.folder), place=self.folder, named=True)
        return _nameless(os.memfd_create("jppo-weights"), "shared memory")

    def _put_away(self, file: _File) -> None:
        if self._sender is not None:
            self._sender.withdraw(file.fd)
        os.close(file.fd)
        if file.named:
            os.unlink(file.path)

    def _elsewhere(self, done: int, why: OSError) -> int:
        """A file in the next spare folder with the first `done` bytes of the one that is written, in its place."""
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
    while at < count:
        at += os.sendfile(target, source, at, count - at)
