"""The guard of a server's routes: requests without the token are refused on every route.

An ASGI middleware in the server's interpreter, outermost, so that it also covers the development routes, `/metrics` and
`/health`. The token comes from the environment, which other users cannot read, never from a command line. A `Key` is
the trainer's counterpart. Another program may listen on the server's port, so the trainer challenges the server before
it sends the token: the proof is a MAC of a nonce with the token. Every answer repeats the proof, for its own nonce.
"""

import dataclasses
import hmac
import os
import secrets
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

TOKEN = "JPPO_SERVER_TOKEN"  # a variable of the environment
CHALLENGE_HEADER, PROOF_HEADER = "x-jppo-challenge", "x-jppo-proof"
MIDDLEWARE = "jppo.rollout.servers.guard.Guard"

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


@dataclasses.dataclass(frozen=True)
class Key:
    """The token of a server; '' is not sent, and no proof is expected."""

    token: str = dataclasses.field(default="", repr=False)

    def headers(self) -> dict[str, str]:
        """Returns the headers of a request, with a new challenge."""
        return {"Authorization": f"Bearer {self.token}", **challenge()} if self.token else {}

    def opened(self, sent: Mapping[str, str], received: Mapping[str, str]) -> bool:
        """Whether the answer to headers `sent` is from a server with the token; names are in lower case."""
        wanted = proof(self.token, sent.get(CHALLENGE_HEADER, ""))
        return not self.token or hmac.compare_digest(received.get(PROOF_HEADER, "").encode(), wanted.encode())

    def environment(self) -> dict[str, str]:
        """Returns the environment variables of the key's server."""
        return {TOKEN: self.token}


def new_key() -> Key:
    """Returns a random key for one start of a server."""
    return Key(secrets.token_hex(32))


def challenge() -> dict[str, str]:
    """Returns the header of a challenge."""
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
        self._app = app
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
                message["headers"] = [*message.get("headers", ()), proved]
            await send(message)

        if not hmac.compare_digest(headers.get(b"authorization", b""), f"Bearer {self._token}".encode()):
            return await _refuse(scope, receive, prove, 401)
        if foreign(headers.get(b"origin"), headers.get(b"host")):
            return await _refuse(scope, receive, prove, 403)
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
