"""The metrics for Prometheus, read by its own parser."""

import gzip
import math
import pathlib
import urllib.error
import urllib.request

import pytest
from prometheus_client import parser
from prometheus_client.openmetrics import parser as openmetrics

from jppo.errors import UserError
from jppo.runlog.diagnosis import Alert
from jppo.runlog.logger import Logger
from jppo.runlog.sinks import Exporter


@pytest.fixture
def exporter():
    made = Exporter("127.0.0.1", 0)
    yield made
    made.close(failed=False)


def scraped(exporter):
    with urllib.request.urlopen(f"http://127.0.0.1:{exporter.port}/metrics", timeout=60) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        families = parser.text_string_to_metric_families(answer.read().decode())
        return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


def test_the_last_step_is_shown(exporter):
    assert scraped(exporter) == {}
    exporter.log(1, {"actor/entropy": 0.5})
    exporter.log(2, {"actor/entropy": 1e-30, "timing_s/gen": 3, "odd": math.nan, "far": -math.inf})
    found = scraped(exporter)
    assert math.isnan(found.pop(("jppo_odd",)))
    assert found == {
        ("jppo_step",): 2.0, ("jppo_actor_entropy",): 1e-30, ("jppo_timing_s_gen",): 3.0, ("jppo_far",): -math.inf
    }  # fmt: skip


def answered(exporter, path="/metrics", method="GET", **headers):
    """Status, headers and content."""
    address = f"http://127.0.0.1:{exporter.port}{path}"
    data = b"" if method in ("POST", "PUT") else None
    asked = urllib.request.Request(address, data=data, headers=headers, method=method)
    try:
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as e:
        return e.code, e.headers, e.read()


SHOWN = b"jppo_reward_mean 0.25\n"


@pytest.mark.parametrize(
    "path, shown", [("/metrics", True), ("/", True), ("/anything?x=1", True), ("/favicon.ico", False)]
)
def test_every_path_has_the_metrics_but_for_the_icon_of_browsers(exporter, path, shown):
    exporter.log(1, {"reward_mean": 0.25})
    status, _, content = answered(exporter, path)
    assert status == 200 and (SHOWN in content if shown else content == b"")


def test_a_query_for_names_selects_nothing(exporter):
    exporter.log(1, {"reward_mean": 0.25})
    assert answered(exporter, "/metrics?name[]=jppo_reward_mean")[::2] == (200, b"")


@pytest.mark.parametrize(
    "method, status", [("OPTIONS", 200), ("HEAD", 405), ("POST", 405), ("PUT", 405), ("DELETE", 405)]
)
def test_the_metrics_can_only_be_read(exporter, method, status):
    exporter.log(1, {"reward_mean": 0.25})
    found, headers, content = answered(exporter, method=method)
    assert (found, headers["Allow"]) == (status, "OPTIONS,GET") and SHOWN not in content
    assert scraped(exporter)[("jppo_reward_mean",)] == 0.25


@pytest.mark.parametrize("accepted, packed", [("gzip", True), ("gzip, deflate", True), ("identity", False)])
def test_the_text_is_packed_for_clients_that_accept_it(exporter, accepted, packed):
    exporter.log(1, {"reward_mean": 0.25})
    _, headers, content = answered(exporter, **{"Accept-Encoding": accepted})
    assert headers["Content-Encoding"] == ("gzip" if packed else None)
    assert SHOWN in (gzip.decompress(content) if packed else content)


def test_openmetrics_for_clients_that_ask_for_it(exporter):
    exporter.warn(Alert(3, "slow_stage", "found", "remedy"))
    exporter.log(4, {"odd": math.inf})
    _, headers, content = answered(exporter, Accept="application/openmetrics-text; version=1.0.0")
    assert headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
    families = openmetrics.text_string_to_metric_families(content.decode())  # refuses what breaks the format
    found = {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}
    assert found == {("jppo_step",): 4.0, ("jppo_odd",): math.inf, ("jppo_warnings_total", "slow_stage"): 1.0}


def test_warnings_are_counted(exporter):
    exporter.warn(Alert(3, "slow_stage", "found", "remedy"))
    exporter.log(4, {})
    assert scraped(exporter) == {("jppo_step",): 4.0, ("jppo_warnings_total", "slow_stage"): 1.0}


def test_a_port_that_is_taken_is_an_error(exporter):
    with pytest.raises(UserError, match=rf"trainer.metrics_port={exporter.port} cannot be opened"):
        Exporter("127.0.0.1", exporter.port)
    with pytest.raises(UserError, match=r"trainer.metrics_host='nowhere.invalid'"):
        Exporter("nowhere.invalid", 0)


def test_a_run_serves_its_metrics_until_it_ends(tmp_path: pathlib.Path):
    probe = Exporter("127.0.0.1", 0)
    probe.close(failed=False)
    with Logger(tmp_path, total_steps=2, loggers=("jsonl",), prometheus_address=("127.0.0.1", probe.port)) as logger:
        logger.log(1, {"reward_mean": 0.25})
        assert scraped(probe)[("jppo_reward_mean",)] == 0.25
    with pytest.raises(urllib.error.URLError):
        scraped(probe)
