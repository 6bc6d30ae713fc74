"""One running vLLM server as the trainer sees it: its routes, and one clear error whatever goes wrong."""

import asyncio
import contextlib
import functools
import json
import ssl
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import httpx

from jppo.rollout import exchange
from jppo.rollout.sampler import RolloutError


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

    def get(self, route: str) -> Any:
        """The JSON that the route answers."""
        with httpx.Client(**self._options) as client, self._explained(route):
            return self._accepted(client.get(self.url + route)).json()

    def post(self, route: str, body: Mapping[str, Any] | None = None) -> Any:
        """The JSON that the route answers to `body`."""
        with httpx.Client(**self._options) as client, self._explained(route):
            return self._accepted(client.post(self.url + route, json=body)).json()

    def tell(self, route: str, body: Mapping[str, Any]) -> None:
        """As `post`, to a route that answers with a sentence."""
        with httpx.Client(**self._options) as client, self._explained(route):
            self._accepted(client.post(self.url + route, json=body))

    async def ask(self, route: str, body: Mapping[str, Any]) -> Any:
        """As `post`, beside other requests."""
        url = self.url + route
        with self._explained(route):
            async with asyncio.timeout(self._timeout_s):
                status, content = await exchange.post(url, json.dumps(body).encode(), tls=_tls())
        reply = httpx.Response(status, content=content, request=httpx.Request("POST", url))
        return self._accepted(reply).json()

    def call(self, method: str, **kwargs: Any) -> list[Any]:
        """Runs a method of the worker extension; one result from each worker."""
        body = {"method": method, "kwargs": kwargs, "timeout": self._timeout_s}
        return self.post("/collective_rpc", body)["results"]

    @contextlib.contextmanager
    def _explained(self, route: str) -> Iterator[None]:
        try:
            yield
        except (httpx.TimeoutException, TimeoutError) as e:
            raise self._failed(f"did not answer {route} within request_timeout_s={self._timeout_s:g}") from e
        except (httpx.HTTPError, OSError, exchange.Broken) as e:
            raise self._failed(f"broke off {route} ({type(e).__name__} {e})") from e

    def _accepted(self, reply: httpx.Response) -> httpx.Response:
        answered = f"answered {reply.url.path} with {reply.status_code}: {reply.text[:500]}"
        if reply.status_code >= 500:
            raise self._failed(answered)
        if reply.status_code != 200:  # the request's fault: the server says all there is to say
            raise RolloutError(f"the vLLM server at {self.url} {answered}")
        return reply

    def _failed(self, what: str) -> RolloutError:
        why = self._why()
        return RolloutError(f"the vLLM server at {self.url} {what}" + (f"; {why}" if why else ""))
