"""Where a run writes and listens: each verdict with a made fault."""

import json
import pathlib
import shutil
import socket
from types import SimpleNamespace

import pytest

from jppo import settings
from jppo.errors import UserError
from jppo.preflight import machine
from jppo.preflight.finding import GIB
from jppo.preflight.memory_budget import MemoryBudget
from tests.make import typed


def only(found):
    (one,) = found
    assert bool(one.remedy) == (one.verdict != "OK")
    return one


def test_the_folder_is_really_written_to_and_left_as_it_was(tmp_path):
    assert only(machine.check_writable("permission", tmp_path / "a/b")).verdict == "OK"
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "kept").mkdir()
    assert only(machine.check_writable("permission", tmp_path / "kept")).verdict == "OK"
    assert list(tmp_path.iterdir()) == [tmp_path / "kept"]


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    found = only(machine.check_writable("permission", tmp_path / "file/run"))
    assert found.verdict == "FAIL" and "Not a directory" in found.found
    assert (tmp_path / "file").is_file()


@pytest.mark.parametrize("free, verdict", [(20, "OK"), (12, "WARN"), (8, "FAIL")])
def test_disk_must_hold_one_checkpoint_more_than_are_kept(monkeypatch, tmp_path, free, verdict):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free * GIB))
    # 3 checkpoints of 2 GiB, 2 of the model, a quarter of logs: 8.25
    found = only(machine.check_disk(tmp_path / "not/yet", checkpoint=2 * GIB, keep=2, export=2 * GIB))
    assert found.verdict == verdict and "3 checkpoints of 2.00 GiB" in found.found


def test_two_copies_of_the_weights_must_fit_where_they_are_handed_over(monkeypatch, tmp_path):
    nameless = only(machine.check_publish_room("", in_dev_shm=False, weights=GIB))
    assert nameless.verdict == "OK" and "2.00 GiB" in nameless.found
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=3 * GIB))
    assert only(machine.check_publish_room(str(tmp_path), in_dev_shm=False, weights=GIB)).verdict == "OK"
    assert only(machine.check_publish_room(str(tmp_path), in_dev_shm=False, weights=2 * GIB)).verdict == "FAIL"
    missing = only(machine.check_publish_room(str(tmp_path / "none"), in_dev_shm=False, weights=1))
    assert missing.verdict == "FAIL" and "is not a folder" in missing.found


def test_memory_is_said_by_its_largest_parts():
    parts = {"policy": GIB, "cache": 3 * GIB, "batch": 1, "temporaries": 2 * GIB}
    found = list(machine.check_memory([MemoryBudget("here", parts, 4 * GIB), MemoryBudget("there", parts, None)]))
    assert [one.verdict for one in found] == ["FAIL", "OK"]
    assert "6.0 GiB of 4.0; most of it cache 3.00, temporaries 2.00, policy 1.00" in found[0].found
    assert "model.remat" in found[0].remedy


def test_a_port_that_is_taken(config):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config.rollout.port = taken.getsockname()[1]
        with pytest.raises(UserError, match="cannot be used"):
            list(machine.check_server_ports(typed(config)))
        config.rollout.urls = "http://elsewhere:1"
        assert "lists running servers" in only(machine.check_server_ports(typed(config))).found
    config.rollout.urls, config.rollout.port = "", 0
    assert only(machine.check_server_ports(typed(config))).verdict == "OK"


@pytest.mark.parametrize(
    "now, verdict",
    [
        (1_800_000_000, "OK"),
        (1_800_000_000 - 3600, "OK"),  # time zones of an archive
        (1_800_000_000 - 2 * 86_400, "WARN"),
        (0, "WARN"),
        (5_000_000_000, "WARN"),  # 2128
    ],
)
def test_the_clock_is_after_the_package(now, verdict):
    assert only(machine.check_clock(now, newest=1_800_000_000)).verdict == verdict


def test_a_clock_that_stands_still(monkeypatch):
    monkeypatch.setattr(machine.time, "monotonic", lambda: 7.0)
    assert only(machine.check_clock(1.8e9, newest=1.8e9)).verdict == "FAIL"


def test_the_package_is_of_today_or_before():
    assert 1.5e9 < machine.package_time() < 4e9


def test_a_folder_with_another_run(config, tmp_path):
    config.trainer.run_dir = str(tmp_path)
    assert "a new run" in only(machine.check_folder(typed(config))).found
    (tmp_path / "checkpoints/7").mkdir(parents=True)
    (tmp_path / "checkpoints/12").mkdir()
    (tmp_path / "checkpoints/13.orbax-tmp").mkdir()  # was never whole
    (tmp_path / "config.json").write_text(settings.dump(config))
    same = only(machine.check_folder(typed(config)))
    assert same.verdict == "OK" and "resumes after step 12" in same.found
    theirs = json.loads(settings.dump(config))
    theirs["actor"]["lr"] = 0.5
    (tmp_path / "config.json").write_text(json.dumps(theirs))
    other = only(machine.check_folder(typed(config)))
    assert other.verdict == "WARN" and "actor.lr=0.5" in other.found
    config.trainer.resume_mode = "disable"
    assert "removes its checkpoints" in only(machine.check_folder(typed(config))).found
    config.trainer.resume_mode = "auto"
    (tmp_path / "config.json").write_text("{")
    assert "cannot be read" in only(machine.check_folder(typed(config))).found


def test_the_nearest_folder_that_is_there(tmp_path):
    assert machine.nearest_existing(tmp_path / "a/b/c") == tmp_path
    assert machine.nearest_existing(pathlib.Path("/")) == pathlib.Path("/")
