"""The task that needs its tool."""

import json
import subprocess
import sys

import pytest

from examples import multiplication
from jppo.data.sft import read_demonstrations
from jppo.data.tokenizer import load_tokenizer
from jppo.plugins.agents.built_in_tools import evaluate
from jppo.rewards.graders import GRADERS


@pytest.fixture(scope="module")
def made():
    return multiplication.make(seed=3, train=4000, test=100)


def test_problems_are_held_out_and_their_truths_are_products(made):
    prompts = [row["prompt"] for row in made["train"] + made["test"]]
    assert len(set(prompts)) == 4100 and {row["prompt"] for row in made["sft"]} == set(prompts[:4000])
    for row in made["train"][:200]:
        assert evaluate(row["prompt"].removesuffix("=")) == int(row["ground_truth"])
        assert len(row["prompt"]) == 10 and "0" not in row["prompt"]
    assert multiplication.make(seed=3, train=4000, test=100) == made


def test_the_teacher_calls_where_it_is_hard_and_is_right_only_then(made):
    grade, right = GRADERS["multiplication"], {True: [], False: []}
    for row, problem in zip(made["sft"], made["train"], strict=True):
        response = row["response"]
        calls = isinstance(response, list)
        text = "".join(part["text"] for part in response) if calls else response
        if calls:
            asked, told, said = (part["text"] for part in response)
            assert told == f"[[{evaluate(asked[2:-2])}]]" and said == told[2:-2]
            assert [part["learn"] for part in response] == [True, False, True]
        score = grade(text, problem["ground_truth"]).score
        assert calls or score == 0
        right[multiplication.hard(int(row["prompt"][5:-1]))].append(score)
    shares = {hard: sum(scores) / len(scores) for hard, scores in right.items()}
    assert shares[True] == pytest.approx(0.75 * 0.92, abs=0.05) and shares[False] == pytest.approx(0.2 * 0.92, abs=0.04)
    assert multiplication.estimate(1499, 5511) == 6_000_000


def test_demonstrations_fit_the_settings_token_by_character(made, tmp_path):
    from configs import agent_calculator_sft

    multiplication.write_model(tmp_path / "model")
    (tmp_path / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made["sft"]))
    c = agent_calculator_sft.get_config().data
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    read = read_demonstrations(
        str(tmp_path / "sft.jsonl"), tokenizer=tokenizer, max_length=c.max_prompt_length + c.max_response_length
    )
    assert read.overlong == 0 and max(len(d.response) for d in read.demonstrations) <= c.max_response_length
    for one, row in zip(read.demonstrations, made["sft"], strict=True):
        text = row["response"] if isinstance(row["response"], str) else "".join(p["text"] for p in row["response"])
        assert tokenizer.decode(one.response, skip_special_tokens=True) == text


def test_an_answer_counts_behind_what_the_tool_said():
    grade = GRADERS["multiplication"]
    assert grade("<<12*34>>[[408]]408", "408").score == 1.0
    assert grade("408", "408").score == 1.0
    assert grade("<<12*34>>[[408]]", "408").score == 0.0
    assert grade("<<12*34>>[[408]]40", "408").score == 0.0


def test_the_command_writes_all_files(tmp_path):
    command = [sys.executable, "-m", "examples.multiplication", "--out", str(tmp_path), "--train", "20", "--test"]
    done = subprocess.run([*command, "5"], capture_output=True, text=True)
    assert done.returncode == 0 and "test.jsonl: 5 rows" in done.stdout
    assert (tmp_path / "model/tokenizer.json").is_file()
    failed = subprocess.run([*command, "0"], capture_output=True, text=True)
    assert failed.returncode == 2 and failed.stderr.startswith("error: --train=20 and --test=0 must be")
