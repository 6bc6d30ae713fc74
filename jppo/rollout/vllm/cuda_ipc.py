"""Memory of a GPU that a trainer shares with its servers, by the calls of CUDA's driver, without torch or JAX.

Also imported in the server's interpreter, so it needs only the standard library. Not yet run on GPUs:
tests/rollout/test_ipc.py runs it with a library whose memory is the host's.
"""

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

LAZY_PEER_ACCESS = 1  # the only flag of cuIpcOpenMemHandle
_P, _ADDRESS = ctypes.c_void_p, ctypes.c_uint64


class CudaError(Exception):
    """CUDA's driver is missing or refused a call."""


class _Handle(ctypes.Structure):
    """CUipcMemHandle; passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


_CALLS: dict[str, tuple[Any, ...]] = {
    "cuInit": (ctypes.c_uint,),
    "cuDeviceGet": (ctypes.POINTER(ctypes.c_int), ctypes.c_int),
    "cuDeviceGetUuid_v2": (ctypes.c_char_p, ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (ctypes.POINTER(_P), ctypes.c_int),
    "cuCtxSetCurrent": (_P,),
    "cuMemAlloc_v2": (ctypes.POINTER(_ADDRESS), ctypes.c_size_t),
    "cuMemFree_v2": (_ADDRESS,),
    "cuMemcpyDtoD_v2": (_ADDRESS, _ADDRESS, ctypes.c_size_t),
    "cuStreamSynchronize": (_P,),
    "cuIpcGetMemHandle": (ctypes.POINTER(_Handle), _ADDRESS),
    "cuIpcOpenMemHandle_v2": (ctypes.POINTER(_ADDRESS), _Handle, ctypes.c_uint),
    "cuIpcCloseMemHandle": (_ADDRESS,),
    "cuGetErrorString": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
}


class CudaDevice:
    """A GPU of this process, by its number, in the context that JAX and torch use, too."""

    def __init__(self, number: int, *, library: str = "libcuda.so.1"):
        """`uuid` is the same in every process."""
        try:
            self._lib = ctypes.CDLL(library)
            for name, arguments in _CALLS.items():
                getattr(self._lib, name).argtypes = arguments
        except (OSError, AttributeError) as e:
            raise CudaError(f"the driver of CUDA cannot be used: {e}") from e
        device, context, uuid = ctypes.c_int(), _P(), ctypes.create_string_buffer(16)
        self._check("cuInit", 0)
        self._check("cuDeviceGet", ctypes.byref(device), number)
        self._check("cuDeviceGetUuid_v2", uuid, device)
        self._check("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.uuid, self._context = uuid.raw.hex(), context

    def allocate(self, nbytes: int) -> tuple[int, str]:
        """Returns the address of new memory, and the handle by which other processes open it."""
        address, handle = _ADDRESS(), _Handle()
        self._call("cuMemAlloc_v2", ctypes.byref(address), nbytes)
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        return address.value, bytes(handle).hex()

    def free(self, address: int) -> None:
        """Frees memory of `allocate`."""
        self._call("cuMemFree_v2", address)

    @contextlib.contextmanager
    def opened(self, handle: str) -> Iterator[int]:
        """Yields the address of another process' memory in this one."""
        address = _ADDRESS()
        given = _Handle.from_buffer_copy(bytes.fromhex(handle))
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), given, LAZY_PEER_ACCESS)
        try:
            yield address.value
        finally:
            self._call("cuIpcCloseMemHandle", address)

    def copy(self, to: int, source: int, nbytes: int) -> None:
        """Copies within the GPU; may return before it is done."""
        self._call("cuMemcpyDtoD_v2", to, source, nbytes)

    def wait(self) -> None:
        """Returns when all copies are done."""
        self._call("cuStreamSynchronize", None)

    def _call(self, name: str, *arguments: Any) -> None:
        self._check("cuCtxSetCurrent", self._context)  # it is the thread's
        self._check(name, *arguments)

    def _check(self, name: str, *arguments: Any) -> None:
        if error := getattr(self._lib, name)(*arguments):
            said = ctypes.c_char_p()
            self._lib.cuGetErrorString(error, ctypes.byref(said))
            raise CudaError(f"{name} failed with {error} ({(said.value or b'').decode()})")
