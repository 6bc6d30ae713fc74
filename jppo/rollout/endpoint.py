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
from jppo.rollout.guard import PROOF_HEADER, Key
from jppo.rollout.sampler import RolloutError

OPEN = Key()


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

    def __init__(self, url: str, *, timeout_s: float, why: Callable[[], str], key: Key = OPEN):
        self._why = why
        self._timeout_s = timeout_s
        self.move(url, key)

    def move(self, url: str, key: Key) -> None:
        """The server is at `url` now, and opens to `key`."""
        self.url, self._key = url.rstrip("/"), key

    def guarded(self) -> bool:
        """Whether a request without the key is refused."""
        with httpx.Client(**self._options(Key())) as client, self._explained("/health"):
            return client.get(f"{self.url}/health").status_code in (401, 403)

    def within(self, timeout_s: float) -> "Endpoint":
        """The same server, for requests that must be answered sooner."""
        other = copy.copy(self)
        other._timeout_s = min(timeout_s, self._timeout_s)
        return other

    def get(self, route: str) -> Any:
        """The JSON that the route answers."""
        with httpx.Client(**self._options()) as client, self._explained(route):
            return self._json(client.get(self.url + route))

    def post(self, route: str, body: Mapping[str, Any] | None = None) -> Any:
        """The JSON that the route answers to `body`."""
        with httpx.Client(**self._options()) as client, self._explained(route):
            return self._json(client.post(self.url + route, json=body))

    def tell(self, route: str, body: Mapping[str, Any]) -> None:
        """As `post`, to a route that answers with a sentence."""
        with httpx.Client(**self._options()) as client, self._explained(route):
            self._accepted(client.post(self.url + route, json=body))

    async def ask(self, route: str, body: Mapping[str, Any]) -> Any:
        """As `post`, beside other requests and without a limit: the caller knows what it waits for in the server."""
        url = self.url + route
        with self._explained(route):
            sent = json.dumps(body).encode()
            status, headers, content = await exchange.post(url, sent, tls=_tls(), headers=self._key.headers())
        kept = {name: value for name, value in headers.items() if name == PROOF_HEADER}  # the content is decoded here
        return self._json(httpx.Response(status, headers=kept, content=content, request=httpx.Request("POST", url)))

    async def look(self, route: str) -> None:
        """Returns when the route answers with 200."""
        async with httpx.AsyncClient(**self._options()) as client:
            with self._explained(route):
                self._accepted(await client.get(self.url + route))

    def see(self, route: str) -> None:
        """As `look`, waited for."""
        with httpx.Client(**self._options()) as client, self._explained(route):
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

    def _options(self, key: Key | None = None) -> dict[str, Any]:
        headers = (self._key if key is None else key).headers()
        return {"timeout": self._timeout_s, "verify": _tls(), "trust_env": False, "headers": headers}

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
        if reply.status_code >= 500:  # of a crash the guard may know nothing
            raise self._failed(answered)
        if not self._key.opened(reply.headers):
            raise self._failed(f"did not prove on {reply.url.path} that it is the one that was started here")
        if reply.status_code != 200:  # the request's fault: the server says all there is to say
            raise RolloutError(f"the server at {self.url} {answered}")
        return reply

    def _failed(self, what: str) -> ServerFault:
        why = self._why()
        return ServerFault(f"the server at {self.url} {what}" + (f"; {why}" if why else ""))
