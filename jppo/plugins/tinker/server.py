"""The HTTP server of the Tinker API: paths, keys and refusals; `sessions.py` answers."""

import contextlib
import hmac
from collections.abc import Iterator, Sequence

from jppo.errors import BadRequest, UserError
from jppo.event_loop import LoopThread
from jppo.http_server import HttpReply, HttpRequest, HttpServer, json_reply
from jppo.plugins.tinker.sessions import Service

_PREFIX = "/api/v1/"
_LEAST_KEY = 20  # characters


def start_server(service: Service, keys: Sequence[str], host: str, port: int) -> tuple[HttpServer, str]:
    """Starts the server on a loop in a thread of its own; returns it and its address."""

    async def answer(request: HttpRequest) -> HttpReply:
        if not request.path.startswith(_PREFIX):
            raise BadRequest(f"there is no {request.path[:80]!r}; paths begin with {_PREFIX}", status=404)
        name = request.path.removeprefix(_PREFIX)
        name = name if name.startswith(("samplers/", "sessions/")) else name.replace("/", "_")
        try:
            return await service.answer(_find_owner(request.key, keys), request.method, name, request.body)
        except UserError as e:
            raise BadRequest(str(e)) from e

    server = HttpServer(answer, lambda key: _find_owner(key, keys), _refusal)
    with name_address_in_errors(host, port):
        host, port = LoopThread("jppo-tinker").submit(server.start(host, port)).result()
    return server, f"http://{host}:{port}"


def require_keys(text: str, source: str) -> tuple[str, ...]:
    """Returns the keys, one a line; raises UserError for one that the client would not send."""
    keys = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not keys or any(not key.startswith("tml-") or len(key) < _LEAST_KEY or not key.isascii() for key in keys):
        raise UserError(
            f"{source} must have keys, one a line, each 'tml-' and random characters, {_LEAST_KEY} or more in all; make"
            " one by python -c \"import secrets; print('tml-' + secrets.token_urlsafe(32))\""
        )
    return keys


def _find_owner(key: str, keys: Sequence[str]) -> str:
    """Returns the known key that was sent, in a time that does not depend on the keys; raises BadRequest."""
    sent = key.encode("utf-8", "surrogateescape")
    matches = [known for known in keys if hmac.compare_digest(known.encode(), sent)]
    if not matches:
        raise BadRequest("the key is not known; send one of the server's as TINKER_API_KEY", status=401)
    return matches[0]


@contextlib.contextmanager
def name_address_in_errors(host: str, port: int) -> Iterator[None]:
    """Turns an OSError of the block into a UserError with the address."""
    try:
        yield
    except OSError as e:
        raise UserError(f"--host={host} --port={port}: {e.strerror}; give an address that is free") from e


def _refusal(error: BadRequest) -> HttpReply:
    return json_reply({"detail": str(error)}, error.status)
