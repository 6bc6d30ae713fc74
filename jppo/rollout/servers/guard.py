"""The guard of a server's routes: requests without the token are refused on every route.

An ASGI middleware in the server's interpreter, outermost, so that it also covers the development routes, `/metrics` and
`/health`. The token comes from the environment, which other users cannot read, never from a command line. A `Key` is
the trainer's counterpart. Another program may listen on the server's port, so the trainer challenges the server before
it sends the token: the proof is a MAC of a nonce with the token. Every answer repeats the proof, for its own nonce.

An attached server outlives its trainer, so behind the token it is leased to one trainer at a time (`Lease`).
"""

import asyncio
import dataclasses
import hmac
import itertools
import json
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

TOKEN = "JPPO_SERVER_TOKEN"  # a variable of the environment
CHALLENGE_HEADER, PROOF_HEADER = "x-jppo-challenge", "x-jppo-proof"
PROCESS_HEADER = "x-jppo-process"  # a random id of the server's process
TRAINER_HEADER = "x-jppo-trainer"  # who it is, '/' and the number of its lease; a lease of '/end' is given back
MIDDLEWARE = "jppo.rollout.servers.guard.Guard"
LEASE_S = 30.0  # without a request of the trainer, until its lease ends
TICK_S = 0.5
RESUMED_BY = {b"/pause": b"/resume", b"/pause_generation": b"/continue_generation"}  # of vLLM and SGLang
TRAINER = f"{os.uname().nodename}-{os.getpid()}-{secrets.token_hex(4)}"  # this process, as a trainer
PROCESS = secrets.token_hex(8)  # this process, as a server: sent without the token, too
LEASES = itertools.count(1)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


@dataclasses.dataclass(frozen=True)
class Key:
    """The token of a server; '' is not sent, and no proof is expected."""

    token: str = dataclasses.field(default="", repr=False)
    trainer: str = ""  # and its lease, of an attached server

    def headers(self) -> dict[str, str]:
        """Returns the headers of a request, with a new challenge."""
        lease_header = {TRAINER_HEADER: self.trainer} if self.trainer else {}
        return {"Authorization": f"Bearer {self.token}", **lease_header, **challenge()} if self.token else {}

    def leased(self, number: str = "") -> "Key":
        """Returns this key with a new lease of this process; without a token there are none."""
        return dataclasses.replace(self, trainer=f"{TRAINER}/{number or next(LEASES)}") if self.token else self

    def is_proven(self, sent_headers: Mapping[str, str], received_headers: Mapping[str, str]) -> bool:
        """Whether the answer to headers `sent_headers` is from a server with the token; names are in lower case."""
        expected = proof(self.token, sent_headers.get(CHALLENGE_HEADER, ""))
        return not self.token or hmac.compare_digest(received_headers.get(PROOF_HEADER, "").encode(), expected.encode())

    def environment(self) -> dict[str, str]:
        return {TOKEN: self.token}


def new_key() -> Key:
    """Returns a random key for one start of a server."""
    return Key(secrets.token_hex(32))


def challenge() -> dict[str, str]:
    return {CHALLENGE_HEADER: secrets.token_hex(16)}


def proof(token: str, nonce: str) -> str:
    """Returns the answer to a challenge."""
    return hmac.digest(token.encode(), f"jppo server {nonce}".encode(), "sha256").hex()


class Guard:
    """The middleware; requires a token."""

    def __init__(self, app: App):
        token = os.environ.get(TOKEN, "").strip()
        if not token:
            raise RuntimeError(f"{TOKEN} is not set: without it anyone could replace the server's weights; set it")
        self._app = Lease(app)
        self._token = token

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Forwards requests with the token and without a foreign origin; answers 401 or 403 to others."""
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        headers = {name.lower(): value for name, value in scope["headers"]}
        nonce = headers.get(CHALLENGE_HEADER.encode(), b"").decode("latin-1")

        async def prove(message: Message) -> None:
            if nonce and message["type"] == "http.response.start":
                proved = (PROOF_HEADER.encode(), proof(self._token, nonce).encode())
                message["headers"] = [*message.get("headers", ()), proved, (PROCESS_HEADER.encode(), PROCESS.encode())]
            await send(message)

        if not hmac.compare_digest(headers.get(b"authorization", b""), f"Bearer {self._token}".encode()):
            return await _refuse(scope, receive, prove, 401)
        if is_foreign(headers.get(b"origin"), headers.get(b"host")):
            return await _refuse(scope, receive, prove, 403)
        await self._app(scope, receive, prove)


class Lease:
    """Behind the guard: one trainer uses the server, and a pause ends with the lease of the trainer that made it.

    Requests of a trainer name it, and each renews its lease. If there is none for `LEASE_S` in a pause, the trainer was
    killed or stopped: the server resumes, and nothing more is taken from that lease, whose next request may be a load.
    """

    def __init__(self, app: App):
        self._app = app
        self._trainer = self._ended_lease = b""
        self._last_request_time = self._silent_s = 0.0
        self._pause_scope: dict[str, Any] = {}  # the request that paused, as the application knows it
        self._resume_route = b""  # the route that ends the pause
        self._watch_task: asyncio.Task[None] | None = None

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Forwards requests without a trainer and of the one that has the lease; others get 409 or 503."""
        trainer = dict(scope["headers"]).get(TRAINER_HEADER.encode(), b"") if scope["type"] == "http" else b""
        if not trainer:
            return await self._app(scope, receive, send)
        if trainer == self._ended_lease:
            why = f"the trainer was silent for {LEASE_S:g} s in a pause: the server has resumed"
            return await _refuse(scope, receive, send, 503, why)
        name, _, number = trainer.partition(b"/")
        if not self._is_free() and name != self._trainer.partition(b"/")[0]:
            fault = f"it is in use by the trainer {self._trainer.partition(b'/')[0].decode('latin-1')}"
            why = f"{fault}; give each its own servers, or end that one: it is free {LEASE_S:g} s later"
            return await _refuse(scope, receive, send, 409, why)
        path, self._trainer = scope["path"].encode(), trainer
        self._renew()
        if path in RESUMED_BY:
            self._pause_scope, self._resume_route = dict(scope), RESUMED_BY[path]
            if self._watch_task is None or self._watch_task.done():
                self._watch_task = asyncio.get_running_loop().create_task(self._end_silent_pause())
        try:
            await self._app(scope, receive, send)
            self._resume_route = b"" if path == self._resume_route else self._resume_route
        finally:
            self._renew()
            if number == b"end":
                self._trainer = b""
                await self._end_pause()

    def _is_free(self) -> bool:
        """Whether no trainer has the lease, or its trainer was silent for too long."""
        return not self._trainer or not (self._resume_route or time.monotonic() - self._last_request_time < LEASE_S)

    def _renew(self) -> None:
        self._last_request_time, self._silent_s = time.monotonic(), 0.0

    async def _end_silent_pause(self) -> None:
        """Ends the pause once its trainer has been silent for `LEASE_S`."""
        while self._resume_route and self._silent_s < LEASE_S:  # by ticks: a load may block this loop for longer
            await asyncio.sleep(TICK_S)
            self._silent_s += TICK_S
        self._ended_lease = self._trainer if self._resume_route else self._ended_lease
        await self._end_pause()

    async def _end_pause(self) -> None:
        """Sends the application the request that ends the pause."""
        route, self._resume_route = self._resume_route, b""
        if route:
            status: list[int] = []

            async def receive() -> Message:
                return {"type": "http.request", "body": b"{}", "more_body": False}

            async def send(message: Message) -> None:
                status.extend([message["status"]] if "status" in message else [])

            headers = [(b"host", b"localhost"), (b"content-type", b"application/json"), (b"content-length", b"2")]
            resume_scope = {"path": route.decode(), "raw_path": route, "query_string": b"", "headers": headers}
            try:
                await self._app(self._pause_scope | resume_scope, receive, send)
            finally:
                print(f"jppo: {route.decode()} after a pause that its trainer left: {status or 'failed'}", flush=True)


def is_foreign(origin: bytes | None, host: bytes | None) -> bool:
    """Whether a browser sent the request from another site."""
    return origin is not None and origin.partition(b"://")[2] != host


async def _refuse(scope: Message, receive: Receive, send: Send, status: int, why: str = "") -> None:
    """Answers a request with `status` and the reason, or closes a websocket."""
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": 1008})
        return
    why = why or "this server belongs to a training run: a request needs its token and no foreign origin"
    body = json.dumps({"error": why}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
