"""Tasks of the package `reasoning-gym` as prompts: `python -m examples.reasoning_tasks --out=runs/reasoning_gym/data`

Needs `pip install reasoning-gym`. Its generators make questions with answers, and each has its own scorer. A task is
NAME or NAME:FIELDS, with fields of its config as JSON. The tasks' names are the data sources. No question of test.jsonl
is in train.jsonl.

`compute_score` is the reward, by `reward.function`: 1 for an answer that the task's scorer gives its full score, else
0. Part of a score would teach what scorers give for texts that contain the answer: `10` for a count of 1. The answer is
the text in the last <answer> tags of the response; without tags the last number where the true answer is a number, else
the whole response.
"""

import json
import pathlib
import re
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from jppo.data.rows import write_sets
from jppo.errors import UserError
from jppo.settings import Parser, exit_on_user_error, natural

TASKS = ('chain_sum:{"max_terms": 2, "max_digits": 2}', 'letter_counting:{"min_words": 3, "max_words": 5}')
_NUMBER = r"-?\d+(?:\.\d+)?"


def package() -> ModuleType:
    """Imports reasoning_gym, which is optional."""
    try:
        import reasoning_gym.utils
    except ImportError as error:
        raise UserError(f"reasoning-gym cannot be imported ({error}); pip install reasoning-gym") from error
    return reasoning_gym


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Returns 1.0 for an answer that is right by the task's scorer, else 0.0; `pred` is the answer."""
    gym = package()
    answer = gym.utils.extract_answer(solution_str)
    if answer is None:
        numbers = re.findall(_NUMBER, solution_str) if re.fullmatch(_NUMBER, ground_truth) else []
        answer = numbers[-1] if numbers else solution_str.strip()
    entry = json.loads((extra_info or {})["entry"])
    return {"score": float(gym.get_score_answer_fn(data_source)(answer=answer, entry=entry) >= 1), "pred": answer}


def make(tasks: Sequence[str], *, seed: int, train: int, test: int) -> dict[str, list[dict[str, Any]]]:
    """Returns the rows of train and test, as a function of the arguments only; `train` and `test` count per task."""
    sets: dict[str, list[dict[str, Any]]] = {"train": [], "test": []}
    for task in tasks:
        name, _, fields = task.partition(":")
        try:
            given = json.loads(fields or "{}") | {"seed": seed, "size": test + train}
            rows = [_row(name, entry) for entry in package().create_dataset(name, **given)]
        except (ValueError, TypeError, AssertionError) as error:
            raise UserError(f"{task}: {error}") from error
        held_out = {row["prompt"][0]["content"] for row in rows[:test]}
        sets["test"] += rows[:test]
        sets["train"] += [row for row in rows[test:] if row["prompt"][0]["content"] not in held_out]
    return sets


def _row(name: str, entry: dict[str, Any]) -> dict[str, Any]:
    prompt = [{"role": "user", "content": f"{entry['question'].strip()} Reply with the answer only."}]
    return {"data_source": name, "prompt": prompt, "ground_truth": entry["answer"], "entry": json.dumps(entry)}


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = Parser("examples.reasoning_tasks", __doc__)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="directory to write to")
    parser.add_argument("--seed", type=natural, default=1, help="random seed")
    parser.add_argument("--train", type=natural, default=4000, help="questions to train on, per task")
    parser.add_argument("--test", type=natural, default=200, help="questions to hold out, per task")
    parser.add_argument("tasks", nargs="*", default=TASKS, metavar="TASK", help='NAME or NAME:{"FIELD": VALUE}')
    args = parser.parse_args(argv)
    write_sets(args.out, make(args.tasks, seed=args.seed, train=args.train, test=args.test))


if __name__ == "__main__":
    main()
