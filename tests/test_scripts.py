"""Programs say yes to what is right, and can say no: check_parity.py, curve.py, compare_commits.py."""

import json
import math
import re
import sys
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from jppo import settings
from tests.make import one_line, script, write_lines
from tests.models.conftest import torch_model


@pytest.mark.parametrize(
    "name, kind, words, said",
    [
        ("llama-biased", "AutoModelForCausalLM", ["--lengths=9,1,4"], "logits"),
        ("llama-biased", "AutoModelForCausalLM", ["--lengths=9,1,4", "--random", "--temperature=0.5"], "logits"),
        ("gemma3-long", "AutoModelForCausalLM", ["--lengths=9", "--greedy=30"], "30 of 30 tokens are the same"),
        ("gemma-wide", "AutoModelForSequenceClassification", ["--lengths=9,3"], "values"),
    ],
)
def test_a_model_passes_below_the_tolerance_of_check_parity_and_fails_above(
    name, kind, words, said, monkeypatch, capsys, tmp_path
):
    pytest.importorskip("torch")
    torch_model(name, kind=kind).save_pretrained(tmp_path / "model")
    check_parity = script("scripts/check_parity.py")
    monkeypatch.setattr(sys, "argv", ["check_parity.py", str(tmp_path / "model"), *words])
    assert check_parity.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("ok") and said in "\n".join(lines)
    errors = [re.search(r"(\S+)$", line)[1] for line in lines[:-1] if "same" not in line]
    assert errors and all(0 < float(error) < 1e-4 for error in errors)
    monkeypatch.setitem(check_parity.TOLERANCE, "float32", 1e-12)
    assert check_parity.main() == 1 and capsys.readouterr().out.splitlines()[-1].startswith("FAILED")
    monkeypatch.setattr(sys, "argv", ["check_parity.py", "/no/such/model"])
    assert check_parity.main() == 2 and len(capsys.readouterr().err.splitlines()) == 1


def test_the_curves_are_rewards_of_each_run_and_the_mean_kl(tmp_path, capsys):
    curve, runs, seen = script("benchmarks/curve.py"), [tmp_path / name for name in "abc"], {}
    for run, kl in zip(runs, (1.0, 3.0, None), strict=True):
        run.mkdir()
        steps = [{"step": i, "reward_mean": i / 2, "actor/reward_kl_penalty_seq": (kl or 0) * i} for i in (1, 2)]
        # a test before training has neither
        write_lines(run / "metrics.jsonl", [{"step": 0, "val/score": 1.0}, *(steps if kl else [])])
    curve.write_curve = lambda path, *, title, lines: seen.update(lines)
    curve.main([*map(str, runs[:2]), "--out", str(tmp_path / "x.svg")])
    assert seen == {
        "reward, a": [(1, 0.5), (2, 1.0)],
        "reward, b": [(1, 0.5), (2, 1.0)],
        "KL, nats a response": [(1, 2.0), (2, 4.0)],
    }
    assert "has no reward_mean" in one_line(capsys, curve.main, runs[2], "--out", tmp_path / "x.svg")


def test_a_line_stands_where_its_values_are_inside_the_picture(tmp_path):
    points = [(0, 0.0), (2, math.nan), (5, 0.75), (10, 1.0)]
    lines = {"reward": points, "none": []}
    script("benchmarks/curve.py").write_curve(tmp_path / "x.svg", title="a < b", lines=lines)
    root = ET.parse(tmp_path / "x.svg").getroot()
    svg = "{http://www.w3.org/2000/svg}"
    (line,) = root.findall(f"{svg}polyline")
    (x0, y0), middle, (x1, y1) = [tuple(map(float, pair.split(","))) for pair in line.get("points").split()]
    assert 0 < x0 < x1 < 720 and 420 > y0 > y1 > 0  # up is smaller in SVG
    assert middle == (round((x0 + x1) / 2, 1), round(y0 + 0.75 * (y1 - y0), 1))
    assert {"a < b", "reward", "none", "step"} <= {text.text for text in root.findall(f"{svg}text")}


@pytest.fixture(scope="module")
def compare_commits():
    return script("scripts/compare_commits.py")


def test_the_cases_of_a_comparison_are_runs(compare_commits, tmp_path):
    """Every case passes the checks of settings, with SGD too."""
    (tmp_path / "config.py").write_text("from jppo.settings import default as get_config\n")
    for name, changes in compare_commits.CASES.items():
        for sgd in (False, True):
            words = compare_commits.words(tmp_path, tmp_path / "run", changes, sgd=sgd)
            config, _ = settings.parse(words, "", settings.default())
            settings.check(config)
            assert config.actor.optimizer == "sgd" or not sgd, name


def test_a_case_runs_with_the_checkout_that_it_is_of(compare_commits, tmp_path):
    (tmp_path / "jppo").mkdir()
    (tmp_path / "jppo/__init__.py").write_text('raise ImportError("the jppo of the checkout")')
    compare_commits.measure(tmp_path, tmp_path / "inputs", tmp_path / "out", ["plain"])
    assert "the jppo of the checkout" in json.loads((tmp_path / "out/plain.json").read_text())["error"]


@pytest.mark.parametrize(
    "level, change, good",
    [
        ("run", {}, True),
        ("run", {"arrays": 1e-3}, False),
        ("run", {"arrays": 1e-6}, True),
        ("run", {"metric": 1e-3}, False),
        ("run", {"program": "jit_other"}, False),
        ("gradient", {"arrays": 1e-6}, False),  # of a step of length 0.1
    ],
)
def test_a_comparison_of_commits_sees_what_differs(compare_commits, tmp_path, level, change, good):
    for folder, more in (("base", {}), ("now", change)):
        (tmp_path / folder).mkdir()
        metrics = [{"actor/grad_norm": 1.0, "loss": 2.0 + more.get("metric", 0.0), "perf/x": len(folder)}]
        found = {"programs": {more.get("program", "jit_one"): "jit"}, level: metrics}
        (tmp_path / folder / "plain.json").write_text(json.dumps(found))
        np.savez(tmp_path / folder / f"plain {level}.npz", w=np.float32([1.0 + more.get("arrays", 0.0), 0.0]))
    row, same = compare_commits.compare(tmp_path / "base", tmp_path / "now", "plain")
    assert same == good and ("same" in row[2:]) == (not change or "program" in change), row
