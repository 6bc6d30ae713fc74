"""Tables of runs with several seeds: python scripts/compare_seeds.py runs/smollm2/sums/* [--samples 10]

Prints markdown: the test score before the first and after the last step, the KL to the reference, seconds per step, and
the scores by data source. Folders that differ only in an ending -seedN are seeds of one run, such as ppo and ppo-seed2.
Intervals are 95%, by Student's t over seeds; the test prompts are the same, so they hold for these prompts. The KL is
the mean of the last five steps, in nats per response.

--samples N adds the first N responses of the test, before and after, of the first seed.
"""

import argparse
import json
import math
import pathlib
import re
import statistics
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jppo.errors import UserError
from jppo.runlog.logger import read_metrics
from jppo.settings import exit_on_user_error

sys.path.append(str(pathlib.Path(__file__).parents[1] / "benchmarks"))
from intervals import interval

SCORE, KL, STEP = "val/score", "actor/reward_kl_penalty_seq", "timing_s/step"
LAST = 5  # steps of which the KL is the mean


class Run(NamedTuple):
    """A finished run."""

    folder: pathlib.Path
    before: dict[str, float]  # metrics of the test at step 0
    after: dict[str, float]  # of the last test
    steps: list[dict[str, float]]
    final: int  # step of the last test


def read(folder: pathlib.Path) -> Run:
    """Reads a run that was tested at step 0 and later."""
    lines = read_metrics(folder)
    tests = [line for line in lines if SCORE in line]
    steps = [line for line in lines if line["step"] > 0]
    if len(tests) < 2 or tests[0]["step"] != 0 or not steps or tests[-1]["step"] != steps[-1]["step"]:
        raise UserError(
            f"{folder}: metrics.jsonl needs {SCORE} of step 0 and of the last step; give the folder of a finished run "
            "with trainer.val_before_train=True"
        )
    return Run(folder, tests[0], tests[-1], steps, tests[-1]["step"])


def grouped(folders: Sequence[pathlib.Path]) -> dict[str, list[Run]]:
    """Returns the runs by their name without -seedN; all seeds have as many steps."""
    groups: dict[str, list[Run]] = {}
    for folder in sorted(folders, key=lambda folder: (len(folder.name), folder.name)):
        groups.setdefault(re.sub(r"-seed\d+$", "", folder.name), []).append(read(folder))
    for name, runs in groups.items():
        if len(steps := {run.final for run in runs}) > 1:
            raise UserError(f"the seeds of {name} have {sorted(steps)} steps; finish them, or leave some out")
    return groups


def table(groups: dict[str, list[Run]]) -> Iterator[str]:
    """Yields the table of all test prompts, a row per run."""
    yield "| run | seeds | steps | score before | after | gain | KL, nats per response | seconds per step |"
    yield "|---|---:|---:|---:|---:|---:|---:|---:|"
    for name, runs in groups.items():
        before, after = ([getattr(run, when)[SCORE] for run in runs] for when in ("before", "after"))
        gain = interval([b - a for a, b in zip(before, after, strict=True)])
        kls = [statistics.mean(line.get(KL, math.nan) for line in run.steps[-LAST:]) for run in runs]
        seconds = statistics.median(line[STEP] for run in runs for line in run.steps if STEP in line)
        row = [name, len(runs), runs[0].final, interval(before), interval(after), gain, interval(kls), f"{seconds:.0f}"]
        yield f"| {' | '.join(map(str, row))} |"


def by_source(groups: dict[str, list[Run]]) -> Iterator[str]:
    """Yields the table by data source; nothing if there is one source only."""
    first = next(iter(groups.values()))[0].after
    sources = sorted(match[1] for name in first if (match := re.fullmatch(r"val/(.+)/score", name)))
    if not sources:
        return
    yield "\n| data source | run | score before | after |\n|---|---|---:|---:|"
    for source in sources:
        for name, runs in groups.items():
            scores = [interval([getattr(r, when)[f"val/{source}/score"] for r in runs]) for when in ("before", "after")]
            yield f"| {source} | {name} | {scores[0]} | {scores[1]} |"


def samples(run: Run, count: int) -> Iterator[str]:
    """Yields the first responses of the tests, before and after, as quotes."""
    yield f"\nThe first {count} prompts of the test, not selected ({run.folder.name}):"
    before, after = (_rows(run.folder / "samples" / f"test_{step}.jsonl") for step in (0, run.final))
    for a, b in list(zip(before, after, strict=True))[:count]:
        asked = a["prompt"] if isinstance(a["prompt"], str) else a["prompt"][-1]["content"]
        yield f"\n> **{_quoted(asked)}**"
        for when, row in (("before", a), ("after", b)):
            cut = ", cut" if row["finish"] == "length" else ""
            score = "none" if row["score"] is None else f"{row['score']:g}"
            yield f">\n> {when}, {score}{cut}: {_quoted(row['response'])}"


def _rows(path: pathlib.Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    except OSError as e:
        raise UserError(f"{path} cannot be read ({e.strerror}); give the folder of a run with its samples") from e


def _quoted(text: str) -> str:
    """Returns the text on one line of a quote, as it is but for its line ends."""
    return " ⏎ ".join(re.sub(r"([*_`<\[])", r"\\\1", line).strip() for line in text.strip().split("\n"))


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=pathlib.Path, help="folders of runs")
    parser.add_argument("--samples", type=int, default=0, metavar="N", help="prompts of the test to show")
    args = parser.parse_args(argv)
    groups = grouped(args.runs)
    print("\n".join([*table(groups), *by_source(groups)]))
    for runs in groups.values():
        if args.samples:
            print("\n".join(samples(runs[0], args.samples)))


if __name__ == "__main__":
    main()
