"""The command that tests a model: its numbers from its own samples, its files, what it refuses, a real vLLM."""

import importlib.util
import itertools
import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
import safetensors.numpy

from examples import arithmetic
from jppo import evaluate
from jppo.models import decoder, hf, hf_write
from jppo.rewards import graders
from jppo.rollout.protocol import RolloutError
from jppo.runlog.durable_files import own
from jppo.types import Reward
from tests.make import ROOT, one_line, read_lines, write_lines

ANSWERS = "124689"


@pytest.fixture
def data(tmp_path):
    """Two files of prompts, whose right answers are digits."""
    for source, count in (("exact", 5), ("gsm8k", 3)):
        rows = [{"prompt": f"{i}+1=", "ground_truth": ANSWERS[i], "data_source": source} for i in range(count)]
        write_lines(tmp_path / f"{source}.jsonl", rows)
    return f"{tmp_path / 'exact.jsonl'},{tmp_path / 'gsm8k.jsonl'}"


@pytest.fixture
def command(tiny_model, data, tmp_path):
    """The command line, with the tiny model and the data unless others are given; what it wrote."""

    def command(*more):
        argv = {"--model": tiny_model, "--data": data, "--max_prompt_length": 8, "--max_response_length": 3}
        argv |= {"--out": tmp_path / "out"} | dict(a.split("=", 1) for a in more)
        evaluate.main([f"{name}={value}" for name, value in argv.items()])
        summary = json.loads((tmp_path / "out/summary.json").read_text())
        return summary, read_lines(tmp_path / "out/samples/test.jsonl")

    return command


def refused(capsys, command, *words, code=2):
    return one_line(capsys, lambda words: command(*words), *words, code=code)


@pytest.fixture
def half_right(monkeypatch):
    """A rule that finds even last digits right: what answers at random is sometimes right."""

    def rule(text, _):
        last = f"0{text}"[-1]
        return Reward(float(last in "02468"), {}, None, last)

    for source in ("exact", "gsm8k"):
        monkeypatch.setitem(graders.GRADERS.own, source, rule)


@pytest.mark.usefixtures("engine", "half_right")
def test_the_numbers_are_those_of_the_samples(command, capsys):
    summary, rows = command("--n=3", "--temperature=0.8")
    groups = [[row["score"] for row in rows[i : i + 3]] for i in range(0, len(rows), 3)]
    assert len(groups) == 8 and len({tuple(group) for group in groups}) > 2
    assert len({row["uid"] for row in rows}) == 8 and rows[0]["uid"] == rows[2]["uid"]
    for place, some in (("val", groups), ("val/exact", groups[:5]), ("val/gsm8k", groups[5:])):
        means = [np.mean(group) for group in some]
        got = summary["metrics"]
        assert got[f"{place}/score"] == pytest.approx(np.mean(means))
        assert got[f"{place}/score_se"] == pytest.approx(np.std(means, ddof=1) / np.sqrt(len(some)))
        pairs = [[max(pair) for pair in itertools.combinations(group, 2)] for group in some]
        assert [got[f"{place}/{name}@2"] for name in ("pass", "best")] == pytest.approx([np.mean(pairs)] * 2)
        assert got[f"{place}/worst@3"] == pytest.approx(np.mean([min(group) for group in some]))
    said = capsys.readouterr().out
    assert "8 prompts of" in said and "3 responses each, at temperature 0.8" in said
    score, se = summary["metrics"]["val/gsm8k/score"], summary["metrics"]["val/gsm8k/score_se"]
    assert f"{score:.4f} ± {se:.4f}" in said
    assert [word in said for word in ("pass@k", "maj@k", "best@k", "worst@k", "all", "exact")] == [True] * 6
    assert "summary.json" in said


def test_the_engine_gets_the_directorys_own_weights_and_is_asked_as_told(command, engine, tiny_model, tmp_path):
    loaded = {}
    engine.load = lambda tensors, *, version: loaded.update({name: np.array(x) for name, x in tensors})
    numbers = ("--top_p=0.9", "--temperature=0.5", "--top_k=7", "--min_p=0.05", "--seed=3", "--limit=2")
    summary, rows = command(*numbers, r"--config.rollout.stop=\n,</a>", "--dtype=bfloat16")
    stored = safetensors.numpy.load_file(tiny_model / "model.safetensors")
    assert loaded.keys() == stored.keys()
    for name, array in stored.items():
        np.testing.assert_array_equal(loaded[name], array)
    [asked] = engine.asked
    assert (asked.temperature, asked.top_p, asked.top_k, asked.n, asked.max_tokens) == (0.5, 0.9, 7, 1, 3)
    assert (asked.min_p, asked.stop, asked.ignore_eos) == (0.05, ("\n", "</a>"), False)
    assert len(rows) == summary["prompts"] == 2 and "val/pass@1" not in summary["metrics"]
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert written["rollout"]["dtype"] == "bfloat16" and written["trainer"]["seed"] == 3
    assert summary["sampling"] == {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.05, "n": 1, "stop": r"\n,</a>", "ignore_eos": False,
        "max_tokens": 3, "seed": 3,
    }  # fmt: skip


@pytest.mark.usefixtures("engine")
def test_a_trainings_config_serves_and_its_folder_is_left_alone(tiny_model, data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = ["--config", f"{ROOT}/configs/quickstart.py:{tmp_path}/run", f"--model={tiny_model}", f"--data={data}"]
    with pytest.raises(SystemExit):
        evaluate.main(before)  # --config wants its =
    evaluate.main(["=".join(before[:2]), *before[2:], "--config.trainer.log_val_generations=0"])
    assert not (tmp_path / "run").exists()
    config = json.loads((tmp_path / "runs/evaluate/config.json").read_text())
    assert config["data"]["max_response_length"] == 4, "the file's"
    assert (tmp_path / "runs/evaluate/summary.json").is_file()


@pytest.mark.usefixtures("engine")
def test_what_is_over_long_or_cannot_be_graded_is_told(command, tmp_path, capsys):
    rows = [("1+1=", "2"), ("100000+1=", "3"), ("2+2=", "four")]
    rows = [{"prompt": prompt, "ground_truth": truth, "data_source": "gsm8k"} for prompt, truth in rows]
    file = write_lines(tmp_path / "some.jsonl", rows)
    summary, _ = command(f"--data={file}")
    assert summary["overlong"] == 1 and summary["metrics"]["val/reward_errors"] == 1.0
    said = capsys.readouterr().out
    assert "1 over-long prompts left out" in said
    assert "1 responses could not be graded" in said and "'four' is not a number" in said
    error = refused(capsys, command, f"--data={file}", "--max_prompt_length=3")
    assert "all 3 prompts are longer" in error
    row = {"prompt": "1+1=", "ground_truth": "two", "data_source": "gsm8k"}
    one = write_lines(tmp_path / "one.jsonl", [row])
    assert "no response could be graded" in refused(capsys, command, f"--data={one}", code=1)
    assert json.loads((tmp_path / "out/summary.json").read_text())["metrics"]["val/score"] is None


def test_an_engine_that_fails_is_one_line_and_code_1(command, engine, capsys):
    def refuse(tensors, *, version):
        raise RolloutError("the server refused the weights")

    engine.load = refuse
    assert refused(capsys, command, code=1) == "error: the server refused the weights\n"


@pytest.mark.parametrize(
    "argument,said",
    [
        ("--model=/no/such/model", "/no/such/model"),
        ("--model=", "--model is missing"),
        ("--data=", "--data is missing"),
        ("--data=missing.jsonl", "missing.jsonl"),
        ("--n=4", "rollout.val_kwargs.n=4: at rollout.val_kwargs.temperature=0.0"),
        ("--n=two", "must be of type int"),
        ("--temperature=-1", "at least 0.0"),
        ("--top_p=0", "rollout.val_kwargs.top_p=0.0 must be above 0"),
        ("--top_p=1.1", "rollout.val_kwargs.top_p=1.1 must be at most 1"),
        ("--top_k=0", "rollout.val_kwargs.top_k=0 must be at least 1, or -1"),
        ("--limit=0", "data.val_max_samples=0"),
        ("--engine=none", "rollout.name='none'"),
        ("--grader=none", "reward.grader='none'"),
        ("--function=none.py:f", "no such file"),
        ("--max_response_length=100000", "max_position_embeddings"),
        (f"--out={__file__}/x", "cannot be written"),
        ("--config.actr.lr=1", "there is no setting 'actr'"),
        ("--config.trainer.run_dir=mine", "--out=DIR is the one of an evaluation"),
        ("--config=missing.py", "--config=missing.py: no such file"),
        ("--speed=3", "speed"),
    ],
)
@pytest.mark.usefixtures("engine")
def test_a_fault_of_the_user_is_one_line_and_code_2(command, argument, said, capsys):
    line = refused(capsys, command, argument)
    assert line.startswith("error: ") and said in line


def test_a_folder_of_another_evaluation_is_left_alone(command, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    with own(tmp_path / "out"):
        assert f"belongs to process {os.getpid()} on" in refused(capsys, command)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["run.lock"]


def test_dry_run_shows_the_settings_and_touches_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    evaluate.main(["--model", "some/model", "--data", "x.jsonl", "--n", "8", "--temperature", "1", "--dry_run"])
    assert json.loads(capsys.readouterr().out)["rollout"]["val_kwargs"]["n"] == 8
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make setup")
def test_a_real_vllm_answers_by_the_directorys_weights(tmp_path):
    """Greedy answers, as the decoder gives them by a forward pass for every token."""
    arithmetic.write_model(tmp_path / "start")
    _, cfg = hf.read_config(tmp_path / "start")
    params = decoder.init_params(cfg, jax.random.key(0), head="lm", param_dtype="float32")
    params = jax.tree.map(lambda x: 8 * x, params)  # answers that differ from prompt to prompt, and end
    hf_write.save_model(tmp_path / "hf", params, cfg, source=tmp_path / "start", dtype="float32")
    prompts = ["47+85=", "1+1=", "99+99=", "20+3="]
    write_lines(tmp_path / "test.jsonl", [{"prompt": p, "ground_truth": "1", "data_source": "exact"} for p in prompts])
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(
        [
            sys.executable, "-m", "jppo.evaluate", f"--model={tmp_path / 'hf'}", f"--data={tmp_path / 'test.jsonl'}",
            "--max_prompt_length=6", "--max_response_length=5", f"--out={tmp_path / 'out'}",
            "--config.rollout.kv_cache_memory_bytes=67108864",
        ],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    vocabulary = json.loads((tmp_path / "hf/tokenizer.json").read_text())["model"]["vocab"]
    letters = {number: c for c, number in vocabulary.items() if len(c) == 1}
    model, position = decoder.Decoder(cfg), np.arange(11, dtype=np.int32)[None]

    @jax.jit
    def following(tokens, length):
        hidden = model.apply({"params": params}, tokens, (position < length).astype(np.int32), position)
        return (hidden[0, length - 1] @ decoder.head_kernel(params, cfg).T).argmax()

    answers = [row["response"] for row in read_lines(tmp_path / "out/samples/test.jsonl")]
    assert len(set(answers)) > 1
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = [vocabulary[c] for c in prompt]
        while len(ids) < len(prompt) + 5 and ids[-1] != vocabulary["<eos>"]:
            row = np.array([ids + [0] * (11 - len(ids))], np.int32)
            ids.append(int(following(row, len(ids))))
        assert answer == "".join(letters.get(i, "") for i in ids[len(prompt) :])
