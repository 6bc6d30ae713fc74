"""The commands of docs/examples/tinystories.md, from an empty folder to a policy, as the page gives them.

    python benchmarks/page.py --model=MODEL                 # the page's sizes, half an hour on two free cores
    python benchmarks/page.py --model=MODEL --small         # fewer stories and steps, half the time

Runs every command of the section "Commands" up to the first PPO run, in order, in a folder with nothing but links to
the checkout's `configs` and `examples`. Prints a table and writes OUT/<date>-<machine>-page.json. Exits with code 2 if
a command fails.
"""

import argparse
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from machine import ROOT, begin, title, write

from jppo import settings
from jppo.errors import UserError

PAGE = ROOT / "docs/examples/tinystories.md"
RUNS = "runs/tinystories"
# Changes by command, for a run in minutes; the second number of stories is of those for pairs.
SMALL = {
    "--n=16": "--n=5",
    "--n=40": "--n=16",
    "configs/tinystories_reward_model.py": "--config.trainer.total_training_steps=80",
    "configs/tinystories_ppo.py": "--config.trainer.total_training_steps=24 --config.trainer.test_freq=24",
}


def commands(page: str) -> list[str]:
    """Returns the commands of the page, each on one line, up to the first PPO run."""
    section = page.partition("\n## Commands\n")[2].partition("\n## ")[0]
    text = "\n".join(re.findall(r"^```\n(.*?)^```", section, re.S | re.M)).replace("\\\n", " ")
    lines = [" ".join(line.split()) for line in text.splitlines() if line]
    return lines[: next(i for i, line in enumerate(lines) if "jppo.train " in line) + 1]


def changed(line: str, changes: Mapping[str, str]) -> str:
    """Returns the command with other numbers: an option in place of its own, or more options of a config."""
    for name, new in changes.items():
        if name in line.split():
            line = line.replace(name, new)
        elif line.endswith(f"--config={name}"):
            line += f" {new}"
    return line


def run(line: str, folder: pathlib.Path) -> float:
    """Runs a command of the page in the folder and returns its seconds."""
    began = time.monotonic()
    words = shlex.split(line)
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"PYTHONPATH": str(ROOT)}
    with (folder / "said.txt").open("a") as log:
        print(f"$ {line}", file=log, flush=True)
        done = subprocess.run([sys.executable, *words[1:]], cwd=folder, env=environment, stdout=log, stderr=log)
    if words[0] != "python" or done.returncode:
        raise UserError(f"{line}: exit code {done.returncode}: {(folder / 'said.txt').read_text().strip()[-1500:]}")
    return round(time.monotonic() - began, 1)


def outcome(folder: pathlib.Path) -> dict[str, Any]:
    """Returns what the stages came to: demonstrations, pairs, the reward model's accuracy, PPO's scores."""
    place = folder / RUNS
    count = {name: len((place / name).read_text().splitlines()) for name in ("data/demo.jsonl", "pairs/train.jsonl")}
    lines = [json.loads(line) for line in (place / "ppo/metrics.jsonl").read_text().splitlines()]
    scores = [line["val/score"] for line in lines if "val/score" in line]
    cats = [line["reward/rule_score/mean"] for line in lines if "reward/rule_score/mean" in line]
    ranked = [json.loads(line) for line in (place / "rm/metrics.jsonl").read_text().splitlines()]
    return {
        "demonstrations": count["data/demo.jsonl"],
        "pairs": count["pairs/train.jsonl"],
        "ranked right": next(line["rm/val_accuracy"] for line in reversed(ranked) if "rm/val_accuracy" in line),
        "reward before": scores[0],
        "reward after": scores[-1],
        "with a cat before": cats[0],
        "with a cat after": sum(cats[-3:]) / 3,
        "steps": len(cats),
    }


def table(result: Mapping[str, Any]) -> str:
    """The result as markdown."""
    lines = [f"{title(result['machine'])}; commit {result['commit']}", "", "| command | s |", "|---|---:|"]
    lines += [f"| `{line}` | {seconds:.0f} |" for line, seconds in result["seconds"].items()]
    return "\n".join([*lines, "", ", ".join(f"{name}: {x:.4g}" for name, x in result["outcome"].items())])


def measure(model: pathlib.Path, folder: pathlib.Path, changes: Mapping[str, str]) -> dict[str, Any]:
    """Runs the commands in the empty folder."""
    for name in ("configs", "examples"):
        (folder / name).symlink_to(ROOT / name)
    seconds = {}
    for line in commands(PAGE.read_text()):
        shown = changed(line, changes)
        seconds[shown] = run(shown.replace("MODEL", str(model.resolve())), folder)
        print(f"{seconds[shown]:7.1f} s  {shown}", flush=True)
    return {"seconds": seconds, "outcome": outcome(folder)}


@settings.exit_on_user_error
def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=pathlib.Path, required=True, help="directory of a TinyStories Llama")
    parser.add_argument("--small", action="store_true", help="fewer stories and steps")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args(argv)
    begun = begin()
    with tempfile.TemporaryDirectory() as temporary:
        result = begun | measure(args.model, pathlib.Path(temporary), SMALL if args.small else {})
    write(result, table, args.out, "page")


if __name__ == "__main__":
    main()
