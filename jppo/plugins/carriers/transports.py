"""The ways of a bucket's bytes to a server: a socket, or memory of a GPU that both processes open (CUDA IPC).

Over a socket, `buckets.py` offers buckets and `weight_engine.py` downloads them:

    receiver: the token               trainer: one byte, yes or no
                                      for each tensor: its length and checksum, its bytes

The list of `TensorEntry` is in the request to download; a tensor with another header is from another bucket. The token
protects the weights on the network; nothing is encrypted.

A `CudaDevice` calls CUDA's driver without torch or JAX. It has not run on GPUs yet: its tests have a library whose
memory is the host's. Also imported in the server's interpreter, so this file needs only the standard library and
`layout.py`.
"""

import asyncio
import contextlib
import ctypes
import dataclasses
import hmac
import mmap
import secrets
import socket
import struct
import sys
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

from jppo.rollout.vllm import layout
from jppo.rollout.vllm.layout import TensorEntry, WeightsRefused

LOCAL = "127.0.0.1"
TOKEN_BYTES = 32  # as sent, hexadecimal
YES, NO = b"+", b"-"
HEADER = struct.Struct(">QI")  # bytes of a tensor, its checksum
HELLO_S = 10.0  # until the token must have arrived
FULL_S = 0.002  # until the next attempt where too many wait to be accepted
AGAIN_S = 0.1  # after a connection that could not be accepted
PIECE = 1 << 20  # bytes that are checksummed while in the processor's cache
BACKLOG = 128
UNKNOWN = 256  # connections without a token yet; the oldest make room for further ones


@dataclasses.dataclass(frozen=True)
class Address:
    """The address of one bucket."""

    host: str  # or the name of a socket of this machine
    port: int  # or 0
    token: str
    timeout_s: float  # for all of it


@dataclasses.dataclass(frozen=True)
class _Offer:
    token: str
    entries: Sequence[TensorEntry]
    tensors: Sequence[memoryview]
    connections: set[socket.socket]


class Sender:
    """Listens at `host` and sends an offered bucket to clients with its token, concurrently.

    '': for this machine alone, at a Unix socket without a file, which costs half of TCP's time.
    """

    def __init__(self, host: str, *, timeout_s: float):
        if host or sys.platform != "linux":
            self._host = host or LOCAL
            family, _, _, _, at = socket.getaddrinfo(self._host, 0, type=socket.SOCK_STREAM)[0]
            self._listening = socket.create_server(at[:2], family=family, backlog=BACKLOG)
            self._port = self._listening.getsockname()[1]
        else:
            self._host, self._port = f"jppo-{secrets.token_hex(8)}", 0
            self._listening = socket.socket(socket.AF_UNIX)
            self._listening.bind(f"\0{self._host}")
            self._listening.listen(BACKLOG)
        self._listening.setblocking(False)
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._offers: list[_Offer] = []
        self._loop = asyncio.new_event_loop()
        self._listens = self._loop.create_task(self._listen())
        self._thread = threading.Thread(target=self._run, name="weights", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def offer(self, entries: Sequence[TensorEntry], tensors: Sequence[memoryview]) -> Iterator[Address]:
        """Offers this bucket within the block; then ends its transfers, since the memory may be used again."""
        offer = _Offer(secrets.token_hex(TOKEN_BYTES // 2), entries, tensors, set())
        with self._lock:
            self._offers.append(offer)
        try:
            yield Address(self._host, self._port, offer.token, self._timeout_s)
        finally:
            with self._lock:
                self._end(offer)

    def close(self) -> None:
        """Stops sending; may be called twice."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._listens.cancel)
        self._thread.join()
        with self._lock:
            for offer in list(self._offers):
                self._end(offer)

    def _end(self, offer: _Offer) -> None:
        self._offers = [other for other in self._offers if other is not offer]
        for connection in offer.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        with contextlib.closing(self._loop), self._listening, contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._listens)

    async def _listen(self) -> None:
        """Accepts connections until it is cancelled; the oldest without a token make room for further ones."""
        unknown: dict[asyncio.Task[None], None] = {}
        async with asyncio.TaskGroup() as group:
            while True:
                try:
                    connection, _ = await self._loop.sock_accept(self._listening)
                except OSError:  # the process has no more files for a moment
                    await asyncio.sleep(AGAIN_S)
                    continue
                task = group.create_task(self._greet(connection))
                task.add_done_callback(lambda done: unknown.pop(done, None))
                unknown[task] = None
                if len(unknown) > UNKNOWN:
                    oldest = next(iter(unknown))
                    del unknown[oldest]
                    oldest.cancel()
                await asyncio.sleep(0)

    async def _greet(self, connection: socket.socket) -> None:
        """Reads a token; answers it in a thread, or rejects it."""
        with contextlib.ExitStack() as closing, contextlib.suppress(OSError):
            closing.enter_context(connection)
            if self._port:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            token = b""
            async with asyncio.timeout(HELLO_S):
                while (left := TOKEN_BYTES - len(token)) and (piece := await self._loop.sock_recv(connection, left)):
                    token += piece
            with self._lock:
                offer = next((o for o in self._offers if hmac.compare_digest(token, o.token.encode())), None)
                if offer is None:
                    connection.send(NO)
                    return
                offer.connections.add(connection)
            closing.pop_all()
            threading.Thread(target=self._send, args=(connection, offer), name="weights", daemon=True).start()

    def _send(self, connection: socket.socket, offer: _Offer) -> None:
        # the receiver reports any broken connection
        with connection, contextlib.suppress(OSError, WeightsRefused):
            try:
                connection.settimeout(self._timeout_s)
                connection.sendall(YES)
                for entry, tensor in zip(offer.entries, offer.tensors, strict=True):
                    connection.sendall(HEADER.pack(entry.nbytes, entry.crc32))
                    connection.sendall(tensor)
            finally:
                with self._lock:
                    offer.connections.discard(connection)


def receive(address: Address, entries: Sequence[TensorEntry], memory: mmap.mmap | None = None) -> mmap.mmap:
    """Downloads a bucket into own memory and verifies checksums; WeightsRefused if any is missing.

    `memory` is used if there is some and it is large enough: pages of new memory cost more than the download.
    """
    deadline = time.monotonic() + address.timeout_s
    source = f"{address.host}:{address.port}" if address.port else address.host
    try:
        connection = _connect(address)
    except OSError as e:
        raise WeightsRefused(
            f"the trainer does not answer at {source} ({e}); set rollout.publish_host to its address as seen"
            " from the server"
        ) from e
    with connection:
        progress = "before the first tensor"
        try:
            connection.sendall(address.token.encode())
            answer = bytearray(1)
            _fill(connection, memoryview(answer), deadline)
            if answer != YES:
                raise WeightsRefused(f"the trainer at {source} rejects the token: it has published again, or ended")
            size = layout.size_of(entries)
            data = memory if memory is not None and len(memory) >= size else _allocate(size)
            with memoryview(data) as view:
                for entry in entries:
                    progress = f"in {entry.name}"
                    _receive_one(connection, entry, view[entry.offset : entry.offset + entry.nbytes], deadline)
            return data
        except TimeoutError as e:
            raise WeightsRefused(
                f"the weights did not arrive within {address.timeout_s:g} s: {progress} from {source}"
            ) from e
        except OSError as e:
            raise WeightsRefused(f"the transfer from {source} broke off {progress}: {e}") from e


def _connect(address: Address) -> socket.socket:
    if address.port:
        return socket.create_connection((address.host, address.port), timeout=address.timeout_s)
    connection, deadline = socket.socket(socket.AF_UNIX), time.monotonic() + address.timeout_s
    connection.settimeout(address.timeout_s)
    while True:
        try:
            connection.connect(f"\0{address.host}")
            return connection
        except OSError as e:
            if not isinstance(e, BlockingIOError) or time.monotonic() > deadline:
                connection.close()
                raise
            time.sleep(FULL_S)


def _receive_one(connection: socket.socket, entry: TensorEntry, view: memoryview, deadline: float) -> None:
    """Receives one tensor into `view`; WeightsRefused if its header or checksum is another one."""
    header = bytearray(HEADER.size)
    _fill(connection, memoryview(header), deadline)
    if HEADER.unpack(header) != (entry.nbytes, entry.crc32):
        raise WeightsRefused(f"{entry.name} has a header with another length or checksum than it was written with")
    layout.check_sum(entry, _fill(connection, view, deadline))


def _fill(connection: socket.socket, view: memoryview, deadline: float) -> int:
    """Receives the bytes of `view`; returns their checksum."""
    crc32, filled = 0, 0
    while filled < len(view):
        if (seconds_left := deadline - time.monotonic()) <= 0:
            raise TimeoutError
        connection.settimeout(seconds_left)
        count = connection.recv_into(view[filled : filled + PIECE])
        if not count:
            raise ConnectionResetError("the connection was closed")
        crc32 = zlib.crc32(view[filled : filled + count], crc32)
        filled += count
    return crc32


def _allocate(nbytes: int) -> mmap.mmap:
    data = mmap.mmap(-1, max(nbytes, 1))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # only an optimization
            data.madvise(mmap.MADV_HUGEPAGE)
    return data


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
        self._call("cuMemFree_v2", address)

    @contextlib.contextmanager
    def opened(self, handle: str) -> Iterator[int]:
        """Yields the address of another process' memory in this one."""
        address = _ADDRESS()
        ipc_handle = _Handle.from_buffer_copy(bytes.fromhex(handle))
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), ipc_handle, LAZY_PEER_ACCESS)
        try:
            yield address.value
        finally:
            self._call("cuIpcCloseMemHandle", address)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copies within the GPU; may return before it is done."""
        self._call("cuMemcpyDtoD_v2", target, source, nbytes)

    def wait(self) -> None:
        """Returns when all copies are done."""
        self._call("cuStreamSynchronize", None)

    def _call(self, name: str, *arguments: Any) -> None:
        """Calls a function of the driver in this GPU's context; CudaError if it fails."""
        self._check("cuCtxSetCurrent", self._context)  # it is the thread's
        self._check(name, *arguments)

    def _check(self, name: str, *arguments: Any) -> None:
        if error := getattr(self._lib, name)(*arguments):
            message = ctypes.c_char_p()
            self._lib.cuGetErrorString(error, ctypes.byref(message))
            raise CudaError(f"{name} failed with {error} ({(message.value or b'').decode()})")
