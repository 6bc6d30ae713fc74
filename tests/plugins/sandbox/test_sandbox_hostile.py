"""Hostile programs under every mix of protections: nothing outside changed, nothing read, no score unearned."""

import functools
import json
import os
import pathlib
import shutil
import stat
import subprocess
import sys

import pytest

from jppo.plugins.sandbox.launcher import NOBODY
from tests.plugins.sandbox.hostile_programs import PROGRAMS

ROOT = pathlib.Path(__file__).resolve().parents[3]
USERS = {"own user": 0, "nobody": NOBODY}
MIXES = [
    ("own user", ""),
    pytest.param("own user", "namespaces", marks=pytest.mark.slow),
    pytest.param("own user", "landlock", marks=pytest.mark.slow),
    ("nobody", ""),
    pytest.param("nobody", "namespaces", marks=pytest.mark.slow),
]
MIX_NAMES = ["own user-all", "own user-namespaces", "own user-landlock", "nobody-all", "nobody-namespaces"]


def interpreter(uid: int) -> str | None:
    """A Python that the user can start: this one, or the system's."""
    if not uid:
        return sys.executable
    for python in filter(None, [sys.executable, shutil.which("python3", path="/usr/local/bin:/usr/bin")]):
        command = [python, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
        try:
            done = subprocess.run(command, user=uid, group=uid, extra_groups=[], capture_output=True)
        except PermissionError:  # below a folder of root's own
            continue
        if done.returncode == 0:
            return python
    return None


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    @functools.cache
    def run(user: str, without: str) -> dict:
        uid = USERS[user]
        if uid and os.geteuid() != 0:
            pytest.skip("only root can become another user")
        python = interpreter(uid)
        if python is None:
            pytest.skip("no Python 3.11 that the other user can start")
        out = pathlib.Path(subprocess.check_output(["mktemp", "-d", "/tmp/jppo-hostile-XXXXXX"], text=True).strip())
        try:
            done = subprocess.run(
                [python, str(ROOT / "tests/plugins/sandbox/hostile_run.py"), str(uid), without, str(out)],
                cwd="/",
                env={"PATH": os.defpath},
                capture_output=True,
                text=True,
                timeout=300,
            )
        finally:
            shutil.rmtree(out, ignore_errors=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


@pytest.mark.parametrize(("user", "without"), MIXES, ids=MIX_NAMES)
@pytest.mark.parametrize(
    ("group", "name", "right"), [(g, n, s) for g, n, _, _, s in PROGRAMS], ids=[f"{g}-{n}" for g, n, *_ in PROGRAMS]
)
def test_a_hostile_program_changes_reads_and_earns_nothing(results, user, without, group, name, right):
    found = results(user, without)
    if found["missing"]:
        pytest.skip(found["missing"])
    score, harm = found["results"][f"{group}: {name}"]
    assert score in right and not harm


@pytest.mark.parametrize(("user", "without"), MIXES, ids=MIX_NAMES)
def test_the_mix_is_what_it_says(results, user, without):
    guards = results(user, without)["guards"]
    assert not without or not guards[without]
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_there_are_forty_programs_of_all_classes():
    groups = [group for group, *_ in PROGRAMS]
    assert len(PROGRAMS) >= 40 and groups.count("self-grading") >= 8 and len(set(groups)) == 9


OWN_WORKER = """
import json, os, pickle, struct, subprocess, sys
length = struct.Struct(">Q")
command = [sys.executable, "-m", "jppo.rewards.pool_worker", str(os.getpid()), str(2**31)]
worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
body = pickle.dumps({"target": ("rule", "exact"), "samples": None})
worker.stdin.write(length.pack(len(body)) + body)
worker.stdin.flush()
reply = json.loads(worker.stdout.read(*length.unpack(worker.stdout.read(8))))
opened = []
with open(f"/proc/{worker.pid}/task/{worker.pid}/children") as f:
    processes = [worker.pid, *map(int, f.read().split())]
for pid in processes:
    for name in ("environ", "mem", "fd/1", "fd/3"):
        try:
            open(f"/proc/{pid}/{name}", "rb").close()
            opened.append(name)
        except OSError:
            pass
worker.stdin.close()
worker.wait()
print(json.dumps([reply, len(processes), opened]))
"""


def test_other_processes_of_the_user_cannot_open_a_reward_worker():
    if os.geteuid() != 0 or (python := interpreter(NOBODY)) is None:
        pytest.skip("root becomes another user here, and root can open everything")
    done = subprocess.run(
        [python, "-c", OWN_WORKER],
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        cwd="/",
        env={"PATH": os.defpath, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [{"batch": False}, 2, []]
