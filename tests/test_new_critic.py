"""A new critic in a run: its values before it has learned."""

import pathlib

import pytest

from jppo import settings, train
from jppo.runlog.logger import read_metrics
from tests.make import changed

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return 0.05 * len(solution_str)
"""
BINS = {"critic.value_bins": 8, "critic.value_range": (-1.0, 3.0)}
LORA = {"model.lora_rank": 2, "critic.lora_rank": 4}


@pytest.mark.parametrize(
    "changes, value",
    [
        ({}, 0.0),
        (BINS, 1.0),  # the middle of the range
        pytest.param(LORA, 0.0, marks=pytest.mark.slow),
        pytest.param({"model.param_dtype": "bfloat16"}, 0.0, marks=pytest.mark.slow),
    ],
)
def test_a_new_critic_explains_nothing_and_contradicts_nothing(
    small_run, engine, quick_compilation, tmp_path, changes, value
):
    """Equal values leave the variance of the returns as it is; normalised ones are the mean of the returns so far."""
    (tmp_path / "reward.py").write_text(REWARD)
    usual = {"critic.value_head_std": settings.default().critic.value_head_std, "critic.value_norm_decay": 0.9}
    usual |= {"critic.lr": 0.0, "actor.lr": 0.0, "trainer.test_freq": -1}
    usual |= {"reward.function": f"{tmp_path / 'reward.py'}:compute_score"}
    c = changed(small_run, usual | changes)
    train.train(c)
    first, second = (line for line in read_metrics(pathlib.Path(c.trainer.run_dir)) if "critic/values/mean" in line)
    assert first["critic/returns/std"] > 0.02
    expected = [value, first["critic/returns/mean"] + value * max(first["critic/returns/std"], 0.1)]
    for line, middle in zip((first, second), expected, strict=True):
        for name in ("mean", "max", "min"):
            assert line[f"critic/values/{name}"] == pytest.approx(middle, abs=1e-3)
        assert 0 <= line["critic/vf_explained_var"] < 0.02
