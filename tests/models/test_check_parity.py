"""scripts/check_parity.py says yes to a right model, and can say no."""

import importlib.util
import pathlib
import re
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "scripts" / "check_parity.py"


@pytest.fixture
def script():
    pytest.importorskip("torch")
    spec = importlib.util.spec_from_file_location("check_parity", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("extra", [[], ["--random", "--temperature=0.5"]])
def test_it_passes_below_its_tolerance_and_fails_above(script, checkpoint, monkeypatch, capsys, extra):
    directory, _ = checkpoint("llama-biased")
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), str(directory), "--lengths=9,1,4", *extra])
    assert script.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 7 and lines[-1].startswith("ok")
    assert all(0 < float(re.search(r"(\S+)$", line)[1]) < 1e-4 for line in lines[:-1])
    monkeypatch.setattr(script, "TOLERANCE", 1e-12)
    assert script.main() == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("FAILED")


def test_both_write_the_same_tokens(script, checkpoint, monkeypatch, capsys):
    directory, _ = checkpoint("gemma3-long")
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), str(directory), "--lengths=9", "--greedy=30"])
    assert script.main() == 0
    assert "greedy  30 of 30 tokens are the same" in capsys.readouterr().out


def test_a_classifier_is_compared_by_its_values(script, checkpoint, monkeypatch, capsys):
    directory, _ = checkpoint("gemma-wide", "AutoModelForSequenceClassification")
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), str(directory), "--lengths=9,3"])
    assert script.main() == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()[:-1]] == ["values", "values"]


def test_a_missing_model_is_one_line_and_exit_2(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "/no/such/model"])
    assert script.main() == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
