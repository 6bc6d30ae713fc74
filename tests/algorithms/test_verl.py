"""Estimators and policy losses against the numbers of verl's own functions: scripts/make_golden.py."""

import collections
import json

import numpy as np
import pytest

from tests import make

CASES = json.loads((make.ROOT / "tests/algorithms/golden/verl.json").read_text())
FUNCTIONS = sorted({one["meta"]["fn"] for one in CASES})


@pytest.fixture(scope="module")
def script():
    return make.script("scripts/check_golden.py")


def case_of(script, one):
    arrays = [{k: np.asarray(v) for k, v in one[name].items()} for name in ("inputs", "expected")]
    metrics = {k: np.float64(v) for k, v in one["meta"].get("metrics", {}).items()}
    return script.Case(one["name"], one["meta"], arrays[0], arrays[1] | metrics)


@pytest.mark.parametrize("fn", FUNCTIONS)
def test_numbers_are_verls(script, fn):
    cases = [case_of(script, one) for one in CASES if one["meta"]["fn"] == fn]
    assert not {case.name: faults for case in cases if (faults := script.check(case)[0])}


def test_every_function_has_cases():
    counts = collections.Counter(one["meta"]["fn"] for one in CASES)
    losses = {"dppo_tv": 6, "dppo_kl": 6, "dro": 6, "clip_cov": 6, "kl_cov": 6, "bypass_mode": 30}
    estimators = {"grpo_vectorized": 12, "gpg_advantage": 6, "gdpo": 12}
    estimators["forward_kl_topk"] = 4
    assert counts == losses | estimators | {"optimal_token_baseline": 12, "tir_optimal_token_baseline": 12}


@pytest.mark.parametrize("fn", FUNCTIONS)
def test_a_number_that_is_off_is_seen(script, fn):
    case = case_of(script, next(one for one in CASES if one["meta"]["fn"] == fn))
    out = case.expected["grad" if "grad" in case.expected else "advantages"]
    out.reshape(-1)[np.argmax(np.abs(out))] *= 1.01
    assert script.check(case)[0]
