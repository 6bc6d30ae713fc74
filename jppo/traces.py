"""Spans of stages, samples, requests and rewards for OpenTelemetry (`trainer.traces`); without it they cost nothing.

A span's parent is the span in which it begins, also on another thread's event loop: a sample's is the stage that
requested it.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

from jppo.errors import UserError

_tracer: Any = None  # of the process; None: off


def require() -> None:
    """UserError if OpenTelemetry is missing."""
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError as e:
        raise UserError("trainer.traces=True: OpenTelemetry is not installed; pip install 'jppo[traces]'") from e


@contextlib.contextmanager
def exporting(processor: Any = None) -> Iterator[None]:
    """Exports the block's spans by OTLP over HTTP, as the variables OTEL_* say, or to a `processor` of the SDK."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    global _tracer
    provider = TracerProvider(resource=Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME") or "jppo"}))
    provider.add_span_processor(processor or BatchSpanProcessor(OTLPSpanExporter()))
    _tracer = provider.get_tracer("jppo")
    try:
        yield
    finally:
        _tracer = None
        provider.shutdown()


@contextlib.contextmanager
def span(name: str, **attributes: Any) -> Iterator[Callable[..., None]]:
    """Records a span around the block, if tracing is on; yields a function that adds attributes."""
    if _tracer is None:
        yield lambda **_: None
        return
    with _tracer.start_as_current_span(name) as current:

        def note(**attributes: Any) -> None:
            current.set_attributes({f"jppo.{key}": value for key, value in attributes.items()})

        note(**attributes)
        yield note


def until_done(name: str, future: Future[Any]) -> None:
    """Records a span from now until the future is done."""
    if _tracer is not None:
        open_span = _tracer.start_span(name)
        future.add_done_callback(lambda _: open_span.end())
