"""NCCL without torch: the calls of its C interface by which the trainer sends weights from its GPU to the servers'.

The library is the one that JAX's CUDA wheels bring along, or the system's. Not yet run on GPUs:
tests/rollout/test_nccl.py runs it with a library that checks the order and the arguments of all ranks' calls.
"""

import contextlib
import ctypes
import importlib.util
import pathlib
import threading
from collections.abc import Callable
from typing import Any

from jppo.rollout.protocol import RolloutError
from jppo.settings import UserError

ID_BYTES = 128
UINT8, FLOAT32, SUM = 1, 7, 0  # of ncclDataType_t and ncclRedOp_t
ROOT = 0  # the trainer's rank

_P = ctypes.c_void_p


class UniqueId(ctypes.Structure):
    """ncclUniqueId; passed by value."""

    _fields_ = (("internal", ctypes.c_byte * ID_BYTES),)


_NCCL: dict[str, tuple[Any, ...]] = {
    "ncclGetUniqueId": (ctypes.POINTER(UniqueId),),
    "ncclCommInitRank": (ctypes.POINTER(_P), ctypes.c_int, UniqueId, ctypes.c_int),
    "ncclAllReduce": (_P, _P, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, _P, _P),
    "ncclBroadcast": (_P, _P, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, _P, _P),
    "ncclCommAbort": (_P,),
}
_CUDA: dict[str, tuple[Any, ...]] = {"cudaSetDevice": (ctypes.c_int,), "cudaStreamSynchronize": (_P,)}


def find(pattern: str) -> str:
    """Returns the path of a library in the `nvidia` wheels, or its name, for the system's search path."""
    spec = importlib.util.find_spec("nvidia")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    found = [path for folder in folders for path in sorted(pathlib.Path(folder).glob(f"*/lib/{pattern}"))]
    return str(found[-1]) if found else pattern.rstrip("*.")


class Communicator:
    """The trainer's rank, 0, in one communicator with the servers' workers; every call is on CUDA's default stream.

    It is joined once: a thread that is late uses the communicator that it began with, never the next one.
    """

    def __init__(self, device: int, *, nccl: str = "", cuda: str = ""):
        """`device` is the GPU's number; no rank is joined yet."""
        try:
            self._lib = ctypes.CDLL(nccl or find("libnccl.so.2"))
            self._cuda = ctypes.CDLL(cuda or find("libcudart.so*"))
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
        self._left, self._lock = False, threading.Lock()

    def unique_id(self) -> bytes:
        """Returns the id of a new communicator, for all its ranks."""
        made = UniqueId()
        self._call("ncclGetUniqueId", ctypes.byref(made))
        return bytes(made)

    def join(self, unique_id: bytes, ranks: int, one: int) -> None:
        """Joins with all other ranks, then sums `one`, the address of a float32, as vLLM's workers do first."""
        self._cuda.cudaSetDevice(self._device)
        comm = _P()
        self._call("ncclCommInitRank", ctypes.byref(comm), ranks, UniqueId.from_buffer_copy(unique_id), ROOT)
        with self._lock:
            self._comm, left = comm, self._left
        if left:
            self.abort()
            raise RolloutError("rollout.publish_via='nccl': the servers joined after the trainer had given up")
        self._call("ncclAllReduce", one, one, 1, FLOAT32, SUM, comm, None)
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
            comm, self._comm, self._left = self._comm, _P(), True
        if comm:
            self._lib.ncclCommAbort(comm)

    def _call(self, name: str, *arguments: Any) -> None:
        self._cuda.cudaSetDevice(self._device)  # it is the thread's
        if error := getattr(self._lib, name)(*arguments):
            said = (self._lib.ncclGetErrorString(error) or b"").decode()
            raise RolloutError(f"rollout.publish_via='nccl': {name} failed with {error} ({said})")


@contextlib.contextmanager
def alongside(work: Callable[[], None], *, timeout_s: float, give_up: Callable[[], None]) -> Any:
    """Runs `work` in a thread during the block; if it fails or is late, gives up, and raises if the block does not."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as e:
            failed.append(e)

    thread = threading.Thread(target=run, name="nccl", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join(timeout_s)
        if thread.is_alive():
            failed.append(RolloutError(f"rollout.publish_via='nccl': servers did not take part within {timeout_s:g} s"))
        if failed:
            give_up()
            thread.join(timeout_s)
    if failed:
        raise failed[0]
