"""Carriers of buckets from the trainer's GPUs: to servers on other GPUs by NCCL, on the same ones by CUDA IPC.

NCCL is called without torch, in the library that JAX's CUDA wheels bring along or the system's; `transports.py` calls
the driver. Neither has run on GPUs yet: tests/plugins/carriers/test_nccl.py has a library that checks all ranks' calls.
"""

import base64
import contextlib
import ctypes
import functools
import importlib.util
import pathlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jppo.errors import UserError
from jppo.plugins.carriers import buckets, transports
from jppo.rollout.protocol import RolloutError
from jppo.rollout.servers.delivery import Step
from jppo.rollout.servers.endpoint import Endpoint
from jppo.rollout.vllm import layout
from jppo.rollout.vllm.layout import TensorEntry
from jppo.rollout.vllm.publish import call_workers

ID_BYTES = 128
UINT8, FLOAT32, SUM = 1, 7, 0  # of ncclDataType_t and ncclRedOp_t
ROOT = 0  # the trainer's rank

_P = ctypes.c_void_p


class UniqueId(ctypes.Structure):
    """ncclUniqueId; passed by value."""

    _fields_ = (("internal", ctypes.c_byte * ID_BYTES),)


_NCCL: dict[str, tuple[Any, ...]] = {
    "ncclGetVersion": (ctypes.POINTER(ctypes.c_int),),
    "ncclGetUniqueId": (ctypes.POINTER(UniqueId),),
    "ncclCommInitRank": (ctypes.POINTER(_P), ctypes.c_int, UniqueId, ctypes.c_int),
    "ncclAllReduce": (_P, _P, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, _P, _P),
    "ncclBroadcast": (_P, _P, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, _P, _P),
    "ncclCommAbort": (_P,),
}
_CUDA: dict[str, tuple[Any, ...]] = {"cudaSetDevice": (ctypes.c_int,), "cudaStreamSynchronize": (_P,)}


def find_library(pattern: str) -> str:
    """Returns the path of a library in the `nvidia` wheels, or its name, for the system's search path."""
    spec = importlib.util.find_spec("nvidia")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    paths = [path for folder in folders for path in sorted(pathlib.Path(folder).glob(f"*/lib/{pattern}"))]
    return str(paths[-1]) if paths else pattern.rstrip("*.")


class Communicator:
    """The trainer's rank, 0, in one communicator with the servers' workers; every call is on CUDA's default stream.

    It is joined once: a thread that is late uses the communicator that it began with, never the next one.
    """

    def __init__(self, device: int, *, nccl: str = "", cuda: str = ""):
        """`device` is the GPU's number; no rank is joined yet."""
        try:
            self._lib = ctypes.CDLL(nccl or find_library("libnccl.so.2"))
            self._cuda = ctypes.CDLL(cuda or find_library("libcudart.so*"))
        except OSError as e:
            raise UserError(
                f"rollout.publish_via='nccl': {e}; install JAX for CUDA, which brings NCCL, or set it to tcp"
            ) from e
        for library, functions in ((self._lib, _NCCL), (self._cuda, _CUDA)):
            for name, arguments in functions.items():
                function = getattr(library, name)
                function.argtypes, function.restype = arguments, ctypes.c_int
        self._lib.ncclGetErrorString.restype = ctypes.c_char_p
        self._device, self._comm = device, _P()
        self._gave_up, self._lock = False, threading.Lock()

    def version(self) -> int:
        """Returns NCCL's version, 22705 for 2.27.5."""
        version = ctypes.c_int()
        self._call("ncclGetVersion", ctypes.byref(version))
        return version.value

    def unique_id(self) -> bytes:
        """Returns the id of a new communicator, for all its ranks."""
        unique_id = UniqueId()
        self._call("ncclGetUniqueId", ctypes.byref(unique_id))
        return bytes(unique_id)

    def join(self, unique_id: bytes, ranks: int, address: int) -> None:
        """Joins with all other ranks, then sums the float32 at `address`, as vLLM's workers do first."""
        self._cuda.cudaSetDevice(self._device)
        comm = _P()
        self._call("ncclCommInitRank", ctypes.byref(comm), ranks, UniqueId.from_buffer_copy(unique_id), ROOT)
        with self._lock:
            self._comm, left = comm, self._gave_up
        if left:
            self.abort()
            raise RolloutError("rollout.publish_via='nccl': the servers joined after the trainer had given up")
        self._call("ncclAllReduce", address, address, 1, FLOAT32, SUM, comm, None)
        self.wait()

    def broadcast(self, address: int, nbytes: int) -> None:
        """Sends memory of the GPU to all ranks; returns before it is sent."""
        self._call("ncclBroadcast", address, address, nbytes, UINT8, ROOT, self._comm, None)

    def wait(self) -> None:
        """Returns when everything is sent."""
        if error := self._cuda.cudaStreamSynchronize(None):
            raise RolloutError(f"rollout.publish_via='nccl': CUDA's error {error} while weights were sent")

    def abort(self) -> None:
        """Leaves the communicator, which ends calls that wait for others; may be called twice."""
        with self._lock:
            comm, self._comm, self._gave_up = self._comm, _P(), True
        if comm:
            self._lib.ncclCommAbort(comm)

    def _call(self, name: str, *arguments: Any) -> None:
        """Calls a function of NCCL on this communicator's GPU; RolloutError if it fails."""
        self._cuda.cudaSetDevice(self._device)  # it is the thread's
        if error := getattr(self._lib, name)(*arguments):
            message = (self._lib.ncclGetErrorString(error) or b"").decode()
            raise RolloutError(f"rollout.publish_via='nccl': {name} failed with {error} ({message})")


@contextlib.contextmanager
def run_alongside(work: Callable[[], None], *, timeout_s: float, give_up: Callable[[], None]) -> Any:
    """Runs `work` in a thread during the block; if either fails or `work` is late, gives up and raises."""
    done: Future[None] = Future()

    def run() -> None:
        try:
            work()
            done.set_result(None)
        except BaseException as e:
            done.set_exception(e)

    thread = threading.Thread(target=run, name="nccl", daemon=True)
    thread.start()
    try:
        yield
        thread.join(timeout_s)
        if not done.done():
            raise RolloutError(f"rollout.publish_via='nccl': servers did not take part within {timeout_s:g} s")
        done.result()
    except BaseException:  # a server that has failed takes no part: `work` would wait for it
        give_up()
        thread.join(timeout_s)
        raise


WAIT_S = 10.0  # after the servers have answered, until the trainer's calls must have ended too


class Nccl(buckets.Carrier):
    """Broadcasts each tensor of a bucket from the first device of this process; all servers are in one communicator.

    Servers that were started or left out since the last publish need a new communicator, by `make`.
    """

    def __init__(self, make: Callable[[], Communicator], device: jax.Device):
        self._make_communicator, self._communicator, self._device = make, make(), device
        self._joined_workers: dict[str, int] = {}  # the servers, and their numbers of workers
        self._unique_id = ""

    def joins(self) -> Iterator[Step]:
        """Yields the steps in which servers join: count their workers and, if these have changed, join them."""
        present: dict[str, tuple[int, set[str]]] = {}
        version = self._communicator.version()

        def count_workers(endpoint: Endpoint) -> None:
            workers = call_workers(endpoint, "jppo_transfer", nccl=True)
            for other in {worker.get("nccl") for worker in workers} - {version}:
                raise RolloutError(
                    f"rollout.publish_via='nccl': the trainer has NCCL {version} and {endpoint.url} has {other}, which"
                    " cannot communicate; install the same nvidia-nccl in both environments, or set it to tcp"
                )
            present[endpoint.url] = (len(workers), {str(worker.get("group")) for worker in workers})

        yield count_workers
        workers = {url: count for url, (count, _) in sorted(present.items())}
        if workers == self._joined_workers and all(groups == {self._unique_id} for _, groups in present.values()):
            return
        self.close()
        self._communicator = communicator = self._make_communicator()
        raw_id, ranks = communicator.unique_id(), 1 + sum(workers.values())
        unique_id = base64.b64encode(raw_id).decode()
        offsets = {url: 1 + sum(list(workers.values())[:i]) for i, url in enumerate(workers)}
        buffer = jax.block_until_ready(jax.device_put(jnp.zeros(1, jnp.float32), self._device))

        def join_as_server(endpoint: Endpoint) -> None:
            info = {"nccl_unique_id_b64": unique_id, "rank_offset": offsets[endpoint.url], "world_size": ranks}
            endpoint.post("/init_weight_transfer_engine", {"init_info": info})

        def join_as_trainer() -> None:
            communicator.join(raw_id, ranks, buffer.unsafe_buffer_pointer())

        with run_alongside(join_as_trainer, timeout_s=WAIT_S, give_up=self.close):
            yield join_as_server
        self._joined_workers, self._unique_id = workers, unique_id

    @contextlib.contextmanager
    def offer(self, bucket: buckets.Tensors) -> Iterator[tuple[list[TensorEntry], Mapping[str, Any]]]:
        """Gathers the tensors on the device and broadcasts them during the block."""
        (entries, arrays), communicator = gather_on_device(bucket, self._device), self._communicator

        def send() -> None:
            for array in arrays:
                if array.nbytes:
                    communicator.broadcast(array.unsafe_buffer_pointer(), array.nbytes)
            communicator.wait()

        with run_alongside(send, timeout_s=WAIT_S, give_up=self.close):
            yield entries, {}

    def close(self) -> None:
        """Leaves the communicator; may be called twice."""
        self._joined_workers, self._unique_id = {}, ""
        self._communicator.abort()


class Ipc(buckets.Carrier):
    """Copies each bucket into a buffer on each GPU, and sends the servers the buffers' handles.

    A buffer is a separate allocation: a handle shows all of its allocation, and JAX's own is the whole pool. Servers
    open the buffer of their GPU, copy it and close it before the next bucket.
    """

    def __init__(self, gpus: Sequence[tuple[jax.Device, transports.CudaDevice]]):
        self._gpus = gpus
        self._buffers: dict[str, tuple[int, int, str]] = {}  # by GPU: bytes, address, handle

    @contextlib.contextmanager
    def offer(self, bucket: buckets.Tensors) -> Iterator[tuple[list[TensorEntry], Mapping[str, Any]]]:
        """Gathers the tensors on every GPU; the buffers are not written again within the block."""
        entries: list[TensorEntry] = []
        try:
            for device, gpu in self._gpus:
                entries, arrays = gather_on_device(bucket, device)
                address = self._ensure_buffer(gpu, layout.size_of(entries))
                for entry, array in zip(entries, arrays, strict=True):
                    if entry.nbytes:
                        gpu.copy(address + entry.offset, array.unsafe_buffer_pointer(), entry.nbytes)
                gpu.wait()
        except transports.CudaError as e:
            raise RolloutError(f"rollout.publish_via='ipc': {e}; set it to file or tcp") from e
        yield entries, {"handles": {uuid: handle for uuid, (_, _, handle) in self._buffers.items()}}

    def close(self) -> None:
        for _, gpu in self._gpus:
            if (buffer := self._buffers.pop(gpu.uuid, None)) is not None:
                with contextlib.suppress(transports.CudaError):  # the process frees it
                    gpu.free(buffer[1])

    def _ensure_buffer(self, gpu: transports.CudaDevice, nbytes: int) -> int:
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


def make_nccl_carrier() -> Nccl:
    """Makes the carrier of this process's first device; UserError if it is no GPU."""
    device = jax.local_devices()[0]
    if device.platform != "gpu":
        raise UserError(f"rollout.publish_via='nccl' sends from a GPU, and JAX runs on a {device.platform}; use tcp")
    return Nccl(functools.partial(Communicator, device.local_hardware_id), device)


def make_ipc_carrier() -> Ipc:
    """Makes the carrier of this process' GPUs; UserError if it has none or no driver."""
    try:
        devices = jax.local_devices()
        if devices[0].platform != "gpu":
            raise transports.CudaError(f"JAX runs on a {devices[0].platform}")
        return Ipc([(device, transports.CudaDevice(device.local_hardware_id)) for device in devices])
    except transports.CudaError as e:
        raise UserError(f"rollout.publish_via='ipc' shares memory of GPUs: {e}; set it to file or tcp") from e


def gather_on_device(bucket: buckets.Tensors, device: jax.Device) -> tuple[list[TensorEntry], list[jax.Array]]:
    """Returns the entries of a bucket, and its tensors on one device."""
    arrays: list[jax.Array] = jax.block_until_ready([jax.device_put(tensor, device) for _, tensor in bucket])
    sums = [int(_checksum(array)) if array.nbytes else 0 for array in arrays]
    tensors = zip(bucket, arrays, sums, strict=True)
    return layout.lay_out((name, a.dtype.name, a.shape, a.nbytes, crc32) for (name, _), a, crc32 in tensors), arrays


@jax.jit
def _checksum(array: jax.Array) -> jax.Array:
    """Returns the sum of the array's words, each times an odd number of its place, modulo 2^32; `crc32` by NCCL."""
    word_dtype = {2: jnp.uint16, 4: jnp.uint32}[array.dtype.itemsize]
    words = jax.lax.bitcast_convert_type(array, word_dtype).reshape(-1).astype(jnp.uint32)
    weights = jax.lax.iota(np.uint32, words.size) * np.uint32(2) + np.uint32(1)
    return jnp.sum(words * weights, dtype=jnp.uint32)
