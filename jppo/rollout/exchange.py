"""One HTTP request and its answer, for `endpoint.py`, which sends hundreds side by side.

A general client takes several times as long for each, which the servers wait for where they share the processor.
"""

import asyncio
import base64
import contextlib
import ssl
import urllib.parse
from collections.abc import AsyncIterator

PORTS = {"http": 80, "https": 443}


class Broken(Exception):
    """What came is no whole answer of HTTP."""


async def post(url: str, body: bytes, *, tls: ssl.SSLContext) -> tuple[int, bytes]:
    """Status and content of the answer to a body of JSON, on a connection of its own; OSError or Broken without one."""
    at = urllib.parse.urlsplit(url)
    port = PORTS[at.scheme] if at.port is None else at.port
    reader, writer = await asyncio.open_connection(at.hostname, port, ssl=tls if at.scheme == "https" else None)
    try:
        writer.write(_head(at, len(body)) + body)
        status, content = await _answer(reader)
        writer.close()
        with contextlib.suppress(OSError):  # the answer is here
            await writer.wait_closed()
        return status, content
    except EOFError as e:
        raise Broken("the connection was closed within the answer") from e
    except ValueError as e:
        raise Broken(f"the answer is no HTTP: {e}") from e
    finally:
        writer.transport.abort()


def _head(at: urllib.parse.SplitResult, length: int) -> bytes:
    fields = {
        "Host": at.netloc.rpartition("@")[2],
        "Content-Type": "application/json",
        "Content-Length": str(length),
        "Accept": "application/json",
        "Connection": "close",
    }
    if at.username is not None:
        said = ":".join(urllib.parse.unquote(part) for part in (at.username, at.password or ""))
        fields["Authorization"] = f"Basic {base64.b64encode(said.encode()).decode()}"
    target = urllib.parse.quote(at.path + (f"?{at.query}" if at.query else ""), safe="/?&=%:,;+@!$'()*~-._")
    lines = [f"POST {target if target else '/'} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join([*lines, "", ""]).encode()


async def _answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    version, status, *_ = (await _line(reader)).split(" ", 2)
    if not version.startswith("HTTP/1."):
        raise ValueError(version)
    fields = {}
    while line := await _line(reader):
        name, _, value = line.partition(":")
        fields[name.strip().lower()] = value.strip()
    if fields.get("transfer-encoding", "identity").lower() != "identity":
        content = b"".join([chunk async for chunk in _chunks(reader)])
    elif "content-length" in fields:
        content = await reader.readexactly(int(fields["content-length"]))
    else:
        content = await reader.read()
    return int(status), content


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int((await _line(reader)).partition(";")[0], 16):
        yield await reader.readexactly(size)
        await _line(reader)
    while await _line(reader):  # fields after the content: there is no use for them
        pass


async def _line(reader: asyncio.StreamReader) -> str:
    line = await reader.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    return line.decode("latin-1").rstrip("\r\n")
