"""The columns that a reward reads: rows may do without the others."""

import pytest

from jppo import settings
from jppo.rewards.make import make_refusal, needed_columns
from tests.make import typed

JUDGE = {"reward.judge.api_type": "openai", "reward.judge.model": "m"}


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({}, ("ground_truth", "data_source")),
        ({"reward.grader": "exact"}, ("ground_truth",)),
        ({"reward.function": "mine.py"}, ()),
        (JUDGE | {"reward.judge.preset": "math"}, ("ground_truth", "data_source")),
        (JUDGE | {"reward.judge.preset": "math", "reward.weights": "judge_score=1"}, ("ground_truth",)),
        (JUDGE | {"reward.judge.preset": "dialogue", "reward.weights": "judge_score=1"}, ()),
        (
            JUDGE
            | {"reward.judge.preset": "dialogue", "reward.judge.scoring_prompt": "is {response} {ground_truth}?"}
            | {"reward.weights": "judge_score=1"},
            ("ground_truth",),
        ),
        (JUDGE | {"reward.judge.scoring_prompt": "rate {response}", "reward.weights": "judge_score=1"}, ()),
        ({"reward.model.path": "classifier", "reward.weights": "rm_score=1"}, ()),
        (
            {"reward.model.path": "classifier", "reward.weights": "rm_score=1,math:rule_score=1"},
            ("ground_truth", "data_source"),
        ),
    ],
)
def test_only_rules_and_some_judges_read_answers_and_sources(changes, needed):
    c = settings.default()
    c.model.path = c.data.train_files = c.data.val_files = "x"
    with c.unlocked():
        c.update_from_flattened_dict(changes)
    assert needed_columns(typed(c)) == needed


@pytest.mark.parametrize(
    "weights, left_out", [("", True), ("rm_score=1", False), ("rm_score=1,code:rule_score=1", True)]
)
def test_a_row_is_left_out_only_where_a_rule_grades_it(weights, left_out):
    c = settings.default()
    c.reward.model.path, c.reward.weights = "classifier", weights
    assert bool(make_refusal(typed(c))("code", "assert eval(f(1)) == 3")) == left_out
