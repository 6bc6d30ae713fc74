"""Draws reward and KL of runs over their steps as a small SVG:

    python benchmarks/curve.py RUN [RUN ...] --out FILE.svg

Plots the mean reward of each run's steps, and the KL in nats per response, a mean over the runs.
"""

import argparse
import pathlib
import statistics
from collections.abc import Sequence

from jppo.errors import UserError
from jppo.plugins.report.curve import write_curve
from jppo.runlog.logger import read_metrics
from jppo.settings import exit_on_user_error

REWARD, KL = "reward_mean", "actor/reward_kl_penalty_seq"


def read(run: pathlib.Path) -> list[dict[str, float]]:
    """The steps of a run that have both."""
    steps = [row for row in read_metrics(run) if row.get(REWARD) is not None and row.get(KL) is not None]
    if not steps:
        raise UserError(f"{run}: its metrics.jsonl has no {REWARD} and {KL}; give a PPO run with a KL in the reward")
    return steps


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=pathlib.Path, help="folders of runs")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="the file to write")
    args = parser.parse_args(argv)
    by_run = {run: read(run) for run in args.runs}
    lines = {f"reward, {run.name}": [(row["step"], row[REWARD]) for row in rows] for run, rows in by_run.items()}
    by_step: dict[float, list[float]] = {}
    for rows in by_run.values():
        for row in rows:
            by_step.setdefault(row["step"], []).append(row[KL])
    lines["KL, nats a response"] = [(step, statistics.mean(values)) for step, values in sorted(by_step.items())]
    try:
        write_curve(args.out, title="Reward and KL to the starting model", lines=lines)
    except OSError as e:
        raise UserError(f"--out={args.out} cannot be written ({e.strerror}); name another place") from e
    print(args.out)


if __name__ == "__main__":
    main()
