"""SwanLab with a fake client: each step is sent once, under the id of the run."""

import json
import sys
import types

import pytest

from jppo.errors import UserError
from jppo.plugins.loggers import remote
from jppo.runlog.logger import Logger
from jppo.runlog.sinks import About


@pytest.fixture
def client(monkeypatch):
    """Its `starts`, and `sent` (step, values); `ends` has the state of each end."""
    fake = types.ModuleType("swanlab")
    fake.starts, fake.sent, fake.ends, fake.Text = [], [], [], str
    fake.log = lambda values, step: fake.sent.append((step, values))
    fake.finish = lambda state="success", error=None: fake.ends.append(state)
    fake.init = lambda **how: fake.starts.append(how) or fake
    monkeypatch.setitem(sys.modules, "swanlab", fake)
    monkeypatch.setenv("SWANLAB_MODE", "online")
    monkeypatch.setenv("SWANLAB_API_KEY", "k")
    return fake


def logger(run, resumed=None):
    about = About("sums", "first", {"model": {"path": "some/model"}})
    return Logger(run, total_steps=9, resumed_step=resumed, loggers=("jsonl", "swanlab"), about=about)


def test_no_package_and_no_key_are_the_users_to_mend(client, monkeypatch):
    remote.Swanlab.require()
    monkeypatch.delenv("SWANLAB_API_KEY")
    with pytest.raises(UserError, match=r"has no key; set SWANLAB_API_KEY, or SWANLAB_MODE=offline"):
        remote.Swanlab.require()
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    remote.Swanlab.require()
    monkeypatch.setitem(sys.modules, "swanlab", None)
    with pytest.raises(UserError, match=r"pip install 'jppo\[swanlab\]'"):
        remote.Swanlab.require()


def test_each_step_is_sent_once_and_a_resume_continues_the_run(tmp_path, client):
    run = tmp_path / "run"
    with pytest.raises(RuntimeError), logger(run) as log:
        log.generations(1, [{"prompt": "1+1=", "response": "2", "score": 1.0}])
        for step in (1, 2, 3):
            log.log(step, {"a": step, "critic/score/mean": float("nan")})
        raise RuntimeError("the engine died")
    with logger(run, resumed=1) as log:
        for step in (2, 3, 4):
            log.log(step, {"a": 10 * step})
    [first, second] = client.starts
    assert (first["project"], first["name"], first["mode"]) == ("sums", "first", "online")
    assert first["id"] == second["id"] == json.loads((run / "swanlab.json").read_text())["id"]
    assert client.ends == ["crashed", "success"]
    metrics = [(step, values["a"]) for step, values in client.sent if "a" in values]
    assert metrics == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]
    assert not any("critic/score/mean" in values for _, values in client.sent)
    [(step, shown)] = [(step, values["generations"]) for step, values in client.sent if "generations" in values]
    assert step == 1 and json.loads(shown[0])["response"] == "2"


def test_a_client_that_does_not_start_is_one_line(tmp_path, client):
    def fail(**_):
        raise RuntimeError("no network")

    client.init = fail
    with pytest.raises(UserError, match="SwanLab does not start: no network"):
        logger(tmp_path / "run")
