"""The page of a verdict: Markdown, and a picture of the curves of each task."""

import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

from jppo.plugins.prove.verdict import RULE, TaskScores, Verdict, compare, interval, learning, mean_differences
from jppo.plugins.report.curve import write_curve
from jppo.runlog import durable_files


def write_page(
    folder: pathlib.Path,
    verdict: Verdict,
    about: Sequence[str],  # the algorithm, then facts
    curves: Mapping[str, Mapping[str, np.ndarray]],
    scores: Mapping[str, TaskScores],
) -> pathlib.Path:
    """Writes FOLDER/prove.md, with the curves [S, T] and the scores of each task: of none if a run has crashed."""
    lines = [f"# {about[0]}: {verdict.result}", "", f"**{verdict.words}**", ""]
    lines += [*list_scores(scores), "", RULE, ""] if scores else []
    for task, by_name in curves.items():
        means = {name: list(enumerate(curve.mean(axis=0).tolist(), 1)) for name, curve in by_name.items()}
        write_curve(folder / f"{task}.svg", title=f"{task}: mean score over seeds", lines=means)
        lines += [f"![mean score of each algorithm over the steps of {task}]({task}.svg)", ""]
    return durable_files.write_text(folder / "prove.md", "\n".join([*lines, *(f"- {line}" for line in about[1:]), ""]))


def list_scores(scores: Mapping[str, TaskScores]) -> list[str]:
    """Returns the table of final scores, and of gain and differences in units."""
    names = list(next(iter(scores.values())).finals)
    heads = ["task", "start", *names, "gain, units", *(f"minus {name}, units" for name in names[:-1])]
    rows = [heads, ["---", *["---:"] * (len(heads) - 1)]]
    for task, found in scores.items():
        gain = f"{interval(found.gain)} {learning(found.gain)}"
        of_seeds = [str(interval(values)) for values in (found.start, *found.finals.values())]
        rows.append([task, *of_seeds, gain, *map(describe, found.differences.values())])
    gains = interval(np.mean([found.gain for found in scores.values()], axis=0))
    rows.append(["mean", *[""] * (len(names) + 1), str(gains), *map(describe, mean_differences(scores).values())])
    return [f"| {' | '.join(row)} |" for row in rows]


def describe(differences: np.ndarray) -> str:
    """Returns an interval with its word."""
    return f"{interval(differences)} {compare(differences)}"
