"""Steps of PPO to the same score with a new critic and with a fitted one, on tasks of learning.py.

    python benchmarks/critic_fit.py --tasks=quickstart,chain --seeds=5

A seed trains three times from the same model, with 64 responses a step:

new      a new critic and two steps of warm-up, as in learning.py
fitted   the starting policy samples --drawn steps, jppo.critic_fit fits a critic on them, and PPO begins with it
warm-up  a new critic and --drawn steps of warm-up: as many samples of the starting policy as for "fitted"

The score to reach is --share of the way from the score of the first step to the mean of the last fifth of the runs with
a new critic, over all seeds. A run reaches it with the first three steps whose mean does. Steps count from the first
update of the policy; a run that does not reach the score counts as one step more than it has. Finished runs are lines
of OUT/<date>-<machine>-critic-fit.jsonl; the same command later adds the missing ones. Intervals are 95%, by Student's
t over seeds; those of differences are Welch's.
"""

import argparse
import contextlib
import json
import pathlib
import shutil
from collections.abc import Sequence
from typing import Any

import numpy as np
from intervals import difference, interval
from learning import EXPLAINED, SCORE, Row, identity, make_config, prepare, run, settings_of
from machine import add_options, begin, lines_of, machine, names_of, run_and_print

from jppo import critic_fit, settings, train
from jppo.configs.learning import COMMON, TASKS

STEPS = COMMON["trainer.total_training_steps"]
WARMUP = {"new": 2, "fitted": 0}  # steps; of "warm-up" --drawn
ARMS = ("new", "fitted", "warm-up")
MEAN = 3  # steps whose mean reaches a score


def changes_of(arm: str, task: str, work: pathlib.Path, drawn: int) -> dict[str, Any]:
    """The settings of a run that differ from PPO's in learning.py; the policy learns in equally many steps."""
    warmup = WARMUP.get(arm, drawn)
    changes = {"trainer.critic_warmup": warmup, "trainer.total_training_steps": STEPS - WARMUP["new"] + warmup}
    fitted = {"critic.path": str(work / "critic" / task / "hf"), "critic.warmup_epochs": None}
    return changes | (fitted if arm == "fitted" else {})


def fit(task: str, seed: int, work: pathlib.Path, drawn: int) -> None:
    """Samples `drawn` steps with the starting policy, and fits a critic on them."""
    out, run_dir = work / "critic" / task, work / "drawn" / task
    for folder in (out, run_dir):
        shutil.rmtree(folder, ignore_errors=True)
    # The critic of this run is not used: it learns as little as it can.
    changes = {"trainer.critic_warmup": drawn, "trainer.total_training_steps": drawn, "critic.warmup_epochs": 1}
    c = make_config(task, "PPO", seed, work, changes | {"trainer.token_samples": 64})
    c.trainer.run_dir = str(run_dir)
    with (work / task / "log").open("a") as log, contextlib.redirect_stdout(log):
        train.train(c)
        critic_fit.main([str(run_dir), f"--out={out}"])


def run_missing(args: argparse.Namespace, path: pathlib.Path) -> None:
    """Runs what the file lacks, seed by seed, and adds each run to it."""
    done = {identity(row) for row in lines_of(path)}
    for task in args.tasks:
        start = prepare(task, args.work, args.stories_model)
        for seed in range(args.first_seed, args.first_seed + args.seeds):
            for arm in args.arms:
                changes = changes_of(arm, task, args.work, args.drawn)
                chosen = settings_of(task, "PPO", changes | ({"critic.path": args.drawn} if arm == "fitted" else {}))
                row = {"task": task, "algorithm": arm, "seed": seed, "settings": chosen, "start": start}
                if identity(row) in done:
                    continue
                if arm == "fitted":
                    fit(task, seed, args.work, args.drawn)
                row |= begin() | {"machine": machine()} | run(task, "PPO", seed, args.work, changes)
                with path.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(f"{task} {arm} seed {seed}: test {row['test']:.3f}, {row['seconds']} s", flush=True)


def learning_curve(row: Row, name: str = SCORE) -> np.ndarray:
    """The values of the steps in which the policy learns."""
    return np.array(row["curves"][name][row["settings"]["trainer.critic_warmup"] :])


def steps_to(scores: np.ndarray, target: float) -> int:
    """The number of steps after which the mean of `MEAN` steps reaches a score; one more than all if it does not."""
    means = np.convolve(scores, np.ones(MEAN) / MEAN, mode="valid")
    return int(np.argmax(means >= target)) + MEAN if (means >= target).any() else len(scores) + 1


def table(rows: Sequence[Row], tasks: Sequence[str], share: float) -> str:
    """The results as markdown, of the last starting model of each task."""
    lines = ["| task (score) | critic | seeds | steps | minus new | explained variance, first step | test |"]
    lines.append("|---|---|---:|---:|---:|---:|---:|")
    for task in tasks:
        start = next((row["start"] for row in reversed(rows) if row["task"] == task), None)
        runs = {arm: [r for r in rows if (r["task"], r["start"], r["algorithm"]) == (task, start, arm)] for arm in ARMS}
        if not runs["new"]:
            continue
        begin, end = (
            float(np.mean([learning_curve(row)[part].mean() for row in runs["new"]]))
            for part in (slice(0, 1), slice(-STEPS // 5, None))
        )
        target = begin + share * (end - begin)
        steps = {arm: [steps_to(learning_curve(row), target) for row in of_arm] for arm, of_arm in runs.items()}
        for arm in filter(runs.get, ARMS):
            gap = "" if arm == "new" else str(difference(steps[arm], steps["new"]))
            shown = [interval([learning_curve(row, EXPLAINED)[0] for row in runs[arm]])]
            shown.append(interval([row["test"] for row in runs[arm]]))
            head = f"{task} ({target:.3f})" if arm == "new" else ""
            cells = (head, arm, len(runs[arm]), interval(steps[arm]), gap, *shown)
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


@settings.exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default="quickstart,chain")
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--drawn", type=int, default=10, help="steps of samples to fit on")
    parser.add_argument("--share", type=float, default=0.9, help="of the way to the final score")
    parser.add_argument("--stories_model", type=pathlib.Path, help="directory of a TinyStories Llama, for rlhf")
    add_options(parser, "runs/learning")
    args = parser.parse_args(argv)
    args.tasks = names_of(args.tasks, TASKS, "--tasks")
    args.arms = names_of(args.arms, ARMS, "--arms")
    run_and_print(args, "critic-fit", run_missing, lambda rows: table(rows, args.tasks, args.share))


if __name__ == "__main__":
    main()
