"""examples/reasoning_tasks.py with the package `reasoning-gym`, if it is installed; its config on a stand-in."""

import importlib.util
import json
import sys

import pytest

from examples import reasoning_tasks
from jppo import settings, train
from jppo.preflight import machine
from jppo.settings import table
from tests.make import ROOT, one_line, read_lines, write_lines

needs_package = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None,
    reason="reasoning-gym is not installed: pip install reasoning-gym",
)
CHAT = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}={% endif %}"


@pytest.fixture
def made(tmp_path):
    reasoning_tasks.main([f"--out={tmp_path / 'data'}", "--train=60", "--test=20"])
    return {name: read_lines(tmp_path / f"data/{name}.jsonl") for name in ("train", "test")}


@needs_package
def test_the_files(made):
    asked = {name: {row["prompt"][0]["content"] for row in rows} for name, rows in made.items()}
    assert not asked["train"] & asked["test"] and len(made["test"]) == 40
    for row in made["test"] + made["train"]:
        words = row["prompt"][0]["content"].removesuffix(" Reply with the answer only.").split()
        if row["data_source"] == "chain_sum":
            a, sign, b, _ = words[-4:]  # State the final answer ...: 12 + 45 =
            assert row["ground_truth"] == str(int(a) + int(f"{sign}{b}"))
        else:  # How many times does the letter "m" appear in the text: "..."?
            assert row["data_source"] == "letter_counting" and 3 <= len(words[11:]) <= 5
            assert row["ground_truth"] == str(" ".join(words[11:]).lower().count(words[6].strip('"')))


@needs_package
@pytest.mark.parametrize(
    "response, score, pred",
    [
        ("-4", 1.0, "-4"),
        (" -4.0\n", 1.0, "-4.0"),
        ("It is <answer>5</answer>, no: <answer> -4 </answer>.", 1.0, "-4"),
        ("-4 <answer>5</answer>", 0.0, "5"),
        ("4", 0.0, "4"),
        ("3 - 7 = -4", 1.0, "-4"),
        ("-4 - 7 = -11", 0.0, "-11"),
        ("<answer>the answer: -4</answer>", 0.0, "the answer: -4"),  # the scorer gives a share
        ("", 0.0, ""),
        ("none", 0.0, "none"),
    ],
)
def test_scores(response, score, pred):
    entry = {"question": "4 - 1 - 7 =", "answer": "-4", "metadata": {}}
    got = reasoning_tasks.compute_score("chain_sum", response, "-4", {"entry": json.dumps(entry)})
    assert got == {"score": score, "pred": pred}


@needs_package
def test_an_answer_that_is_no_number_is_the_whole_response():
    entry = {"question": "", "answer": "olleh 2", "metadata": {}}
    scores = [
        reasoning_tasks.compute_score("spell_backward", text, "olleh 2", {"entry": json.dumps(entry)})["score"]
        for text in ("olleh 2", "2", "the answer is olleh 2")
    ]
    assert scores == [1.0, 0.0, 0.0]


@needs_package
def test_a_task_that_is_not_there_is_one_line(tmp_path, capsys):
    out = f"--out={tmp_path}"
    assert "'chain_sums' not registered" in one_line(capsys, reasoning_tasks.main, out, "chain_sums")
    line = one_line(capsys, reasoning_tasks.main, out, 'chain_sum:{"max_terms": 1}')
    assert line.startswith("error: chain_sum:{")
    assert "unexpected keyword" in one_line(capsys, reasoning_tasks.main, out, 'chain_sum:{"terms": 1}')
    assert "Expecting" in one_line(capsys, reasoning_tasks.main, out, "chain_sum:{terms")


def test_without_the_package_it_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    monkeypatch.delitem(sys.modules, "reasoning_gym.utils", raising=False)
    line = one_line(capsys, reasoning_tasks.main, f"--out={tmp_path / 'data'}")
    assert line.startswith("error: reasoning-gym cannot be imported") and "pip install reasoning-gym" in line
    assert not (tmp_path / "data").exists()


def test_the_config_is_that_of_sums_but_for_the_prompts(tmp_path):
    ours, sums = (settings.recipe(name, str(tmp_path)) for name in ("reasoning_gym", "smollm2_sums"))
    ours, sums = (dict(table.by_name(c)) for c in (ours, sums))
    differ = {"data.train_files", "data.val_files", "data.max_prompt_length", "actor.max_tokens_per_device"}
    differ |= {"reward.function", "trainer.run_dir"}
    assert {name for name in ours if ours[name] != sums[name]} == differ


@pytest.mark.slow
def test_the_config_passes_a_dry_run(tiny_model, tmp_path, capsys, monkeypatch):
    """With a small stand-in for the model, on prompts of its characters."""
    monkeypatch.setattr(machine, "check_environment", lambda *_: [])
    monkeypatch.chdir(ROOT)
    (tmp_path / "model").mkdir()
    for path in tiny_model.iterdir():
        (tmp_path / "model" / path.name).write_bytes(path.read_bytes())
    (tmp_path / "model/chat_template.jinja").write_text(CHAT)
    (tmp_path / "data/reasoning_gym").mkdir(parents=True)
    row = {
        "prompt": [{"role": "user", "content": "1+2"}],
        "ground_truth": "3",
        "data_source": "chain_sum",
        "entry": "{}",
    }
    for name in ("train", "test"):
        write_lines(tmp_path / f"data/reasoning_gym/{name}.jsonl", [row] * 2560)
    small = ["--config.data.max_prompt_length=8", "--config.data.max_response_length=8"]
    train.main([f"--config=jppo://reasoning_gym:{tmp_path}", *small, "--dry_run"])
    out = capsys.readouterr().out
    said = json.loads(out[: out.index("\n}\n") + 3])
    assert said["reward"]["function"].endswith("examples/reasoning_tasks.py:compute_score") and "critic " in out
