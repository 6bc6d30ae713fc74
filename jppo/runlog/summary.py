"""The summary at the end of a run: scores, time by stage, paths."""

import pathlib

from jppo.runlog.append_file import read_lines
from jppo.runlog.curve import learning, write_curve
from jppo.runlog.logger import WARNINGS, read_metrics
from jppo.runlog.timers import STAGES


def print_summary(run: pathlib.Path, report: str) -> None:
    """Prints test scores before and after, time by stage, and the paths of results."""
    lines = read_metrics(run)
    drawn = learning(lines)
    write_curve(run / "curve.svg", title=run.name, **drawn)
    print()
    if tested := drawn["dots"].get("test score"):
        (first, before), (final, after) = tested[0], tested[-1]
        print(f"test score        {before:.3f} at step {first}  →  {after:.3f} at step {final}")
    print(f"steps             {lines[-1]['step'] if lines else 0}, seconds by stage:")
    for stage in STAGES:
        seconds = sum(m.get(f"timing_s/{stage}", 0.0) for m in lines)
        if seconds:
            print(f"  {stage:<15} {seconds:8.1f}")
    print(f"curve             {run / 'curve.svg'}")
    print(f"report            {report}")
    print(f"samples           {run / 'samples'}, step_N.jsonl and test_N.jsonl")
    board = f", TensorBoard in {run / 'tensorboard'}" if (run / "tensorboard").is_dir() else ""
    print(f"metrics           {run / 'metrics.jsonl'}{board}")
    if warned := read_lines(run / WARNINGS):
        print(f"warnings          {', '.join(w['name'] for w in warned)}: {run / WARNINGS} has the remedies")
    print(f"model             {run / 'hf'}")
