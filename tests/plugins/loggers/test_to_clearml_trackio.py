"""ClearML and Trackio with fake clients: each step is sent once, under the id of the run."""

import json
import sys
import types

import pytest

from jppo.errors import UserError
from jppo.plugins.loggers import remote
from jppo.runlog.logger import Logger
from jppo.runlog.sinks import About

ROWS = [{"prompt": "1+1=", "response": "2", "score": 1.0}]


class Fake(types.ModuleType):
    """A client: its `starts`, what was `sent` (step, metric, value) and `tables`, and how runs ended."""

    def __init__(self, name):
        super().__init__(name)
        self.starts, self.sent, self.tables, self.ends = [], [], [], []


class FakeClearML(Fake):
    id = "task-1"

    def __init__(self):
        super().__init__("clearml")
        self.Task, self.get_logger = self, lambda: self

    def init(self, **how):
        self.starts.append(how["continue_last_task"])
        return self

    def report_scalar(self, title, series, value, iteration):
        self.sent.append((iteration, title, value))

    def report_table(self, title, series, iteration, table_plot):
        self.tables.append((iteration, table_plot[1]))

    def mark_failed(self, status_reason):
        self.ends.append("failed")

    def close(self):
        self.ends.append("closed")

    def set_initial_iteration(self, first):
        self.first = first

    def connect_configuration(self, configuration, name):
        self.configuration = configuration

    def flush(self, wait_for_uploads):
        pass


class FakeTrackio(Fake):
    name = "first"

    def __init__(self):
        super().__init__("trackio")
        self.Table = lambda columns, data: data

    def init(self, **how):
        self.starts.append((how["name"], how["resume"]))
        return self

    def log(self, values, step):
        for name, value in values.items():
            if name == "generations":
                self.tables.append((step, value[0]))
            else:
                self.sent.append((step, name, value))

    def finish(self):
        self.ends.append("closed")


def logger(run, name, resumed=None):
    about = About("sums", "first", {"model": {"path": "some/model"}})
    return Logger(run, total_steps=9, resumed_step=resumed, loggers=("jsonl", name), about=about)


@pytest.mark.parametrize(
    "make, starts, ends",
    [
        (FakeClearML, [False, "task-1"], ["failed", "closed", "closed"]),
        (FakeTrackio, [("first", "never"), ("first", "allow")], ["closed", "closed"]),
    ],
)
def test_each_step_is_sent_once_and_a_resume_continues_the_run(tmp_path, monkeypatch, make, starts, ends):
    client, run = make(), tmp_path / "run"
    name = client.__name__
    monkeypatch.setitem(sys.modules, name, client)
    with pytest.raises(RuntimeError), logger(run, name) as log:
        log.generations(1, ROWS)
        for step in (1, 2, 3):
            log.log(step, {"a": step, "critic/score/mean": float("nan")})
        raise RuntimeError("the engine died")
    with logger(run, name, resumed=1) as log:
        for step in (2, 3, 4):
            log.log(step, {"a": 10 * step})
    assert client.starts == starts and client.ends == ends
    assert client.sent == [(1, "a", 1.0), (2, "a", 2.0), (3, "a", 3.0), (4, "a", 40.0)]
    assert client.tables == [(1, ["1+1=", "2", None, 1.0, None, None])]
    assert json.loads((run / f"{name}.json").read_text())["step"] == 4


@pytest.mark.parametrize("make, title", [(FakeClearML, "ClearML"), (FakeTrackio, "Trackio")])
def test_no_package_and_a_client_that_does_not_start_are_one_line(tmp_path, monkeypatch, make, title):
    def fail(**_):
        raise RuntimeError("no network")

    client = make()
    client.init = fail
    monkeypatch.setitem(sys.modules, client.__name__, client)
    with pytest.raises(UserError, match=f"{title} does not start: no network"):
        logger(tmp_path / "run", client.__name__)
    monkeypatch.setitem(sys.modules, client.__name__, None)
    with pytest.raises(UserError, match=rf"pip install 'jppo\[{client.__name__}\]'"):
        getattr(remote, title).require()
