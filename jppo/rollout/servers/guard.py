"""The guard of a server's routes: requests without the token are refused on every route.

An ASGI middleware in the server's interpreter, outermost, so that it also covers the development routes, `/metrics` and
`/health`. The token comes from the environment, which other users cannot read, never from a command line. A `Key` is
the trainer's counterpart: it sends the token and checks that the answer is from its server and not from a program that
took over the port.
"""

import dataclasses
import hmac
import os
import secrets
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

TOKEN, PROOF = "JPPO_SERVER_TOKEN", "JPPO_SERVER_PROOF"  # variables of the environment
PROOF_HEADER = "x-jppo-proof"
MIDDLEWARE = "jppo.rollout.servers.guard.Guard"

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


@dataclasses.dataclass(frozen=True)
class Key:
    """The token and proof of a server; '' is neither sent nor expected."""

    token: str = dataclasses.field(default="", repr=False)
    proof: str = dataclasses.field(default="", repr=False)

    def headers(self) -> dict[str, str]:
        """Returns the headers of a request."""
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    def opened(self, headers: Mapping[str, str]) -> bool:
        """Whether an answer with these headers (lower-case names) is from the key's server."""
        return hmac.compare_digest(headers.get(PROOF_HEADER, "").encode(), self.proof.encode()) or not self.proof

    def environment(self) -> dict[str, str]:
        """Returns the environment variables of the key's server."""
        return {TOKEN: self.token, PROOF: self.proof}


def new_key() -> Key:
    """Returns a random key for one start of a server."""
    return Key(secrets.token_hex(32), secrets.token_hex(32))


class Guard:
    """The middleware; requires a token."""

    def __init__(self, app: App):
        token = os.environ.get(TOKEN, "").strip()
        if not token:
            raise RuntimeError(f"{TOKEN} is not set: without it anyone could replace the server's weights; set it")
        self._app = app
        self._wanted = f"Bearer {token}".encode()
        self._proof = os.environ.get(PROOF, "").encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Forwards requests with the token and without a foreign origin; answers 401 or 403 to others."""
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        headers = {name.lower(): value for name, value in scope["headers"]}
        if not hmac.compare_digest(headers.get(b"authorization", b""), self._wanted):
            return await _refuse(scope, receive, send, 401)
        if foreign(headers.get(b"origin"), headers.get(b"host")):
            return await _refuse(scope, receive, send, 403)

        async def prove(message: Message) -> None:
            if self._proof and message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (PROOF_HEADER.encode(), self._proof)]
            await send(message)

        await self._app(scope, receive, prove)


def foreign(origin: bytes | None, host: bytes | None) -> bool:
    """Whether a browser sent the request from another site."""
    return origin is not None and origin.partition(b"://")[2] != host


async def _refuse(scope: Message, receive: Receive, send: Send, status: int) -> None:
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": 1008})
        return
    body = b'{"error":"this server belongs to a training run: a request needs its token and no foreign origin"}'
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
