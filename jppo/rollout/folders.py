"""Publishing to SGLang: a whole new policy as a model directory, which every server loads while it is paused.

    write the directory -> pause -> load, name the version and ask for the name (take) -> resume

SGLang has no route that compares a directory with its model and changes nothing, and a tensor that is missing it
keeps as it was, without a word. So the names and shapes are held against those of the first publish here, before a
server hears of them; that the first was right, the log-probs say.
Two directories are written in turn, as the files of `weights.py` are.
"""

import dataclasses
import os
import pathlib
import shutil
from collections.abc import Callable, Iterable

import numpy as np

from jppo import tensorheader
from jppo.config import UserError
from jppo.rollout import buffers, layout
from jppo.rollout.endpoint import Endpoint, ServerFault
from jppo.rollout.sampler import RolloutError

LOAD = "/update_weights_from_disk"
INFO = "/model_info"
FILE = "model.safetensors"
HEAD_ROOM = 1 << 20  # bytes that are left free for the head, which is known when all tensors are written


class Folders:
    """The two directories, in shared memory or in a `publish_dir`; both have the `config` of the model."""

    def __init__(self, publish_dir: str, config: pathlib.Path):
        if not publish_dir and os.path.isdir(buffers.SHARED_MEMORY):
            publish_dir = buffers.SHARED_MEMORY
        self.folder = buffers.make_folder(publish_dir)
        self._folders = [pathlib.Path(self.folder) / name for name in ("a", "b")]
        for folder in self._folders:
            folder.mkdir()
            shutil.copy(config, folder)

    def write(self, tensors: Iterable[tuple[str, np.ndarray]]) -> tuple[pathlib.Path, list[layout.Entry]]:
        """Writes into the directory that was not written last; returns it and what lies in it."""
        self._folders.reverse()
        folder = self._folders[0]
        try:
            (folder / FILE).unlink(missing_ok=True)  # one that a server still reads stays what it was
            with (folder / FILE).open("wb") as file:
                entries = layout.write(file.fileno(), tensors, start=HEAD_ROOM, align=1)
                head = tensorheader.head(((e.name, e.dtype, e.shape, e.nbytes) for e in entries), room=HEAD_ROOM)
                if len(head) > HEAD_ROOM:
                    raise UserError(f"a model of {len(entries)} tensors has more than SGLang can be given; use vLLM")
                file.write(head)
        except OSError as e:
            raise UserError(
                f"the weights cannot be written to {self.folder}: {e}; rollout.publish_dir must name a folder with"
                " room for them twice"
            ) from e
        return folder, entries

    def close(self) -> None:
        """Removes both."""
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclasses.dataclass(frozen=True)
class Directory:
    """A whole policy in one of the two directories, as `fleet.py` hands it to each server."""

    path: pathlib.Path
    version: int
    model: None = None
    whole: bool = True

    def offer(self, endpoint: Endpoint) -> None:
        """Nothing is asked: there is no route that looks and does not load."""

    def take(self, endpoint: Endpoint) -> None:
        """The server loads it; then it must have the name, which comes with the weights."""
        body = {
            "model_path": str(self.path),
            "load_format": "safetensors",  # else what it was started with, which is 'dummy'
            "weight_version": str(self.version),
            "flush_cache": True,
            "abort_all_requests": False,  # the pause has seen to those
        }
        answered = endpoint.post(LOAD, body)
        if not isinstance(answered, dict) or answered.get("success") is not True:
            raise RolloutError(f"the server at {endpoint.url} did not load version {self.version}: {answered}")
        if (has := named(endpoint)) != str(self.version):
            raise ServerFault(f"the server at {endpoint.url} was given version {self.version} and names {has!r}")


class Publisher:
    """What the servers are given: directories that they read."""

    def __init__(self, folders: Folders):
        self._folders = folders
        self._first: dict[str, tuple[int, ...]] = {}

    def whole(self, tensors: Iterable[tuple[str, np.ndarray]], version: int) -> Directory:
        """A whole policy, written; RolloutError if it has not the tensors that the first had."""
        path, entries = self._folders.write(tensors)
        shapes = {entry.name: entry.shape for entry in entries}
        self._first = self._first or shapes
        if differ := sorted(name for name in {*shapes, *self._first} if shapes.get(name) != self._first.get(name)):
            name = differ[0]
            raise RolloutError(
                f"version {version} of the weights is not the model that was published first: {name} has shape"
                f" {_said(shapes.get(name))} and had {_said(self._first.get(name))}; no server was given it"
            )
        return Directory(path, version)

    def adapter(self, save: Callable[[pathlib.Path], object], version: int) -> Directory:
        """SGLang is given whole policies only."""
        raise UserError("rollout.lora_sync='adapter' is for rollout.name=vllm; take rollout.lora_sync=merge")

    def refused(self) -> None:
        """Nothing is given up: what is written next is a new file."""

    def close(self) -> None:
        """Removes the directories."""
        self._folders.close()


def named(endpoint: Endpoint) -> str:
    """The name of the weights that a server has."""
    answered = endpoint.get(INFO)
    if not isinstance(answered, dict) or "weight_version" not in answered:
        raise ServerFault(f"the server at {endpoint.url} answered {INFO} with {str(answered)[:200]}")
    return str(answered["weight_version"])


def _said(shape: tuple[int, ...] | None) -> str:
    return "none" if shape is None else str(list(shape))
