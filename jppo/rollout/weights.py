"""Publishing to vLLM: a whole new policy handed to every server, or to none, after each update.

    write the file -> every server checks it (offer) -> pause -> load and name the version (take) -> resume

`fleet.py` goes through the steps. A file that any server refuses changes nothing anywhere: the servers go on with
the weights that they have.
"""

import dataclasses
import pathlib
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from jppo.config import UserError
from jppo.rollout.buffers import Buffers
from jppo.rollout.endpoint import Endpoint, ServerFault
from jppo.rollout.sampler import RolloutError


@dataclasses.dataclass(frozen=True)
class Whole:
    """A whole policy in one of the two files, as `fleet.py` hands it to each server."""

    where: Mapping[str, Any]  # what it is and where a server finds it
    version: int
    model: None = None
    whole: bool = True

    def offer(self, endpoint: Endpoint) -> None:
        """The server compares the file with its model; it goes on with the weights that it has."""
        _accept(endpoint, "jppo_check", version=self.version, **self.where)

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
        self._adapters: list[pathlib.Path] = []  # the last ones, beside the model that was written last

    def whole(self, tensors: Iterable[tuple[str, np.ndarray]], version: int) -> Whole:
        """A whole policy, written."""
        self._forget(0)  # they were beside another model
        return Whole(self._buffers.write(tensors).check_args(), version)

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
        self._forget(1)
        last = self._adapters[-1].name if self._adapters else None
        self._adapters.append(path)
        return Adapter(path, version, last)

    def refused(self) -> None:
        """The file written last is given up: a server may still be reading it."""
        self._buffers.renew()

    def close(self) -> None:
        """Frees the files."""
        self._buffers.close()

    def _forget(self, kept: int) -> None:
        while len(self._adapters) > kept:
            shutil.rmtree(self._adapters.pop(0), ignore_errors=True)


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
