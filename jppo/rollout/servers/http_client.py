"""One HTTP/1.1 request on its own connection, with a limit on everything that the server sends.

By h11 directly, because general clients take several times as long per request, with hundreds under way. Redirects are
not followed, and compressed replies are not asked for.
"""

import asyncio
import contextlib
import dataclasses
import functools
import reprlib
import ssl
import urllib.parse
from collections.abc import Mapping
from typing import Any

import h11

from jppo.errors import escaped

PORTS = {"http": 80, "https": 443}
MOST_HEAD = 1 << 16  # bytes of all header fields, and of all trailing fields
MOST_CONTENT = 1 << 28  # bytes: the experts or kept tokens of a long response have tens of millions
PIECE = 1 << 16

_BRIEF = reprlib.Repr()
_BRIEF.maxlevel, _BRIEF.maxdict, _BRIEF.maxlist, _BRIEF.maxstring = 4, 8, 8, 200


class Broken(Exception):
    """No complete HTTP reply came."""


@dataclasses.dataclass(frozen=True)
class Reply:
    """A reply's status, header fields by lower-case names, and content."""

    status: int
    headers: Mapping[str, str]
    content: bytes


def quoted(content: bytes | str, max_chars: int) -> str:
    """Returns the first characters of a reply's content in one line."""
    start = content[: 4 * max_chars]
    text = start if isinstance(start, str) else start.decode(errors="replace")
    return " ".join(escaped(text).split())[:max_chars]


def brief(value: Any) -> str:
    """Returns parsed JSON in one short line, however large or nested it is."""
    return _BRIEF.repr(value)[:400]


@functools.cache
def _tls_context() -> ssl.SSLContext:
    return ssl.create_default_context()  # slow to create, so requests share it


async def send(method: str, url: str, body: bytes, headers: Mapping[str, str], *, limit: int | None = None) -> Reply:
    """Sends a request with a JSON body, or with none for b''; OSError or Broken without a complete reply.

    `limit`: bytes of the reply's content; None: `MOST_CONTENT`.
    """
    connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=MOST_HEAD)
    try:
        address = urllib.parse.urlsplit(url)
        port = PORTS[address.scheme] if address.port is None else address.port
        sent = connection.send(_request(method, address, len(body), headers))
        tls = _tls_context() if address.scheme == "https" else None
        reader, writer = await asyncio.open_connection(address.hostname, port, ssl=tls)
    except (KeyError, ValueError, OverflowError, h11.LocalProtocolError) as e:
        raise Broken(f"the address cannot be used: {e}") from e
    try:
        writer.write(sent + connection.send(h11.Data(body)) + connection.send(h11.EndOfMessage()))
        reply = await _read_reply(connection, reader, MOST_CONTENT if limit is None else limit)
        writer.close()
        with contextlib.suppress(OSError):  # the reply is complete
            await writer.wait_closed()
        return reply
    except h11.RemoteProtocolError as e:
        closed = "the connection was closed within the reply"
        raise Broken(closed if reader.at_eof() else f"the reply cannot be read: {e}") from e
    finally:
        writer.transport.abort()


def _request(method: str, address: urllib.parse.SplitResult, length: int, headers: Mapping[str, str]) -> h11.Request:
    fields = {
        "Host": address.netloc,
        **({"Content-Type": "application/json"} if length else {}),
        "Content-Length": str(length),
        "Accept": "application/json",
        "Accept-Encoding": "identity",
        "Connection": "close",
        **headers,
    }
    path = address.path + (f"?{address.query}" if address.query else "")
    target = urllib.parse.quote(path or "/", safe="/?&=%:,;+@!$'()*~-._")
    return h11.Request(method=method, target=target, headers=list(fields.items()))


async def _read_reply(connection: h11.Connection, reader: asyncio.StreamReader, max_bytes: int) -> Reply:
    """Reads a reply whose content has at most `max_bytes`; h11.RemoteProtocolError for any other."""
    head, content = None, bytearray()
    while not isinstance(event := connection.next_event(), h11.EndOfMessage):
        if event is h11.NEED_DATA:
            connection.receive_data(await reader.read(PIECE))
        elif isinstance(event, h11.Response):
            head = event
        elif isinstance(event, h11.Data):
            content += event.data
            if len(content) > max_bytes:
                raise h11.RemoteProtocolError(f"its content exceeds {max_bytes} bytes")
    assert head is not None  # h11 has checked the order of events
    fields = {name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers}
    return Reply(head.status_code, fields, bytes(content))
