"""A minimal HTTP/1.1 server on the loopback interface, with JSON bodies and event streams, for hundreds of clients."""

import asyncio
import contextlib
import json
import re
import socket
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NamedTuple

from jppo.agent.gateway.request import BadRequest

HOST = "127.0.0.1"
MOST_HEAD, MOST_BODY = 2**16, 2**24  # bytes
HEAD_S = 10.0  # until a connection's first request must have shown a key
_UNKNOWN = 512  # connections without a key yet; the oldest make room for further ones
_AT_ONCE, _BACKLOG = 64, 1024  # connections accepted before any is read, a part of _UNKNOWN; those that wait for that
_PROBE_S = 0.5  # between two looks whether a client that sends no more still reads
REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 413: "Content Too Large"}


class Call(NamedTuple):
    """A request as it arrived."""

    method: str
    path: str
    key: str  # the bearer's, or Anthropic's
    body: bytes


Events = Iterable[tuple[str, Any]]  # (name or '', JSON)
Answering = Callable[[Call], Awaitable[dict[str, Any] | Events]]
Admitting = Callable[[str], object]


class _Reader(asyncio.StreamReader):
    """A reader with an event for the end of what the client sends."""

    def __init__(self) -> None:
        super().__init__(limit=MOST_HEAD, loop=asyncio.get_running_loop())
        self.ended = asyncio.Event()

    def feed_eof(self) -> None:
        super().feed_eof()
        self.ended.set()

    def set_exception(self, exc: BaseException) -> None:
        super().set_exception(exc)  # type: ignore[arg-type]
        self.ended.set()


async def serve(answer: Answering, admit: Admitting) -> asyncio.Server:
    """Starts the server on a free port; `answer` returns JSON or events, or raises BadRequest.

    `admit` raises BadRequest for an unknown key, before the body is read. Other users of the machine can connect, too.
    The answer to a client that has gone is cancelled.
    """
    unknown: dict[asyncio.StreamWriter, asyncio.TimerHandle] = {}  # with the end of their time, the oldest first

    def forget(writer: asyncio.StreamWriter) -> None:
        if (late := unknown.pop(writer, None)) is not None:
            late.cancel()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def known(key: str) -> None:
            admit(key)
            forget(writer)

        unknown[writer] = asyncio.get_running_loop().call_later(HEAD_S, writer.transport.abort)
        if len(unknown) > _UNKNOWN:
            oldest = next(iter(unknown))
            forget(oldest)
            oldest.transport.abort()
        try:
            with contextlib.suppress(OSError, EOFError, asyncio.CancelledError):  # the client or the episode has gone
                while await _one(reader, writer, answer, known):
                    pass
        finally:
            forget(writer)
            writer.close()

    listening = socket.create_server((HOST, 0))
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: asyncio.StreamReaderProtocol(_Reader(), handle), sock=listening, backlog=_AT_ONCE
    )
    listening.listen(_BACKLOG)
    return server


async def _one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: Answering, admit: Admitting) -> bool:
    """Answers one request; returns whether the connection stays open."""
    stays = False
    try:
        call, stays = await _read(reader, writer, admit)
        found = await _while_there(answer(call), reader, writer)
        status = 200
    except BadRequest as e:
        error = {"message": str(e), "type": e.code, "code": e.code, "param": None}
        status, found = e.status, {"type": "error", "error": error}
    if isinstance(found, dict):
        writer.write(_head(status, "application/json", stays, body := json.dumps(found).encode()) + body)
    else:
        writer.write(_head(status, "text/event-stream", stays, body := _stream(found)) + body)
    await writer.drain()
    return stays


async def _read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, admit: Admitting) -> tuple[Call, bool]:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.LimitOverrunError as e:
        raise BadRequest(f"the head of the request must be at most {MOST_HEAD} bytes") from e
    line, *rest = head.rstrip().split("\r\n")
    fields = {name.strip().lower(): value.strip() for name, _, value in (one.partition(":") for one in rest)}
    parts = line.split(" ")
    length, coding = fields.get("content-length", "0"), fields.get("transfer-encoding", "").lower()
    if len(parts) != 3 or not parts[2].startswith("HTTP/1.") or coding not in ("", "chunked"):
        raise BadRequest("the request must be HTTP/1.1 with a Content-Length, or chunked")
    if not (length.isascii() and length.isdecimal() and len(length) < 16):
        raise BadRequest(f"Content-Length={length[:40]!r} must be a number")
    _require_short(int(length))
    key = fields.get("x-api-key") or fields.get("authorization", "").split(" ")[-1]
    admit(key)
    if fields.get("expect", "").lower() == "100-continue":
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    body = await _chunks(reader) if coding else await reader.readexactly(int(length))
    stays = fields.get("connection", "keep-alive").lower() != "close" and parts[2] == "HTTP/1.1"
    stays &= parts[0] != "HEAD"  # its client expects no body
    return Call(parts[0], parts[1].partition("?")[0], key, body), stays


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    """Returns a chunked body; fields after it are dropped."""
    body = b""
    while True:
        line = (await reader.readuntil(b"\n")).partition(b";")[0].strip()
        if not re.fullmatch(rb"[0-9a-fA-F]{1,8}", line):
            raise BadRequest(f"a chunk of the body has the size {line[:40]!r}; it must be a hexadecimal number")
        if not (size := int(line, 16)):
            break
        _require_short(len(body) + size)
        body += await reader.readexactly(size)
        await reader.readuntil(b"\n")
    while (await reader.readuntil(b"\n")).strip():
        pass
    return body


def _require_short(length: int) -> None:
    if length > MOST_BODY:
        raise BadRequest(f"the body has {length} bytes or more; it must have at most {MOST_BODY}", status=413)


async def _while_there(answer: Awaitable[Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Any:
    """Returns the answer; cancels it and raises ConnectionError when the client has closed the connection."""
    assert isinstance(reader, _Reader)
    working, ended = asyncio.ensure_future(answer), asyncio.ensure_future(reader.ended.wait())
    try:
        await asyncio.wait({working, ended}, return_when=asyncio.FIRST_COMPLETED)
        while not working.done():
            if _gone(writer):
                raise ConnectionResetError
            await asyncio.wait({working}, timeout=_PROBE_S)
        return working.result()
    finally:
        ended.cancel()
        working.cancel()


def _gone(writer: asyncio.StreamWriter) -> bool:
    """Whether a client that sends no more does not read either: at an interim reply its system then resets."""
    if not writer.is_closing():
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    return writer.is_closing() or bool(writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))


def _head(status: int, kind: str, stays: bool, body: bytes) -> bytes:
    lines = [
        f"HTTP/1.1 {status} {REASONS.get(status, 'Error')}",
        f"Content-Type: {kind}",
        f"Content-Length: {len(body)}",
        f"Connection: {'keep-alive' if stays else 'close'}",
    ]
    return "\r\n".join([*lines, "", ""]).encode()


def _stream(events: Events) -> bytes:
    """Returns a whole stream: an answer's tokens arrive from the engine together."""
    found = list(events)
    lines = [(f"event: {name}\n" if name else "") + f"data: {json.dumps(data)}\n\n" for name, data in found]
    return ("".join(lines) + ("" if all(name for name, _ in found) else "data: [DONE]\n\n")).encode()
