"""A bounded HTTP/1.1 server on asyncio and h11: the front of the gateway and of the Tinker server.

Everybody who reaches the port may connect. A connection is unknown until its first request has shown a key: for
`HEAD_S` at most, and the oldest of `_MAX_UNKNOWN` makes room for another. A body is read only after a known key. Heads
and bodies have bounds, and a client's bytes are read in slices, so that no client waits for another's.
"""

import asyncio
import gc
import http
import json
import re
import socket
import traceback
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, cast

import h11

from jppo.errors import BadRequest
from jppo.process import allow_files

HEAD_S = 10.0  # until a connection must have shown a key, and to read the last reply
MOST_HEAD, MOST_BODY = 2**16, 2**24  # bytes
_MAX_FIELDS = 100  # of a head
_MAX_HELD = 2**30  # bytes of unfinished bodies, all together
_MAX_UNKNOWN = 512  # connections without a key yet, at most
_AT_ONCE, _BACKLOG = 64, 4096  # connections accepted before any is read, a part of those; those that wait for that
_PROBE_S = 0.5  # between two looks whether a client that sends no more still reads
_READ, _READ_CHUNKED = 2**14, 2**12  # bytes that are read at a time; chunks can be single bytes
_ORIGIN = re.compile("^https?://[^/?]*", re.IGNORECASE)


class HttpRequest(NamedTuple):
    """A request as it arrived."""

    method: str
    path: str
    key: str  # the bearer's, or that of X-API-Key
    body: bytes


class HttpReply(NamedTuple):
    """A reply to a request."""

    body: bytes
    kind: str = "application/json"
    status: int = 200


def json_reply(value: Any, status: int = 200) -> HttpReply:
    return HttpReply(json.dumps(value).encode(), status=status)


def json_object(body: bytes) -> dict[str, Any]:
    """Parses a body that must be a JSON object; BadRequest for another body."""
    gc_enabled = gc.isenabled()
    gc.disable()  # it would look at millions of new lists again and again
    try:
        parsed = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as e:
        raise BadRequest(f"the body is not valid JSON: {e}") from e
    finally:
        if gc_enabled:
            gc.enable()
    if not isinstance(parsed, dict):
        raise BadRequest("the body must be a JSON object")
    return parsed


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


class HttpServer:
    """A server on a loop, and its connections."""

    def __init__(
        self,
        answer: Callable[[HttpRequest], Awaitable[HttpReply]],
        admit: Callable[[str], object],
        refusal: Callable[[BadRequest], HttpReply],
    ):
        """`answer` gets a request, `admit` its key; both may raise BadRequest, which `refusal` turns into a reply.

        The answer to a client that has gone is cancelled.
        """
        self.answer, self.admit, self.refusal = answer, admit, refusal
        self.buffer = memoryview(bytearray(_READ))  # of the connection that is read
        self.unknown: dict[_Connection, None] = {}  # without a key yet, the oldest first
        self.waiting: dict[_Connection, None] = {}  # for their clients, the longest first
        self.answering: dict[_Connection, None] = {}
        self.held = 0  # bytes of unfinished bodies

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Starts to listen and returns the address; port 0 takes a free one."""
        file_limit = allow_files()
        self.most_unknown, self.most_known = min(_MAX_UNKNOWN, file_limit // 4), file_limit // 2
        listening = socket.create_server((host, port))
        self.loop = asyncio.get_running_loop()
        self._listener = await self.loop.create_server(lambda: _Connection(self), sock=listening, backlog=_AT_ONCE)
        listening.listen(_BACKLOG)
        return cast(tuple[str, int], listening.getsockname()[:2])

    def close(self) -> None:
        """Ends the server and its connections; called on its loop."""
        self._listener.close()
        for connection in (*self.unknown, *self.waiting, *self.answering):
            connection.abort()

    def move(self, connection: "_Connection", group_of: "dict[_Connection, None] | None") -> None:
        """Moves a connection to the end of a group, or out of all; the oldest of a full group is ended."""
        for group in (self.unknown, self.waiting, self.answering):
            group.pop(connection, None)
        if group_of is not None:
            group_of[connection] = None
        if len(self.unknown) > self.most_unknown:
            next(iter(self.unknown)).abort()
        if self.waiting and len(self.waiting) + len(self.answering) > self.most_known:
            next(iter(self.waiting)).abort()

    def hold(self, count: int) -> None:
        """Counts bytes of unfinished bodies; beyond the bound, the body that has waited longest makes room."""
        self.held += count
        while self.held > _MAX_HELD:
            next(connection for connection in self.waiting if connection.body).abort()


class _Connection(asyncio.BufferedProtocol):
    """A client's connection: bytes to h11, its events to one request at a time, and the reply."""

    transport: asyncio.Transport

    def __init__(self, server: HttpServer):
        """Makes the state of a connection that has not shown a key yet."""
        self._server = server
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=MOST_HEAD)
        self.body = bytearray()
        self._request = HttpRequest("", "", "", b"")  # without its body
        self._task: asyncio.Task[None] | None = None  # of the answer
        self._unread = 0  # bytes that arrived during answers, and are not yet read
        self._written = asyncio.Event()
        self._written.set()
        self._chunked = False
        self._client_done = self._ended = False  # the client sends no more; what it sends is dropped

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._timeout = self._server.loop.call_later(HEAD_S, self.abort)
        self._server.move(self, self._server.unknown)

    def connection_lost(self, exc: Exception | None) -> None:
        self.abort()
        if self._task is not None:
            self._task.cancel()

    def abort(self) -> None:
        """Ends the connection at once."""
        self._ended = True
        self._timeout.cancel()
        self._server.move(self, None)
        self._take_body()
        self.transport.abort()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._server.buffer[: _READ_CHUNKED if self._chunked else _READ]

    def buffer_updated(self, count: int) -> None:
        """Passes the bytes that arrived to h11, or stops reading while too many wait behind an answer."""
        if self._ended:
            return
        self._http.receive_data(self._server.buffer[:count].tobytes())
        if self._task is None:
            self._read()
        else:
            self._unread += count
            if self._unread > MOST_HEAD:
                self.transport.pause_reading()

    def eof_received(self) -> bool:
        """Keeps the connection of a client that sends no more but waits for its answer."""
        if self._task is None or self._ended:
            return False
        self._client_done = True
        self._http.receive_data(b"")
        self._probe()
        return True

    def pause_writing(self) -> None:
        self._written.clear()

    def resume_writing(self) -> None:
        self._written.set()

    def _read(self) -> None:
        """Reads on to the end of a request, then starts the task of its answer."""
        try:
            while self._task is None and not self._ended:
                event = self._http.next_event()
                if isinstance(event, h11.Request):
                    self._begin(event)
                elif isinstance(event, h11.Data):
                    self.body += event.data
                    self._server.hold(len(event.data))
                    _require_length(len(self.body))
                elif isinstance(event, h11.EndOfMessage):
                    self._server.move(self, self._server.answering)
                    request = self._request._replace(body=self._take_body())
                    self._task = self._server.loop.create_task(self._answer(request))
                    if self._client_done:
                        self._probe()
                elif isinstance(event, h11.ConnectionClosed):
                    self.transport.close()
                    return
                else:  # more bytes are needed
                    self._unread = 0
                    self.transport.resume_reading()
                    return
        except h11.RemoteProtocolError as e:
            reason = f"the request must be HTTP/1.1: {str(e).partition(': bytearray')[0]}"
            if e.error_status_hint == http.HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE:
                reason = f"the head of the request must be at most {MOST_HEAD} bytes"
            self._refuse(BadRequest(reason, status=e.error_status_hint))
        except BadRequest as e:
            self._refuse(e)

    def _begin(self, head: h11.Request) -> None:
        """Checks the head of a request and admits its key; a body is read for a known key only."""
        fields = {name.decode(): value.decode("latin-1") for name, value in head.headers}
        key = fields.get("x-api-key") or fields.get("authorization", "").split(" ")[-1]
        path = _ORIGIN.sub("", head.target.decode()).partition("?")[0]
        self._request = HttpRequest(head.method.decode(), path, key, b"")
        if head.http_version not in (b"1.1", b"1.0"):
            raise BadRequest("the request must be HTTP/1.1", status=505)
        if len(head.headers) > _MAX_FIELDS:
            raise BadRequest(f"the head of the request must have at most {_MAX_FIELDS} fields", status=431)
        self._chunked = "transfer-encoding" in fields
        if self._chunked and ("content-length" in fields or head.http_version == b"1.0"):
            raise BadRequest("the request must have a Content-Length, or be chunked in HTTP/1.1, but not both")
        self._server.admit(key)
        self._timeout.cancel()
        self._server.move(self, self._server.waiting)
        if "content-encoding" in fields:
            raise BadRequest("Content-Encoding is not supported; send the body as it is", status=415)
        _require_length(int(fields.get("content-length", "0")))
        if self._http.they_are_waiting_for_100_continue:
            self._continue()

    async def _answer(self, request: HttpRequest) -> None:
        """Answers a request, then reads the next one."""
        try:
            self._send(await self._server.answer(request))
        except BadRequest as e:
            self._send(self._server.refusal(e))
        except RecursionError:
            self._send(self._server.refusal(BadRequest("the body is nested too deeply; send a flatter one")))
        except asyncio.CancelledError:  # the client or the episode has gone
            self.abort()
            raise
        except Exception as e:
            traceback.print_exception(e)
            reason = f"the server failed: {type(e).__name__}; see its output"
            self._send(self._server.refusal(BadRequest(reason, "server_error", 500)))
        self._server.move(self, self._server.waiting)
        await self._written.wait()
        self._task = None
        if self.transport.is_closing():
            return
        if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
            self._close_after_reply()
        else:
            self._http.start_next_cycle()
            self._read()

    def _send(self, reply: HttpReply) -> None:
        """Writes a reply; the connection is to be closed after one that comes before the request's end."""
        if self.transport.is_closing():
            return
        headers = [("Content-Type", reply.kind), ("Content-Length", str(len(reply.body)))]
        no_body = self._request.method == "HEAD"
        if no_body or self._http.their_state is not h11.DONE:
            headers.append(("Connection", "close"))
        reason = http.HTTPStatus(reply.status).phrase
        data = self._http.send(h11.Response(status_code=reply.status, headers=headers, reason=reason))
        if not no_body:
            data += self._http.send(h11.Data(data=reply.body))
        self.transport.write(data + self._http.send(h11.EndOfMessage()))

    def _refuse(self, error: BadRequest) -> None:
        """Answers a request with an error, and reads no more of it."""
        self._send(self._server.refusal(error))
        self._close_after_reply()

    def _close_after_reply(self) -> None:
        """Ends the connection once its client has the reply: it reads the rest of the request first.

        A socket that is closed with unread bytes is reset, and the client may lose a reply that is on its way.
        """
        self._ended = True
        self._take_body()
        self._timeout.cancel()
        self._timeout = self._server.loop.call_later(HEAD_S, self.abort)
        self.transport.resume_reading()
        if self._client_done:
            self.transport.close()
        elif not self.transport.is_closing():
            self.transport.write_eof()

    def _continue(self) -> None:
        self.transport.write(self._http.send(h11.InformationalResponse(status_code=100, headers=[], reason="Continue")))

    def _probe(self) -> None:
        """Sends interim replies to a client that sends no more: if it does not read either, its system resets."""
        is_waiting = self._http.our_state is h11.SEND_RESPONSE and self._http.their_http_version == b"1.1"
        if is_waiting and not self.transport.is_closing():
            self._continue()
            self._timeout.cancel()
            self._timeout = self._server.loop.call_later(_PROBE_S, self._probe)
            if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self.abort()

    def _take_body(self) -> bytes:
        """Returns the body that was read so far and forgets it."""
        body, self.body = bytes(self.body), bytearray()
        self._server.held -= len(body)
        return body


def _require_length(length: int) -> None:
    """BadRequest for a body over MOST_BODY bytes."""
    if length > MOST_BODY:
        raise BadRequest(f"the body has {length} bytes or more; it must have at most {MOST_BODY}", status=413)
