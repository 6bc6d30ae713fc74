"""verl's rules against the scores that verl 0.9.1's own functions gave: scripts/make_grader_golden.py."""

import json
import pathlib
import time

import pytest

from jppo.rewards import graders, verl_rules
from jppo.settings import UserError

GOLDEN = json.loads((pathlib.Path(__file__).parent / "golden/graders.json").read_text())
SEARCH = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
# verl's list of data sources, as its dispatch has them, without those that are refused.
SOURCES = {
    "gsm8k_strict": ("openai/gsm8k",),
    "math_reward": ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"),
    "math_dapo": ("math_dapo", "math", "math_dapo_reasoning", "aime", "aime24", "aime_2024", "aime2025"),
    "search_r1": tuple(f"searchR1_{name}" for name in SEARCH),
}
RULES = sorted(SOURCES)


@pytest.mark.parametrize("rule", RULES)
def test_every_response_scores_as_in_verl(rule):
    assert len(GOLDEN[rule]) >= 60 and len({score for *_, score in GOLDEN[rule]}) > 1
    for response, truth, score in GOLDEN[rule]:
        assert getattr(verl_rules, rule)(response, truth).score == score, (response, truth)


@pytest.mark.parametrize(("rule", "source"), [(rule, source) for rule in RULES for source in SOURCES[rule]])
def test_sources_of_verl_are_graded_by_its_rules(rule, source):
    found = graders.graders_for([source])[source]
    assert [found(response, truth).score for response, truth, _ in GOLDEN[rule]] == [s for *_, s in GOLDEN[rule]]


@pytest.mark.parametrize(
    "source",
    [
        *("numina_aops_forum", "numina_synthetic_math", "numina_amc_aime", "numina_synthetic_amc", "numina_cn_k12"),
        *("numina_olympiads", "codecontests", "apps", "codeforces", "taco", "hiyouga/geometry3k"),
    ],
)
def test_sources_whose_rule_cannot_be_had_are_refused_with_the_way_out(source):
    with pytest.raises(UserError, match=r"as verl grades it: .*(set reward\.grader=|leave these rows)"):
        graders.graders_for([source])
    assert graders.graders_for([source], override="exact")


def test_an_answer_and_none_are_told_apart():
    assert verl_rules.gsm8k_strict("#### 1,234", "5") == (0.0, {"exact": 0.0, "answered": 1.0}, "1234")
    assert verl_rules.math_reward(r"\fbox{5}", "5") == (0.0, {"exact": 0.0, "answered": 0.0}, "")
    assert verl_rules.math_dapo("none", "5") == (-1.0, {"exact": 0.0, "answered": 0.0}, "")
    assert verl_rules.math_dapo(r"\boxed{ 5}", "5") == (-1.0, {"exact": 0.0, "answered": 1.0}, " 5")
    assert verl_rules.search_r1("<answer> Rome </answer>", "Paris").answer == "Rome"


def test_a_search_truth_is_text_or_json_with_a_target():
    for truth in ("Paris", '{"target": "Paris"}', '{"target": ["Rome", "Paris"]}'):
        assert verl_rules.search_r1("<answer>paris</answer>", truth).score == 1.0
    assert verl_rules.search_r1("<answer>5</answer>", "5").score == 1.0
    with pytest.raises(ValueError, match="must be text, or JSON"):
        verl_rules.search_r1("<answer>paris</answer>", '{"answer": "Paris"}')


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("unit", ["<answer>", r"\boxed{", r"\boxed ", "{", "$", "#### 1", "Answer: ", "a ", r"\frac"])
def test_long_responses_take_no_more_than_a_moment(rule, unit):
    start = time.perf_counter()
    getattr(verl_rules, rule)(unit * 20_000, "5")
    assert time.perf_counter() - start < 2.0
