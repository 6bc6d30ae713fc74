import math

import numpy as np
import pytest

from jppo.runlog import diagnosis

NAN = float("nan")


@pytest.mark.parametrize(
    "name, value, expected",
    [
        ("actor/ppo_kl", 0.0005, "weak"),
        ("actor/ppo_kl", 0.001, "good"),
        ("actor/ppo_kl", -0.02, "good"),  # an estimate may be negative
        ("actor/ppo_kl", 0.1, "good"),
        ("actor/ppo_kl", 0.11, "bad"),
        ("actor/ppo_kl", NAN, "bad"),
        ("actor/pg_clipfrac", 0.0, "weak"),
        ("actor/pg_clipfrac", 0.2, "good"),
        ("actor/pg_clipfrac", 0.31, "bad"),
        ("actor/ratio_mean", 1.0, "good"),
        ("actor/ratio_mean", 0.8, "bad"),
        ("actor/ratio_mean", math.inf, "bad"),
        ("actor/entropy", 0.0, None),
    ],
)
def test_a_value_is_judged_by_its_range(name, value, expected):
    assert diagnosis.verdict(name, value) == expected


def test_a_trend_is_told_from_noise():
    noise = np.random.default_rng(0).normal(0, 0.02, (200, 10))
    rising = [diagnosis.trend(0.02 * np.arange(10) + row) for row in noise]
    level = [diagnosis.trend(0.5 + row) for row in noise]
    assert rising.count("rising") > 190 and "falling" not in rising
    assert level.count(None) > 160  # two standard errors, both ways
    assert diagnosis.trend([-0.1 * t for t in range(5)]) == "falling"
    assert diagnosis.trend([0.7] * 10) is None
    assert diagnosis.trend([0.1, 0.2, 0.3]) is None, "too few to tell"
    assert diagnosis.trend([0.1, 0.2, NAN, 0.4, 0.5]) is None


def test_the_slope_is_that_of_least_squares():
    values = np.random.default_rng(1).normal(size=10) + 0.9 * np.arange(10)
    design = np.stack([np.arange(10), np.ones(10)], 1)
    (slope, _), (residual,), *_ = np.linalg.lstsq(design, values, rcond=None)
    error = math.sqrt(residual / 8 * np.linalg.inv(design.T @ design)[0, 0])
    for shift, expected in ((0.0, "rising"), (slope - 1.9 * error, None), (slope + 2.1 * error, "falling")):
        assert diagnosis.trend(values - shift * np.arange(10)) == expected


def test_a_step_has_the_verdicts_of_what_it_has():
    metrics = {"critic/score/mean": 0.5, "actor/ppo_kl": 0.5, "actor/entropy": 1.0}
    assert diagnosis.verdicts(metrics, [0.1, 0.2, 0.3, 0.4, 0.5]) == {
        "critic/score/mean": "good",
        "actor/ppo_kl": "bad",
    }
    assert diagnosis.verdicts(metrics, [0.5, 0.4, 0.3, 0.2, 0.1])["critic/score/mean"] == "bad"
    assert diagnosis.verdicts({"val/score": 1.0}, [0.1, 0.2, 0.3, 0.4]) == {}
