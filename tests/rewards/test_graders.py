import math

import numpy as np
import pytest

from jppo.errors import UserError
from jppo.rewards.graders import GRADERS, RulePart, graders_for
from jppo.rewards.parts import Sample
from jppo.rewards.pool import Pool
from jppo.rewards.rules import exact, gsm8k
from jppo.types import Prompt


def prompt(source, truth):
    return Prompt("u", source, "q", np.zeros(1, np.int32), truth, {})


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        ("so\n#### 18", "18", 1),
        ("#### 18.", "18", 1),  # a full stop is no part of the number
        ("#### $18", "18", 1),
        ("#### $1,234.50", "1234.5", 1),
        ("#### 1,234", "1234", 1),
        ("#### 1234", "1,234", 1),
        ("#### 18.00", "18", 1),
        ("#### -5", "-5", 1),
        ("#### -$5", "-5", 1),
        ("#### 5", "-5", 0),
        ("#### .5", "0.5", 1),
        ("#### 18 eggs", "18", 1),
        ("#### 18, or so", "18", 1),
        ("####18", "18", 1),
        ("#### 18 #### 19", "18", 1),  # the first counts
        ("#### 19 #### 18", "18", 0),
        ("#### 180", "18", 0),
        ("#### 1.2.3", "1.2", 0),
        ("#### 18.1", "18", 0),
        ("#### 100000000000000000001", "100000000000000000000", 0),  # exact, not as floats
        ("The answer is 18", "18", 0),
        ("#### eighteen", "18", 0),
        ("####", "18", 0),
        ("", "18", 0),
    ],
)
def test_strict_gsm8k(response, truth, score):
    reward = gsm8k(response, truth)
    assert reward.score == score and reward.parts["exact"] == score


def test_gsm8k_tells_no_answer_from_a_wrong_one():
    assert gsm8k("18", "18").parts["answered"] == 0.0
    assert gsm8k("#### 17", "18").parts["answered"] == 1.0


def test_exact_ignores_white_space_around():
    assert exact(" 132\n", "132").score == 1.0
    assert exact("1 32", "132").score == 0.0 and exact("0132", "132").score == 0.0


def grade(texts, prompts):
    """By the part of a reward that applies the rules; the quick ones need no process of the pool."""
    pool = Pool(1, timeout_s=60.0, memory_bytes=2**31)
    part = RulePart([p.data_source for p in prompts], pool=pool)
    futures = [part.submit(Sample(p, t, len(t), "stop")) for t, p in zip(texts, prompts, strict=True)]
    part.close()
    return [future.result() for future in futures]


def test_each_prompt_gets_the_grader_of_its_source():
    prompts = [prompt("openai/gsm8k", "18"), prompt("arithmetic", "18"), prompt("arithmetic", "18")]
    rewards = grade(["#### 18", "#### 18", "18"], prompts)
    assert [r.score for r in rewards] == [1.0, 0.0, 1.0]


def test_a_failing_grader_is_an_error_of_its_own_sample():
    prompts = [prompt("gsm8k", "eighteen"), prompt("gsm8k", "18")]
    failed, good = grade(["#### 18"] * 2, prompts)
    assert failed.error == "ValueError: ground_truth='eighteen' is not a number"
    assert math.isnan(failed.score) and failed.parts == {}  # no 0: that would be an answer judged wrong
    assert good.score == 1.0 and good.error is None


def test_a_source_without_a_grader_is_an_error_that_lists_the_known():
    with pytest.raises(UserError) as e:
        graders_for(["gsm8k", "my/data"])
    assert "data_source='my/data'" in str(e.value) and all(name in str(e.value) for name in GRADERS)
    assert graders_for(["my/data"], override="exact") == {"my/data": exact}
    with pytest.raises(UserError, match=r"reward\.grader='nope'"):
        graders_for(["gsm8k"], override="nope")
