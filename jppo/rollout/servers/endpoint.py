"""The HTTP client of one running server; failures are one clear error."""

import asyncio
import contextlib
import copy
import functools
import json
import ssl
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import httpx

from jppo.rollout.protocol import RolloutError
from jppo.rollout.servers import guard, http
from jppo.rollout.servers.guard import Key

OPEN = Key()


class ServerFault(RolloutError):
    """A server does not answer, or answers unexpectedly; repeating the request or restarting may help."""


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
            status, headers, content = await http.post(url, sent, tls=_tls(), headers=own)
        kept = {name: value for name, value in headers.items() if name == guard.PROOF_HEADER}  # content is decoded here
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

    def call(self, method: str, **kwargs: Any) -> list[Any]:
        """Calls a method of the worker extension; returns one result per worker."""
        body = {"method": method, "kwargs": kwargs, "timeout": self._timeout_s}
        results = self.post("/collective_rpc", body)
        if not isinstance(results, dict) or not isinstance(results.get("results"), list) or not results["results"]:
            raise self._failed(f"answered {method} with {str(results)[:300]}")
        return results["results"]

    @property
    def timeout_s(self) -> float:
        """Returns the timeout of a request."""
        return self._timeout_s

    def late(self, route: str) -> ServerFault:
        """Returns the fault of a late answer."""
        return self._failed(f"did not answer {route} within {self._timeout_s:g} s")

    def _sent(self, method: str, route: str, body: Mapping[str, Any] | None = None) -> httpx.Response:
        self._prove()
        return self._request(method, route, body, headers=self._key.headers())

    def _prove(self) -> None:
        """ServerFault unless the server proves, once until it fails, that it has the token, before it is sent."""
        if self._key not in self._proven:
            reply = self._request("GET", "/health", headers=(asked := guard.challenge()))
            if not self._key.opened(asked, reply.headers):
                raise self._failed(f"does not prove that it has this run's {guard.TOKEN}, so it is not sent")
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
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError, OSError, http.Broken) as e:
            raise self._failed(f"broke off {route} ({type(e).__name__} {e})") from e

    def _json(self, reply: httpx.Response) -> Any:
        try:
            return self._accepted(reply).json()
        except json.JSONDecodeError as e:
            raise self._failed(f"answered {reply.url.path} with {reply.text[:200]!r}, which is not valid JSON") from e

    def _accepted(self, reply: httpx.Response) -> httpx.Response:
        answered = f"answered {reply.url.path} with {reply.status_code}: {reply.text[:500]}"
        if reply.status_code >= 500:  # the guard may know nothing of a crash
            raise self._failed(answered)
        if not self._key.opened(reply.request.headers, reply.headers):
            raise self._failed(f"sent no proof on {reply.url.path} that it is the server started here")
        if reply.status_code != 200:  # an error of the request; the server's message is complete
            raise RolloutError(f"the server at {self.url} {answered}")
        return reply

    def _failed(self, what: str) -> ServerFault:
        self._proven &= {OPEN}  # another program may have taken the port
        why = self._why()
        return ServerFault(f"the server at {self.url} {what}" + (f"; {why}" if why else ""))
