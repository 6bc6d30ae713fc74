"""One HTTP/1.1 request on its own connection, with a limit on everything that the server sends.

Written here, because general clients take several times as long per request, with hundreds under way. Redirects are not
followed, and compressed replies are not asked for.
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

from jppo.errors import escaped

PORTS = {"http": 80, "https": 443}
MOST_HEAD = 1 << 16  # bytes of a line, of all header fields, and of all trailing fields
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
    try:
        address = urllib.parse.urlsplit(url)
        port = PORTS[address.scheme] if address.port is None else address.port
        head = _request_head(method, address, len(body), headers)
        tls = _tls_context() if address.scheme == "https" else None
        reader, writer = await asyncio.open_connection(address.hostname, port, ssl=tls)
    except (KeyError, ValueError, OverflowError) as e:
        raise Broken(f"the address cannot be used: {e}") from e
    try:
        writer.write(head + body)
        reply = await _read_reply(reader, MOST_CONTENT if limit is None else limit)
        writer.close()
        with contextlib.suppress(OSError):  # the reply is complete
            await writer.wait_closed()
        return reply
    except EOFError as e:
        raise Broken("the connection was closed within the reply") from e
    except ValueError as e:
        raise Broken(f"the reply cannot be read: {e}") from e
    finally:
        writer.transport.abort()


def _request_head(method: str, parts: urllib.parse.SplitResult, length: int, headers: Mapping[str, str]) -> bytes:
    fields = {
        "Host": parts.netloc,
        **({"Content-Type": "application/json"} if length else {}),
        "Content-Length": str(length),
        "Accept": "application/json",
        "Accept-Encoding": "identity",
        "Connection": "close",
        **headers,
    }
    target = urllib.parse.quote(parts.path + (f"?{parts.query}" if parts.query else ""), safe="/?&=%:,;+@!$'()*~-._")
    lines = [f"{method} {target if target else '/'} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join([*lines, "", ""]).encode()


async def _read_reply(reader: asyncio.StreamReader, max_bytes: int) -> Reply:
    version, status, *_ = (await _read_line(reader)).split(" ", 2)
    if not version.startswith("HTTP/1."):
        raise ValueError(version[:40])
    fields = {}
    for line in await _read_lines(reader):
        name, _, value = line.partition(":")
        fields[name.strip().lower()] = value.strip()
    if fields.get("transfer-encoding", "identity").lower() != "identity":
        content = await _read_chunks(reader, max_bytes)
    elif "content-length" in fields:
        content = await _read_exactly(reader, int(fields["content-length"]), max_bytes)
    else:
        content = await _read_rest(reader, max_bytes)
    return Reply(int(status), fields, content)


async def _read_chunks(reader: asyncio.StreamReader, max_bytes: int) -> bytes:
    content = bytearray()
    while size := int((await _read_line(reader)).partition(";")[0], 16):
        content += await _read_exactly(reader, size, max_bytes - len(content))
        if await _read_line(reader):
            raise ValueError("a chunk is longer than its size")
    await _read_lines(reader)  # trailing fields are ignored
    return bytes(content)


async def _read_exactly(reader: asyncio.StreamReader, size: int, max_bytes: int) -> bytes:
    if not 0 <= size <= max_bytes:
        raise ValueError(f"its content of {size} bytes is not within 0..{max_bytes}")
    return await reader.readexactly(size)


async def _read_rest(reader: asyncio.StreamReader, max_bytes: int) -> bytes:
    content = bytearray()
    while piece := await reader.read(PIECE):
        content += piece
        if len(content) > max_bytes:
            raise ValueError(f"its content exceeds {max_bytes} bytes")
    return bytes(content)


async def _read_lines(reader: asyncio.StreamReader) -> list[str]:
    """Returns the lines up to an empty one."""
    lines, size = [], 0
    while line := await _read_line(reader):
        lines.append(line)
        size += len(line)
        if size > MOST_HEAD:
            raise ValueError(f"its header exceeds {MOST_HEAD} bytes")
    return lines


async def _read_line(reader: asyncio.StreamReader) -> str:
    line = await reader.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    return line.decode("latin-1").rstrip("\r\n")
