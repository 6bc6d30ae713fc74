"""Training with a custom reward function that returns its amounts by step."""

import pathlib

import pytest

from jppo import settings, train
from tests.make import read_lines

FILE = """
def by_step(data_source, solution_str, ground_truth, extra_info=None):
    steps = [step for step in solution_str.split("1") if step.strip()]
    amounts = [float(len(step)) for step in steps]
    if len(solution_str) == 3:
        amounts.append(1.0)
    return {"score": sum(amounts) - 1, "steps": amounts, "delimiter": "1"}

def at_the_end(data_source, solution_str, ground_truth, extra_info=None):
    found = by_step(data_source, solution_str, ground_truth)
    return found["score"] if len(solution_str) != 3 else float("nan")
"""


def trained(c, folder, name):
    """Runs two steps; returns the metrics of each step and the samples of the first."""
    (folder / "mine.py").write_text(FILE)
    c.reward.function, c.trainer.run_dir = f"{folder / 'mine.py'}:{name}", str(folder / name)
    c.trainer.test_freq, c.trainer.save_freq = -1, -1
    settings.check(c)
    train.train(c)
    run = pathlib.Path(c.trainer.run_dir)
    steps = [row for row in read_lines(run / "metrics.jsonl") if "actor/loss" in row]
    return steps, read_lines(run / "samples/step_1.jsonl")


@pytest.mark.usefixtures("quick_compilation")
def test_a_run_learns_from_amounts_where_they_are_earned(small_run, tmp_path):
    steps, samples = trained(small_run, tmp_path, "by_step")
    others, plain = trained(small_run, tmp_path, "at_the_end")
    assert len(steps) == len(others) == 2
    assert [row["response"] for row in samples] == [row["response"] for row in plain]
    earned = [row for row in samples if row["earned"]]
    assert earned and not any(row["earned"] for row in plain)
    for row in earned:
        pieces = [piece for piece in row["response"].split("1") if piece.strip()]
        assert [amount for _, amount in row["earned"]] == [len(piece) for piece in pieces]
        assert row["score"] == sum(map(len, pieces)) - 1
        ends = [token for token, _ in row["earned"]]  # a token has one character here
        assert [row["response"][: end + 1][-1] for end in ends] == [piece[-1] for piece in pieces]
    for name in ("reward_mean", "critic/rewards/mean", "critic/rewards/max", "reward/errors"):
        assert steps[0][name] == others[0][name], name
    wrong = [row for row in samples if row["error"]]
    assert steps[0]["reward/errors"] == len(wrong)
    assert all("amounts for the" in row["error"] and row["uid"] and row["score"] is None for row in wrong)
    assert steps[0]["critic/returns/mean"] != others[0]["critic/returns/mean"], "they count from their own tokens on"
