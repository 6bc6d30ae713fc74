"""Spans of steps, samples, requests and rewards, read by OpenTelemetry's own SDK and protocol."""

import collections
import http.server
import sys
import threading

import pytest

from jppo import traces, train
from jppo.errors import UserError
from jppo.rewards.parts import RewardSum, parse_weights, sample_of
from jppo.runlog.make import require_loggers
from jppo.settings import check
from jppo.types import Reward
from tests.make import typed
from tests.rollout import test_fleet

pytest.importorskip("opentelemetry.sdk", reason="OpenTelemetry is not installed")
fakes_that_know_their_weights = test_fleet.made


@pytest.fixture
def recorded():
    """The spans that end while the test exports them."""
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    memory = InMemorySpanExporter()
    with traces.exporting(SimpleSpanProcessor(memory)):
        yield memory.get_finished_spans


def named(spans, name):
    return [span for span in spans if span.name == name]


def children(spans, parent):
    return [span for span in spans if span.parent is not None and span.parent.span_id == parent.context.span_id]


class Counts:
    """A part that grades by the number of tokens, when it is told to."""

    def __init__(self):
        self.pool = []

    def submit(self, sample):
        from concurrent.futures import Future

        self.pool.append(Future())
        return self.pool[-1]


def test_a_sample_has_its_requests_and_its_reward(recorded, fakes_that_know_their_weights, fakes):
    sampler, part = fakes_that_know_their_weights(), Counts()
    grading = RewardSum({"length": part}, parse_weights("", ["length"]), score_on_error=None).begin()
    test_fleet.failing(fakes[0], 1)

    def done(number, t):
        grading.submit(number, sample_of(test_fleet.PROMPTS[number // 2], t))

    with traces.span("gen"):
        found = sampler.start(test_fleet.PROMPTS, test_fleet.SAMPLING, done=done).result(20)
    assert not named(recorded(), "length"), "nothing is graded yet"
    for future in part.pool:
        future.set_result(Reward(1.0, {}, None))
    spans = recorded()
    [gen], samples = named(spans, "gen"), named(spans, "sample")
    assert sorted((s.attributes["jppo.prompt"], s.attributes["jppo.number"]) for s in samples) == [
        (prompt.uid, j) for prompt in test_fleet.PROMPTS for j in range(2)
    ]
    servers = collections.Counter(s.attributes["jppo.server"] for s in samples)
    assert servers == collections.Counter(t.server for t in found)
    for sample in samples:
        assert sample.parent.span_id == gen.context.span_id
        told = {name.removeprefix("jppo."): value for name, value in sample.attributes.items()}
        assert (told["versions"], told["turns"], told["tokens"], told["finish"]) == ((7,), 1, 3, "stop")
        inner = children(spans, sample)
        assert {span.name for span in inner} == {"queue", "generate", "length"}
        [reward] = named(inner, "length")
        assert all(span.end_time <= reward.start_time <= reward.end_time for span in named(inner, "generate"))
    failed = [span for span in named(spans, "generate") if not span.status.is_ok]
    assert len(failed) == 1 and failed[0].attributes["jppo.server"] == fakes[0].url
    assert len(named(spans, "generate")) == len(samples) + 1


@pytest.mark.slow
def test_a_run_has_its_steps_and_stages(recorded, small_run):
    small_run.rollout.name = "inprocess"
    check(small_run)
    train.train(small_run)
    steps = named(recorded(), "step")
    assert [step.attributes["jppo.number"] for step in steps] == [1, 2]
    for version, step in enumerate(steps):
        stages = children(recorded(), step)
        assert {"gen", "reward", "update_actor", "update_critic", "update_weights"} <= {span.name for span in stages}
        samples = [span for gen in named(stages, "gen") for span in children(recorded(), gen)]
        assert [span.attributes["jppo.versions"] for span in samples] == [(version,)] * 4
        rewards = [span for sample in samples for span in children(recorded(), sample)]
        assert [span.name for span in rewards] == ["rule_score"] * 4


def test_spans_go_where_the_environment_says(monkeypatch):
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    received = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append((self.path, self.headers["x-key"], ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_): ...

    server = http.server.HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=secret")
    with traces.exporting(), traces.span("step", number=3):
        pass
    server.shutdown()
    server.server_close()
    [(path, key, request)] = received
    [spans] = request.resource_spans
    assert (path, key) == ("/v1/traces", "secret")
    assert {a.key: a.value.string_value for a in spans.resource.attributes}["service.name"] == "jppo"
    assert [span.name for span in spans.scope_spans[0].spans] == ["step"]


def test_a_missing_package_is_one_line(small_run, monkeypatch):
    require_loggers(typed(small_run))
    small_run.trainer.traces = True
    require_loggers(typed(small_run))
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(UserError, match=r"trainer.traces=True: .* not installed; pip install 'jppo\[traces\]'$"):
        require_loggers(typed(small_run))
