"""Trainer and servers on one GPU: at no moment of a run do they hold more than it has, nor more than the dry run says.

The processes are real, the GPU is a ledger. The trainer's sizes are those of a 7B run on eight GPUs.
"""

import os
import pathlib
import signal
import subprocess
import sys
import threading

import pytest

from jppo import train
from jppo.learner import ppo
from jppo.learner.trainable import Trainable
from jppo.preflight.memory_budget import CONTEXT, device_budgets
from jppo.preflight.programs import Estimate, ProgramMemory
from jppo.preflight.servers import ASLEEP, ServerMemory
from jppo.rollout.servers.member import Server
from jppo.rollout.servers.repair import Repairs
from jppo.run import start
from tests.conftest import write_small_run
from tests.rollout.ledger import Ledger

GIB = 2**30
TOTAL, STATE, SCORING, UPDATE, WEIGHTS = 80 * GIB, 30 * GIB, 6 * GIB, 34 * GIB, 8 * GIB
ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def python(tmp_path):
    """An interpreter whose vLLM is the stand-in."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")], check=True)
    site = next((tmp_path / "env").glob("lib/python3*/site-packages"))
    (site / "vllm-0.32.0.dist-info").mkdir()
    (site / "vllm-0.32.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n")
    program = site / "vllm/entrypoints/openai/api_server.py"
    program.parent.mkdir(parents=True)
    for folder in list(program.relative_to(site).parents)[:-1]:
        (site / folder / "__init__.py").touch()
    program.write_text("import tests.rollout.fake_vllm_gpu\n")
    return str(tmp_path / "env/bin/python")


@pytest.fixture
def card(config, python, tmp_path, monkeypatch):
    """A small run whose trainer enters what it holds of the card, and the ledger."""
    ledger = Ledger(tmp_path / "ledger.json", TOTAL)
    environment = {"FAKE_LEDGER": str(ledger.path), "FAKE_ASLEEP": str(ASLEEP), "FAKE_WEIGHTS": str(WEIGHTS)}
    environment |= {"PYTHONPATH": str(ROOT), "XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    def enters(module, name, during, after):
        real = getattr(module, name)

        def wrapped(*args, **kwargs):
            ledger.hold("trainer", CONTEXT + during, name)
            try:
                return real(*args, **kwargs)
            finally:
                ledger.hold("trainer", CONTEXT + after, f"after {name}")

        monkeypatch.setattr(module, name, wrapped)

    enters(start, "make_learner", STATE, STATE)
    enters(start, "prepare_programs", STATE + UPDATE, STATE)
    for name in ("with_old_logprob", "with_values"):
        enters(ppo, name, STATE + SCORING, STATE)
    enters(Trainable, "learn", STATE + UPDATE, STATE)
    c = write_small_run(config, tmp_path)
    c.rollout.python, c.rollout.sleep_level, c.rollout.gpu_memory_utilization = python, 2, 0.5
    c.rollout.max_kl_jump, c.rollout.health_timeout_s = 0.0, 5.0
    ledger.hold("trainer", CONTEXT, "start")
    return c, ledger


@pytest.fixture
def servers(monkeypatch):
    """The servers that were started, a restarted one again."""
    started, start = [], Server.start
    monkeypatch.setattr(Server, "start", lambda self: (started.append(self), start(self))[1])
    return started


def run(c, steps):
    """Trains in this process, which then holds nothing more."""
    c.trainer.total_training_steps = steps
    train.train(c)


def kill(server):
    """Ends a server's program as a fault would: not its launcher, which sees it."""
    [child] = subprocess.run(["pgrep", "-P", str(server.pid)], capture_output=True, text=True).stdout.split()
    os.kill(int(child), signal.SIGKILL)


def test_no_moment_takes_more_than_the_card_has_or_the_dry_run_said(card, servers, monkeypatch):
    c, ledger = card
    killed, learn = [], Trainable.learn

    def learning(*args, **kwargs):
        if not killed:
            killed.append(kill(servers[0]))
        return learn(*args, **kwargs)

    monkeypatch.setattr(Trainable, "learn", learning)
    run(c, 2)
    ledger.hold("trainer", CONTEXT, "a new process")
    run(c, 3)
    found = ledger.read()
    assert not found["over"], found["over"]
    moments = [why for who, why, _ in found["moments"] if who == "server"]
    assert moments.count("start") == 3, "of the run, after the kill, of the resumed run"
    said = Estimate(
        {"models": STATE},
        (ProgramMemory("log-probs", 0, SCORING), ProgramMemory("actor gradient", 0, UPDATE)),
        server=ServerMemory("vLLM", True, 0.5, 0, WEIGHTS, working=0, graphs=0, response=0),
    )
    budgets = device_budgets(said, "the GPU", None, TOTAL)
    assert all(one.verdict != "FAIL" for one in budgets)
    assert max(total for *_, total in found["moments"]) == max(one.needs for one in budgets[1:])


def test_a_server_that_broke_while_the_trainer_learned_starts_with_the_publish(card, servers, monkeypatch, capfd):
    c, ledger = card
    suspected, suspect, with_values = threading.Event(), Repairs.report_failure, ppo.with_values
    monkeypatch.setattr(Repairs, "report_failure", lambda self, *a, **k: (suspect(self, *a, **k), suspected.set())[0])

    def valuing(*args, **kwargs):
        if not suspected.is_set():
            kill(servers[0])
            assert suspected.wait(30)
        return with_values(*args, **kwargs)

    monkeypatch.setattr(ppo, "with_values", valuing)
    run(c, 1)
    found = ledger.read()
    assert not found["over"] and len(servers) == 2
    assert "restarted with the next publish" in capfd.readouterr().err
