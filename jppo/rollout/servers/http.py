"""A minimal asynchronous HTTP POST for `endpoint.py`, which sends hundreds concurrently.

General clients take several times as long per request; servers on the same processor wait for that.
"""

import asyncio
import contextlib
import ssl
import urllib.parse
from collections.abc import AsyncIterator, Mapping

PORTS = {"http": 80, "https": 443}


class Broken(Exception):
    """The reply is not a complete HTTP response."""


async def post(
    url: str, body: bytes, *, tls: ssl.SSLContext, headers: Mapping[str, str]
) -> tuple[int, dict[str, str], bytes]:
    """Posts a JSON body and returns status, headers and content; OSError or Broken without a complete reply.

    `headers` are sent with the request, which has its own connection.
    """
    at = urllib.parse.urlsplit(url)
    port = PORTS[at.scheme] if at.port is None else at.port
    reader, writer = await asyncio.open_connection(at.hostname, port, ssl=tls if at.scheme == "https" else None)
    try:
        writer.write(_head(at, len(body), headers) + body)
        answer = await _answer(reader)
        writer.close()
        with contextlib.suppress(OSError):  # the answer is complete
            await writer.wait_closed()
        return answer
    except EOFError as e:
        raise Broken("the connection was closed within the answer") from e
    except ValueError as e:
        raise Broken(f"the answer is not HTTP: {e}") from e
    finally:
        writer.transport.abort()


def _head(at: urllib.parse.SplitResult, length: int, headers: Mapping[str, str]) -> bytes:
    fields = {
        "Host": at.netloc,
        "Content-Type": "application/json",
        "Content-Length": str(length),
        "Accept": "application/json",
        "Connection": "close",
        **headers,
    }
    target = urllib.parse.quote(at.path + (f"?{at.query}" if at.query else ""), safe="/?&=%:,;+@!$'()*~-._")
    lines = [f"POST {target if target else '/'} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join([*lines, "", ""]).encode()


async def _answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
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
    return int(status), fields, content


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int((await _line(reader)).partition(";")[0], 16):
        yield await reader.readexactly(size)
        await _line(reader)
    while await _line(reader):  # trailing fields are ignored
        pass


async def _line(reader: asyncio.StreamReader) -> str:
    line = await reader.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    return line.decode("latin-1").rstrip("\r\n")
