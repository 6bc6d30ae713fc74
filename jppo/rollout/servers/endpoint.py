"""The HTTP client of one running server; failures are one clear error.

Its POST is written here: general clients take several times as long per request, with hundreds under way.
"""

import asyncio
import contextlib
import copy
import email.utils
import functools
import json
import os
import ssl
import time
import urllib.parse
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any

import httpx

from jppo.rollout.protocol import RolloutError
from jppo.rollout.servers import guard
from jppo.rollout.servers.guard import PROOF_HEADER, TOKEN, Key
from jppo.settings import UserError

OPEN = Key()
KEPT = (PROOF_HEADER, "retry-after")  # headers; the content is decoded here
MISSING, TAKEN, BUSY = 404, 409, 429
TRIES = 5  # of a call that a busy server refuses
AGAIN_S = 1.0  # before a refused request is sent again, if the server does not name a time; doubles with each try


class ServerFault(RolloutError):
    """A server does not answer, or answers unexpectedly; repeating the request or restarting may help.

    After 404 and 429, as of a proxy, `after_s` is the time until it may help, as far as the server names it, or 0.
    """

    after_s: float | None = None


class Busy(ServerFault):
    """A server or proxy limits the rate of requests; nothing is wrong with it."""


class Taken(RolloutError):
    """Another trainer has the lease of the server."""


@functools.cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()  # slow to create, so clients share it


class Endpoint:
    """The routes of a server; `why` adds details when it does not answer, such as its last log lines.

    Every request has its own connection: a pool would hold connections that closed during a training step, and hundreds
    of pooled connections cost the client more time than the tokens cost the server.
    """

    def __init__(self, url: str, *, timeout_s: float, why: Callable[[], str], key: Key = OPEN):
        self._why = why
        self._timeout_s = timeout_s
        self.move(url, key)

    def move(self, url: str, key: Key) -> None:
        """Sets a new address and key."""
        self.url, self._key = url.rstrip("/"), key
        self._proven: set[Key] = {OPEN}  # keys that the server has; shared with copies

    def guarded(self) -> bool:
        """Whether requests without the key are refused."""
        return self._request("GET", "/health", headers={}).status_code in (401, 403)

    def lease(self) -> None:
        """Begins a new lease, after the server has ended the last."""
        self.move(self.url, self._key.leased())

    def leave(self) -> None:
        """Gives the lease back, if there is one."""
        if self._key.trainer:
            self.move(self.url, self._key.leased("end"))
            self.see("/health")

    def within(self, timeout_s: float) -> "Endpoint":
        """Returns the same server with a shorter timeout."""
        other = copy.copy(self)
        other._timeout_s = min(timeout_s, self._timeout_s)
        return other

    def get(self, route: str) -> Any:
        """Returns the route's JSON."""
        return self._json(self._sent("GET", route))

    def get_field(self, route: str, name: str) -> Any:
        """Returns a field of the route's JSON object; ServerFault without it."""
        answered = self.get(route)
        if not isinstance(answered, dict) or name not in answered:
            raise ServerFault(f"the server at {self.url} answered {route} with {str(answered)[:200]}")
        return answered[name]

    def post(self, route: str, body: Mapping[str, Any] | None = None) -> Any:
        """Posts `body` and returns the JSON answer."""
        return self._json(self._sent("POST", route, body))

    def tell(self, route: str, body: Mapping[str, Any]) -> None:
        """Like `post`, for a route that answers with text."""
        self._accepted(self._sent("POST", route, body))

    async def ask(self, route: str, body: Mapping[str, Any]) -> Any:
        """Like `post`, concurrently and without a timeout: the caller tracks the server's progress."""
        url = self.url + route
        with self._explained(route):
            await self._prove_later()
            sent, own = json.dumps(body).encode(), self._key.headers()
            status, headers, content = await post(url, sent, tls=_tls(), headers=own)
        kept = {name: value for name, value in headers.items() if name in KEPT}
        request = httpx.Request("POST", url, headers=own)
        return self._json(httpx.Response(status, headers=kept, content=content, request=request))

    async def look(self, route: str) -> None:
        """Returns when the route answers with 200."""
        await self._prove_later()
        async with httpx.AsyncClient(**self._options(self._key.headers())) as client:
            with self._explained(route):
                self._accepted(await client.get(self.url + route))

    def see(self, route: str) -> None:
        """Blocking version of `look`."""
        self._accepted(self._sent("GET", route))

    @property
    def timeout_s(self) -> float:
        """Returns the timeout of a request."""
        return self._timeout_s

    def late(self, route: str) -> ServerFault:
        """Returns the fault of a late answer."""
        return self.fault(f"did not answer {route} within {self._timeout_s:g} s")

    def _sent(self, method: str, route: str, body: Mapping[str, Any] | None = None) -> httpx.Response:
        self._prove()
        for tried in range(TRIES):
            reply = self._request(method, route, body, headers=self._key.headers())
            if reply.status_code != BUSY or tried == TRIES - 1:
                break
            time.sleep(wait_s(_after(reply), tried, self._timeout_s))
        return reply

    def _prove(self) -> None:
        """ServerFault unless the server proves, once until it fails, that it has the token, before it is sent."""
        if self._key not in self._proven:
            reply = self._request("GET", "/health", headers=(asked := guard.challenge()))
            if not self._key.opened(asked, reply.headers):
                raise self.fault(f"does not prove that it has this run's {TOKEN}, so it is not sent")
            self._proven.add(self._key)

    async def _prove_later(self) -> None:
        if self._key not in self._proven:
            await asyncio.to_thread(self._prove)

    def _request(
        self, method: str, route: str, body: Mapping[str, Any] | None = None, *, headers: Mapping[str, str]
    ) -> httpx.Response:
        with httpx.Client(**self._options(headers)) as client, self._explained(route):
            return client.request(method, self.url + route, json=body)

    def _options(self, headers: Mapping[str, str]) -> dict[str, Any]:
        return {"timeout": self._timeout_s, "verify": _tls(), "trust_env": False, "headers": headers}

    @contextlib.contextmanager
    def _explained(self, route: str) -> Iterator[None]:
        try:
            yield
        except (httpx.TimeoutException, TimeoutError) as e:
            raise self.late(route) from e
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError, OSError, Broken) as e:
            raise self.fault(f"broke off {route} ({type(e).__name__} {e})") from e

    def _json(self, reply: httpx.Response) -> Any:
        try:
            return self._accepted(reply).json()
        except json.JSONDecodeError as e:
            raise self.fault(f"answered {reply.url.path} with {reply.text[:200]!r}, which is not valid JSON") from e

    def _accepted(self, reply: httpx.Response) -> httpx.Response:
        answered = f"answered {reply.url.path} with {reply.status_code}: {reply.text[:500]}"
        if reply.status_code >= 500 or reply.status_code in (MISSING, BUSY):  # the guard may know nothing of a crash
            fault = self.fault(answered, Busy if reply.status_code == BUSY else ServerFault)
            fault.after_s = _after(reply) if reply.status_code < 500 or "retry-after" in reply.headers else None
            raise fault
        if not self._key.opened(reply.request.headers, reply.headers):
            raise self.fault(f"sent no proof on {reply.url.path} that it is the server started here")
        if reply.status_code in (401, 403):
            answered += f"; set {TOKEN} to the value that the server was started with, and resume"
        if reply.status_code != 200:  # an error of the request; the server's message is complete
            kind = Taken if reply.status_code == TAKEN else RolloutError
            raise kind(f"the server at {self.url} {answered}")
        return reply

    def fault(self, message: str, kind: type[ServerFault] = ServerFault) -> ServerFault:
        """Returns the fault of a server that `message` says, with the reason as far as it is known."""
        self._proven &= {OPEN}  # another program may have taken the port
        why = self._why()
        return kind(f"the server at {self.url} {message}" + (f"; {why}" if why else ""))


def wait_s(after_s: float, tried: int, most: float) -> float:
    """Returns the pause before the next try: what the server asks for, or one that doubles; at most `most`."""
    return min(after_s or AGAIN_S * 2**tried, most)


def _after(reply: httpx.Response) -> float:
    """Returns the seconds of Retry-After, which may also be a date; 0 without it."""
    given = reply.headers.get("retry-after", "").strip()
    if given.isdecimal():
        return float(given)
    try:
        return max(email.utils.parsedate_to_datetime(given).timestamp() - time.time(), 0.0)
    except ValueError:
        return 0.0


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


def attached_key() -> Key:
    """Returns the key of attached servers from the environment; UserError if it is invalid."""
    token = os.environ.get(TOKEN, "").strip()
    if not (token.isascii() and token.isprintable()):
        raise UserError(f"the token in {TOKEN} contains invalid characters; set it again")
    return Key(token)
