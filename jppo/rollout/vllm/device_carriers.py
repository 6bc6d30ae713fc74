"""Carriers of buckets from the trainer's GPUs: to servers on other GPUs by NCCL, on the same ones by CUDA IPC.

`nccl.py` and `cuda_ipc.py` call the libraries; neither has run on GPUs yet.
"""

import base64
import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jppo.rollout.protocol import RolloutError
from jppo.rollout.servers.delivery import Step
from jppo.rollout.servers.endpoint import Endpoint
from jppo.rollout.vllm import buckets, cuda_ipc, layout, nccl
from jppo.rollout.vllm.layout import TensorEntry
from jppo.settings import UserError

WAIT_S = 10.0  # after the servers have answered, until the trainer's calls must have ended too


class Nccl:
    """Broadcasts each tensor of a bucket from the first device of this process; all servers are in one communicator.

    Servers that were started or left out since the last publish need a new communicator, by `make`.
    """

    alone = True

    def __init__(self, make: Callable[[], nccl.Communicator], device: jax.Device):
        self._make, self._communicator, self._device = make, make(), device
        self._joined: dict[str, int] = {}  # the servers, and their numbers of workers
        self._id = ""

    def joins(self) -> Iterator[Step]:
        """Yields: ask who is there and, if these are others than before, join them."""
        found: dict[str, tuple[int, set[str]]] = {}

        def ask(endpoint: Endpoint) -> None:
            workers = endpoint.call("jppo_transfer")
            found[endpoint.url] = (len(workers), {worker["group"] for worker in workers})

        yield ask
        workers = {url: count for url, (count, _) in sorted(found.items())}
        if workers == self._joined and all(groups == {self._id} for _, groups in found.values()):
            return
        self.close()
        self._communicator = communicator = self._make()
        made, ranks = communicator.unique_id(), 1 + sum(workers.values())
        unique_id = base64.b64encode(made).decode()
        first = {url: 1 + sum(list(workers.values())[:i]) for i, url in enumerate(workers)}
        one = jax.block_until_ready(jax.device_put(jnp.zeros(1, jnp.float32), self._device))

        def join(endpoint: Endpoint) -> None:
            about = {"nccl_unique_id_b64": unique_id, "rank_offset": first[endpoint.url], "world_size": ranks}
            endpoint.post("/init_weight_transfer_engine", {"init_info": about})

        def enter() -> None:
            communicator.join(made, ranks, one.unsafe_buffer_pointer())

        with nccl.alongside(enter, timeout_s=WAIT_S, give_up=self.close):
            yield join
        self._joined, self._id = workers, unique_id

    @contextlib.contextmanager
    def offer(self, bucket: buckets.Tensors) -> Iterator[tuple[list[TensorEntry], Mapping[str, Any]]]:
        """Gathers the tensors on the device and broadcasts them during the block."""
        (entries, arrays), communicator = gathered(bucket, self._device), self._communicator

        def send() -> None:
            for array in arrays:
                if array.nbytes:
                    communicator.broadcast(array.unsafe_buffer_pointer(), array.nbytes)
            communicator.wait()

        with nccl.alongside(send, timeout_s=WAIT_S, give_up=self.close):
            yield entries, {}

    def close(self) -> None:
        """Leaves the communicator; may be called twice."""
        self._joined, self._id = {}, ""
        self._communicator.abort()


class Ipc:
    """Copies each bucket into a buffer on each GPU, and sends the servers the buffers' handles.

    A buffer is a separate allocation: a handle shows all of its allocation, and JAX's own is the whole pool. Servers
    open the buffer of their GPU, copy it and close it before the next bucket.
    """

    alone = True

    def __init__(self, gpus: Sequence[tuple[jax.Device, cuda_ipc.Gpu]]):
        self._gpus = gpus
        self._buffers: dict[str, tuple[int, int, str]] = {}  # by GPU: bytes, address, handle

    def joins(self) -> Iterator[Step]:
        """Yields nothing: each bucket names its handles."""
        return iter(())

    @contextlib.contextmanager
    def offer(self, bucket: buckets.Tensors) -> Iterator[tuple[list[TensorEntry], Mapping[str, Any]]]:
        """Gathers the tensors on every GPU; the buffers are not written again within the block."""
        entries: list[TensorEntry] = []
        try:
            for device, gpu in self._gpus:
                entries, arrays = gathered(bucket, device)
                address = self._room(gpu, layout.size(entries))
                for entry, array in zip(entries, arrays, strict=True):
                    if entry.nbytes:
                        gpu.copy(address + entry.offset, array.unsafe_buffer_pointer(), entry.nbytes)
                gpu.wait()
        except cuda_ipc.CudaError as e:
            raise RolloutError(f"rollout.publish_via='ipc': {e}; set it to file or tcp") from e
        yield entries, {"handles": {uuid: handle for uuid, (_, _, handle) in self._buffers.items()}}

    def close(self) -> None:
        """Frees the buffers; may be called twice."""
        for _, gpu in self._gpus:
            if (had := self._buffers.pop(gpu.uuid, None)) is not None:
                with contextlib.suppress(cuda_ipc.CudaError):  # the process frees it
                    gpu.free(had[1])

    def _room(self, gpu: cuda_ipc.Gpu, nbytes: int) -> int:
        """Returns the address of a buffer for so many bytes; no server has it open."""
        nbytes = max(nbytes, buckets.BUCKET)
        size, address, _ = self._buffers.get(gpu.uuid, (0, 0, ""))
        if size < nbytes:
            if size:
                del self._buffers[gpu.uuid]
                gpu.free(address)
            address, handle = gpu.allocate(nbytes)
            self._buffers[gpu.uuid] = nbytes, address, handle
        return address


def on_first_gpu() -> Nccl:
    """Makes the carrier of this process's first device; UserError if it is no GPU."""
    device = jax.local_devices()[0]
    if device.platform != "gpu":
        raise UserError(f"rollout.publish_via='nccl' sends from a GPU, and JAX runs on a {device.platform}; use tcp")
    return Nccl(functools.partial(nccl.Communicator, device.local_hardware_id), device)


def on_gpus() -> Ipc:
    """Makes the carrier of this process' GPUs; UserError if it has none or no driver."""
    try:
        devices = jax.local_devices()
        if devices[0].platform != "gpu":
            raise cuda_ipc.CudaError(f"JAX runs on a {devices[0].platform}")
        return Ipc([(device, cuda_ipc.Gpu(device.local_hardware_id)) for device in devices])
    except cuda_ipc.CudaError as e:
        raise UserError(f"rollout.publish_via='ipc' shares memory of GPUs: {e}; set it to file or tcp") from e


def gathered(bucket: buckets.Tensors, device: jax.Device) -> tuple[list[TensorEntry], list[jax.Array]]:
    """Returns the entries of a bucket, and its tensors on one device."""
    arrays: list[jax.Array] = jax.block_until_ready([jax.device_put(tensor, device) for _, tensor in bucket])
    sums = [int(_checksum(array)) if array.nbytes else 0 for array in arrays]
    known = zip(bucket, arrays, sums, strict=True)
    return layout.in_order((name, a.dtype.name, a.shape, a.nbytes, crc32) for (name, _), a, crc32 in known), arrays


@jax.jit
def _checksum(array: jax.Array) -> jax.Array:
    """Returns the sum of the array's words, each times an odd number of its place, modulo 2^32; `crc32` by NCCL."""
    kind = {2: jnp.uint16, 4: jnp.uint32}[array.dtype.itemsize]
    words = jax.lax.bitcast_convert_type(array, kind).reshape(-1).astype(jnp.uint32)
    place = jax.lax.iota(np.uint32, words.size) * np.uint32(2) + np.uint32(1)
    return jnp.sum(words * place, dtype=jnp.uint32)
