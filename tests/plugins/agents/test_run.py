"""Whole runs with conversations, by the trainer's own sampling."""

import json
import pathlib

import jax
import numpy as np
import pytest
import rich.console

from examples import arithmetic, multiplication
from jppo import evaluate, replay, settings, train
from jppo.distributed.hosts import Stopped
from jppo.errors import UserError
from jppo.models import decoder, hf, hf_write
from jppo.rollout.protocol import RolloutError
from jppo.run.inputs import read_inputs
from tests.make import typed

WORLD = '''
class World:
    """Pays a tenth for every turn, and never ends."""
    def reset(self, prompt):
        assert prompt.ground_truth.isdigit()
        return "12"
    async def step(self, text):
        return "34", 0.1, False
'''


@pytest.fixture
def agent_run(small_run, tmp_path):
    """Two steps of multiplication with a model of one layer, sampled from in the trainer."""
    c = small_run
    made = multiplication.make(seed=0, train=8, test=8)
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made[name]))
    multiplication.write_model(tmp_path / "model")
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    (tmp_path / "model/config.json").write_text(json.dumps(arithmetic.MODEL | shape))
    c.data.max_prompt_length, c.data.max_response_length = 10, 40
    c.rollout.name, c.rollout.logp_tolerance = "inprocess", 1e-3
    c.rollout.multi_turn.enable, c.rollout.multi_turn.format = True, "plain"
    c.trainer.test_freq = c.trainer.save_freq = -1
    c.trainer.val_before_train = False
    (tmp_path / "world.py").write_text(WORLD)
    return c


def metrics_of(c):
    lines = (pathlib.Path(c.trainer.run_dir) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_an_environment_trains_the_policy(agent_run, tmp_path, quick_compilation):
    c = agent_run
    c.rollout.multi_turn.environment = f"{tmp_path / 'world.py'}:World"
    settings.check(c)
    train.train(c)  # its first act is to see that sampler and trainer agree on whole conversations
    first, second = metrics_of(c)
    assert second["agent/turns/max"] >= 2 and second["agent/given_tokens/mean"] > 0 and first["agent/faults"] == 0
    assert set(first) >= {"reward/environment_score/mean", "agent/turns/mean"} and "reward/rule_score/mean" not in first
    for step in (first, second):  # a turn that is cut by the length of the response is not paid
        paid = [0.1 * (step["agent/turns/mean"] - step["response_length/clip_ratio"]), 0.1 * step["agent/turns/mean"]]
        assert paid[0] - 1e-6 <= step["reward/environment_score/mean"] <= paid[1] + 1e-6
    assert second["prompt_length/mean"] == 10 + 2  # with what the environment says first


PAYS = """
class Pays:
    rewards = True
    schema = {"type": "function", "function": {"name": "pay", "parameters": {"properties": {"x": {}}}}}
    def __call__(self, arguments, context):
        return "1", 0.5
"""


def test_a_tool_that_gives_rewards_is_a_part_of_the_reward(agent_run, tmp_path, quick_compilation):
    (tmp_path / "pays.py").write_text(PAYS)
    (tmp_path / "tools.yaml").write_text(f"tools:\n- class_name: {tmp_path / 'pays.py'}:Pays\n")
    agent_run.rollout.multi_turn.tool_config_path = str(tmp_path / "tools.yaml")
    agent_run.trainer.total_training_steps = 1
    settings.check(agent_run)
    train.train(agent_run)
    (only,) = metrics_of(agent_run)
    assert {"reward/tool_score/mean", "reward/rule_score/mean"} <= set(only)
    assert only["reward/tool_score/mean"] == only["agent/faults"] == 0.0  # a random model calls nothing


def test_a_model_is_tested_with_its_tools(agent_run, tiny_multiplier, tmp_path, capsys):
    c = agent_run
    (tmp_path / "tools.yaml").write_text("tools:\n- class_name: calculator\n")
    argv = [
        f"--model={tiny_multiplier}", f"--data={c.data.val_files}", f"--out={tmp_path / 'out'}",
        "--max_prompt_length=10", "--max_response_length=40", "--config.rollout.name=inprocess",
        "--config.rollout.multi_turn.enable=True", "--config.rollout.multi_turn.format=plain",
        f"--config.rollout.multi_turn.tool_config_path={tmp_path / 'tools.yaml'}",
    ]  # fmt: skip
    evaluate.main(argv)
    assert json.loads((tmp_path / "out/summary.json").read_text())["metrics"]["val/score"] == 0.0


BRANCHES = """
import json, os, urllib.request

def say(text):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    body = json.dumps({"prompt": text, "max_tokens": 6}).encode()
    asked = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/completions", body, headers)
    return json.load(urllib.request.urlopen(asked))["choices"][0]["text"]

def agent(task):
    if task["uid"].endswith("3"):
        raise ValueError("I give up")
    text = task["prompt"]
    text += say(text) + "12"
    say(text)
    say("1*1=")
    return {"reward": 0.5}
"""


@pytest.fixture
def program_run(agent_run, tmp_path):
    """Such a run with an agent program that needs two branches, and gives up on one prompt."""
    c = agent_run
    c.rollout.multi_turn.update(settings.default().rollout.multi_turn)
    (tmp_path / "program.py").write_text(BRANCHES)
    c.rollout.agent, c.rollout.agent_format = f"{tmp_path / 'program.py'}:agent", "plain"
    c.rollout.agent_reward, c.rollout.agent_branches, c.data.train_batch_size = "reported", 2, 8
    return c


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_an_agent_program_trains_the_policy(program_run, quick_compilation, mode):
    c = program_run
    c.rollout.mode = mode
    settings.check(c)
    train.train(c)
    for step in metrics_of(c):
        assert step["agent/branches/mean"] == 15 / 8 and step["agent/branches_left_out"] == 0  # one has none
        assert step["agent/faults"] == step["reward/errors"] == 1 and step["reward/agent_score/mean"] == 0.5
        assert "reward/rule_score/mean" not in step and step["rollout/logp_gap_max"] < 1e-3
        assert step["agent/turns/mean"] == 3 * 7 / 8  # two in one branch, one in the other
    rows = [
        json.loads(line) for line in (pathlib.Path(c.trainer.run_dir) / "samples/step_1.jsonl").read_text().splitlines()
    ]
    (failed,) = [row["error"] for row in rows if row["error"]]
    assert failed.startswith("agent_score: the agent exited with 70: ValueError: I give up\nTraceback")


def test_a_step_of_agents_with_branches_is_recomputed_to_the_bit(program_run, quick_compilation):
    c = program_run
    c.trainer.replay_steps = "1"
    settings.check(c)
    train.train(c)
    console = rich.console.Console(width=200, record=True)
    assert not replay.replay_step([c.trainer.run_dir], console)
    assert "nothing differs" in console.export_text()
    with np.load(pathlib.Path(c.trainer.run_dir) / "replay/step_1/batch.npz") as file:
        assert len(file["score"]) == 15, "eight episodes, one without a second branch"
        assert (file["episode"] != np.arange(15)).sum() == 7


COLUMNS = """
import numpy as np
from jppo.learner.algorithm import Algorithm

def listen(memory, step):
    batch, branches = step.batch, 0
    for row in np.flatnonzero(batch.mask.any(axis=1)):
        [i] = np.flatnonzero(step.rows == batch["episode"][row])
        branches += row != batch["episode"][row]
        np.testing.assert_array_equal(batch["advantage"][row][batch.mask[row]], step.places[i] + step.number)
    return {"mine/branches": branches, "mine/episodes": len(step.rewards)}

def columns():
    return Algorithm(
        init=lambda prompts: 1, update=lambda memory, step: memory + 1, listen=listen,
        columns=lambda memory, places: {"x": places + memory}, outcome=lambda view: view.column("x") + 0 * view.score,
    )
"""


def test_the_branches_of_an_episode_have_its_columns(program_run, quick_compilation, tmp_path):
    c = program_run
    (tmp_path / "columns.py").write_text(COLUMNS)
    c.algorithm.extension = f"{tmp_path}/columns.py:columns"
    settings.check(c)
    train.train(c)
    assert [(step["mine/episodes"], step["mine/branches"]) for step in metrics_of(c)] == [(8, 7)] * 2


def test_an_agent_that_always_fails_ends_the_start_with_its_error(program_run, tmp_path, quick_compilation):
    c = program_run
    (tmp_path / "program.py").write_text("def agent(task): raise ValueError('no such table')")
    settings.check(c)
    with pytest.raises(
        RolloutError, match=r"none of the 4 first conversations .* exited with 70: ValueError: no such t"
    ):
        train.train(c)


def test_a_stop_while_the_policies_are_compared_ends_the_run(program_run, tmp_path, quick_compilation):
    """The first agent sends it to the trainer, in the check before the first step."""
    c = program_run
    c.rollout.agent_timeout_s = 120.0
    (tmp_path / "program.py").write_text(
        "import os, signal, time\nTRAINER = os.getppid()\n"
        "def agent(task):\n    os.kill(TRAINER, signal.SIGTERM)\n    time.sleep(60)"
    )
    settings.check(c)
    with pytest.raises(Stopped) as e:
        train.train(c)
    assert (e.value.status, e.value.why) == (143, "stopped by SIGTERM")


def test_a_model_is_tested_with_an_agent_program(program_run, tiny_multiplier, tmp_path):
    c = program_run
    argv = [
        f"--model={tiny_multiplier}", f"--data={c.data.val_files}", f"--out={tmp_path / 'out'}",
        "--max_prompt_length=10", "--max_response_length=40", "--config.rollout.name=inprocess",
        f"--config.rollout.agent={c.rollout.agent}", "--config.rollout.agent_format=plain",
        "--config.rollout.agent_reward=reported",
    ]  # fmt: skip
    evaluate.main(argv)
    found = json.loads((tmp_path / "out/summary.json").read_text())["metrics"]
    assert found["val/score"] == 0.5 and found["val/reward_errors"] == 1


@pytest.mark.parametrize(
    "changes,said",
    [
        ({"agent": "bash x.sh", "multi_turn.enable": True}, "would both lead the conversations"),
        ({"agent": "", "agent_reward": "exit"}, "is read only with rollout.agent set"),
        ({"agent": "bash x.sh", "agent_reward": "luck"}, "agent_reward='luck' is not known"),
        ({"agent": "no-such-program --x"}, "'no-such-program' is no program"),
        ({"agent": "bash 'x"}, "is no command line"),
        ({"agent": "missing.py:agent"}, "there is no file missing.py"),
    ],
)
def test_agent_programs_that_cannot_be_are_one_line(program_run, changes, said):
    c = program_run
    if not changes["agent"]:
        c.rollout.agent_branches, c.rollout.agent_format = 4, "hermes"
    for name, value in changes.items():
        c.rollout.update_from_flattened_dict({name: value})
    with pytest.raises(UserError) as e:
        settings.check(c)
        read_inputs(typed(c))
    assert said in str(e.value) and "\n" not in str(e.value)


@pytest.fixture
def tiny_multiplier(agent_run, tmp_path):
    """The random model of such a run, with weights."""
    _, cfg = hf.read_config(agent_run.model.path)
    values = decoder.init_params(cfg, jax.random.key(0), head="lm", param_dtype="float32")
    return hf_write.save_model(tmp_path / "multiplier", values, cfg, source=agent_run.model.path, dtype="float32")


@pytest.mark.parametrize(
    "changes,said",
    [
        ({}, "nothing answers the policy"),
        ({"enable": False}, "is read only with rollout.multi_turn.enable set"),
        ({"interaction": "a.py:A", "environment": "b.py:B"}, "would both answer"),
        (
            {"interaction": "a.py:A", "max_parallel_calls": 2},
            "is read only with rollout.multi_turn.tool_config_path set",
        ),
        ({"tool_config_path": "x", "max_user_turns": 0}, "max_user_turns=0 must be at least 1, or -1"),
        ({"tool_config_path": "x", "format": "xml"}, "format='xml' is not known"),
        ({"tool_config_path": "x", "tool_timeout_s": 0.0}, "tool_timeout_s=0.0 must be above 0"),
        ({"tool_config_path": "x", "tool_response_truncate_side": "top"}, "'top' is not known"),
    ],
)
def test_settings_that_cannot_be_are_one_line(agent_run, changes, said):
    for name, value in changes.items():
        agent_run.rollout.multi_turn[name] = value
    with pytest.raises(UserError) as e:
        settings.check(agent_run)
    assert said in str(e.value) and "\n" not in str(e.value)
