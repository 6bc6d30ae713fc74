"""Buckets by CUDA IPC: from the trainer's GPUs to servers on the same ones, by copies within each GPU.

Every GPU of the trainer has a buffer of one bucket, a separate allocation: a handle shows all of its allocation, and
JAX's own is the whole pool. Servers open the buffer of their GPU, copy it and close it before the next bucket.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from jppo.rollout.protocol import RolloutError
from jppo.rollout.vllm import buckets, cuda_ipc, layout
from jppo.rollout.vllm.layout import TensorEntry
from jppo.rollout.vllm.nccl_carrier import gathered
from jppo.settings import UserError


class Ipc:
    """Copies each bucket into the buffers, and sends the servers their handles by GPU."""

    alone = True

    def __init__(self, gpus: Sequence[tuple[jax.Device, cuda_ipc.Gpu]]):
        self._gpus = gpus
        self._buffers: dict[str, tuple[int, int, str]] = {}  # by GPU: bytes, address, handle

    def joins(self) -> Iterator[buckets.Step]:
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


def on_gpus() -> Ipc:
    """Makes the carrier of this process' GPUs; UserError if it has none or no driver."""
    try:
        devices = jax.local_devices()
        if devices[0].platform != "gpu":
            raise cuda_ipc.CudaError(f"JAX runs on a {devices[0].platform}")
        return Ipc([(device, cuda_ipc.Gpu(device.local_hardware_id)) for device in devices])
    except cuda_ipc.CudaError as e:
        raise UserError(f"rollout.publish_via='ipc' shares memory of GPUs: {e}; set it to file or tcp") from e
