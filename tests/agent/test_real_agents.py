"""The example agents, each trained on the calculator task through a real vLLM."""

import importlib.util
import json
import pathlib

import numpy as np
import pytest

from examples import arithmetic, multiplication
from jppo import settings, sft, train

ROOT = pathlib.Path(__file__).resolve().parents[2]
TEST, LONGEST = 200, 26
SHAPE = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "vocab_size": 32}
EXAMPLES = {
    "bash examples/calculator_curl.sh": "graders",
    "examples/calculator_openai.py:multiply": "reported",
    "examples/calculator_anthropic.py:multiply": "exit",
}
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make setup"),
]


@pytest.fixture(scope="module")
def imitator(tmp_path_factory):
    """The task with numbers of two digits, and a model that imitates the teacher who mostly estimates."""
    folder, rng = tmp_path_factory.mktemp("products"), np.random.default_rng(0)
    numbers = [a for a in range(11, 100) if a % 10]
    pairs = rng.permutation([(a, b) for a in numbers for b in numbers]).tolist()
    rows = [{"prompt": f"{a}*{b}=", "ground_truth": str(a * b), "data_source": "multiplication"} for a, b in pairs]
    shown = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiplication, "DIGITS", 2)
        for a, b in pairs[TEST:] * 3:
            calls = rng.random() < (0.75 if multiplication.hard(b) else 0.2)
            mistyped = int(rng.integers(2)) if rng.random() < 0.08 else None
            response = multiplication.demonstration(a, b, calls=bool(calls), mistyped=mistyped)
            shown.append({"prompt": f"{a}*{b}=", "response": response})
    made = {"train": rows[TEST:], "test": rows[:TEST], "sft": shown}
    arithmetic.write(folder / "data", made, multiplication.CHARACTERS)
    config = arithmetic.MODEL | SHAPE
    (folder / "data/model/config.json").write_text(json.dumps(config))
    c = settings.recipe("agent_calculator_sft", str(folder))
    c.data.max_prompt_length, c.data.max_response_length, c.data.train_batch_size = 6, LONGEST, 64
    c.trainer.total_training_steps = 600
    settings.check(c)
    sft.train(c)
    return folder


@pytest.mark.parametrize("agent", EXAMPLES)
def test_an_example_agent_learns_its_tool_through_vllm(imitator, agent, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    c = settings.recipe("agent_calculator", str(imitator))
    c.rollout.multi_turn.update(settings.default().rollout.multi_turn)
    c.rollout.name, c.rollout.agent, c.rollout.agent_format = "vllm", agent, "plain"
    c.rollout.agent_reward, c.rollout.agent_concurrency = EXAMPLES[agent], 16
    c.data.max_prompt_length, c.data.max_response_length = 6, LONGEST
    c.data.train_batch_size, c.actor.ppo_mini_batch_size, c.data.val_max_samples = 64, 32, 64
    c.actor.lr, c.critic.lr, c.actor.lr_warmup_steps = 1e-3, 1e-3, 0
    c.trainer.run_dir, c.trainer.save_freq = str(tmp_path), -1
    c.trainer.total_training_steps = c.trainer.test_freq = 12
    settings.check(c)
    train.train(c)
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps[0]["val/score"] < 0.6 and steps[-1]["val/score"] >= 0.9
    assert all(step["rollout/logp_gap_max"] < 1e-3 and step["agent/faults"] == 0 for step in steps[1:])
