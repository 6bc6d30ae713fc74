"""scripts/fuzz_inputs.py: its cases are what they are to be, what is bad is seen, and some of them are tried."""

import importlib.util
import os
import pathlib
import subprocess
import sys
import time

import pytest

from examples import arithmetic
from jppo.data.tokenizer import load_tokenizer
from jppo.settings import UserError

SCRIPT = pathlib.Path(__file__).parents[1] / "scripts" / "fuzz_inputs.py"


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    spec = importlib.util.spec_from_file_location("fuzz_inputs", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["fuzz_inputs"] = module
    spec.loader.exec_module(module)
    folder = tmp_path_factory.mktemp("fuzz") / "quickstart"
    arithmetic.write_model(folder)
    module.TOKENIZER.append(load_tokenizer(str(folder)))
    return module


def test_three_hundred_cases_are_accepted_or_refused_by_one_line(script, tmp_path):
    found = [script.judge(number, tmp_path / str(number)) for number in range(300)]
    assert [one for one in found if one not in ("accepted", "refused")] == []
    for kind in range(3):  # each kind sees both, so that it tries more than the first check
        assert {"accepted", "refused"} <= set(found[kind::3]) or kind == 1


def test_what_is_bad_is_seen(script, tmp_path, monkeypatch):
    def case(what):
        monkeypatch.setattr(script, "KINDS", (what,))
        return script.judge(0, tmp_path)

    def fails(*_):
        raise KeyError("nobody expects this")

    def tells(*_):
        raise UserError("two\nlines")

    def hangs(*_):
        time.sleep(30)

    assert "KeyError: 'nobody expects this'" in case(fails)
    assert case(tells) == "an error of several lines: two\nlines"
    monkeypatch.setattr(script, "LIMIT_S", 1)
    assert "Slow: not done after 1 s" in case(hangs)
    assert case(lambda *_: None) == "accepted"


@pytest.mark.slow
def test_thirty_whole_commands_end_with_exit_code_0_or_2_and_one_line():
    """In a process of its own: each case is a fork of one that has no JAX backend yet."""
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[1])}
    command = [sys.executable, str(SCRIPT), "--commands", "--first", "7000", "--cases", "30", "--limit_s", "240"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "30 cases" in done.stdout and done.stdout.rstrip().endswith(" 0 otherwise")


@pytest.mark.parametrize(
    ("code", "stdout", "stderr", "said"),
    [
        (0, "fine\n", "a warning\n", ""),
        (2, "", "error: no such file\n", ""),
        (None, "", "", "no end within the time limit"),
        (1, "", "Traceback (most recent call last):\n  File\nKeyError: 1\n", "a traceback"),
        (-11, "", "", "exit code -11"),
        (1, "", "error: x\n", "exit code 1"),
        (2, "", "usage: x\nerror: x\n", "2 lines of stderr"),
        (2, "", "", "0 lines of stderr"),
        (2, "", "error: \x1b[2J\n", "a control character"),
    ],
)
def test_how_a_command_ends_is_judged(monkeypatch, code, stdout, stderr, said):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    commands = importlib.import_module("fuzz_commands")
    assert commands.fault(commands.Case([], ()), commands.Ended(code, stdout, stderr, 1.0)) == said
