"""Serves the Tinker API on your machine: python -m jppo.tinker MODEL --lora=32 --key_file=keys.txt

    JPPO_TINKER_KEYS=tml-... python -m jppo.tinker path/to/model --data.max_response_length=512

Clients set TINKER_BASE_URL=http://127.0.0.1:8000 and TINKER_API_KEY to one of the keys. Further arguments are settings
of jppo.train: --rollout.name=inprocess, --mesh.fsdp=4. See docs/tinker.md.
"""

import ast
import hmac
import http.server
import json
import os
import pathlib
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import Any

from jppo import settings
from jppo.agent.gateway.request import BadRequest
from jppo.run.own_loop import open_model
from jppo.settings import UserError
from jppo.tinker.futures import JSON
from jppo.tinker.sessions import Answer, Service

KEYS = "JPPO_TINKER_KEYS"
_ALPHA = 32  # the API's scale of adapters
_PREFIX = "/api/v1/"
_MOST_BODY = 2**26  # bytes; the client cuts gradients at 5 MB
_IDLE_S = 120.0
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
    given = dict[str, Any]({"rollout.name": "vllm"}) | dict(_setting(argument) for argument in rest)
    lora = {"rank": args.lora, "alpha": _ALPHA} if args.lora else None
    engine = {"name": given.pop("rollout.name")}
    with open_model(args.model, lora=lora, engine=engine, **given) as model:
        name = args.name or args.model
        bounds = dict(expiry_s=args.expiry_s, most=args.sessions)
        service = Service(model, name, args.lora, folder=args.folder, **bounds)
        server = start_server(service, keys, args.host, args.port)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: service.stop())
        host, port = server.server_address[:2]
        print(f"the Tinker API of {name} is at http://{host!s}:{port}", flush=True)
        service.work()


def _setting(argument: str) -> tuple[str, Any]:
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


def _owner_of(key: str, keys: Sequence[str]) -> str:
    """Returns the known key that was sent, in a time that does not depend on the keys; raises BadRequest."""
    sent = key.encode("utf-8", "surrogateescape")
    matches = [known for known in keys if hmac.compare_digest(known.encode(), sent)]
    if not matches:
        raise BadRequest("the key is not known; send one of the server's as TINKER_API_KEY", status=401)
    return matches[0]


def start_server(service: Service, keys: Sequence[str], host: str, port: int) -> http.server.ThreadingHTTPServer:
    """Starts the server, which answers in its own threads, and returns it."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version, timeout, server_version, sys_version = "HTTP/1.1", _IDLE_S, "jppo", ""
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            self._answer()

        def do_POST(self) -> None:
            self._answer()

        def log_message(self, *_: object) -> None:
            pass

        def _answer(self) -> None:
            try:
                status, kind, body = self._found()
            except (BadRequest, UserError) as e:
                self.close_connection = self.close_connection or not self._read
                status, kind, body = getattr(e, "status", 400), JSON, json.dumps({"detail": str(e)}).encode()
            except (ConnectionError, TimeoutError):
                raise  # the client has gone
            except Exception as e:
                traceback.print_exception(e)
                detail = f"the server failed: {type(e).__name__}; see its output"
                status, kind, body = 500, JSON, json.dumps({"detail": detail}).encode()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            if self.close_connection:
                self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(body)

        def _found(self) -> Answer:
            self._read = False
            owner = _owner_of(self.headers.get("X-API-Key", ""), keys)
            length = self.headers.get("Content-Length", "0")
            if "Transfer-Encoding" in self.headers or not (length.isascii() and length.isdecimal()):
                raise BadRequest("the request needs a Content-Length", status=411)
            if "Content-Encoding" in self.headers:
                raise BadRequest("Content-Encoding is not supported; send the body as it is", status=415)
            if int(length) > _MOST_BODY:
                raise BadRequest(f"the body has {length} bytes; it must have at most {_MOST_BODY}", status=413)
            body = self.rfile.read(int(length))
            self._read = True
            path = self.path.partition("?")[0]
            if not path.startswith(_PREFIX):
                raise BadRequest(f"there is no {path[:80]!r}; paths begin with {_PREFIX}", status=404)
            name = path.removeprefix(_PREFIX)
            name = name if name.startswith(("samplers/", "sessions/")) else name.replace("/", "_")
            return service.answer(owner, self.command, name, body)

    class Server(http.server.ThreadingHTTPServer):
        daemon_threads, request_queue_size = True, 1024

        def handle_error(self, *_: object) -> None:
            pass  # the client has gone

    server = Server((host, port), Handler)
    threading.Thread(target=server.serve_forever, name="jppo-tinker", daemon=True).start()
    return server


if __name__ == "__main__":
    main()
