"""The metrics of the last step at `http://HOST:PORT/metrics`, in Prometheus' text format."""

import collections
import http.server
import math
import re
import threading
from collections.abc import Mapping

from jppo.errors import UserError
from jppo.runlog.diagnosis import Alert
from jppo.runlog.sinks import Rows

TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Exporter:
    """The HTTP server, in its own threads."""

    def __init__(self, host: str, port: int) -> None:
        self._text = render(None, {}, {})
        self._step: int | None = None
        self._metrics: Mapping[str, float] = {}
        self._warnings: collections.Counter[str] = collections.Counter()
        try:
            self._server = http.server.ThreadingHTTPServer((host, port), self._handler())
        except (OSError, OverflowError) as e:
            raise UserError(
                f"trainer.metrics_port={port} cannot be opened on trainer.metrics_host={host!r}: {e}; choose another"
            ) from e
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, name="jppo-metrics", daemon=True).start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows this step."""
        self._step, self._metrics = step, metrics
        self._text = render(step, metrics, self._warnings)

    def generations(self, step: int, rows: Rows) -> None:
        """Does nothing: samples are not numbers."""

    def warn(self, alert: Alert) -> None:
        """Counts a warning."""
        self._warnings[alert.name] += 1
        self._text = render(self._step, self._metrics, self._warnings)

    def close(self, *, failed: bool) -> None:
        """Ends the server."""
        self._server.shutdown()
        self._server.server_close()

    def _handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        exporter = self

        class Handler(http.server.BaseHTTPRequestHandler):
            timeout = 10.0  # of a client that sends nothing

            def do_GET(self) -> None:
                found = self.path.partition("?")[0] == "/metrics"
                body = exporter._text.encode() if found else b"the metrics are at /metrics\n"
                self.send_response(200 if found else 404)
                self.send_header("Content-Type", TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None: ...

        return Handler


def render(step: int | None, metrics: Mapping[str, float], warnings: Mapping[str, int]) -> str:
    """Returns the text: `jppo_actor_entropy 0.1` for `actor/entropy`."""
    values = {} if step is None else {"step": float(step)} | {_name(name): value for name, value in metrics.items()}
    lines = [f"# TYPE jppo_{name} gauge\njppo_{name} {_number(value)}" for name, value in values.items()]
    if warnings:
        lines.append("# TYPE jppo_warnings_total counter")
        lines += [f'jppo_warnings_total{{name="{name}"}} {count}' for name, count in warnings.items()]
    return "".join(f"{line}\n" for line in lines)


def _name(metric: str) -> str:
    return re.sub(r"[^a-zA-Z0-9_]", "_", metric)


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(float(value))
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
