"""Environments of the package `verifiers`, installed beside jppo, with a policy that says what it is told to."""

import json
import os
import pathlib
import subprocess

import pytest

from jppo import settings
from tests import make
from tests.plugins.agents.test_gateway import run, spans  # noqa: F401

ROOT = pathlib.Path(__file__).parents[3]
PLAY = """
import asyncio, json, sys
from examples.verifiers_env import play
print(json.dumps(asyncio.run(play(json.load(sys.stdin)))))
"""
TASKS = "taskset.id=products_environment"


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """An interpreter with `verifiers`."""
    return make.python_with(tmp_path_factory.mktemp("verifiers"), "verifiers>=0.4", "uv")


@pytest.fixture
def episode(python, tmp_path, monkeypatch, hermes, run):  # noqa: F811
    """Plays the first task of an environment with what the policy says."""
    monkeypatch.setenv("PATH", f"{python.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{ROOT / 'tests/plugins/agents/environments'}")

    def play(*said, fields):
        command = [python, "-m", "examples.verifiers_env", "--out", tmp_path, "--test", "1", TASKS, *fields]
        subprocess.run(command, check=True, cwd=ROOT)
        row = json.loads((tmp_path / "test.jsonl").read_text())
        prompt = hermes.prompt(row["prompt"][-1]["content"], verifiers=row["verifiers"])
        (tmp_path / "play.py").write_text(PLAY)
        ask = hermes.policy(*said)
        return run(hermes, f"{python} {tmp_path / 'play.py'}", ask, prompt=prompt, timeout_s=120.0), ask

    return play


def test_the_config_plays_rows_of_the_example(tmp_path):
    argv = [f"--config=jppo://verifiers:{tmp_path}", "--config.model.path=some/model"]
    config, _ = settings.parse(argv, "", settings.default())
    agent, function = config.rollout.agent.split(":")
    assert f"async def {function}(task" in (ROOT / agent).read_text()
    assert (config.rollout.agent_reward, config.data.train_files) == ("reported", f"{tmp_path}/data/train.jsonl")


CALL = '<tool_call>\n{"name": "calculator_multiply", "arguments": {"a": 12, "b": 34}}\n</tool_call>'


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields,said,score",
    [
        ([], ["It is 408."], 1.0),
        ([], ["408"], 1.25),
        (["taskset.tools=true"], [CALL, "408"], 1.25),
        (["id=game_environment"], ["1", "2", "408"], 1 / 3 + 1.25),
        (["id=best-of-n", "n=2"], ["408", "no"], (1.25 + 0.25) / 2),
    ],
)
def test_an_environment_scores_what_the_policy_says(episode, fields, said, score):
    t, ask = episode(*said, fields=fields)
    assert t.exchange.fault is None and t.exchange.score == pytest.approx(score)
    if "n=2" not in fields:
        assert spans(t) == ask.answers
