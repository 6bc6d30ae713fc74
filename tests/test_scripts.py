"""Programs of scripts/ say yes to what is right, and can say no: check_export.py, check_parity.py, draw_kl.py, fuzz."""

import importlib
import json
import math
import os
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ET

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples import arithmetic
from jppo import settings
from jppo.data.tokenizer import load_tokenizer
from jppo.errors import UserError
from jppo.models import decoder, hf, hf_write
from tests.make import ROOT, one_line, script, write_lines
from tests.models.conftest import torch_model

PROMPTS = ["47+85=", "1+1=", "99+99=", "2"]


@pytest.fixture(scope="module")
def check_export():
    pytest.importorskip("torch")
    return script("scripts/check_export.py")


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A random model as a run leaves it: hf/, and data/test.jsonl beside it."""
    tmp_path = tmp_path_factory.mktemp("run")
    arithmetic.write_model(tmp_path / "start")
    _, cfg = hf.read_config(tmp_path / "start")
    params = decoder.init_params(cfg, jax.random.key(0), head="lm", param_dtype=jnp.float32)
    params = jax.tree.map(lambda x: 8 * x, params)  # answers that differ from prompt to prompt, and end
    hf_write.save_model(tmp_path / "hf", params, cfg, source=tmp_path / "start", dtype="float32")
    (tmp_path / "data").mkdir()
    write_lines(tmp_path / "data/test.jsonl", [{"prompt": prompt} for prompt in PROMPTS])
    return tmp_path / "hf"


def test_answers_of_an_export_agree_or_differ(check_export, exported, monkeypatch, capsys):
    """The real vLLM in it is tested elsewhere."""

    def right(args, params, cfg, prompts, end):
        answers = check_export.by_transformers(args.hf_dir, prompts, max_tokens=args.max_tokens, end=end)
        assert len(set(map(tuple, answers))) > 1
        return answers

    def wrong(*args):
        answers = right(*args)
        answers[2][1] = 5 if answers[2][1] != 5 else 6
        return answers

    monkeypatch.setattr(check_export, "by_vllm", right)
    assert check_export.main([str(exported), "--max-tokens=12"]) == 0
    out = capsys.readouterr().out
    assert out.count("agree on 4 of 4 answers") == 3 and "first at" not in out
    monkeypatch.setattr(check_export, "by_vllm", wrong)
    assert check_export.main([str(exported), "--max-tokens=12", "--n=3"]) == 1
    out = capsys.readouterr().out
    assert out.count("agree on 2 of 3 answers") == 2 and out.count("agree on 3 of 3 answers") == 1
    assert out.count(f"first at token 1 of the answer to {PROMPTS[2]!r}") == 2
    assert check_export.first_difference([[1, 2], [3]], [[1, 2], [3]]) is None
    assert check_export.first_difference([[1, 2], [3]], [[1, 2], [3, 4]]) == (1, 1)
    assert check_export.first_difference([[1, 2, 9], [3]], [[1, 5, 9], []]) == (0, 1)
    for unread in ("--prompts=no.jsonl", "--n=0"):
        assert check_export.main([str(exported), unread]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


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
    monkeypatch.setattr(check_parity, "TOLERANCE", 1e-12)
    assert check_parity.main() == 1 and capsys.readouterr().out.splitlines()[-1].startswith("FAILED")
    monkeypatch.setattr(sys, "argv", ["check_parity.py", "/no/such/model"])
    assert check_parity.main() == 2 and len(capsys.readouterr().err.splitlines()) == 1


def test_draw_kl_has_rewards_of_each_run_and_the_mean_kl(tmp_path, capsys):
    draw_kl, runs, seen = script("scripts/draw_kl.py"), [tmp_path / name for name in "abc"], {}
    for run, kl in zip(runs, (1.0, 3.0, None), strict=True):
        run.mkdir()
        steps = [{"step": i, "reward_mean": i / 2, "actor/reward_kl_penalty_seq": (kl or 0) * i} for i in (1, 2)]
        # a test before training has neither
        write_lines(run / "metrics.jsonl", [{"step": 0, "val/score": 1.0}, *(steps if kl else [])])
    draw_kl.write_curve = lambda path, *, title, lines: seen.update(lines)
    draw_kl.main([*map(str, runs[:2]), "--out", str(tmp_path / "x.svg")])
    assert seen == {
        "reward, a": [(1, 0.5), (2, 1.0)],
        "reward, b": [(1, 0.5), (2, 1.0)],
        "KL, nats a response": [(1, 2.0), (2, 4.0)],
    }
    assert "has no reward_mean" in one_line(capsys, draw_kl.main, runs[2], "--out", tmp_path / "x.svg")


def test_a_line_stands_where_its_values_are_inside_the_picture(tmp_path):
    points = [(0, 0.0), (2, math.nan), (5, 0.75), (10, 1.0)]
    lines = {"reward": points, "none": []}
    script("scripts/draw_kl.py").write_curve(tmp_path / "x.svg", title="a < b", lines=lines)
    root = ET.parse(tmp_path / "x.svg").getroot()
    svg = "{http://www.w3.org/2000/svg}"
    (line,) = root.findall(f"{svg}polyline")
    (x0, y0), middle, (x1, y1) = [tuple(map(float, pair.split(","))) for pair in line.get("points").split()]
    assert 0 < x0 < x1 < 720 and 420 > y0 > y1 > 0  # up is smaller in SVG
    assert middle == (round((x0 + x1) / 2, 1), round(y0 + 0.75 * (y1 - y0), 1))
    assert {"a < b", "reward", "none", "step"} <= {text.text for text in root.findall(f"{svg}text")}


@pytest.fixture(scope="module")
def fuzz(tmp_path_factory):
    module = script("scripts/fuzz_inputs.py")
    folder = tmp_path_factory.mktemp("fuzz") / "quickstart"
    arithmetic.write_model(folder)
    module.TOKENIZER.append(load_tokenizer(str(folder)))
    return module


def test_three_hundred_cases_are_accepted_or_refused_by_one_line(fuzz, tmp_path):
    found = [fuzz.judge(number, tmp_path / str(number)) for number in range(300)]
    assert [one for one in found if one not in ("accepted", "refused")] == []
    for kind in range(3):  # each kind sees both, so that it tries more than the first check
        assert {"accepted", "refused"} <= set(found[kind::3]) or kind == 1


def test_what_is_bad_is_seen(fuzz, tmp_path, monkeypatch):
    def case(what):
        monkeypatch.setattr(fuzz, "KINDS", (what,))
        return fuzz.judge(0, tmp_path)

    def fails(*_):
        raise KeyError("nobody expects this")

    def tells(*_):
        raise UserError("two\nlines")

    assert "KeyError: 'nobody expects this'" in case(fails)
    assert case(tells) == "an error of several lines: two\nlines"
    monkeypatch.setattr(fuzz, "LIMIT_S", 1)
    assert "Slow: not done after 1 s" in case(lambda *_: time.sleep(30))
    assert case(lambda *_: None) == "accepted"


@pytest.mark.slow
def test_thirty_whole_commands_end_with_exit_code_0_or_2_and_one_line():
    """In a process of its own: each case is a fork of one that has no JAX backend yet."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [
        sys.executable,
        "scripts/fuzz_inputs.py",
        *["--commands", "--first", "7000", "--cases", "30", "--limit_s", "240"],
    ]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
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
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    commands = importlib.import_module("fuzz_commands")
    assert commands.fault(commands.Case([], ()), commands.Ended(code, stdout, stderr, 1.0)) == said


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
