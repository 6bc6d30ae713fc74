"""PPO against GRPO, RLOO and REINFORCE++ at equal numbers of sampled tokens, on four small tasks.

    python benchmarks/learning.py --stories_model=MODEL                      # all tasks, 5 seeds
    python benchmarks/learning.py --tasks=chain,bisection --seeds=10

configs/learning.py describes the tasks. Each run samples 64 responses a step in process, from the same starting model.
Every finished run is a line of OUT/<date>-<machine>-learning.jsonl; the same command later adds the missing runs.
--tables prints the tables of that file without running anything, --plot also draws the curves of one task.

A score is the mean over the responses of a step, at temperature 1. A task's budget is the number of tokens of the run
that sampled fewest. "final" is the mean score over the last fifth of the budget, "mean" over all of it. Intervals are
95%, by Student's t over seeds; those of differences are Welch's.
"""

import argparse
import contextlib
import json
import pathlib
import shutil
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from intervals import difference, interval
from machine import add_options, begin, lines_of, machine, names_of, run_and_print
from ml_collections import ConfigDict

from jppo import settings, train
from jppo.configs import learning
from jppo.configs.learning import TASKS
from jppo.errors import UserError
from jppo.plugins.prove import tasks
from jppo.plugins.report.curve import write_curve
from jppo.runlog.logger import read_metrics

SCORE, EXPLAINED = "critic/score/mean", "critic/vf_explained_var"
LOGGED = (SCORE, EXPLAINED, "reward/rule_score/mean", "actor/reward_kl_penalty_seq", "actor/entropy")
LOGGED += ("rollout/staleness_mean",)  # of asynchronous runs, by sao.py
STEP = 10  # at which the explained variance is compared

ALGORITHMS: dict[str, dict[str, Any]] = {
    "PPO": {"algorithm.adv_estimator": "gae", **learning.CRITIC},
    "GRPO": {"algorithm.adv_estimator": "grpo", **learning.GROUPS},
    "RLOO": {"algorithm.adv_estimator": "rloo", **learning.GROUPS},
    "REINFORCE++": {"algorithm.adv_estimator": "reinforce_plus_plus"},
}

Row = dict[str, Any]  # a finished run


def mean_score(tokens: Sequence[float], scores: Sequence[float], begin: float, end: float) -> float:
    """The mean of the steps' scores over the sampled tokens from `begin` to `end`; `tokens` are those of each step."""
    ends = np.cumsum(tokens)
    covered = np.clip(np.minimum(ends, end) - np.maximum(ends - tokens, begin), 0.0, None)
    return float(covered @ np.asarray(scores) / covered.sum())


def settings_of(task: str, algorithm: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """All settings of a run that differ from the defaults, but for paths and the seed."""
    return {**learning.COMMON, **TASKS[task], **ALGORITHMS[algorithm], **changes}


def make_config(task: str, algorithm: str, seed: int, work: pathlib.Path, changes: Mapping[str, Any]) -> ConfigDict:
    """The config of a run, in the folder `work`."""
    paths = learning.CRITIC_FILES.get(task, {}) if algorithm == "PPO" else {}
    c = learning.get_config(str(work / task))
    c.update_from_flattened_dict(settings_of(task, algorithm, changes))
    c.update_from_flattened_dict({name: str(work / task / path) for name, path in paths.items()})
    c.trainer.run_dir, c.trainer.seed = str(work / task / "run"), seed
    c.trainer.compile_cache = str(work / "programs")
    settings.check(c)
    return c


def run(task: str, algorithm: str, seed: int, work: pathlib.Path, changes: Mapping[str, Any]) -> Row:
    """Trains once and returns the line of the result."""
    c = make_config(task, algorithm, seed, work, changes)
    folder = pathlib.Path(c.trainer.run_dir)
    shutil.rmtree(folder, ignore_errors=True)
    with (work / task / "log").open("a") as log, contextlib.redirect_stdout(log):
        train.train(c)
    lines = read_metrics(folder)
    steps = [line for line in lines if SCORE in line]
    responses = c.data.train_batch_size * c.rollout.n
    shutil.rmtree(folder)
    jax.clear_caches()
    return {
        "tokens": [round(line["response_length/mean"] * responses) for line in steps],
        "test": next(line["val/score"] for line in reversed(lines) if "val/score" in line),
        "seconds": round(sum(line["timing_s/step"] for line in steps), 1),
        "curves": {  # None: a step without the number, as without an explained variance of equal returns
            name: [round(line[name], 5) if name in line else None for line in steps]
            for name in LOGGED
            if any(name in line for line in steps)
        },
    }


def identity(row: Row) -> str:
    """The key of a run; runs with other settings, data or starting models are other runs."""
    return json.dumps([row[name] for name in ("task", "algorithm", "seed", "settings", "start")], sort_keys=True)


def checksum(folder: pathlib.Path) -> int:
    """A checksum of a task's prompts and of its models' weights."""
    crc = 0
    for path in (folder / "data/train.jsonl", folder / "data/test.jsonl", *sorted(folder.glob("*/hf/*.safetensors"))):
        crc = zlib.crc32(path.read_bytes(), crc)
    return crc


def prepare(task: str, work: pathlib.Path, stories_model: pathlib.Path | None, heads: int = 4) -> int:
    """Makes data and starting model of a task, if they are not there; returns their checksum."""
    folder = work / task
    if not tasks.is_ready(task, folder, stories_model):
        tasks.prepare(task, folder, stories_model, heads=heads)
    return checksum(folder)


def run_missing(args: argparse.Namespace, path: pathlib.Path) -> None:
    """Runs what the file lacks, seed by seed, and adds each run to it."""
    changes = {CHANGES[option]: vars(args)[option] for option in CHANGES if vars(args)[option] is not None}
    done = {identity(row) for row in lines_of(path)}
    for task in args.tasks:
        start = prepare(task, args.work, args.stories_model)
        for seed in range(args.first_seed, args.first_seed + args.seeds):
            for algorithm in args.algorithms:
                row = {"task": task, "algorithm": algorithm, "seed": seed}
                row |= {"settings": settings_of(task, algorithm, changes), "start": start}
                if identity(row) in done:
                    continue
                row |= begin() | {"machine": machine()} | run(task, algorithm, seed, args.work, changes)
                with path.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(f"{task} {algorithm} seed {seed}: test {row['test']:.3f}, {row['seconds']} s", flush=True)


def select(rows: Sequence[Row], task: str, seeds: int) -> dict[str, list[Row]]:
    """The runs of a task with today's settings and its last starting model, by algorithm.

    Empty unless each algorithm has `seeds` of them.
    """
    start = next((row["start"] for row in reversed(rows) if row["task"] == task), None)
    selected: dict[str, list[Row]] = {}
    for name in ALGORITHMS:
        mine = (task, name, settings_of(task, name, {}), start)
        selected[name] = [r for r in rows if (r["task"], r["algorithm"], r["settings"], r["start"]) == mine]
    return selected if all(len(runs) >= seeds for runs in selected.values()) else {}


def figures(selected: Mapping[str, Sequence[Row]]) -> tuple[int, dict[str, dict[str, list[float]]]]:
    """The budget in tokens, and by algorithm the values of each seed."""
    budget = min(sum(row["tokens"]) for runs in selected.values() for row in runs)
    values = {}
    for name, runs in selected.items():
        scores = [(row["tokens"], row["curves"][SCORE]) for row in runs]
        values[name] = {
            "final": [mean_score(*one, 0.8 * budget, budget) for one in scores],
            "mean": [mean_score(*one, 0.0, budget) for one in scores],
            "explained": [x for row in runs for x in row["curves"].get(EXPLAINED, [])[:STEP][-1:] if x is not None],
            "test": [row["test"] for row in runs],
        }
    return budget, values


def tables(rows: Sequence[Row], tasks: Sequence[str], seeds: int) -> str:
    """The complete tasks as markdown."""
    lines = [
        f"| task (tokens) | algorithm | seeds | final | mean | test | explained variance, step {STEP} |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    versus = ["| task | PPO minus | final | mean |", "|---|---|---:|---:|"]
    incomplete = []
    for task in tasks:
        if not (selected := select(rows, task, seeds)):
            incomplete.append(task)
            continue
        budget, values = figures(selected)
        for name, v in values.items():
            head = f"{task} ({budget:,})" if name == "PPO" else ""
            explained = str(interval(v["explained"])) if v["explained"] else ""
            shown = " | ".join(str(interval(v[kind])) for kind in ("final", "mean", "test"))
            lines.append(f"| {head} | {name} | {len(v['final'])} | {shown} | {explained} |")
            if name != "PPO":
                against = (difference(values["PPO"][kind], v[kind]) for kind in ("final", "mean"))
                versus.append(f"| {task} | {name} | {' | '.join(map(str, against))} |")
    left = f"\nWithout {seeds} seeds of every algorithm: {', '.join(incomplete)}." if incomplete else ""
    return "\n".join([*lines, "", *versus]) + left


def draw(rows: Sequence[Row], task: str, seeds: int, path: pathlib.Path) -> None:
    """Draws the mean scores of a task over its steps."""
    lines = {}
    for name, runs in select(rows, task, seeds).items():
        mean = np.mean([row["curves"][SCORE] for row in runs], axis=0)
        lines[name] = [(step, float(score)) for step, score in enumerate(mean, 1)]
    if not lines:
        raise UserError(f"--plot={path}: {task} has fewer than --seeds={seeds} runs of some algorithm; run it first")
    write_curve(path, title=f"Mean score of {seeds} seeds: {task}", lines=lines)


CHANGES = {"steps": "trainer.total_training_steps", "lr": "actor.lr"}  # options that change a setting


@settings.exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--algorithms", default=",".join(ALGORITHMS))
    parser.add_argument("--steps", type=int, help="of a run, in place of the task's")
    parser.add_argument("--lr", type=float, help="of the actor, in place of the task's")
    parser.add_argument("--stories_model", type=pathlib.Path, help="directory of a TinyStories Llama, for rlhf")
    parser.add_argument("--plot", type=pathlib.Path, help="also draw the first task's curves to this SVG file")
    add_options(parser, "runs/learning")
    args = parser.parse_args(argv)
    args.tasks = names_of(args.tasks, TASKS, "--tasks")
    args.algorithms = names_of(args.algorithms, ALGORITHMS, "--algorithms")
    rows = run_and_print(args, "learning", run_missing, lambda rows: tables(rows, args.tasks, args.seeds))
    if args.plot is not None:
        draw(rows, args.tasks[0], args.seeds, args.plot)


if __name__ == "__main__":
    main()
