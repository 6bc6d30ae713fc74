"""scripts/fuzz_inputs.py: its cases are what they are to be, what is bad is seen, and some of them are tried."""

import importlib.util
import pathlib
import sys
import time

import pytest

from jppo.config import UserError
from jppo.data import arithmetic
from jppo.data.tokenizer import load_tokenizer

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
