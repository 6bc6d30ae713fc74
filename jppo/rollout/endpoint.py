"""One running server as the trainer sees it: its routes, and one clear error whatever goes wrong."""

import contextlib
import copy
import functools
import json
import ssl
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import httpx

from jppo.rollout import exchange
from jppo.rollout.sampler import RolloutError


class ServerFault(RolloutError):
    """A server that does not answer, or not as agreed: asking again, or starting it again, may mend that."""


@functools.cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()  # slow to make; every client would make its own


class Endpoint:
    """The routes of a server; `why` adds what is known when it does not answer, such as its last lines.

    Every request has a connection of its own: none is found closed after a long training step, and a pool of
    hundreds of connections costs the client more time than the tokens cost the server.
    """

    def __init__(self, url: str, *, timeout_s: float, why: Callable[[], str]):
        self.url = url.rstrip("/")
        self._why = why
        self._timeout_s = timeout_s
        self._options: dict[str, Any] = {"timeout": timeout_s, "verify": _tls(), "trust_env": False}

    def within(self, timeout_s: float) -> "Endpoint":
        """The same server, for requests that must be answered sooner."""
        other = copy.copy(self)
        other._timeout_s = min(timeout_s, self._timeout_s)
        other._options = self._options | {"timeout": other._timeout_s}
        return other

    def get(self, route: str) -> Any:
        """The JSON that the route answers."""
        with httpx.Client(**self._options) as client, self._explained(route):
            return self._json(client.get(self.url + route))

    def post(self, route: str, body: Mapping[str, Any] | None = None) -> Any:
        """The JSON that the route answers to `body`."""
        with httpx.Client(**self._options) as client, self._explained(route):
            return self._json(client.post(self.url + route, json=body))

    def tell(self, route: str, body: Mapping[str, Any]) -> None:
        """As `post`, to a route that answers with a sentence."""
        with httpx.Client(**self._options) as client, self._explained(route):
            self._accepted(client.post(self.url + route, json=body))

    async def ask(self, route: str, body: Mapping[str, Any]) -> Any:
        """As `post`, beside other requests and without a limit: the caller knows what it waits for in the server."""
        url = self.url + route
        with self._explained(route):
            status, content = await exchange.post(url, json.dumps(body).encode(), tls=_tls())
        return self._json(httpx.Response(status, content=content, request=httpx.Request("POST", url)))

    async def look(self, route: str) -> None:
        """Returns when the route answers with 200."""
        async with httpx.AsyncClient(**self._options) as client:
            with self._explained(route):
                self._accepted(await client.get(self.url + route))

    def see(self, route: str) -> None:
        """As `look`, waited for."""
        with httpx.Client(**self._options) as client, self._explained(route):
            self._accepted(client.get(self.url + route))

    def call(self, method: str, **kwargs: Any) -> list[Any]:
        """Runs a method of the worker extension; one result from each worker."""
        body = {"method": method, "kwargs": kwargs, "timeout": self._timeout_s}
        results = self.post("/collective_rpc", body)
        if not isinstance(results, dict) or not isinstance(results.get("results"), list) or not results["results"]:
            raise self._failed(f"answered {method} with {str(results)[:300]}")
        return results["results"]

    @property
    def timeout_s(self) -> float:
        """How long an answer may take."""
        return self._timeout_s

    def late(self, route: str) -> ServerFault:
        """The fault of an answer that took longer."""
        return self._failed(f"did not answer {route} within {self._timeout_s:g} s")

    @contextlib.contextmanager
    def _explained(self, route: str) -> Iterator[None]:
        try:
            yield
        except (httpx.TimeoutException, TimeoutError) as e:
            raise self.late(route) from e
        except (httpx.HTTPError, OSError, exchange.Broken) as e:
            raise self._failed(f"broke off {route} ({type(e).__name__} {e})") from e

    def _json(self, reply: httpx.Response) -> Any:
        try:
            return self._accepted(reply).json()
        except json.JSONDecodeError as e:
            raise self._failed(f"answered {reply.url.path} with {reply.text[:200]!r}, which is no JSON") from e

    def _accepted(self, reply: httpx.Response) -> httpx.Response:
        answered = f"answered {reply.url.path} with {reply.status_code}: {reply.text[:500]}"
        if reply.status_code >= 500:
            raise self._failed(answered)
        if reply.status_code != 200:  # the request's fault: the server says all there is to say
            raise RolloutError(f"the server at {self.url} {answered}")
        return reply

    def _failed(self, what: str) -> ServerFault:
        why = self._why()
        return ServerFault(f"the server at {self.url} {what}" + (f"; {why}" if why else ""))
