"""SAO, PPO and GRPO at equal numbers of samples, whose weights are 0, 2 or 4 updates old, on two small tasks.

    python benchmarks/sao.py                                     # both tasks, 5 seeds
    python benchmarks/sao.py --tasks=chain --staleness=0,4 --seeds=1
    python benchmarks/sao.py --tasks=bisection --staleness=4 --seeds=1 --engine=vllm
    python benchmarks/sao.py --tables                            # prints the tables, runs nothing

The tasks `chain` and `bisection`, their starting models and the common settings are learning.py's: 64 responses a step,
in process or by a vLLM server, requested `staleness` steps ahead. SAO is configs/sao.py's algorithm with PPO's learning
rates; PPO and GRPO correct the age of a sample by a weight, as configs/async.py does. Every finished run is a line of
OUT/<date>-<machine>-sao.jsonl; the same command later adds the missing runs.

Scores are as in learning.py. "age" is the mean age of samples in updates. Intervals are 95% over seeds.
"""

import argparse
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from intervals import difference, interval
from learning import Row, figures, prepare, run, settings_of
from machine import add_options, begin, lines_of, machine, names_of, run_and_print

from jppo import settings
from jppo.configs import learning
from jppo.errors import UserError
from jppo.settings import value_of

TASKS = ("chain", "bisection")
AGE = "rollout/staleness_mean"
SERVED_HEADS = 2  # of 32, the smallest that vLLM serves on a CPU
_CORRECTED = {"algorithm.old_logprob": "correction", "algorithm.rollout_is": "token"}
_TAKEN = ("algorithm.lam_alpha", "algorithm.old_logprob", "algorithm.rollout_is", "algorithm.rollout_is_threshold")
_TAKEN += ("actor.loss_mode", "critic.freeze", "critic.lam", "critic.ppo_epochs")
RECIPE = settings.recipe("sao")
# By name: the algorithm of learning.py, and the settings that differ.
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "SAO": ("PPO", {name: value_of(RECIPE, name) for name in _TAKEN}),
    "PPO": ("PPO", _CORRECTED),
    "GRPO": ("GRPO", _CORRECTED),
}


def changes_of(arm: str, staleness: int, args: argparse.Namespace) -> dict[str, Any]:
    """Returns the settings that a run changes in those of learning.py."""
    changes = dict(ARMS[arm][1])
    if staleness:
        changes |= {"rollout.mode": "async", "rollout.max_staleness": staleness}
    if args.engine != learning.COMMON["rollout.name"]:
        changes |= {"rollout.name": args.engine}
    return changes if args.steps is None else changes | {"trainer.total_training_steps": args.steps}


def identity(row: Row) -> str:
    """The key of a run; runs with other settings, data or starting models are other runs."""
    return json.dumps([row[name] for name in ("task", "arm", "seed", "settings", "start")], sort_keys=True)


def run_missing(args: argparse.Namespace, path: pathlib.Path) -> None:
    """Runs what the file lacks, seed by seed, and adds each run to it."""
    done = {identity(row) for row in lines_of(path)}
    work, heads = (args.work, 4) if args.engine == "inprocess" else (args.work / "vllm", SERVED_HEADS)
    for task in args.tasks:
        start = prepare(task, work, None, heads)
        for seed in range(args.first_seed, args.first_seed + args.seeds):
            for staleness in args.staleness:
                for arm, (algorithm, _) in ARMS.items():
                    changes = changes_of(arm, staleness, args)
                    row = {"task": task, "arm": arm, "staleness": staleness, "seed": seed, "start": start}
                    row |= {"settings": settings_of(task, algorithm, changes)}
                    if identity(row) in done:
                        continue
                    row |= begin() | {"machine": machine()} | run(task, algorithm, seed, work, changes)
                    with path.open("a") as file:
                        file.write(json.dumps(row) + "\n")
                    print(
                        f"{task} {arm} {staleness} seed {seed}: test {row['test']:.3f}, {row['seconds']} s", flush=True
                    )


def select(rows: Sequence[Row], task: str, staleness: int, args: argparse.Namespace) -> dict[str, list[Row]]:
    """The runs of a task with today's settings and its last starting model, by arm; empty if one has too few."""
    start = next((row["start"] for row in reversed(rows) if row["task"] == task), None)
    selected = {}
    for arm, (algorithm, _) in ARMS.items():
        mine = (task, arm, settings_of(task, algorithm, changes_of(arm, staleness, args)), start)
        selected[arm] = [r for r in rows if (r["task"], r["arm"], r["settings"], r["start"]) == mine]
    return selected if all(len(runs) >= args.seeds for runs in selected.values()) else {}


def tables(rows: Sequence[Row], args: argparse.Namespace) -> str:
    """The complete tasks as markdown."""
    lines = [
        "| task | staleness | algorithm | seeds | age | final | mean | test |",
        "|---|---:|---|---:|---:|---:|---:|---:|",
    ]
    versus = ["| task | staleness | SAO minus | final | mean |", "|---|---:|---|---:|---:|"]
    left = []
    for task in args.tasks:
        for staleness in args.staleness:
            if not (selected := select(rows, task, staleness, args)):
                left.append(f"{task} at {staleness}")
                continue
            _, values = figures(selected)
            for arm, v in values.items():
                age = np.mean([np.mean(row["curves"].get(AGE, [0.0])) for row in selected[arm]])
                shown = " | ".join(str(interval(v[kind])) for kind in ("final", "mean", "test"))
                lines.append(f"| {task} | {staleness} | {arm} | {len(v['final'])} | {age:.2f} | {shown} |")
                if arm != "SAO":
                    against = (difference(values["SAO"][kind], v[kind]) for kind in ("final", "mean"))
                    versus.append(f"| {task} | {staleness} | {arm} | {' | '.join(map(str, against))} |")
    rest = f"\nWithout {args.seeds} seeds of every algorithm: {', '.join(left)}." if left else ""
    return "\n".join([*lines, "", *versus]) + rest


@settings.exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--staleness", default="0,2,4", help="ages of the samples' weights, in steps")
    parser.add_argument("--engine", choices=("inprocess", "vllm"), default="inprocess", help="what samples")
    parser.add_argument("--steps", type=int, help="of a run, in place of the task's")
    add_options(parser, "runs/learning")
    args = parser.parse_args(argv)
    args.tasks = names_of(args.tasks, TASKS, "--tasks")
    if not all(text.isdecimal() for text in args.staleness.split(",")):
        raise UserError(f"--staleness={args.staleness} must be whole numbers separated by commas, as in 0,2,4")
    args.staleness = [int(text) for text in args.staleness.split(",")]
    run_and_print(args, "sao", run_missing, lambda rows: tables(rows, args))


if __name__ == "__main__":
    main()
