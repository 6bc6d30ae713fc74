"""Publishing: a whole new policy handed to every server, or to none. Called by `vllm.py` after each update.

    write the file -> every server checks it -> pause -> load -> name the version -> resume

A file that any server refuses changes nothing anywhere: the servers go on with the weights that they have.
Two files are written in turn: the one that a server may still be reading is never the one being written.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from jppo.config import UserError
from jppo.rollout import layout
from jppo.rollout.endpoint import Endpoint
from jppo.rollout.sampler import RolloutError

T = TypeVar("T")


class Buffers:
    """The two files. Without names in shared memory, so that the kernel frees them however the trainer ends.

    A `publish_dir` is for a server that cannot see the trainer's own files, as in another container: there
    the files have names, in `folder`, which is removed by whoever survives.
    """

    def __init__(self, publish_dir: str):
        self.folder: str | None = None
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


def _accept(endpoint: Endpoint, method: str, **kwargs: Any) -> None:
    for result in endpoint.call(method, **kwargs):
        if not result["ok"]:
            raise RolloutError(
                f"the vLLM server at {endpoint.url} refused version {kwargs['version']} of the weights:"
                f" {result['error']}"
            )
