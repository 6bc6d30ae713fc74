"""Connections of the Tinker server: HTTP/1.1, a key in each request."""

import hmac
import http.server
import json
import threading
import traceback
from collections.abc import Sequence

from jppo.agent.gateway.request import BadRequest
from jppo.errors import UserError
from jppo.tinker.futures import JSON
from jppo.tinker.sessions import Answer, Service

PREFIX = "/api/v1/"
MOST_BODY = 2**26  # bytes; the client cuts gradients at 5 MB
IDLE_S = 120.0
LEAST_KEY = 20  # characters


def require_keys(text: str, source: str) -> tuple[str, ...]:
    """Returns the keys, one a line; raises UserError for one that the client would not send."""
    keys = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not keys or any(not key.startswith("tml-") or len(key) < LEAST_KEY or not key.isascii() for key in keys):
        raise UserError(
            f"{source} must have keys, one a line, each 'tml-' and random characters, {LEAST_KEY} or more in all; make"
            " one by python -c \"import secrets; print('tml-' + secrets.token_urlsafe(32))\""
        )
    return keys


def owner_of(key: str, keys: Sequence[str]) -> str:
    """Returns the known key that was sent, in a time that does not depend on the keys; raises BadRequest."""
    sent = key.encode("utf-8", "surrogateescape")
    found = [one for one in keys if hmac.compare_digest(one.encode(), sent)]
    if not found:
        raise BadRequest("the key is not known; send one of the server's as TINKER_API_KEY", status=401)
    return found[0]


def serve(service: Service, keys: Sequence[str], host: str, port: int) -> http.server.ThreadingHTTPServer:
    """Starts the server in threads of its own."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version, timeout, server_version, sys_version = "HTTP/1.1", IDLE_S, "jppo", ""
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
            owner = owner_of(self.headers.get("X-API-Key", ""), keys)
            length = self.headers.get("Content-Length", "0")
            if "Transfer-Encoding" in self.headers or not (length.isascii() and length.isdecimal()):
                raise BadRequest("the request needs a Content-Length", status=411)
            if "Content-Encoding" in self.headers:
                raise BadRequest("Content-Encoding is not supported; send the body as it is", status=415)
            if int(length) > MOST_BODY:
                raise BadRequest(f"the body has {length} bytes; it must have at most {MOST_BODY}", status=413)
            body = self.rfile.read(int(length))
            self._read = True
            path = self.path.partition("?")[0]
            if not path.startswith(PREFIX):
                raise BadRequest(f"there is no {path[:80]!r}; paths begin with {PREFIX}", status=404)
            name = path.removeprefix(PREFIX)
            name = name if name.startswith(("samplers/", "sessions/")) else name.replace("/", "_")
            return service.answer(owner, self.command, name, body)

    class Server(http.server.ThreadingHTTPServer):
        daemon_threads, request_queue_size = True, 1024

        def handle_error(self, *_: object) -> None:
            pass  # the client has gone

    server = Server((host, port), Handler)
    threading.Thread(target=server.serve_forever, name="jppo-tinker", daemon=True).start()
    return server
