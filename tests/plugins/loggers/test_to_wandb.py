"""wandb offline, read back from its own files by a reader of this test's."""

import contextlib
import json
import pathlib
import struct
import sys

import pytest
import rich.console

from jppo.errors import UserError
from jppo.plugins.loggers import remote
from jppo.runlog.logger import Logger, read_metrics
from jppo.runlog.sinks import About

wandb = pytest.importorskip("wandb", reason="the extra wandb is not installed")
from wandb.proto.wandb_internal_pb2 import Record  # noqa: E402

BLOCK = 32768


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    yield
    wandb.teardown()


def records(path):
    """The records of a .wandb file: LevelDB's log after a header of 7 bytes."""
    data, at, held = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:  # too short for a header: padding
            at += BLOCK - at % BLOCK
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        if kind == 0:
            break
        held += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = Record()
            record.ParseFromString(held)
            yield record
            held = b""


def sent(run):
    """(run id, name, project, {step: {metric: value}}) of each start, the oldest first."""
    wandb.teardown()  # waits for the process that writes
    out = []
    for path in sorted(run.glob("wandb/offline-run-*/*.wandb")):
        steps, about = {}, None
        for record in records(path):
            if record.HasField("run"):
                about = (record.run.run_id, record.run.display_name, record.run.project)
            if record.HasField("history"):
                items = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
                steps[items.pop("_step")] = {k: v for k, v in items.items() if not k.startswith("_")}
        out.append((*about, steps))
    return out


def logger(run, resumed=None, **kw):
    places = ("console", "jsonl", "wandb")
    about = About("sums", "first", {"model": {"path": "some/model"}})
    return Logger(run, total_steps=9, resumed_step=resumed, loggers=places, about=about, **kw)


ROW = {
    "prompt": [{"role": "user", "content": "1+1="}],
    "response": "2",
    "ground_truth": "2",
    "score": None,
    "parts": {},
}


def test_offline_the_metrics_and_samples_are_in_wandbs_files(tmp_path):
    remote.Wandb.require()
    run = tmp_path / "run"
    with logger(run) as log:
        log.generations(0, [ROW])
        log.log(0, {"val/score": 0.5})
        log.log(1, {"critic/score/mean": 0.25, "actor/grad_norm": float("nan")})
    [(name, display, project, steps)] = sent(run)
    assert (display, project) == ("first", "sums")
    assert json.loads((run / "wandb.json").read_text()) == {"id": name, "step": 1}
    assert steps[1] == {"critic/score/mean": 0.25} and steps[0]["val/score"] == 0.5
    [table] = run.glob("wandb/offline-run-*/files/media/table/generations_0_*.json")
    assert json.loads(table.read_text())["data"] == [["1+1=", "2", "2", None, None, None]]


@pytest.mark.parametrize("error", [None, RuntimeError("the engine died"), KeyboardInterrupt()])
def test_a_run_that_breaks_off_has_failed_there(tmp_path, error):
    run = tmp_path / "run"
    with contextlib.suppress(RuntimeError, KeyboardInterrupt), logger(run) as log:
        log.log(1, {"a": 1})
        if error is not None:
            raise error
    wandb.teardown()
    [path] = run.glob("wandb/offline-run-*/*.wandb")
    assert [r.exit.exit_code for r in records(path) if r.HasField("exit")] == [0 if error is None else 1]


def test_a_resume_goes_on_with_the_same_run_and_no_step_is_lost_or_doubled(tmp_path):
    run = tmp_path / "run"
    with logger(run) as log:
        for step in (1, 2, 3):
            log.log(step, {"a": step})
    with logger(run, resumed=1) as log:  # 2 and 3 run again
        for step in (2, 3, 4):
            log.generations(step, [ROW])
            log.log(step, {"a": 10 * step})
    first, second = sent(run)
    assert first[0] == second[0]
    assert first[3] == {1: {"a": 1}, 2: {"a": 2}, 3: {"a": 3}}
    assert {step: m["a"] for step, m in second[3].items()} == {4: 40}
    assert [m["a"] for m in read_metrics(run)] == [1, 20, 30, 40]


def test_a_run_that_is_resumed_with_wandb_sends_what_it_did_without(tmp_path):
    run = tmp_path / "run"
    with Logger(run, total_steps=9, loggers=("jsonl",)) as log:
        for step in (1, 2, 3):
            log.log(step, {"a": step, "b": float("nan")})
    with logger(run, resumed=2) as log:
        log.log(3, {"a": 30})
    [(*_, steps)] = sent(run)
    assert steps == {1: {"a": 1}, 2: {"a": 2}, 3: {"a": 30}}


def test_a_new_run_in_the_same_folder_is_a_new_one_there(tmp_path):
    run = tmp_path / "run"
    ids = []
    for _ in range(2):
        with logger(run) as log:
            log.log(1, {"a": 1})
        ids.append(json.loads((run / "wandb.json").read_text())["id"])
    assert len(set(ids)) == 2


def test_a_wandb_that_fails_in_mid_run_is_told_once_and_the_run_goes_on(tmp_path, monkeypatch, capsys):
    with logger(tmp_path / "run", console=rich.console.Console(width=200)) as log:
        log.log(1, {"a": 1})

        def fail(*_, **__):
            raise wandb.Error("no network")

        monkeypatch.setattr(type(log._sinks["wandb"]._run), "log", fail)
        for step in (2, 3):
            log.log(step, {"a": step})
    assert capsys.readouterr().out.count("wandb fails: Error: no network") == 1
    assert [m["step"] for m in read_metrics(tmp_path / "run")] == [1, 2, 3]


def test_no_key_is_the_users_to_mend(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("NETRC", "/dev/null")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    wandb.teardown()
    with pytest.raises(UserError, match="run `wandb login`, or set WANDB_MODE=offline"):
        remote.Wandb.require()


def test_no_package_is_the_users_to_mend(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"pip install 'jppo\[wandb\]'"):
        remote.Wandb.require()


def test_nothing_of_it_lands_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with logger(pathlib.Path("run")) as log:
        log.log(1, {"a": 1})
    assert {path.name for path in tmp_path.iterdir()} <= {"run", "home"}
