"""MLflow without a server: a folder of the run, read back by MLflow's own client."""

import json
import sys
import types

import pytest

from jppo.errors import UserError
from jppo.plugins.loggers import remote
from jppo.runlog.logger import Logger
from jppo.runlog.sinks import About


def test_no_package_is_the_users_to_mend(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(UserError, match=r"pip install 'jppo\[mlflow\]'"):
        remote.MLflow.require()


@pytest.fixture
def client(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_ALLOW_FILE_STORE", *remote.PATIENCE):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return lambda: mlflow.MlflowClient(tracking_uri=(tmp_path / "run/mlruns").as_uri())


def logger(run, resumed=None):
    about = About("sums", "first", {"model": {"path": "some/model"}})
    return Logger(run, total_steps=9, resumed_step=resumed, loggers=("jsonl", "mlflow"), about=about)


def history(client, run_id):
    return [(m.step, m.value) for m in client.get_metric_history(run_id, "a")]


def test_metrics_and_samples_are_there_and_a_resume_goes_on(tmp_path, client):
    run = tmp_path / "run"
    with logger(run) as log:
        log.generations(1, [{"prompt": "1+1=", "response": "2", "score": 1.0}])
        for step in (1, 2, 3):
            log.log(step, {"a": step, "critic/score/mean": float("nan")})
    with logger(run, resumed=1) as log:
        for step in (2, 3, 4):
            log.log(step, {"a": 10 * step})
    about = json.loads((run / "mlflow.json").read_text())
    assert about["step"] == 4
    assert history(client(), about["id"]) == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]
    found = client().get_run(about["id"])
    assert (found.info.run_name, found.info.status) == ("first", "FINISHED")
    assert {f.path for f in client().list_artifacts(about["id"])} == {"config.json", "generations"}


def test_a_run_that_breaks_off_has_failed_there_until_it_goes_on(tmp_path, client):
    run = tmp_path / "run"
    with pytest.raises(RuntimeError), logger(run) as log:
        log.log(1, {"a": 1})
        raise RuntimeError("the engine died")
    run_id = json.loads((run / "mlflow.json").read_text())["id"]
    assert client().get_run(run_id).info.status == "FAILED"
    with logger(run, resumed=1) as log:
        assert client().get_run(run_id).info.status == "RUNNING"
        log.log(2, {"a": 2})
    assert client().get_run(run_id).info.status == "FINISHED"


def test_what_a_server_did_not_take_is_sent_when_it_does(tmp_path, client, monkeypatch, capsys):
    with logger(tmp_path / "run") as log:
        mine = log._sinks["mlflow"]._client

        def fail(*_, **__):
            raise ConnectionError("no server")

        log.log(1, {"a": 1})
        with monkeypatch.context() as m:
            m.setattr(mine, "log_batch", fail)
            log.log(2, {"a": 2})
            log.log(3, {"a": 3})
        log.log(4, {"a": 4})
    assert capsys.readouterr().err.count("mlflow fails: ConnectionError: no server") == 1
    run_id = json.loads((tmp_path / "run/mlflow.json").read_text())["id"]
    assert history(client(), run_id) == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]


def test_a_server_that_is_not_there_is_the_users_to_mend(tmp_path, client, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"MLflow at http://127\.0\.0\.1:9 does not start"):
        logger(tmp_path / "run")


def test_samples_of_a_step_are_a_file_once(tmp_path):
    """By a stand-in for MLflow's client, which may not be installed."""
    sink, files = object.__new__(remote.MLflow), []
    sink._sent = remote.SentSteps(tmp_path, "mlflow", resumed=False)
    sink._sent.begin("id")
    sink._client = types.SimpleNamespace(log_dict=lambda run, content, name: files.append((run, content, name)))
    sink.generations(2, [])
    assert files == []
    sink.generations(2, [{"prompt": "1+1=", "response": "2", "score": 1.0, "other": 7}])
    [(run, content, name)] = files
    assert (run, name) == ("id", "generations/step_2.json") and "other" not in content["rows"][0]
    assert content["rows"][0]["response"] == "2"
    sink._sent.done(2)
    sink.generations(2, [{"prompt": "1+1=", "response": "2", "score": 1.0}])
    assert len(files) == 1
