"""Publishing to vLLM: delivers a whole policy to every server, or to none, after each update.

    write the file -> every server checks it (offer) -> pause -> load and set the version (take) -> resume

`fleet.py` runs these steps. A file that any server refuses changes nothing on any server.
"""

import dataclasses
import pathlib
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from jppo.rollout.protocol import RolloutError
from jppo.rollout.servers.endpoint import Endpoint, ServerFault
from jppo.rollout.servers.server_api import Delivery, Offers
from jppo.rollout.vllm.buffers import Buffers
from jppo.settings import UserError


@dataclasses.dataclass(frozen=True)
class Whole:
    """A whole policy in one of the two files."""

    where: Mapping[str, Any]  # description and place of the file
    version: int
    model: None = None
    whole: bool = True
    alone: bool = False

    def offers(self) -> Offers:
        """Yields one step: the server compares the file with its model; its weights stay."""
        yield lambda endpoint: accept(endpoint, self.version, "jppo_check", version=self.version, **self.where)

    def take(self, endpoint: Endpoint) -> None:
        """Loads the file on the server."""
        accept(endpoint, self.version, "jppo_load", version=self.version, path=self.where["path"])
        endpoint.post("/update_weight_version", {"new_version": str(self.version)})


@dataclasses.dataclass(frozen=True)
class Adapter:
    """Adapters for the previously delivered policy.

    Each version has its own path and name, so a name on a server never changes its meaning.
    """

    path: pathlib.Path
    version: int
    before: str | None  # the adapters that these replace
    whole: bool = False
    alone: bool = False

    @property
    def model(self) -> str:
        """Returns the model name for requests."""
        return self.path.name

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
        endpoint.tell("/v1/load_lora_adapter", {"lora_name": self.model, "lora_path": str(self.path)})


class Publisher:
    """Writes files for the servers."""

    def __init__(self, buffers: Buffers):
        self._buffers = buffers
        self._run = uuid.uuid4().hex[:8]  # an attached server may still have another run's adapters
        self._adapters: list[pathlib.Path] = []  # the last ones, for the last written model

    def whole(self, tensors: Iterable[tuple[str, np.ndarray]], version: int) -> Delivery:
        """Writes a whole policy."""
        self._forget(0)  # they belonged to another model
        return Whole(self._buffers.write(tensors).check_args(), version)

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
        self._forget(1)
        last = self._adapters[-1].name if self._adapters else None
        self._adapters.append(path)
        return Adapter(path, version, last)

    def refused(self) -> None:
        """Abandons the last written file, which a server may still read."""
        self._buffers.renew()

    def close(self) -> None:
        """Frees the files."""
        self._buffers.close()

    def _forget(self, kept: int) -> None:
        while len(self._adapters) > kept:
            shutil.rmtree(self._adapters.pop(0), ignore_errors=True)


def _unload(endpoint: Endpoint, adapter: str) -> None:
    """Removes adapters if the server has them."""
    try:
        served = [model["id"] for model in endpoint.get("/v1/models")["data"]]
    except (KeyError, TypeError) as e:
        raise ServerFault(f"the server at {endpoint.url} answered /v1/models with no list of models") from e
    if adapter in served:
        endpoint.tell("/v1/unload_lora_adapter", {"lora_name": adapter})


def accept(endpoint: Endpoint, version: int, method: str, /, **kwargs: Any) -> None:
    """Calls a method of the worker extension; RolloutError if a worker refuses these weights."""
    for result in endpoint.call(method, **kwargs):
        if not isinstance(result, dict) or "ok" not in result:
            raise ServerFault(f"the server at {endpoint.url} answered {method} with {str(result)[:300]}")
        if not result["ok"]:
            raise RolloutError(
                f"the vLLM server at {endpoint.url} refused version {version} of the weights: {result['error']}"
            )
