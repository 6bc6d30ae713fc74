import os
import signal
import subprocess
import sys
import time

import pytest

from tests.make import alive

# A child with a child of its own, both deaf to SIGTERM when asked; it writes both process ids.
CHILD = """
import os, signal, subprocess, sys, time
if "deaf" in sys.argv: signal.signal(signal.SIGTERM, signal.SIG_IGN)
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
with open(sys.argv[1] + ".tmp", "w") as f: f.write(f"{os.getpid()} {other.pid}")
os.rename(sys.argv[1] + ".tmp", sys.argv[1])
time.sleep(0 if "short" in sys.argv else 100)
sys.exit(3)
"""
LAUNCH = """
import sys
from jppo.rollout.servers import launch
launch.GRACE_S = 0.5
launch.main({parent}, sys.argv[1], sys.argv[2:])
"""
# Stands for the trainer: starts the launcher as `member.py` does, then waits.
PARENT = """
import os, subprocess, sys, time
launch = sys.argv[1].replace("{parent}", str(os.getpid()))
subprocess.Popen([sys.executable, "-c", launch, *sys.argv[2:]], start_new_session=True)
time.sleep(100)
"""


def eventually(truth, seconds=60.0):
    """Whether it comes true in that time."""
    deadline = time.monotonic() + seconds
    while not truth() and time.monotonic() < deadline:
        time.sleep(0.02)
    return truth()


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "weights"
    made.mkdir()
    (made / "file").write_text("x")
    return made


def started(pids):
    assert eventually(pids.exists)
    return [int(pid) for pid in pids.read_text().split()]


@pytest.mark.parametrize("how", ["", "deaf"])
def test_all_die_with_a_parent_that_is_killed(tmp_path, folder, how):
    pids = tmp_path / "pids"
    command = [sys.executable, "-c", CHILD, str(pids), how]
    parent = subprocess.Popen([sys.executable, "-c", PARENT, LAUNCH, str(folder), *command])
    children = started(pids)
    parent.kill()
    parent.wait()
    assert eventually(lambda: not any(map(alive, children)))
    assert eventually(lambda: not folder.exists())


def test_all_die_when_the_parent_is_gone_before_the_launcher_looks(tmp_path, folder):
    pids = tmp_path / "pids"
    gone = subprocess.Popen(["true"])
    gone.wait()
    command = [sys.executable, "-c", LAUNCH.replace("{parent}", str(gone.pid)), str(folder)]
    launcher = subprocess.Popen([*command, sys.executable, "-c", CHILD, str(pids)], start_new_session=True)
    assert launcher.wait(60) == -signal.SIGKILL
    assert not folder.exists()
    if pids.exists():
        assert not any(map(alive, started(pids)))


def launch(folder, *command, **options):
    code = LAUNCH.replace("{parent}", str(os.getpid()))
    line = [sys.executable, "-c", code, folder, *command]
    return subprocess.Popen(line, start_new_session=True, **options)


def test_all_die_when_the_child_ends_and_its_code_is_said(tmp_path, folder):
    pids = tmp_path / "pids"
    launcher = launch(str(folder), sys.executable, "-c", CHILD, str(pids), "short", stderr=subprocess.PIPE)
    assert b"ended with code 3" in launcher.communicate(timeout=60)[1]
    assert eventually(lambda: not any(map(alive, started(pids))))
    assert folder.exists()  # the parent lives: it may start another server


def test_the_command_line_names_parent_folder_and_command(folder):
    line = [sys.executable, "-m", "jppo.rollout.servers.launch", str(os.getpid()), str(folder)]
    line += [sys.executable, "-c", "import sys; sys.exit(3 if sys.argv[1:] == ['a', 'b'] else 4)", "a", "b"]
    launcher = subprocess.Popen(line, start_new_session=True, stderr=subprocess.PIPE)
    assert b"ended with code 3" in launcher.communicate(timeout=60)[1]
    assert folder.exists()


def test_sigterm_ends_all(tmp_path):
    pids = tmp_path / "pids"
    launcher = launch("", sys.executable, "-c", CHILD, str(pids))
    children = started(pids)
    launcher.terminate()
    launcher.wait(60)
    assert eventually(lambda: not any(map(alive, children)))


def test_the_child_goes_when_the_launcher_itself_is_killed(tmp_path):
    pids = tmp_path / "pids"
    launcher = launch("", sys.executable, "-c", CHILD, str(pids))
    child, other = started(pids)
    os.kill(launcher.pid, signal.SIGKILL)
    assert eventually(lambda: not alive(child))
    os.kill(other, signal.SIGKILL)  # vLLM ends its own children; this stand-in does not
    launcher.wait()
