"""Publishing to SGLang: a whole policy as a model directory, which every server loads while paused.

    write the directory -> pause -> load, set and check the version name (take) -> resume

SGLang has no route that checks a directory without loading it, and it silently keeps old values for missing tensors. So
names and shapes are compared with the first publish here, before any server loads them; the agreement of log-probs
checks every publish. Two directories are written alternately, like the files of `vllm/publish.py`.
"""

import dataclasses
import os
import pathlib
import shutil
from collections.abc import Callable, Iterable

import numpy as np

from jppo import tensorheader
from jppo.rollout.protocol import RolloutError
from jppo.rollout.servers.delivery import Offers
from jppo.rollout.servers.endpoint import Endpoint, ServerFault
from jppo.rollout.vllm import layout
from jppo.rollout.vllm.publish import SHARED_MEMORY, make_folder
from jppo.settings import UserError

LOAD = "/update_weights_from_disk"
INFO = "/model_info"
FILE = "model.safetensors"
HEAD_ROOM = 1 << 20  # bytes reserved for the header, which is known after all tensors are written


@dataclasses.dataclass(frozen=True)
class Directory:
    """A whole policy in one of the two directories."""

    path: pathlib.Path
    version: int
    model: None = None
    whole: bool = True
    alone: bool = False

    def offers(self) -> Offers:
        """Yields nothing: no route checks without loading."""
        yield from ()

    def take(self, endpoint: Endpoint) -> None:
        """Loads it on the server and checks the version name."""
        body = {
            "model_path": str(self.path),
            "load_format": "safetensors",  # otherwise the start option applies, which is 'dummy'
            "weight_version": str(self.version),
            "flush_cache": True,
            "abort_all_requests": False,  # the pause has handled them
        }
        answered = endpoint.post(LOAD, body)
        if not isinstance(answered, dict) or answered.get("success") is not True:
            raise RolloutError(f"the server at {endpoint.url} did not load version {self.version}: {answered}")
        if (has := named(endpoint)) != str(self.version):
            raise ServerFault(f"the server at {endpoint.url} was given version {self.version} but reports {has!r}")


class Publisher:
    """Writes whole policies as directories: two, in shared memory or in `publish_dir`, with the model's `config`."""

    def __init__(self, publish_dir: str, config: pathlib.Path):
        if not publish_dir and os.path.isdir(SHARED_MEMORY):
            publish_dir = SHARED_MEMORY
        self.folder = make_folder(publish_dir)
        self._folders = [pathlib.Path(self.folder) / name for name in ("a", "b")]
        for folder in self._folders:
            folder.mkdir()
            shutil.copy(config, folder)
        self._first: dict[str, tuple[int, ...]] = {}

    def whole(self, tensors: Iterable[tuple[str, np.ndarray]], version: int) -> Directory:
        """Writes a whole policy; RolloutError if its tensors differ from the first publish."""
        path, entries = self._write(tensors)
        shapes = {entry.name: entry.shape for entry in entries}
        self._first = self._first or shapes
        if differ := sorted(name for name in {*shapes, *self._first} if shapes.get(name) != self._first.get(name)):
            name = differ[0]
            raise RolloutError(
                f"version {version} of the weights differs from the first published model: {name} has shape"
                f" {_said(shapes.get(name))} instead of {_said(self._first.get(name))}; no server received it"
            )
        return Directory(path, version)

    def adapter(self, save: Callable[[pathlib.Path], object], version: int) -> Directory:
        """Refuses: SGLang only loads whole policies."""
        raise UserError("rollout.lora_sync='adapter' needs rollout.name=vllm; use rollout.lora_sync=merge")

    def refused(self) -> None:
        """Does nothing: the next write creates a new file."""

    def close(self) -> None:
        """Removes the directories."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _write(self, tensors: Iterable[tuple[str, np.ndarray]]) -> tuple[pathlib.Path, list[layout.TensorEntry]]:
        """Writes into the directory that was not written last."""
        self._folders.reverse()
        folder = self._folders[0]
        try:
            (folder / FILE).unlink(missing_ok=True)  # a file that a server still reads stays unchanged
            with (folder / FILE).open("wb") as file:
                entries = layout.write(file.fileno(), tensors, start=HEAD_ROOM, align=1)
                head = tensorheader.make_header(((e.name, e.dtype, e.shape, e.nbytes) for e in entries), room=HEAD_ROOM)
                if len(head) > HEAD_ROOM:
                    raise UserError(f"a model of {len(entries)} tensors is too large for SGLang; use vLLM")
                file.write(head)
        except OSError as e:
            raise UserError(
                f"the weights cannot be written to {self.folder}: {e}; set rollout.publish_dir to a folder with"
                " room for two copies"
            ) from e
        return folder, entries


def named(endpoint: Endpoint) -> str:
    """Returns the name of a server's weights."""
    return str(endpoint.get_field(INFO, "weight_version"))


def _said(shape: tuple[int, ...] | None) -> str:
    return "none" if shape is None else str(list(shape))
