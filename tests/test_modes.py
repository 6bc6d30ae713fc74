"""Modes of rollouts trained through a real vLLM: modes.py, and its rules."""

import importlib.util

import pytest

from jppo import settings
from jppo.rewards.make import needed_columns
from tests import modes
from tests.make import changed, typed, write_lines


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("modes")
    modes.prepare(folder)
    return folder


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make setup")
@pytest.mark.parametrize("name", modes.MODES)
def test_a_mode_learns_and_shows_its_work(work, name):
    row = modes.run(name, work)
    assert modes.lacks(row) == [], row
    assert 0.35 < row["before"] < 0.6


@pytest.mark.parametrize("name", modes.MODES)
def test_the_settings_of_a_mode_weigh_every_part_of_the_reward(name):
    mode = modes.COMMON | modes.MODES[name].settings
    mode |= {"reward.model.path": "rm"} if "reward.model.engine" in mode else {}
    c = typed(changed(settings.recipe("quickstart", "runs/modes"), mode))
    assert needed_columns(c) == ()  # not those of rules: the reward is a function


def test_every_figure_that_a_mode_lacks_is_named():
    row = {"mode": "abort-1", "before": 0.45, "after": 0.9, "steps": modes.STEPS}
    seen = {"oldest": 1, "mean age": 0.2, "dropped": 0, "mixed": 0.02, "out of turn": 0, "lost or doubled": 0}
    assert modes.lacks(row | {"seen": seen}) == []
    for figure, bad in zip(seen, (0, 0.0, 3, 0.0, 0.5, 1), strict=True):
        assert modes.lacks(row | {"seen": seen | {figure: bad}}) == [f"{figure} {bad:g}"]
    assert modes.lacks(row | {"seen": seen, "after": 0.6}) == ["accuracy 0.450 -> 0.600"]
    assert modes.lacks(row | {"seen": seen, "steps": 12}) == ["12 steps"]


@pytest.mark.parametrize("change, count", [(None, 0), ("doubled", 2), ("lost", 1), ("another", 2)])
def test_prompts_that_were_lost_or_doubled_are_counted(tmp_path, change, count):
    size, n = 2, 3
    prompts = [f"{i}+1=" for i in range(modes.STEPS * size + 5)]
    (tmp_path / "data").mkdir()
    write_lines(tmp_path / "data/train.jsonl", [{"prompt": p} for p in prompts])
    drawn = [p for p in prompts[: modes.STEPS * size] for _ in range(n)]
    if change == "doubled":  # in another's place
        drawn[:n] = drawn[-n:]
    elif change == "lost":
        drawn[-1:] = []
    elif change == "another":
        drawn[:n] = [prompts[-1]] * n
    (tmp_path / "run/samples").mkdir(parents=True)
    for step in range(modes.STEPS):
        lines = drawn[step * size * n : (step + 1) * size * n]
        write_lines(tmp_path / f"run/samples/step_{step + 1}.jsonl", [{"prompt": p} for p in lines])
    ran = modes.Ran({"data.train_batch_size": size, "rollout.n": n}, tmp_path / "run", "", [])
    assert modes.trained_otherwise(ran) == count
    assert (modes.out_of_turn(ran) > 0) == (change in ("doubled", "another"))
