r"""Recomputes tests/rewards/golden/graders.json: scores that verl's own reward functions give to hostile responses.

    pip download verl==0.9.1 --no-deps -d DIR && unzip -d DIR DIR/verl-0.9.1-*.whl
    python scripts/make_grader_golden.py --verl DIR

Responses and truths are those of the file, [response, truth, score] by rule; a new case gets any score there first.
Only the modules of verl/utils/reward_score are loaded: verl's dependencies need not be installed.
"""

import argparse
import contextlib
import importlib.util
import io
import json
import pathlib
import types
from typing import Any

OUT = pathlib.Path(__file__).resolve().parents[1] / "tests/rewards/golden/graders.json"
MODULES = {  # of verl, by jppo's rule
    "gsm8k_strict": "gsm8k",
    "math_reward": "math_reward",
    "math_dapo": "math_dapo",
    "search_r1": "search_r1_like_qa_em",
}


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
    cases = json.loads(OUT.read_text())
    for rule, some in cases.items():
        function = load(verl, MODULES[rule]).compute_score
        read = json.loads if rule == "search_r1" else str
        cases[rule] = [[response, truth, score(function, response, read(truth))] for response, truth, _ in some]
    lines = [f'"{rule}": [\n' + ",\n".join(map(json.dumps, some)) + "\n]" for rule, some in cases.items()]
    OUT.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    for rule, some in cases.items():
        print(f"{rule}: {len(some)} cases, {sum(case[2] > 0 for case in some)} of them right")


if __name__ == "__main__":
    main()
