"""Training of a reward model: python -m jppo.reward_model --config=configs/tinystories_reward_model.py

Trains on preference pairs to score the chosen response higher, with the packing and optimizer of PPO. The model's
scalar head is read at the last token. The result is an HF directory, RUN_DIR/hf, a sequence classifier with one label:
reward.model.path of a PPO run. The same command resumes a killed run from its last checkpoint (trainer.save_freq).
Settings are given as --config.SECTION.NAME=VALUE. --dry_run prints them with the run's derived sizes and memory, and
stops. --dry_run --machine=8xH100 does so for a described machine.
"""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from jppo import settings
from jppo.data.preferences import Encode, Pair, PairSet, read_pairs
from jppo.errors import escaped
from jppo.learner import batch, packing, ppo, preference, score, sharding, update
from jppo.learner.make import make_decoder
from jppo.learner.model_configs import longest_sequence, make_adapters
from jppo.learner.plan import make_plan
from jppo.models import cost, hf, hf_write, placing
from jppo.models.config import pad_vocab
from jppo.preflight import memory, preview
from jppo.preflight.checks import dry_run_of_one_model
from jppo.preflight.described_machine import Request
from jppo.preflight.programs import Estimate
from jppo.rewards.model.classifier import Texts, without_padding
from jppo.rewards.parts import Sample
from jppo.run import command, supervised
from jppo.run.inputs import read_tokenizer, total_steps
from jppo.run.resume import checksum_of, require_resumable
from jppo.runlog.console import REWARD_MODEL_COLUMNS
from jppo.runlog.make import require_loggers
from jppo.settings import PairTraining
from jppo.types import Array, Params, Prompt, Rows, Trajectory, given_text


@dataclasses.dataclass(frozen=True)
class PairTask(supervised.Task):
    """The inputs of a run, before it loads the model; `accumulate` is the second pass."""

    pairs: PairSet
    held_out: PairSet
    changes: dict[str, Any]  # to config.json, for a sequence classifier
    scores: Callable[..., Array]  # the first pass, compiled
    slope: Callable[..., Any]


def prepare(c: PairTraining, request: Request = preview.HERE) -> PairTask:
    """Reads the pairs and the model config."""
    written, cfg = hf.read_config(c.model.path, longest=longest_sequence(c))
    if c.model.init == "pretrained":
        hf.check_weights(c.model.path, cfg, head="value")
    tokenizer = read_tokenizer(c, cfg)
    changes = hf_write.classifier_changes(c.model.path, pad_token_id=tokenizer.pad_token_id)
    reading = dict[str, Any](
        encode=make_encode(tokenizer, (written | changes).get("pad_token_id")),
        max_length=longest_sequence(c),
        margin=c.loss.margin,
        margin_column=c.loss.margin_column,
        system_prompt=c.data.system_prompt,
        custom_cls=c.data.custom_cls,
        tokenizer=tokenizer,
    )
    pairs = read_pairs(c.data.train_files, **reading)
    held_out = read_pairs(c.data.val_files, **reading, setting="data.val_files")
    mesh = request.mesh(c)
    options = sharding.compiler_options(mesh, c.model.compiler_options)
    # Random, unlike a critic's: nothing subtracts the first scores, and equal ones would order no pair.
    std = (cfg.hidden_size + 1) ** -0.5
    cfg = dataclasses.replace(pad_vocab(cfg, mesh.shape["tensor"]), value_head_std=std)
    value = score.make_value(make_decoder(c, cfg, mesh))
    return PairTask(
        pairs=pairs,
        held_out=held_out,
        steps=total_steps(c, len(pairs.pairs)),
        mesh=mesh,
        plan=make_plan(
            c,
            mesh,
            tokens_per_device=c.optim.max_tokens_per_device,
            sequences=2 * c.data.train_batch_size,
            more=1,  # added by `as_trajectory`
        ),
        cfg=cfg,
        changes=changes,
        adapters=make_adapters(c),
        scores=preference.make_scores(value, mesh=mesh),
        slope=preference.make_slope(center=c.loss.center_rewards_coefficient),
        accumulate=update.make_accumulate(preference.make_pulled(value), mesh=mesh, options=options),
    )


def make_encode(tokenizer: Any, pad_token_id: int | None) -> Encode:
    """Tokenizes prompt and response as a PPO run's reward model reads them, without truncation."""
    texts = Texts(tokenizer, max_length=sys.maxsize)
    nothing = np.zeros(0, np.int32)

    def encode(messages: str | list[dict[str, str]], response: str) -> list[int]:
        ids, _ = texts.read(Sample(Prompt("", "", messages, nothing, "", {}), response, 0, "stop"))
        return without_padding(ids, pad_token_id)

    return encode


def train(config: PairTraining | ConfigDict) -> None:
    """Trains on all pairs, or resumes, tests on held-out pairs, and writes the model."""
    c = settings.typed(config, PairTraining)
    require_loggers(c)
    require_resumable(c)
    task = prepare(c)
    pairs = task.pairs.pairs

    def draw(descent: ppo.ModelUpdate, learned: Params, indices: np.ndarray) -> supervised.Batch:
        some = [pairs[i] for i in indices]
        rows = pack_pairs(some, task.plan)
        (_, judged), slope = task.slope(score_pairs(task, descent, learned, rows, len(some)), margins(some))
        return supervised.Batch(
            batch.Mini(rows, batch.count(rows), sharding.rows_sharding(task.mesh)),
            tokens=sum(len(pair.chosen) + len(pair.rejected) for pair in some),
            further=(slope,),
            metrics={name: float(value) for name, value in judged.items()},
        )

    objective = supervised.Objective(
        name="rm",
        head="value",
        examples=len(pairs),
        checksum=checksum_of(array for one in pairs for array in (one.chosen, one.rejected, margins([one]))),
        columns=REWARD_MODEL_COLUMNS,
        opening=f"pairs             {counted(task.pairs)}; held out {counted(task.held_out)}",
        draw=draw,
        test=lambda descent, learned: test(c, task, descent, learned),
        test_freq=c.trainer.test_freq,
        changes=task.changes,
    )
    metrics = supervised.train(c, task, objective)
    if "rm/val_accuracy" in metrics:
        print(f"held-out accuracy {metrics['rm/val_accuracy']:.4f} on {len(task.held_out.pairs)} pairs")
    print(escaped(f"model             {supervised.folder(c) / 'hf'}"))


def score_pairs(task: PairTask, descent: ppo.ModelUpdate, learned: Any, rows: Sequence[Rows], pairs: int) -> Array:
    """Scores a batch of pairs, [2N] f32: the chosen halves, then the rejected."""
    base, params = placing.to_device((descent.base, learned))
    whole, place = sharding.replicated(task.mesh), sharding.rows_sharding(task.mesh)
    found = placing.put(np.zeros(2 * pairs, np.float32), whole)
    for one in rows:
        found = task.scores(params, base, placing.put(one, place), found)
    return found


def test(c: PairTraining, task: PairTask, descent: ppo.ModelUpdate, learned: Any) -> dict[str, float]:
    """Returns loss and accuracy on held-out pairs."""
    pairs, size = task.held_out.pairs, c.data.train_batch_size
    sums = {"rm/loss": 0.0, "rm/accuracy": 0.0}
    for first in range(0, len(pairs), size):
        some = pairs[first : first + size]
        (_, found), _ = task.slope(
            score_pairs(task, descent, learned, pack_pairs(some, task.plan), len(some)), margins(some)
        )
        sums = {name: so_far + len(some) * float(found[name]) for name, so_far in sums.items()}
    return {"rm/val_loss": sums["rm/loss"] / len(pairs), "rm/val_accuracy": sums["rm/accuracy"] / len(pairs)}


def dry_run(c: PairTraining, request: Request = preview.HERE) -> str:
    """Reports on a run with these settings; reads no weight."""

    def describe(task: PairTask, micro_batches: int) -> tuple[list[str], dict[str, int]]:
        lines = [
            f"pairs            {counted(task.pairs)}",
            f"held out         {counted(task.held_out)}",
            f"steps            {task.steps:,}, each of {c.data.train_batch_size:,} pairs, one optimizer step",
            f"rows             {preview.shapes(task.plan)}",
            f"                 up to {micro_batches} micro-batches a step, each read twice",
            f"to compile       {2 * len(task.plan.shapes) + 3} programs for {len(task.plan.shapes)} shape(s)",
        ]
        return lines, {"rm gradient": micro_batches, "rm step": 1, "scores": micro_batches}

    return dry_run_of_one_model(c, request, prepare, estimate, describe, head="value")


def estimate(c: PairTraining, task: PairTask) -> tuple[Estimate, int]:
    """Estimates a run's memory and counts the micro-batches of a step of its longest pairs."""
    plan, mesh, count = task.plan, task.mesh, c.data.train_batch_size
    trained = memory.sketch(c, mesh, task.cfg, head="value", adapters=task.adapters)
    shapes = memory.largest(plan)
    rows = [memory.abstract_rows(shape, mesh) for shape in shapes]
    scores = jax.ShapeDtypeStruct((2 * count,), np.float32, sharding=sharding.replicated(mesh))
    whole = [[length] * some for some, length in shapes]
    flop = [cost.update(task.cfg, lengths, head_tokens=0, adapters=task.adapters) for lengths in whole]
    opt, moments = memory.update_moments("rm", task.accumulate, c.optim, trained, rows, scores, useful=flop)
    for one, lengths in zip(rows, whole, strict=True):
        needed = cost.forward(task.cfg, lengths, head_tokens=0, adapters=task.adapters)
        models = trained.learned, trained.base, one, scores
        moments.append(memory.account("scores", 0, task.scores, *models, useful=needed))
    longest = sorted(task.pairs.pairs, key=lambda pair: -len(pair.chosen) - len(pair.rejected))[:count]
    packed = pack_pairs(longest, plan)
    return memory.of_one_model(c, mesh, trained, opt, moments, packed), len(packed)


def counted(found: PairSet) -> str:
    """Formats the number of pairs and of excluded ones."""
    return f"{len(found.pairs):,} ({found.overlong} over-long ones and {found.alike} with equal halves left out)"


def margins(pairs: Sequence[Pair]) -> np.ndarray:
    """[N] f32."""
    return np.array([pair.margin for pair in pairs], np.float32)


def pack_pairs(pairs: Sequence[Pair], plan: packing.Plan) -> list[Rows]:
    """Packs both halves of each pair in any row: of N pairs sequence i is chosen, N + i rejected."""
    halves = [as_trajectory(ids) for ids in (*(p.chosen for p in pairs), *(p.rejected for p in pairs))]
    return packing.pack(halves, range(len(halves)), plan)


def as_trajectory(ids: np.ndarray) -> Trajectory:
    """Converts a text to the layout of a sampled response, so that one packer serves both.

    The packer drops the last token, the prediction target. A score needs all tokens, so one is appended. Only its
    position is used, as the one entry in the mask.
    """
    return given_text(np.append(ids, 0), np.arange(len(ids) + 1) == len(ids))


@settings.exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    """Runs the command line."""
    command.run(argv, "jppo.reward_model", __doc__, PairTraining, dry_run=dry_run, train=train)


if __name__ == "__main__":
    main()
