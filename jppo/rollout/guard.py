"""The guard of a server's routes: who has no token gets no answer, whichever route is asked for.

An ASGI middleware that runs in the server's interpreter, outside of the engine's own ones: it covers the development
routes, `/metrics` and `/health` too. The token comes from the environment, where other users cannot read it, and never
from a command line. A `Key` is the trainer's half: it sends the token and checks that the answer is from the server
that it was made for, and not from whoever took the port after that server had ended.
"""

import dataclasses
import hmac
import os
import secrets
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

TOKEN, PROOF = "JPPO_SERVER_TOKEN", "JPPO_SERVER_PROOF"  # variables of the environment
PROOF_HEADER = "x-jppo-proof"
MIDDLEWARE = "jppo.rollout.guard.Guard"

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


@dataclasses.dataclass(frozen=True)
class Key:
    """What opens a server; '' is sent to none and expected of none."""

    token: str = dataclasses.field(default="", repr=False)
    proof: str = dataclasses.field(default="", repr=False)

    def headers(self) -> dict[str, str]:
        """Those of a request."""
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    def opened(self, headers: Mapping[str, str]) -> bool:
        """Whether an answer with these headers (names in lower case) is from the server that the key was made for."""
        return hmac.compare_digest(headers.get(PROOF_HEADER, "").encode(), self.proof.encode()) or not self.proof

    def environment(self) -> dict[str, str]:
        """Variables of the server that the key is for."""
        return {TOKEN: self.token, PROOF: self.proof}


def new_key() -> Key:
    """A random one, for one start of a server."""
    return Key(secrets.token_hex(32), secrets.token_hex(32))


class Guard:
    """The middleware; refuses to be made without a token."""

    def __init__(self, app: App):
        token = os.environ.get(TOKEN, "").strip()
        if not token:
            raise RuntimeError(f"{TOKEN} is not set: without it anybody could replace the weights of this server")
        self._app = app
        self._wanted = f"Bearer {token}".encode()
        self._proof = os.environ.get(PROOF, "").encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Passes on what has the token and no foreign origin; answers 401 or 403 to the rest."""
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
    """Whether a browser sent the request for a page of another place."""
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
