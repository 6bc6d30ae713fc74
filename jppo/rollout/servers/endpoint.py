"""One running server, as the trainer speaks with it; every failure to get a JSON answer is one clear error."""

import asyncio
import contextlib
import copy
import email.utils
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from jppo.errors import UserError
from jppo.rollout.protocol import RolloutError, run
from jppo.rollout.servers import guard
from jppo.rollout.servers.guard import PROCESS_HEADER, TOKEN, Key
from jppo.rollout.servers.http_client import Broken, Reply, brief, quoted, send

T = TypeVar("T")
OPEN = Key()
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


class Endpoint:
    """The routes of a server; `why` adds details when it does not answer, such as its last log lines.

    Every request has its own connection: a pool would hold connections that closed during a training step, and hundreds
    of pooled connections cost the client more time than the tokens cost the server.
    """

    def __init__(self, url: str, *, timeout_s: float, why: Callable[[], str], key: Key = OPEN):
        self._why = why
        self.timeout_s = timeout_s
        self.move(url, key)

    def move(self, url: str, key: Key) -> None:
        """Sets a new address and key."""
        self.url, self._key = url.rstrip("/"), key
        self._proven = {OPEN: ""}  # keys that the server has, and its process by that answer; shared with copies

    @property
    def process(self) -> str:
        """Returns the random id of the process with the guard; '' without one."""
        return self._proven.get(self._key, "")

    def guarded(self) -> bool:
        """Whether requests without the key are refused."""
        return run(self._request("GET", "/health", headers={})).status in (401, 403)

    def lease(self) -> None:
        """Begins a new lease, after the server has ended the last."""
        self.move(self.url, self._key.leased())

    def leave(self) -> None:
        """Gives the lease back, if there is one."""
        if self._key.trainer:
            self.move(self.url, self._key.leased("end"))
            self.see("/health")

    def within(self, timeout_s: float) -> "Endpoint":
        """Returns the same server with another timeout."""
        other = copy.copy(self)
        other.timeout_s = timeout_s
        return other

    def get(self, route: str) -> Any:
        """Returns the route's JSON."""
        return self._sent("GET", route, parsed=True)

    def get_field(self, route: str, name: str, kind: type[T]) -> T:
        """Returns a field of the route's JSON object; ServerFault unless it is of this kind."""
        answered = self.get(route)
        if not isinstance(answered, dict) or not isinstance(field := answered.get(name), kind):
            raise ServerFault(f"the server at {self.url} answered {route} with {brief(answered)}")
        return field

    def post(self, route: str, body: Mapping[str, Any] | None = None) -> Any:
        """Posts `body` and returns the JSON answer."""
        return self._sent("POST", route, body, parsed=True)

    def tell(self, route: str, body: Mapping[str, Any]) -> None:
        """Like `post`, for a route that answers with text."""
        self._sent("POST", route, body)

    async def ask(self, route: str, body: Mapping[str, Any], *, most: int | None = None) -> Any:
        """Like `post`, concurrently and without a timeout: the caller tracks the server's progress.

        `most`: bytes of the answer.
        """
        await self._prove()
        own = self._key.headers()
        with self._explained(route):
            reply = await send("POST", self.url + route, json.dumps(body).encode(), own, most=most)
        return self._parsed(route, self._accepted(route, own, reply))

    async def look(self, route: str) -> None:
        """Returns when the route answers with 200."""
        await self._prove()
        own = self._key.headers()
        self._accepted(route, own, await self._request("GET", route, headers=own))

    def see(self, route: str) -> None:
        """Blocking version of `look`."""
        self._sent("GET", route)

    def late(self, route: str) -> ServerFault:
        """Returns the fault of a late answer."""
        return self.fault(f"did not answer {route} within {self.timeout_s:g} s")

    def _sent(self, method: str, route: str, body: Mapping[str, Any] | None = None, *, parsed: bool = False) -> Any:
        """Returns the content of the answer, or its JSON; a request that a busy server refuses is repeated."""
        content = run(self._repeated(method, route, body))
        return self._parsed(route, content) if parsed else content

    async def _repeated(self, method: str, route: str, body: Mapping[str, Any] | None) -> bytes:
        await self._prove()
        for tried in range(TRIES):
            own = self._key.headers()
            reply = await self._request(method, route, body, headers=own)
            if reply.status != BUSY or tried == TRIES - 1:
                break
            await asyncio.sleep(wait_s(_after(reply), tried, self.timeout_s))
        return self._accepted(route, own, reply)

    async def _prove(self) -> None:
        """ServerFault unless the server proves, once until it fails, that it has the token, before it is sent."""
        if self._key not in self._proven:
            reply = await self._request("GET", "/health", headers=(asked := guard.challenge()))
            if not self._key.opened(asked, reply.headers):
                raise self.fault(f"does not prove that it has this run's {TOKEN}, so it is not sent")
            self._proven[self._key] = reply.headers.get(PROCESS_HEADER, "")

    async def _request(
        self, method: str, route: str, body: Mapping[str, Any] | None = None, *, headers: Mapping[str, str]
    ) -> Reply:
        content = b"" if body is None else json.dumps(body).encode()
        with self._explained(route):
            async with asyncio.timeout(self.timeout_s):
                return await send(method, self.url + route, content, headers)

    @contextlib.contextmanager
    def _explained(self, route: str) -> Iterator[None]:
        try:
            yield
        except TimeoutError as e:
            raise self.late(route) from e
        except Broken as e:
            raise self.fault(f"broke off {route} ({e})") from e
        except OSError as e:
            raise self.fault(f"broke off {route} ({type(e).__name__} {e})") from e

    def _parsed(self, route: str, content: bytes) -> Any:
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as e:  # also for content that is not Unicode, or nested too deep
            said = f"answered {route} with {quoted(content, 200)!r}, which is not valid JSON ({type(e).__name__})"
            raise self.fault(said) from e

    def _accepted(self, route: str, sent: Mapping[str, str], reply: Reply) -> bytes:
        """Returns the content of a good reply to a request with the headers `sent`."""
        status, opened = reply.status, self._key.opened(sent, reply.headers)
        route = route.partition("?")[0]
        if status == 200 and opened:
            return reply.content
        answered = f"answered {route} with {status}: {quoted(reply.content, 500)}"
        # of the server or of a proxy; the guard may know nothing of a crash
        if status in (MISSING, BUSY) or not (status == 200 or 400 <= status < 500):
            fault = self.fault(answered, Busy if status == BUSY else ServerFault)
            fault.after_s = _after(reply) if status < 500 or "retry-after" in reply.headers else None
            raise fault
        if not opened:
            raise self.fault(f"sent no proof on {route} that it is the server started here")
        if status in (401, 403):
            answered += f"; set {TOKEN} to the value that the server was started with, and resume"
        # an error of the request; the server's message is complete
        raise (Taken if status == TAKEN else RolloutError)(f"the server at {self.url} {answered}")

    def fault(self, message: str, kind: type[ServerFault] = ServerFault) -> ServerFault:
        """Returns the fault of a server that `message` says, with the reason as far as it is known."""
        for key in self._proven.keys() - {OPEN}:  # another program may have taken the port
            self._proven.pop(key, None)
        why = self._why()
        return kind(f"the server at {self.url} {message}" + (f"; {why}" if why else ""))


def wait_s(after_s: float, tried: int, most: float) -> float:
    """Returns the pause before the next try: what the server asks for, or one that doubles; at most `most`."""
    return min(after_s or AGAIN_S * 2**tried, most)


def _after(reply: Reply) -> float:
    """Returns the seconds of Retry-After, which may also be a date; 0 without it."""
    given = reply.headers.get("retry-after", "").strip()
    if given.isdecimal():
        return float(given)
    try:
        return max(email.utils.parsedate_to_datetime(given).timestamp() - time.time(), 0.0)
    except (ValueError, TypeError, OverflowError, OSError):
        return 0.0


def attached_key() -> Key:
    """Returns the key of attached servers from the environment; UserError if it is invalid."""
    token = os.environ.get(TOKEN, "").strip()
    if not (token.isascii() and token.isprintable()):
        raise UserError(f"the token in {TOKEN} contains invalid characters; set it again")
    return Key(token)
