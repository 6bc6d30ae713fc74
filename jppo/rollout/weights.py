"""Publishing: a whole new policy handed to every server, or to none. Called by `vllm.py` after each update.

    write the file -> every server checks it -> pause -> load -> name the version -> resume

A file that any server refuses changes nothing anywhere: the servers go on with the weights that they have.
"""

import pathlib
import shutil
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from jppo.config import UserError
from jppo.rollout.buffers import Buffers
from jppo.rollout.endpoint import Endpoint
from jppo.rollout.sampler import RolloutError

T = TypeVar("T")


def publish(
    endpoints: Sequence[Endpoint], buffers: Buffers, tensors: Iterable[tuple[str, np.ndarray]], version: int
) -> None:
    """Makes `tensors` the model of every server, named `version`; RolloutError if one will not take it."""
    parcel = buffers.write(tensors)
    with ThreadPoolExecutor(len(endpoints)) as pool:

        def everywhere(do: Callable[[Endpoint], T]) -> list[T]:
            return list(pool.map(do, endpoints))

        try:
            everywhere(lambda e: _accept(e, "jppo_check", version=version, **parcel.check_args()))
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
