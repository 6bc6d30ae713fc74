r"""Writes tests/rewards/golden/graders.json: scores that verl's own reward functions give to hostile responses.

    pip download verl==0.9.1 --no-deps -d DIR && unzip -d DIR DIR/verl-0.9.1-*.whl
    python scripts/make_grader_golden.py --verl DIR

Only the modules of verl/utils/reward_score are loaded: verl's dependencies need not be installed. For each rule every
response is graded with every truth.
"""

import argparse
import contextlib
import importlib.util
import io
import itertools
import json
import pathlib
import types
from typing import Any

OUT = pathlib.Path(__file__).resolve().parents[1] / "tests/rewards/golden/graders.json"
LONG = "Let us think. " * 60

GSM8K = (
    *("", "18", "#### 18", "so\n#### 18\n", "#### 18.", "#### $18", "####18", "#### -18", "#### 18.0", "#### 1,8"),
    *("#### 5 #### 18", "#### 18 #### 5", "#### 18 eggs", "#### 18, or so", "####  18", "####\t18", "#### 18 ####"),
    *("#### eighteen", "#### ", "#### .", "#### ,", "### 18", "##### 18", "#### +18", "#### --18", "#### 1.8.1"),
    *(LONG + "#### 18", "#### 18" + LONG, "#### 18" + "x" * 293, "#### 18" + "x" * 294, "#### ١٨", "#### 18²"),
    *("#### 18%", "#### 18\n#### 5", "#### 1,234", "#### $1,234.50", "\\boxed{18}", "#### \\boxed{18}", "#### 018"),
)
GSM8K_TRUTHS = ("18", "5", "1234")

BOXES = (
    *("", "5", r"\boxed{5}", r"so \boxed{5}.", r"\boxed{ 5 }", r"\boxed 5", r"\boxed 5$ and more", r"\boxed5"),
    *(
        r"\fbox{5}",
        r"\boxed{4} or \boxed{5}",
        r"\boxed{5} or \boxed{4}",
        r"\boxed{5} \boxed 4",
        r"\boxed{5",
        r"\boxed}",
    ),
    *(r"\boxed{{5}}", r"\boxed {5}", r"\boxed{\boxed{5}}", r"\boxed{5} \boxed", r"\boxed{x=5}", r"\boxed{abc=5}"),
    *(r"\boxed{5\text{ cm}}", r"\boxed{5\text{cm}}", r"\boxed{5^\circ}", r"\boxed{5^{\circ}}", r"\boxed{5\%}"),
    *(r"\boxed{5%}", r"\boxed{\$5}", r"\boxed{$5$}", r"\boxed{5.0}", r"\boxed{5,000}", r"\boxed{5000}", r"\boxed{05}"),
    *(r"\boxed{\frac12}", r"\boxed{\frac{1}{2}}", r"\boxed{\dfrac{1}{2}}", r"\boxed{\tfrac1{2}}", r"\boxed{1/2}"),
    *(
        r"\boxed{0.5}",
        r"\boxed{.5}",
        r"\boxed{0.50}",
        r"\boxed{2/4}",
        r"\boxed{\frac}",
        r"\boxed{\frac1}",
        r"\boxed{-1/2}",
    ),
    *(
        r"\boxed{\sqrt3}",
        r"\boxed{\sqrt{3}}",
        r"\boxed{\sqrt}",
        r"\boxed{2\sqrt3}",
        r"\boxed{(1,2]}",
        r"\boxed{(1, 2]}",
    ),
    *(r"\boxed{\left(1,2\right]}", r"\boxed{[1,2]}", r"\boxed{B) 5}", r"\boxed{\text{B}}", r"\boxed{é}", r"\boxed{５}"),
    *(r"\boxed{\begin{pmatrix}1&2\\3&4\end{pmatrix}}", r"\boxed{\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}}"),
    *(r"\boxed{\text{ a }\text{ b }}", r"\boxed{5} " + LONG, LONG + r"\boxed{5}", r"\boxed{\pi}", r"\boxed{3.14}"),
    *("\\boxed{5\n}", r"\boxed{\!5}", r"\boxed{a\ b}", r"\boxed{" + "5" * 400 + "}", r"\boxed{}", r"\boxed{ }"),
)
MATH_TRUTHS = ("5", r"\frac{1}{2}", r"\sqrt{3}", "(1,2]", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"5\text{ cm}", "")

DAPO = (
    *(
        "Answer: 5",
        "answer:5",
        "ANSWER :  5",
        "Answer:\n\n5",
        "Answer:",
        "Answer: 5\nAnswer: 4",
        "Answer: 4\nAnswer: 5",
    ),
    *(
        "The answer is 5",
        "Answer: $5$",
        "Answer: $5$.",
        "Answer: 5.",
        "Answer: x = 5",
        "Answer: 5 dollars",
        "Answer: 05",
    ),
    *(
        "Answer: 5 cm",
        "Answer: \\boxed{5}",
        "Answer: \\text{5}",
        "Answer: \\textbf{5}",
        "Answer: 5^\\circ",
        "Answer: 5,000",
    ),
    *("Answer: 1,234", "Answer: 1234", "Answer: 1{,}234", "Answer: \\frac12", "Answer: \\frac{1}{2}", "Answer: 1/2"),
    *(
        "Answer: \\sqrt3",
        "Answer: an 5",
        "Answer: a 5",
        "Answer: [INVALID]",
        "Answer: [INVALID] \\boxed{5}",
        "Answer: ５",
    ),
    *("Answer: 4 \\boxed{5}", "\\boxed{5} Answer: 4", "Answer: (1,2]", "Answer: (1, 2]", "Answer: 5%", "Answer: 5\\%"),
    *(
        "Answer: 5" + LONG,
        LONG + "Answer: 5",
        "Answer: 5\n" + "x" * 290,
        "Answer: 5\n" + "x" * 291,
        "Answer: $\\frac12$",
    ),
    *(
        r"\boxed{5}" + "x" * 91,
        r"\boxed{5}" + "x" * 92,
        "**Answer:** 5",
        "Answer: **5**",
        "Answer: 5 and 6",
        "Answer: $5",
    ),
)
DAPO_TRUTHS = ("5", r"\frac{1}{2}", "1234", "(1,2]", "[INVALID]", "5.0")

SEARCH = (
    *(
        "",
        "Paris",
        "<answer>Paris</answer>",
        "<answer> paris. </answer>",
        "<answer>The Paris</answer>",
        "<answer>Paris",
    ),
    *("<answer>Rome</answer><answer>Paris</answer>", "<answer>Paris</answer><answer>Rome</answer>", "Paris</answer>"),
    *("<answer>Paris, France</answer>", "<answer></answer>", "<answer>PARIS!</answer>", "<answer>\nParis\n</answer>"),
    *("<answer>a Paris an</answer>", "<answer>Pa ris</answer>", "<answer>P-a-r-i-s</answer>", "<Answer>Paris</Answer>"),
    *("<answer><answer>Paris</answer>", "<answer>Paris</answer>" * 10, "<answer>Paris</answer>" * 11),
    *("<answer>" * 12 + "Paris</answer>", "<answer>Paris</answer>" + "</answer>" * 11, "<answer>São Paulo</answer>"),
    *("<answer>Sao Paulo</answer>", "<answer>SÃO PAULO</answer>", LONG + "<answer>Paris</answer>" + LONG),
    *("<answer>1,234</answer>", "<answer>1234</answer>", "<answer>the</answer>", "<think>Paris</think>"),
)
SEARCH_TRUTHS = (["Paris"], ["Rome", "the city of light", "PARIS"], ["São Paulo"], ["1234"], [""])


def load(verl: pathlib.Path, name: str) -> types.ModuleType:
    """Loads a module of verl without its package."""
    spec = importlib.util.spec_from_file_location(name, verl / f"verl/utils/reward_score/{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def score(function: Any, response: str, truth: Any) -> float:
    """Returns the score that verl's `default_compute_score` takes from the function's result."""
    with contextlib.redirect_stdout(io.StringIO()):
        grade = function(response, truth)
    return float(grade["score"] if isinstance(grade, dict) else grade)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verl", type=pathlib.Path, required=True, help="directory with the unpacked package")
    verl = parser.parse_args().verl
    cases: dict[str, list[list[Any]]] = {}
    for rule, module, responses, truths in (
        ("gsm8k_strict", "gsm8k", GSM8K, GSM8K_TRUTHS),
        ("math_reward", "math_reward", BOXES, MATH_TRUTHS),
        ("math_dapo", "math_dapo", DAPO + BOXES, DAPO_TRUTHS),
    ):
        function = load(verl, module).compute_score
        cases[rule] = [[r, t, score(function, r, t)] for r, t in itertools.product(responses, truths)]
    function = load(verl, "search_r1_like_qa_em").compute_score
    pairs = [(r, {"target": t}) for r, t in itertools.product(SEARCH, SEARCH_TRUTHS)]
    cases["search_r1"] = [[response, json.dumps(truth), score(function, response, truth)] for response, truth in pairs]
    OUT.parent.mkdir(exist_ok=True)
    lines = [f'"{rule}": [\n' + ",\n".join(map(json.dumps, some)) + "\n]" for rule, some in cases.items()]
    OUT.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    for rule, some in cases.items():
        print(f"{rule}: {len(some)} cases, {sum(case[2] > 0 for case in some)} of them right")


if __name__ == "__main__":
    main()
