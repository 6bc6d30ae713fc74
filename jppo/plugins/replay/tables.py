"""The tables that `jppo replay` prints: stages, one sample by token, and another algorithm on the same samples."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import rich.box
import rich.table

from jppo.algorithms import kl
from jppo.data.tokenizer import pieces
from jppo.learner import estimate
from jppo.plugins.replay.compare import Difference, StageResult
from jppo.plugins.replay.recompute import Recomputed, Replay, updated_logprob
from jppo.run.sample_log import collect_arrays
from jppo.settings import parts

Rows = Sequence[Sequence[str]]
SHOWN = 16  # samples in the table of another algorithm
# Metrics of both algorithms, by the label of their row.
COMPARED = {
    "largest advantage": "critic/advantages/max",
    "smallest advantage": "critic/advantages/min",
    "standard deviation": "critic/advantages/std",
    "policy loss": "actor/pg_loss",
    "share of clipped tokens": "actor/pg_clipfrac",
    "gradient norm": "actor/grad_norm",
}


def make_table(headings: Sequence[str], rows: Rows, texts: int = 1) -> rich.table.Table:
    """Returns a table whose first `texts` columns are aligned to the left."""
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD, header_style="bold")
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number < texts else "right", overflow="fold")
    for row in rows:
        table.add_row(*(rich.markup.escape(cell) for cell in row))
    return table


def stage_table(results: Mapping[str, StageResult], note: str) -> rich.table.Table:
    """Returns a row for each stage; `note` says why rewards are the recorded ones."""

    def cells(stage: str, result: StageResult) -> list[str]:
        verdict = "differs" if result.first else "same" if result.count else "none"
        if stage == "rewards" and note and not result.first:
            verdict = "recorded"
        first = result.first or Difference(stage, "", "", "")
        largest = "" if not result.largest else f"{result.largest:.1e}" if math.isfinite(result.largest) else "other"
        return [stage, verdict, str(result.count), first.place, first.recorded, first.recomputed, largest]

    headings = ("stage", "result", "numbers", "first difference", "recorded", "recomputed", "largest, relative")
    return make_table(headings, [cells(*item) for item in results.items()], texts=2)


def sample_table(replay: Replay, step: Recomputed, sample: int) -> rich.table.Table:
    """Returns a row for each token of a response."""
    sequences = step.episodes.trajectories
    data, c, recipe = step.data, replay.c, replay.learner.recipe
    arrays = collect_arrays(data, [sample], step.value_norm, bypass=recipe.bypass)
    kind = recipe.kl_penalty if recipe.kl_penalty is not None else recipe.kl_loss_type
    if "exact_kl" in data.arrays or (kind not in kl.EXACT and "ref_logprob" in data.arrays):
        arrays["kl"] = np.asarray(estimate.penalty_of(data, kind))[[sample]]
    new, old = updated_logprob(replay, step)[sample], np.asarray(data["old_logprob"])[sample]
    advantage = arrays["advantage"][0]
    low, high = (c.actor.clip_ratio if x is None else x for x in (c.actor.clip_ratio_low, c.actor.clip_ratio_high))
    ratio, users = np.exp(new - old), parts.extension(c)
    clips = c.actor.loss_mode == "vanilla" and (users is None or not users.terms)  # other losses have other rules
    clipped = ((advantage > 0) & (ratio > 1 + high)) | ((advantage < 0) & (ratio < 1 - low))
    first, mask = int(data.first[sample]), np.asarray(data.mask)[sample]
    ids = sequences[sample].tokens[first + 1 :].tolist()
    columns = {"log π": new, "old": old, "ratio": ratio}
    columns |= {name: arrays[name][0] for name in ("reward", "kl", "value", "advantage") if name in arrays}
    rows = [
        [str(k), repr(text)[1:-1] or f"[{ids[k]}]"]
        + ([f"{x[k]:.4f}" for x in columns.values()] + ["yes" * bool(clipped[k])] * clips if mask[k] else [])
        for k, text in enumerate(pieces(replay.tokenizer, ids))
    ]
    return make_table(["token", "text", *columns, *["clipped"] * clips], rows, texts=2)


def algorithm_tables(ours: Recomputed, other: Recomputed, name: str) -> tuple[rich.table.Table, rich.table.Table]:
    """Returns the numbers of a step by the run's algorithm and by another, and the samples with both advantages."""

    def text(metrics: Mapping[str, float], key: str) -> str:
        return f"{metrics[key]:.6g}" if key in metrics else "none"

    rows = [[label, text(ours.metrics, key), text(other.metrics, key)] for label, key in COMPARED.items()]
    rows.append(["cosine of the two gradients", "", f"{cosine(ours.gradient, other.gradient):.6f}"])
    means = [_mean_advantages(step) for step in (ours, other)]
    scores = np.asarray(ours.data.score)
    samples = [[str(i), *(f"{x[i]:.4f}" for x in (scores, *means))] for i in range(min(SHOWN, len(means[0])))]
    headings = ("recorded algorithm", name)
    return make_table(["", *headings], rows), make_table(["sample", "score", *(f"A by {h}" for h in headings)], samples)


def describe_nonfinite(step: Recomputed, name: str) -> str:
    """Returns a line on numbers of the step by another algorithm that are not finite; '' without one."""
    faulty = [label for label, key in COMPARED.items() if not math.isfinite(step.metrics.get(key, 0.0))]
    return f"{name} gives NaN or infinities: {', '.join(faulty)}; a run would skip this update" if faulty else ""


def _mean_advantages(step: Recomputed) -> np.ndarray:
    """Returns the mean advantage of each sequence's trained tokens; 0 without one."""
    mask, count = np.asarray(step.data.mask), len(step.episodes.trajectories)
    with np.errstate(invalid="ignore"):  # ∞ - ∞
        means = np.where(mask, step.data["advantage"], 0.0).sum(axis=1) / np.maximum(mask.sum(axis=1), 1)
    return np.asarray(means[:count])


def cosine(a: Any, b: Any) -> float:
    """Returns the cosine of two gradients; NaN if one is missing or zero."""
    if a is None or b is None:
        return math.nan
    x, y = (np.concatenate([np.asarray(leaf).reshape(-1) for leaf in jax.tree.leaves(g)]) for g in (a, b))
    norms = float(np.linalg.norm(x)) * float(np.linalg.norm(y))
    return float(x @ y) / norms if norms else math.nan
