"""A minimal HTTP/1.1 server on the loopback interface, with JSON bodies and event streams, for hundreds of clients."""

import asyncio
import contextlib
import json
import socket
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NamedTuple

from jppo.agent.gateway.request import BadRequest

HOST = "127.0.0.1"
MOST_HEAD, MOST_BODY = 2**16, 2**24  # bytes
HEAD_S = 10.0  # until a connection's first request must have shown a key
UNKNOWN = 512  # connections without a key yet; the oldest make room for further ones
AT_ONCE, BACKLOG = 64, 1024  # connections accepted before any is read, a part of UNKNOWN; those that wait for that
REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 413: "Content Too Large"}


class Call(NamedTuple):
    """A request as it arrived."""

    method: str
    path: str
    key: str  # the bearer's, or Anthropic's
    body: bytes
    gone: Callable[[], bool]  # whether the client has closed the connection


Events = Iterable[tuple[str, Any]]  # (name or '', JSON)
Answering = Callable[[Call], Awaitable[dict[str, Any] | Events]]
Admitting = Callable[[str], object]


async def serve(answer: Answering, admit: Admitting) -> asyncio.Server:
    """Starts the server on a free port; `answer` returns JSON or events, or raises BadRequest.

    `admit` raises BadRequest for an unknown key, before the body is read. Other users of the machine can connect, too.
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
        if len(unknown) > UNKNOWN:
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
    server = await asyncio.start_server(handle, sock=listening, limit=MOST_HEAD, backlog=AT_ONCE)
    listening.listen(BACKLOG)
    return server


async def _one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: Answering, admit: Admitting) -> bool:
    """Answers one request; returns whether the connection stays open."""
    stays = False
    try:
        call, stays = await _read(reader, writer, admit)
        found = await answer(call)
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
    length = fields.get("content-length", "0")
    if len(parts) != 3 or not parts[2].startswith("HTTP/1.") or "transfer-encoding" in fields:
        raise BadRequest("the request must be HTTP/1.1 with a Content-Length")
    if not (length.isascii() and length.isdecimal() and len(length) < 16):
        raise BadRequest(f"Content-Length={length[:40]!r} must be a number")
    if int(length) > MOST_BODY:
        raise BadRequest(f"the body has {length} bytes; it must have at most {MOST_BODY}", status=413)
    key = fields.get("x-api-key") or fields.get("authorization", "").split(" ")[-1]
    admit(key)
    if fields.get("expect", "").lower() == "100-continue":
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    body = await reader.readexactly(int(length))
    stays = fields.get("connection", "keep-alive").lower() != "close" and parts[2] == "HTTP/1.1"
    stays &= parts[0] != "HEAD"  # its client expects no body

    def gone() -> bool:
        return reader.at_eof() or reader.exception() is not None

    return Call(parts[0], parts[1].partition("?")[0], key, body, gone), stays


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
