"""Publishing to vLLM: a whole new policy handed to every server, or to none, after each update.

    write the file -> every server checks it (offer) -> pause -> load and name the version (take) -> resume

`fleet.py` goes through the steps. A file that any server refuses changes nothing anywhere: the servers go on with
the weights that they have.
Two files are written in turn: the one that a server may still be reading is never the one being written.
"""

import dataclasses
import os
import pathlib
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from jppo.config import UserError
from jppo.rollout import layout
from jppo.rollout.endpoint import Endpoint, ServerFault
from jppo.rollout.sampler import RolloutError

SHARED_MEMORY = "/dev/shm"


class Buffers:
    """The two files. Without names in shared memory, so that the kernel frees them however the trainer ends.

    A `publish_dir` is for a server that cannot see the trainer's own files, as in another container: there
    the files have names, in `folder`, which is removed by whoever survives. Adapters, which vLLM itself reads from a
    path, need one too (`named`).
    """

    def __init__(self, publish_dir: str, *, named: bool = False):
        self.folder: str | None = None
        if named and not publish_dir and os.path.isdir(SHARED_MEMORY):
            publish_dir = SHARED_MEMORY
        if publish_dir or not hasattr(os, "memfd_create"):
            self.folder = make_folder(publish_dir)
        self._files = [self._open(), self._open()]

    def write(self, tensors: Iterable[tuple[str, np.ndarray]]) -> tuple[str, list[layout.Entry]]:
        """Writes into the file that was not written last; returns its path and what lies in it."""
        self._files.reverse()
        fd, path = self._files[0]
        try:
            return path, layout.write(fd, tensors)
        except OSError as e:
            where = self.folder if self.folder is not None else "shared memory"
            raise UserError(
                f"the weights cannot be written to {where}: {e}; rollout.publish_dir must name a folder with"
                " room for them twice"
            ) from e

    def renew(self) -> None:
        """Gives up the file written last: a server may still be reading it."""
        self._close(self._files[0])
        self._files[0] = self._open()

    def close(self) -> None:
        """Frees both."""
        while self._files:
            self._close(self._files.pop())
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _open(self) -> tuple[int, str]:
        if self.folder is not None:
            return tempfile.mkstemp(dir=self.folder)
        fd = os.memfd_create("jppo-weights")
        return fd, f"/proc/{os.getpid()}/fd/{fd}"

    def _close(self, file: tuple[int, str]) -> None:
        os.close(file[0])
        if self.folder is not None:
            os.unlink(file[1])


def make_folder(publish_dir: str) -> str:
    """A folder of our own in `publish_dir`; '' is where temporary files go."""
    try:
        return tempfile.mkdtemp(prefix="jppo-weights-", dir=publish_dir if publish_dir else None)
    except OSError as e:
        raise UserError(f"rollout.publish_dir={publish_dir!r}: {e}; give a folder that can be written") from e


@dataclasses.dataclass(frozen=True)
class Whole:
    """A whole policy in one of the two files, as `fleet.py` hands it to each server."""

    path: str
    entries: list[list[Any]]
    version: int
    model: None = None
    whole: bool = True

    def offer(self, endpoint: Endpoint) -> None:
        """The server compares the file with its model; it goes on with the weights that it has."""
        _accept(endpoint, "jppo_check", path=self.path, version=self.version, entries=self.entries)

    def take(self, endpoint: Endpoint) -> None:
        """The server loads it."""
        _accept(endpoint, "jppo_load", version=self.version)
        endpoint.post("/update_weight_version", {"new_version": str(self.version)})


@dataclasses.dataclass(frozen=True)
class Adapter:
    """Adapters beside the policy that was delivered before.

    Each version has a path and a name of its own: what a server was given under a name stays what it was.
    """

    path: pathlib.Path
    version: int
    before: str | None  # the adapters that these replace
    whole: bool = False

    @property
    def model(self) -> str:
        """Requests ask for it."""
        return self.path.name

    def offer(self, endpoint: Endpoint) -> None:
        """The server reads them, and asks nothing of them yet."""
        endpoint.tell("/v1/load_lora_adapter", {"lora_name": self.model, "lora_path": str(self.path)})

    def take(self, endpoint: Endpoint) -> None:
        """The server forgets those before."""
        endpoint.post("/update_weight_version", {"new_version": str(self.version)})
        if self.before is not None and self.before in _served(endpoint):  # one that was started again has none
            endpoint.tell("/v1/unload_lora_adapter", {"lora_name": self.before})


class Publisher:
    """What the servers are given: files that they read."""

    def __init__(self, buffers: Buffers):
        self._buffers = buffers
        self._run = uuid.uuid4().hex[:8]  # an attached server may still have the adapters of another run
        self._adapter: pathlib.Path | None = None

    def whole(self, tensors: Iterable[tuple[str, np.ndarray]], version: int) -> Whole:
        """A whole policy, written."""
        self._adapter = None  # it was beside another model
        path, entries = self._buffers.write(tensors)
        return Whole(path, layout.pack(entries), version)

    def adapter(self, save: Callable[[pathlib.Path], object], version: int) -> Adapter:
        """Adapters, written by `save`; those before the last go."""
        assert self._buffers.folder is not None  # Buffers was told that there will be some
        path = pathlib.Path(self._buffers.folder) / f"adapter-{self._run}-{version}"
        try:
            save(path)
        except OSError as e:
            raise UserError(
                f"the adapters cannot be written to {path}: {e}; rollout.publish_dir must name a folder with room"
            ) from e
        last, self._adapter = self._adapter, path
        return Adapter(path, version, None if last is None else last.name)

    def refused(self) -> None:
        """The file written last is given up: a server may still be reading it."""
        self._buffers.renew()

    def close(self) -> None:
        """Frees the files."""
        self._buffers.close()


def _served(endpoint: Endpoint) -> list[str]:
    try:
        return [model["id"] for model in endpoint.get("/v1/models")["data"]]
    except (KeyError, TypeError) as e:
        raise ServerFault(f"the server at {endpoint.url} answered /v1/models with no list of models") from e


def _accept(endpoint: Endpoint, method: str, **kwargs: Any) -> None:
    for result in endpoint.call(method, **kwargs):
        if not isinstance(result, dict) or "ok" not in result:
            raise ServerFault(f"the server at {endpoint.url} answered {method} with {str(result)[:300]}")
        if not result["ok"]:
            raise RolloutError(
                f"the vLLM server at {endpoint.url} refused version {kwargs['version']} of the weights:"
                f" {result['error']}"
            )
