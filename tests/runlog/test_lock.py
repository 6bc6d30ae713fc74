import json
import os
import pathlib
import signal
import socket
import subprocess
import sys

import pytest

from jppo import train
from jppo.errors import UserError
from jppo.runlog.durable_files import FILE, own

HOLDER = """
import pathlib, subprocess, sys, time
from jppo.runlog.durable_files import own
with own(pathlib.Path(sys.argv[1])):
    child = subprocess.Popen(["sleep", "60"])  # such as a server that outlives a killed trainer for a moment
    print(child.pid, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """A process that owns the folder, and a child of it."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    child = int(process.stdout.readline())
    yield process
    process.kill()
    process.wait()
    process.stdout.close()
    os.kill(child, signal.SIGKILL)


def test_the_holder_is_named_and_a_dead_one_is_none(tmp_path, holder):
    run = tmp_path / "run"
    said = rf"trainer\.run_dir=.*run belongs to process {holder.pid} on {socket.gethostname()}, which is still running"
    with pytest.raises(UserError, match=said), own(run):
        pass
    holder.kill()
    holder.wait()
    with own(run):
        assert json.loads((run / FILE).read_text())["pid"] == os.getpid()
        with pytest.raises(UserError, match=f"process {os.getpid()} on"), own(run):
            pass
    with own(run):
        pass


@pytest.mark.parametrize("made", ["file", "below a file", "dangling link", "proc", "folder in the lock's place"])
def test_a_folder_that_cannot_be_is_one_line(tmp_path, made):
    run = tmp_path / "run"
    if made == "file":
        run.write_text("")
    elif made == "below a file":
        (tmp_path / "file").write_text("")
        run = tmp_path / "file/run"
    elif made == "dangling link":
        run.symlink_to(tmp_path / "nothing")
    elif made == "proc":
        run = pathlib.Path("/proc/run")
    else:
        (run / FILE).mkdir(parents=True)
    with (
        pytest.raises(UserError, match=r"trainer\.run_dir=.* cannot be written \(.*\); choose another folder") as e,
        own(run),
    ):
        pass
    assert "\n" not in str(e.value)


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_second_training_touches_nothing(small_run, holder, tmp_path):
    small_run.trainer.run_dir = str(tmp_path / "run")
    unfinished = tmp_path / "run/checkpoints/1.orbax-checkpoint-tmp-0"
    unfinished.mkdir(parents=True)
    (unfinished / "array").write_text("half")
    (tmp_path / "run/metrics.jsonl").write_text('{"step": 1}\n')
    before = contents(tmp_path / "run")
    with pytest.raises(UserError, match=f"belongs to process {holder.pid}"):
        train.train(small_run)
    assert contents(tmp_path / "run") == before


def test_a_new_folder_stays_only_with_content(tmp_path):
    """The lock, empty folders and empty logs are none; an older folder stays as it is."""
    run = tmp_path / "runs/mine"
    with pytest.raises(UserError, match="refused"), own(run):
        (run / "checkpoints").mkdir()
        (run / "reward.log").touch()
        raise UserError("refused")
    assert not (tmp_path / "runs").exists()
    with own(run):
        (run / "server-0.log").write_text("started")
    assert (run / "server-0.log").exists()
    (tmp_path / "old").mkdir()
    with own(tmp_path / "old"):
        pass
    assert (tmp_path / "old" / FILE).exists()
