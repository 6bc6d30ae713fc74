"""Publishing: a whole new policy handed to every server, or to none. Called by `vllm.py` after each update.

    write the file -> every server checks it -> pause -> load -> name the version -> resume

A file that any server refuses changes nothing anywhere: the servers go on with the weights that they have.
Two files are written in turn: the one that a server may still be reading is never the one being written.
"""

import os
import pathlib
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from jppo.config import UserError
from jppo.rollout import layout
from jppo.rollout.endpoint import Endpoint
from jppo.rollout.sampler import RolloutError

T = TypeVar("T")
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
            try:
                self.folder = tempfile.mkdtemp(prefix="jppo-weights-", dir=publish_dir if publish_dir else None)
            except OSError as e:
                raise UserError(f"rollout.publish_dir={publish_dir!r}: {e}; give a folder that can be written") from e
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


def publish(
    endpoints: Sequence[Endpoint], buffers: Buffers, tensors: Iterable[tuple[str, np.ndarray]], version: int
) -> None:
    """Makes `tensors` the model of every server, named `version`; RolloutError if one will not take it."""
    path, entries = buffers.write(tensors)
    packed = layout.pack(entries)
    with ThreadPoolExecutor(len(endpoints)) as pool:

        def everywhere(do: Callable[[Endpoint], T]) -> list[T]:
            return list(pool.map(do, endpoints))

        try:
            everywhere(lambda e: _accept(e, "jppo_check", path=path, version=version, entries=packed))
            everywhere(lambda e: e.post("/pause?mode=wait"))  # also drops the prefix cache
        except RolloutError:
            buffers.renew()
            raise
        try:
            everywhere(lambda e: _accept(e, "jppo_load", version=version))
            everywhere(lambda e: e.post("/update_weight_version", {"new_version": str(version)}))
        except RolloutError as e:
            buffers.renew()
            raise RolloutError(f"{e}; its weights are in doubt: the server must be started again") from e
        everywhere(lambda e: e.post("/resume"))


class Adapters:
    """The adapters that the servers have, beside the model that was published last.

    Each version has a path and a name of its own: what a server was given under a name stays what it was.
    """

    def __init__(self, folder: str):
        self._folder = pathlib.Path(folder)
        self._run = uuid.uuid4().hex[:8]  # an attached server may still have those of another run
        self.name: str | None = None  # of the last one; requests ask for it

    def publish(self, endpoints: Sequence[Endpoint], save: Callable[[pathlib.Path], object], version: int) -> None:
        """Hands the adapters that `save` writes to every server; the ones before are forgotten."""
        old, name = self.name, f"adapter-{self._run}-{version}"
        path = self._folder / name
        try:
            save(path)
        except OSError as e:
            raise UserError(
                f"the adapters cannot be written to {path}: {e}; rollout.publish_dir must name a folder with room"
            ) from e
        with ThreadPoolExecutor(len(endpoints)) as pool:

            def everywhere(route: str, body: dict[str, str]) -> None:
                list(pool.map(lambda e: e.tell(route, body), endpoints))

            everywhere("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})
            everywhere("/update_weight_version", {"new_version": str(version)})
            self.name = name
            if old is not None:
                everywhere("/v1/unload_lora_adapter", {"lora_name": old})
                shutil.rmtree(self._folder / old, ignore_errors=True)


def _accept(endpoint: Endpoint, method: str, **kwargs: Any) -> None:
    for result in endpoint.call(method, **kwargs):
        if not result["ok"]:
            raise RolloutError(
                f"the vLLM server at {endpoint.url} refused version {kwargs['version']} of the weights:"
                f" {result['error']}"
            )
