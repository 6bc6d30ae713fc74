"""Serves the Tinker API on your machine: python -m jppo.tinker MODEL --lora=32 --key_file=keys.txt

    JPPO_TINKER_KEYS=tml-... python -m jppo.tinker path/to/model --data.max_response_length=512

Clients set TINKER_BASE_URL=http://127.0.0.1:8000 and TINKER_API_KEY to one of the keys. Further arguments are settings
of jppo.train: --rollout.name=inprocess, --mesh.fsdp=4. See docs/tinker.md.
"""

import ast
import asyncio
import contextlib
import hmac
import os
import pathlib
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from jppo import settings
from jppo.errors import BadRequest, UserError
from jppo.http_server import HttpReply, HttpRequest, HttpServer, json_reply
from jppo.run.api.model import open_model
from jppo.tinker.sessions import Service

KEYS = "JPPO_TINKER_KEYS"
_ALPHA = 32  # the API's scale of adapters
_PREFIX = "/api/v1/"
_LEAST_KEY = 20  # characters


@settings.exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    """Runs the command line."""
    parser = settings.Parser("jppo.tinker", __doc__)
    parser.add_argument("model", help="model directory or Hub name")
    parser.add_argument(
        "--lora", type=settings.natural, default=32, help="rank of the adapters; 0 trains whole weights"
    )
    parser.add_argument("--name", help="the base_model that clients name; by default MODEL")
    parser.add_argument("--key_file", type=pathlib.Path, help=f"keys, one a line; by default {KEYS}")
    parser.add_argument("--folder", type=pathlib.Path, default="runs/tinker", help="folder of the checkpoints")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on")
    parser.add_argument("--port", type=settings.natural, default=8000, help="the port to listen on")
    parser.add_argument("--expiry_s", type=settings.natural, default=300, help="seconds without a client's heartbeat")
    parser.add_argument("--sessions", type=settings.natural, default=16, help="the most sessions at once")
    args, rest = parser.parse_known_args(sys.argv[1:] if argv is None else argv)
    text = args.key_file.read_text(encoding="utf-8") if args.key_file else os.environ.get(KEYS, "")
    keys = _require_keys(text, str(args.key_file or KEYS))
    loop_settings = dict[str, Any]({"rollout.name": "vllm"}) | dict(_parse_setting(argument) for argument in rest)
    lora = {"rank": args.lora, "alpha": _ALPHA} if args.lora else None
    engine = {"name": loop_settings.pop("rollout.name")}
    if args.port > 65535:
        raise UserError(f"--port={args.port} must be 0 to 65535; 0 takes a free one")
    with _name_address_in_errors(args.host, args.port):  # before the model is loaded
        socket.create_server((args.host, args.port)).close()
    with open_model(args.model, lora=lora, engine=engine, **loop_settings) as model:
        name = args.name or args.model
        bounds = dict(expiry_s=args.expiry_s, max_sessions=args.sessions)
        service = Service(model, name, args.lora, folder=args.folder, **bounds)
        _, address = start_server(service, keys, args.host, args.port)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: service.stop())
        print(f"the Tinker API of {name} is at {address}", flush=True)
        service.work()


def _parse_setting(argument: str) -> tuple[str, Any]:
    """Returns the name and value of an argument --SECTION.NAME=VALUE."""
    name, equals, text = argument.removeprefix("--").partition("=")
    if not argument.startswith("--") or not equals or "." not in name:
        raise UserError(f"{argument!r} is no argument; settings are --SECTION.NAME=VALUE")
    try:
        return name, ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return name, text


def _require_keys(text: str, source: str) -> tuple[str, ...]:
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

    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="jppo-tinker", daemon=True).start()
    server = HttpServer(answer, lambda key: _find_owner(key, keys), _refusal)
    with _name_address_in_errors(host, port):
        host, port = asyncio.run_coroutine_threadsafe(server.start(host, port), loop).result()
    return server, f"http://{host}:{port}"


@contextlib.contextmanager
def _name_address_in_errors(host: str, port: int) -> Iterator[None]:
    """Turns an OSError of the block into a UserError with the address."""
    try:
        yield
    except OSError as e:
        raise UserError(f"--host={host} --port={port}: {e.strerror}; give an address that is free") from e


def _refusal(error: BadRequest) -> HttpReply:
    return json_reply({"detail": str(error)}, error.status)


if __name__ == "__main__":
    main()
