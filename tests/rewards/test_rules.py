"""The rules by tables worked out by hand, by the reference answers of real data, and by verl 0.9.1's own scores.

Those are in golden/graders.json: scripts/make_grader_golden.py.
"""

import json
import pathlib
import time

import pytest

from jppo.errors import UserError
from jppo.rewards import graders, rules

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


@pytest.mark.parametrize(
    ("response", "truth", "strict", "flexible"),
    [
        ("#### 18", "18", 1, 1),
        ("it is 18", "18", 0, 1),  # only the strict rule asks for ####
        ("#### 18 #### 19", "18", 1, 0),  # the first after ####, the last of all
        ("#### 19, no: 18", "18", 0, 1),
        ("#### 18\nIn 3 steps.", "18", 1, 0),
        ("so she has $1,234.50.", "1234.5", 0, 1),
        ("10-4", "4", 0, 1),  # a minus between numbers is no sign
        ("x = -4", "-4", 0, 1),
        ("-$4", "-4", 0, 1),
        ("about .5", "0.5", 0, 1),
        ("5...", "5", 0, 1),
        ("version 1.2.3", "3", 0, 0),
        ("eighteen", "18", 0, 0),
        ("", "18", 0, 0),
    ],
)
def test_strict_and_flexible_gsm8k(response, truth, strict, flexible):
    assert rules.gsm8k(response, truth).score == strict
    assert rules.gsm8k_flexible(response, truth).score == flexible


@pytest.mark.parametrize("before", ["", " ", "$", "+", "\\$", "€", "+$"])
@pytest.mark.parametrize(
    "behind",
    [
        *(
            "",
            ".",
            ",",
            ".00",
            " eggs",
            ", or so",
            "%",
            " %",
            "\\%",
            "$",
            "€",
            " dollars",
            "**",
            "**.",
            "_",
            "`",
            ")",
            ").",
        ),
        *(
            "</answer>",
            "<|im_end|>",
            "\n5 more",
            "\n- 2",
            "...",
            "?",
            ": because",
            "cm",
            "kg.",
            " cm^2",
            " = 9*2",
            "\\)",
            "\\]",
        ),
        *(
            ". 5 are left",
            "; 5 are left",
            " (2 each)",
            " #### 19",
            " of 20",
            " - that is all",
            " \N{EM DASH} yes",
            "\r\n",
            "\t|",
        ),
        *("\N{NO-BREAK SPACE}eggs", "°", "pm"),
    ],
)
def test_what_may_stand_around_the_number(before, behind):
    assert rules.gsm8k(f"so\n####{before}18{behind}", "18").score == 1.0


@pytest.mark.parametrize(
    "number",
    [
        *(
            "18/2",
            "18^2",
            "18e2",
            "18E2",
            "18:30",
            "1,8",
            "18*2",
            "18**2",
            "18-2",
            "18+2",
            "18=18",
            "18x",
            "18k",
            "18!",
            "18th",
        ),
        *(
            "18 / 2",
            "18 ^ 2",
            "18 * 2",
            "18 ** 2",
            "18 - 2",
            "18 + 2",
            "18 x 2",
            "18 : 30",
            "18 000",
            "18 1/2",
            "18, 19",
            "18 19",
        ),
        *(
            "1,80",
            "18,00",
            "18,0000",
            "1,8,0",
            "18.1.8",
            "18.e2",
            "18,x",
            "018,000",
            "18_2",
            "18'5",
            "18²",
            "18½",
            "18 ½",
            "18π",
        ),
        *(
            "18\N{MINUS SIGN}2",
            "18\N{EN DASH}20",
            "18×2",
            "18 × 2",
            "18÷2",
            "18 ÷ 2",
            "18·2",
            "18√2",
            "18 √2",
            "18<20",
            "18 < 20",
        ),
        *(
            "18\\times 2",
            "18 \\times 2",
            "18\\frac12",
            "18 \\frac{1}{2}",
            "18 \\cdot2",
            "18\\%^2",
            "18)^2",
            "18)(2)",
            "18$^2$",
        ),
        *(
            "18<sup>2</sup>",
            "18%5",
            "--18",
            "+-18",
            "0x18",
            "18\N{ARABIC-INDIC DIGIT THREE}",
            "18\N{NARROW NO-BREAK SPACE}000",
        ),
    ],
)
def test_a_number_that_goes_on_is_none(number):
    for truth in ("18", "1", "180", "18000"):
        verdict = rules.gsm8k(f"#### {number}\n#### 18", truth)
        assert (verdict.score, verdict.parts["answered"]) == (0.0, 0.0)


@pytest.mark.parametrize(
    "minus", "-\N{MINUS SIGN}\N{EN DASH}\N{HYPHEN}\N{NON-BREAKING HYPHEN}\N{FULLWIDTH HYPHEN-MINUS}"
)
def test_a_minus_of_unicode_is_one(minus):
    for number in (f"{minus}1,800.50", f"{minus}$1,800.50", f"${minus}1,800.50"):
        for truth in ("-1800.5", f"{minus}1800.5"):
            assert rules.gsm8k(f"#### {number}", truth) == rules.gsm8k_flexible(f"so {number}.", truth)
            assert rules.gsm8k(f"#### {number}", truth)[::2] == (1.0, "-1800.5")
        assert rules.gsm8k(f"#### {number}", "1800.5").score == 0.0
    assert rules.gsm8k_flexible(f"10{minus}4", "4").score == 1.0


@pytest.mark.parametrize(
    ("number", "value"), [("1,800", "1800"), ("12,345,678.9", "12345678.9"), ("1,8", ""), ("1,80", ""), ("1,2,3", "")]
)
def test_commas_stand_between_groups_of_three(number, value):
    assert rules.gsm8k(f"#### {number}", "1").answer == rules.gsm8k_flexible(number, "1").answer == value


def test_all_reference_solutions_of_gsm8k_score_1_by_both_rules(shared):
    graded = 0
    for split in ("train", "test"):
        for line in (shared / f"data/gsm8k/{split}.jsonl").read_text().splitlines():
            answer = json.loads(line)["answer"]
            truth = answer.split("####")[1].strip()
            assert rules.gsm8k(answer, truth).score == 1.0
            assert rules.gsm8k_flexible(answer, truth).score == 1.0
            assert rules.gsm8k(answer, truth + "1").score == 0.0
            graded += 1
    assert graded == 8792


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("#### C", "C"),
        ("#### (c)", "C"),
        ("The answer is (B).", "B"),
        ("the answer is b", None),  # may be an article's neighbour: lower case counts in brackets only
        ("the answer is (b)", "B"),
        ("The answer is B: 42", "B"),
        ("Answer: B. 42", "B"),
        ("**Answer:** C", "C"),
        ("The correct choice is **(C) 42**", "C"),
        ("Option D", "D"),
        ("ANS:A", "A"),
        ("so the answer will be option E", "E"),
        ("Thus, C is the correct answer", "C"),
        (r"so \boxed{D}", "D"),
        (r"so \boxed{D) 5}", "D"),
        (r"so \boxed{D. 5 \text km}", "D"),
        (r"so \boxed{D + 5}", None),
        (r"so $\boxed{\textbf{(D)}}$", "D"),
        ("let me see\n(E)\n", "E"),
        ("**B.**", "B"),
        ("answer is A\nno, the answer is B", "B"),  # the last counts
        ("#### A\nThe answer is (C)", "C"),
        ("Final answer:\n\nB", "B"),
        ("The answer is Apple", None),
        ("The answer is E = mc^2", None),
        ("A) 4\nB) 5", None),  # the options themselves, said again
        ("it is 5", None),
        ("", None),
    ],
)
def test_the_option_that_is_stated_last(response, letter):
    for truth in "ABCDE":
        verdict = rules.choice(response, truth)
        assert verdict.score == (truth == letter) and verdict.parts["answered"] == (letter is not None)


def test_strict_choice_reads_only_what_follows_the_mark():
    assert rules.choice_strict("#### B\nthe answer is C", "B").score == 1.0
    assert rules.choice_strict("the answer is (B)", "B").score == 0.0
    assert rules.choice_strict("#### Because", "B").score == 0.0
    for hedged in ("#### B/C", "#### B'", "#### B = 2", "#### (B)^2"):
        assert rules.choice_strict(hedged, "B").score == rules.choice(hedged, "B").score == 0.0


def test_all_rows_of_aqua(shared):
    rows = [
        json.loads(line)
        for split in ("dev", "test")
        for line in (shared / f"data/aqua/{split}.json").read_text().splitlines()
    ]
    assert len(rows) == 508
    stated = agreed = 0.0
    for row in rows:
        right, wrong = row["correct"], "BCDEA"["ABCDE".index(row["correct"])]
        for form in ("\nThe answer is ({}).", "\n#### {}", "\n\\boxed{{{}}}", "\n{}"):
            assert rules.choice(row["rationale"] + form.format(right), right).score == 1.0
            assert rules.choice(row["rationale"] + form.format(wrong), right).score == 0.0
        verdict = rules.choice(row["rationale"], right)  # as people wrote it: most name their letter
        stated, agreed = stated + verdict.parts["answered"], agreed + verdict.score
    assert stated > 0.9 * len(rows) and agreed > 0.99 * stated


@pytest.mark.parametrize(
    ("answer", "truth", "score"),
    [
        ("0.5", "1/2", 1),
        (r"\frac12", "0.5", 1),
        (r"\frac{\frac{1}{2}}{3}", "1/6", 1),
        (r"\dfrac{3}{4}", r"$\frac{3}{4}$", 1),
        (r"2\sqrt2", r"\sqrt{8}", 1),
        (r"\{2,1\}", r"\{1,2\}", 1),  # sets have no order
        ("(2,1)", "(1,2)", 0),  # points have
        ("(1, 2)", "(1,2)", 1),
        ("[1,2]", "[1,2)", 0),
        ("(x+1)^2", "x^2+2x+1", 1),
        ("1,234", "1234", 1),
        (r"50\%", "0.5", 1),
        ("x=5", "5", 1),
        (r"\text{Evelyn}", r"\text{Evelyn}", 1),
        ("7", r"The sum is \boxed{7}.", 1),
        ("0.3333", r"\frac{1}{3}", 0),
        ("1 1/2", "11/2", 0),  # white space between digits has a meaning
        ("1  1/2", "11/2", 0),
        ("31/2", "3 1/2", 0),
        ("1 2", "12", 0),
        ("1 1/2", "3/2", 1),  # a mixed number
        ("3 1/2", "7/2", 1),
        ("-3 1/2", "-3.5", 1),
        (r"3\,1/2", r"3 \frac{1}{2}", 1),
        ("1 234/567", "1234/567", 0),
        ("1 000", "1000", 1),  # groups of three digits
        (r"12\,345", "12345", 1),
        (r"1\;234\ 567", "1234567", 1),
        ("12~345", "12345", 1),
        ("12345", r"12\,345", 1),
        ("42.", "42", 1),  # the end of a sentence
        ("42 ,", "42", 1),
        ("5", "5.", 1),
        (r"5\;", "5", 1),
        ("0.333...", "0.333", 0),
        (r"2 \pi r", r"2\pi r", 1),
        (r"\frac{", "3", 0),
        (r"\foo{\bar", "3", 0),
        ("}{", "3", 0),
        ("", "3", 0),
    ],
)
def test_answers_are_compared_as_mathematics(answer, truth, score):
    assert rules.math_verify(rf"So it is \boxed{{{answer}}}.", truth).score == score


@pytest.mark.parametrize(
    ("response", "content"),
    [
        (r"\boxed 42", "42"),
        (r"it is \boxed 42, so", "42"),
        (r"$\boxed 42$ or $5", "42"),
        (r"\[ \boxed x+1 \] and \]", "x+1"),
        (r"$\boxed42$", "42"),
        (r"$\boxed\frac12$", r"\frac12"),
        (r"$\boxed \$5$", r"\$5"),
        (r"it is \boxed \frac{\sqrt{2}}{2} or so", r"\frac{\sqrt{2}}{2}"),
        (r"\boxed{x = \boxed 42}", "42"),
        (r"\boxed{1} or $\boxed 2$", "2"),
        (r"\boxed{\boxed{42}}", "42"),
        (r"\boxed{x = \boxed{42}}", "42"),
        (r"\boxed{\text{so } \boxed {42} }", "42"),
        ("\\boxed\n{42}", "42"),
        (r"\boxedfoo", None),
        (r"\boxed", None),
        (r"$\boxed$", None),
    ],
)
def test_a_box_without_braces_and_a_box_in_a_box(response, content):
    assert rules.boxed(response) == content
    if content is not None:
        assert rules.math_verify(response, content).score == 1.0


def test_only_the_last_box_counts():
    assert rules.boxed(r"\boxed{1} or \boxed{\frac{1}{\sqrt{2}}} it is") == r"\frac{1}{\sqrt{2}}"
    assert rules.boxed(r"\boxed{\{1,2\}}") == r"\{1,2\}"
    assert rules.boxed(r"\boxed{1} or \boxed{2") is None and rules.boxed("1") is None
    assert rules.math_verify("it is 5", "5") == (0.0, {"exact": 0.0, "answered": 0.0}, "")
    with pytest.raises(ValueError, match="has no answer"):
        rules.math_verify(r"\boxed{1}", r"\boxed{}")


@pytest.mark.parametrize(
    ("rule", "truth", "responses", "answers"),
    [
        (rules.gsm8k, "1", ["#### 18", "#### 18.00", "####$18.", "#### 0018", "#### 1,800", "18"],
         ["18", "18", "18", "18", "1800", ""]),
        (rules.gsm8k_flexible, "1", ["-0.50", "-.5", "0", "-0.0", "1.2.3"], ["-0.5", "-0.5", "0", "0", ""]),
        (rules.gsm8k, "1", [f"#### {'9' * 40}.10"], [f"{'9' * 40}.1"]),  # no digit is rounded
        (rules.choice, "A", ["#### b", "the answer is (B)", "none"], ["B", "B", ""]),
        (rules.choice_strict, "A", ["#### e", "B"], ["E", ""]),
        (rules.exact, "x", [" a b\n", "a b", ""], ["a b", "a b", ""]),
        (rules.math_verify, "x", [r"\boxed{ x }", r"\boxed{x} or \boxed{x}", "x"], ["x", "x", ""]),
        (rules.math_verify, "5", [r"\boxed{11/2}", r"\boxed{1 1/2}", r"\boxed{5\,000.}", r"\boxed{5 000}"],
         ["11/2", r"1\frac{1}{2}", "5000", "5000"]),
    ],
)  # fmt: skip
def test_answers_that_are_equal_have_one_form(rule, truth, responses, answers):
    assert [rule(response, truth).answer for response in responses] == answers


@pytest.mark.parametrize("rule", [rules.gsm8k, rules.gsm8k_flexible, rules.choice, rules.choice_strict])
def test_a_truth_that_is_none_is_no_zero(rule):
    with pytest.raises(ValueError, match="ground_truth='eighteen'"):
        rule("#### 18", "eighteen")


@pytest.mark.parametrize(
    "unit",
    [
        "answer ",
        "answer" + " " * 50,
        "#### ",
        "#### 1 ",
        "1,",
        "1,800,",
        "\\boxed ",
        "\\boxed  ",
        "x{",
        "{}",
        "x{x",
        "\\boxed{\\text  ",
        "1.",
        "*",
        " ",
        "\n ",
        "((",
    ],
)
def test_no_text_takes_the_quick_rules_long(unit):
    text, begun = unit * (30_000 // len(unit)), time.thread_time()
    for rule, truth in (
        (rules.gsm8k, "1"),
        (rules.gsm8k_flexible, "1"),
        (rules.choice, "A"),
        (rules.choice_strict, "A"),
    ):
        for response in (text, f"#### 1{text}", f"#### {text}"):
            rule(response, truth)
    rules.boxed(rf"\boxed{text}")
    assert time.thread_time() - begun < 2


@pytest.mark.parametrize("rule", RULES)
def test_every_response_scores_as_in_verl(rule):
    assert len(GOLDEN[rule]) >= 60 and len({score for *_, score in GOLDEN[rule]}) > 1
    for response, truth, score in GOLDEN[rule]:
        assert getattr(rules, rule)(response, truth).score == score, (response, truth)


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
    assert rules.gsm8k_strict("#### 1,234", "5") == (0.0, {"exact": 0.0, "answered": 1.0}, "1234")
    assert rules.math_reward(r"\fbox{5}", "5") == (0.0, {"exact": 0.0, "answered": 0.0}, "")
    assert rules.math_dapo("none", "5") == (-1.0, {"exact": 0.0, "answered": 0.0}, "")
    assert rules.math_dapo(r"\boxed{ 5}", "5") == (-1.0, {"exact": 0.0, "answered": 1.0}, " 5")
    assert rules.search_r1("<answer> Rome </answer>", "Paris").answer == "Rome"


def test_a_search_truth_is_text_or_json_with_a_target():
    for truth in ("Paris", '{"target": "Paris"}', '{"target": ["Rome", "Paris"]}'):
        assert rules.search_r1("<answer>paris</answer>", truth).score == 1.0
    assert rules.search_r1("<answer>5</answer>", "5").score == 1.0
    with pytest.raises(ValueError, match="must be text, or JSON"):
        rules.search_r1("<answer>paris</answer>", '{"answer": "Paris"}')


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("unit", ["<answer>", r"\boxed{", r"\boxed ", "{", "$", "#### 1", "Answer: ", "a ", r"\frac"])
def test_long_responses_take_no_more_than_a_moment(rule, unit):
    start = time.thread_time()
    getattr(rules, rule)(unit * 20_000, "5")
    assert time.thread_time() - start < 2.0
