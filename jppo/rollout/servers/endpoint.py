"""One running server, as the trainer speaks with it; every failure to get a JSON answer is one clear error."""

import asyncio
import copy
import email.utils
import json
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from jppo.errors import UserError
from jppo.rollout.protocol import RolloutError, run
from jppo.rollout.servers import guard
from jppo.rollout.servers.guard import PROCESS_HEADER, TOKEN, Key
from jppo.rollout.servers.http_client import Broken, Reply, brief, quoted, send

T = TypeVar("T")
OPEN = Key()
MISSING, TAKEN, BUSY, UNAVAILABLE = 404, 409, 429, 503
TRIES = 5  # of a call that a busy server refuses
AGAIN_S = 1.0  # before a refused request is sent again, if the server does not name a time; doubles with each try


class ServerFault(RolloutError):
    """A server does not answer, or answers unexpectedly; repeating the request or restarting may help.

    After 404 and 429, as of a proxy, `after_s` is the time until it may help, as far as the server names it, or 0.
    """

    after_s: float | None = None


class Busy(ServerFault):
    """A server or proxy limits the rate of requests, or pauses; nothing is wrong with it."""


class LeaseTaken(RolloutError):
    """Another trainer has the lease of the server."""


class Endpoint:
    """The routes of a server; `explain` adds details when it does not answer, such as its last log lines.

    Every request has its own connection: a pool would hold connections that closed during a training step, and hundreds
    of pooled connections cost the client more time than the tokens cost the server.
    """

    def __init__(self, url: str, *, timeout_s: float, explain: Callable[[], str], key: Key = OPEN):
        self._explain = explain
        self.timeout_s = timeout_s
        self.set_address(url, key)

    def set_address(self, url: str, key: Key) -> None:
        self.url, self._key = url.rstrip("/"), key
        self._process_ids = {OPEN: ""}  # keys that the server has, and its process by that answer; shared with copies

    @property
    def process(self) -> str:
        """Returns the random id of the process with the guard; '' without one."""
        return self._process_ids.get(self._key, "")

    def requires_key(self) -> bool:
        """Whether requests without the key are refused."""
        return run(self._request("GET", "/health", None, {}, timeout_s=self.timeout_s)).status in (401, 403)

    def begin_lease(self) -> None:
        """Begins a new lease, after the server has ended the last."""
        self.set_address(self.url, self._key.leased())

    def end_lease(self) -> None:
        """Gives the lease back, if there is one."""
        if self._key.trainer:
            self.set_address(self.url, self._key.leased("end"))
            self.check("/health")

    def with_timeout(self, timeout_s: float) -> "Endpoint":
        endpoint = copy.copy(self)
        endpoint.timeout_s = timeout_s
        return endpoint

    def get(self, route: str) -> Any:
        """Returns the route's JSON."""
        return self._parse(route, run(self._call("GET", route)))

    def get_field(self, route: str, field: str, kind: type[T]) -> T:
        """Returns a field of the route's JSON object; ServerFault unless it is of this kind."""
        answer = self.get(route)
        if not isinstance(answer, dict) or not isinstance(value := answer.get(field), kind):
            raise ServerFault(f"the server at {self.url} answered {route} with {brief(answer)}")
        return value

    def post(self, route: str, body: Mapping[str, Any] | None = None) -> Any:
        """Posts `body` and returns the JSON answer."""
        return self._parse(route, run(self._call("POST", route, body)))

    def post_for_text(self, route: str, body: Mapping[str, Any]) -> None:
        """Like `post`, for a route that answers with text."""
        run(self._call("POST", route, body))

    async def ask(self, route: str, body: Mapping[str, Any], *, max_bytes: int | None = None) -> Any:
        """Like `post`, concurrently and without a timeout: the caller tracks the server's progress.

        `max_bytes`: bytes of the answer.
        """
        await self._require_proof()
        headers = self._key.headers()
        reply = await self._request("POST", route, body, headers, timeout_s=None, limit=max_bytes)
        return self._parse(route, self._require_success(route, headers, reply))

    async def check_async(self, route: str) -> None:
        """Returns when the route answers with 200."""
        await self._call("GET", route, tries=1)

    def check(self, route: str) -> None:
        """Blocking version of `check_async`, which repeats the request to a busy server."""
        run(self._call("GET", route))

    def timeout_fault(self, route: str) -> ServerFault:
        return self.fault(f"did not answer {route} within {self.timeout_s:g} s")

    async def _call(
        self, method: str, route: str, body: Mapping[str, Any] | None = None, *, tries: int = TRIES
    ) -> bytes:
        """Returns the content of the answer; a request that a busy server refuses is repeated."""
        await self._require_proof()
        for attempt in range(tries):
            headers = self._key.headers()
            reply = await self._request(method, route, body, headers, timeout_s=self.timeout_s)
            if reply.status != BUSY or attempt == tries - 1:
                break
            await asyncio.sleep(retry_pause_s(_retry_after_s(reply), attempt, self.timeout_s))
        return self._require_success(route, headers, reply)

    async def _require_proof(self) -> None:
        """ServerFault unless the server proves, once until it fails, that it has the token, before it is sent."""
        if self._key not in self._process_ids:
            challenge = guard.challenge()
            reply = await self._request("GET", "/health", None, challenge, timeout_s=self.timeout_s)
            if not self._key.is_proven(challenge, reply.headers):
                raise self.fault(f"does not prove that it has this run's {TOKEN}, so it is not sent")
            self._process_ids[self._key] = reply.headers.get(PROCESS_HEADER, "")

    async def _request(
        self,
        method: str,
        route: str,
        body: Mapping[str, Any] | None,
        headers: Mapping[str, str],
        *,
        timeout_s: float | None,
        limit: int | None = None,
    ) -> Reply:
        """Returns the reply, whatever its status; ServerFault if the connection fails."""
        content = b"" if body is None else json.dumps(body).encode()
        try:
            async with asyncio.timeout(timeout_s):
                return await send(method, self.url + route, content, headers, limit=limit)
        except TimeoutError as e:
            raise self.timeout_fault(route) from e
        except Broken as e:
            raise self.fault(f"broke off {route} ({e})") from e
        except OSError as e:
            raise self.fault(f"broke off {route} ({type(e).__name__} {e})") from e

    def _parse(self, route: str, content: bytes) -> Any:
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as e:  # also for content that is not Unicode, or nested too deep
            message = f"answered {route} with {quoted(content, 200)!r}, which is not valid JSON ({type(e).__name__})"
            raise self.fault(message) from e

    def _require_success(self, route: str, sent_headers: Mapping[str, str], reply: Reply) -> bytes:
        """Returns the content of a good reply to a request with the headers `sent_headers`."""
        status, is_proven = reply.status, self._key.is_proven(sent_headers, reply.headers)
        route = route.partition("?")[0]
        if status == 200 and is_proven:
            return reply.content
        message = f"answered {route} with {status}: {quoted(reply.content, 500)}"
        # of the server or of a proxy; the guard may know nothing of a crash
        if status in (MISSING, BUSY) or not (status == 200 or 400 <= status < 500):
            is_busy = status == BUSY or _is_paused(reply)
            fault = self.fault(message, Busy if is_busy else ServerFault)
            names_time = status < 500 or is_busy or "retry-after" in reply.headers
            fault.after_s = _retry_after_s(reply) if names_time else None
            raise fault
        if not is_proven:
            raise self.fault(f"sent no proof on {route} that it is the server started here")
        if status in (401, 403):
            message += f"; set {TOKEN} to the value that the server was started with, and resume"
        # an error of the request; the server's message is complete
        raise (LeaseTaken if status == TAKEN else RolloutError)(f"the server at {self.url} {message}")

    def fault(self, message: str, kind: type[ServerFault] = ServerFault) -> ServerFault:
        """Returns a fault of this server with the message, and with the reason as far as it is known."""
        for key in self._process_ids.keys() - {OPEN}:  # another program may have taken the port
            self._process_ids.pop(key, None)
        explanation = self._explain()
        return kind(f"the server at {self.url} {message}" + (f"; {explanation}" if explanation else ""))


def retry_pause_s(after_s: float, attempt: int, max_s: float) -> float:
    """Returns the pause before the next try: what the server asks for, or one that doubles; at most `max_s`."""
    return min(after_s or AGAIN_S * 2**attempt, max_s)


def _is_paused(reply: Reply) -> bool:
    """Whether vLLM 0.33 or newer itself refuses requests for a while: paused, or its queue is full."""
    try:
        return reply.status == UNAVAILABLE and bool(json.loads(reply.content)["error"]["code"] == UNAVAILABLE)
    except (ValueError, RecursionError, TypeError, KeyError):
        return False


def _retry_after_s(reply: Reply) -> float:
    """Returns the seconds of Retry-After, which may also be a date; 0 without it."""
    retry_after = reply.headers.get("retry-after", "").strip()
    if retry_after.isdecimal():
        return float(retry_after)
    try:
        return max(email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time(), 0.0)
    except (ValueError, TypeError, OverflowError, OSError):
        return 0.0


def attached_key() -> Key:
    """Returns the key of attached servers from the environment; UserError if it is invalid."""
    token = os.environ.get(TOKEN, "").strip()
    if not (token.isascii() and token.isprintable()):
        raise UserError(f"the token in {TOKEN} contains invalid characters; set it again")
    return Key(token)
