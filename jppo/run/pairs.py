"""Training on preference pairs, for reward models and DPO: the halves of a pair may be anywhere in a batch.

A step takes two passes over its rows (`learner/preference.py`): one scores every half, one is the gradient. A command
brings the scores, the loss of a batch's scores, and what the loss needs besides them.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from jppo.data.preferences import Pair, PairSet, read_pairs
from jppo.errors import escaped
from jppo.learner import batch, packing, sharding
from jppo.learner.trainable import Trainable
from jppo.models import placing
from jppo.preflight.request import DryRun
from jppo.run import supervised
from jppo.run.out_of_memory import memory_explained
from jppo.run.resume import checksum_of, require_resumable
from jppo.runlog.console import Columns
from jppo.runlog.make import require_loggers
from jppo.settings import Paired
from jppo.types import Array, Params, Rows, Trajectory

C = TypeVar("C", bound=Paired)
LossInputs = tuple[np.ndarray, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairTask(supervised.Task):
    """The inputs of a run, before it loads the model; `loss` is the second pass."""

    pairs: PairSet
    held_out: PairSet
    sequence: Callable[[np.ndarray, int], Trajectory]  # (tokens, response's start); masks what is scored
    scores: Callable[..., Array]  # the first pass, compiled
    slope: Callable[..., Any]  # (scores [2N], *loss inputs) -> (loss, metrics), the loss's slope by each score


def train_on_pairs(
    c: C,
    prepare: Callable[[C], PairTask],
    columns: Columns,
    loss_inputs: Callable[[PairTask, PairSet, Sequence[int]], LossInputs],
    begin: Callable[[PairTask, Trainable, Params], None] | None = None,
) -> None:
    """Trains on all pairs, or resumes, tests on held-out pairs, and writes the model.

    `loss_inputs` returns what the loss needs of pairs besides scores; `begin` is called before the model is trained.
    """
    require_loggers(c)
    require_resumable(c)
    task = prepare(c)

    def slope_of(model: Trainable, params: Params, pairs: PairSet, indices: Sequence[int], rows: list[Rows]) -> Any:
        return task.slope(score_pairs(task, model, params, rows, len(indices)), *loss_inputs(task, pairs, indices))

    def draw_pairs(model: Trainable, params: Params, indices: np.ndarray) -> supervised.ExampleBatch:
        """Packs the pairs of a step and scores them, for the second pass with the slope of their loss."""
        batch_pairs = [task.pairs.pairs[i] for i in indices]
        rows = pack_pairs(task, batch_pairs)
        (_, metrics), slope = slope_of(model, params, task.pairs, [*indices], rows)
        return supervised.ExampleBatch(
            batch.Mini(rows, batch.count(rows), sharding.rows_sharding(task.mesh)),
            tokens=sum(len(pair.chosen) + len(pair.rejected) for pair in batch_pairs),
            further=(slope,),
            metrics={f"{task.name}/{name}": float(value) for name, value in metrics.items()},
        )

    def test_held_out(model: Trainable, params: Params) -> dict[str, float]:
        pairs, sums = task.held_out.pairs, {"loss": 0.0, "accuracy": 0.0}
        for batch_pairs in pair_blocks(c, len(pairs)):
            rows = pack_pairs(task, [pairs[i] for i in batch_pairs])
            (_, metrics), _ = slope_of(model, params, task.held_out, batch_pairs, rows)
            sums = {name: total + len(batch_pairs) * float(metrics[name]) for name, total in sums.items()}
        return {f"{task.name}/val_{name}": value / len(pairs) for name, value in sums.items()}

    objective = supervised.ExampleObjective(
        examples=len(task.pairs.pairs),
        checksum=checksum_of(
            array for pair in task.pairs.pairs for array in (pair.chosen, pair.rejected, margins([pair]))
        ),
        columns=columns,
        opening=f"pairs             {_describe_count(task.pairs)}; held out {_describe_count(task.held_out)}",
        begin=None if begin is None else lambda model, params: begin(task, model, params),
        draw=draw_pairs,
        test=test_held_out,
        test_freq=c.trainer.test_freq,
    )
    with memory_explained(c):
        metrics = supervised.train_on_examples(c, task, objective)
    if (accuracy := metrics.get(f"{task.name}/val_accuracy")) is not None:
        print(f"held-out accuracy {accuracy:.4f} on {len(task.held_out.pairs)} pairs")
    print(escaped(f"model             {supervised.folder(c) / 'hf'}"))


def read_pair_sets(c: Paired, tokenizer: Any, **options: Any) -> tuple[PairSet, PairSet]:
    """Reads the pairs to train on and the held-out ones; `options` go to the tokenisation."""
    data = c.data
    options |= dict(max_length=c.data.longest_row, system_prompt=data.system_prompt, custom_cls=data.custom_cls)
    sets = (("data.train_files", data.train_files), ("data.val_files", data.val_files))
    train, held_out = (read_pairs(files, setting=name, tokenizer=tokenizer, **options) for name, files in sets)
    return train, held_out


def score_pairs(task: PairTask, model: Trainable, params: Any, rows: Sequence[Rows], pairs: int) -> Array:
    """Scores a batch of pairs, [2N] f32: the chosen halves, then the rejected."""
    base, params = placing.to_device((model.base, params))
    replicated, rows_sharding = sharding.replicated(task.mesh), sharding.rows_sharding(task.mesh)
    scores: Array = placing.put(np.zeros(2 * pairs, np.float32), replicated)
    for micro in rows:
        scores = task.scores(params, base, placing.put(micro, rows_sharding), scores)
    return scores


def pair_blocks(c: Paired, count: int) -> list[range]:
    """Returns the numbers of so many pairs in blocks of a batch."""
    size = c.data.train_batch_size
    return [range(first, min(first + size, count)) for first in range(0, count, size)]


def dry_run_of_pairs(c: C, request: DryRun, prepare: Callable[[C, DryRun], PairTask]) -> str:
    """Returns the report of a dry run on pairs; reads no weights."""
    from jppo.preflight.checks import dry_run_of_one_model

    def describe(task: PairTask) -> list[str]:
        return [f"pairs            {_describe_count(task.pairs)}", f"held out         {_describe_count(task.held_out)}"]

    def pack_longest(task: PairTask) -> list[Rows]:
        longest = sorted(task.pairs.pairs, key=lambda pair: -len(pair.chosen) - len(pair.rejected))
        return pack_pairs(task, longest[: c.data.train_batch_size])

    return dry_run_of_one_model(c, request, prepare, describe, pack_longest, noun="pairs")


def _describe_count(pairs: PairSet) -> str:
    """Describes the number of pairs and of excluded ones, for the console."""
    return f"{len(pairs.pairs):,} ({pairs.overlong} over-long ones and {pairs.alike} with equal halves left out)"


def margins(pairs: Sequence[Pair]) -> np.ndarray:
    """Returns the margin of each pair, [N] f32."""
    return np.array([pair.margin for pair in pairs], np.float32)


def pack_pairs(task: PairTask, pairs: Sequence[Pair]) -> list[Rows]:
    """Packs both halves of each pair, wherever they fit: of N pairs sequence i is chosen, N + i rejected."""
    halves = [task.sequence(pair.chosen, pair.starts[0]) for pair in pairs]
    halves += [task.sequence(pair.rejected, pair.starts[1]) for pair in pairs]
    return packing.pack(halves, range(len(halves)), task.plan)
