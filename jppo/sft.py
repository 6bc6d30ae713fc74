"""Supervised fine-tuning: python -m jppo.sft --config=configs/quickstart_sft.py

Next-token training on the responses of (prompt, response) pairs, with the model, packing and optimizer of PPO. The
result is an HF directory, RUN_DIR/hf, to start PPO from. The same command resumes a killed run from its last checkpoint
(trainer.save_freq). Settings are given as --config.SECTION.NAME=VALUE. --dry_run prints them with the run's derived
sizes and memory, and stops. --dry_run --machine=8xH100 does so for a described machine.
"""

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
from ml_collections import ConfigDict

from jppo import settings
from jppo.data.sft import Demonstration, read_demonstrations
from jppo.errors import escaped
from jppo.learner import batch, packing, sharding, update
from jppo.learner.make import logprob_of_texts, make_adapters, plan_rows
from jppo.learner.trainable import CompiledLoss, Trainable
from jppo.models import hf
from jppo.models.config import pad_vocab
from jppo.preflight.request import HERE, DryRun
from jppo.run import supervised
from jppo.run.command import run_training
from jppo.run.loop import total_steps
from jppo.run.out_of_memory import memory_explained
from jppo.run.resume import checksum_of, require_resumable
from jppo.run.tokenizer import read_tokenizer
from jppo.runlog.console import SFT_COLUMNS
from jppo.runlog.make import require_loggers
from jppo.settings import FineTuning
from jppo.types import Params, Trajectory, given_text

if TYPE_CHECKING:
    from jppo.preflight.programs import Estimate


@dataclasses.dataclass(frozen=True)
class DemonstrationTask(supervised.Task):
    """The inputs of a run, before it loads the model."""

    demonstrations: list[Demonstration]
    overlong: int  # excluded demonstrations


def prepare(c: FineTuning, request: DryRun = HERE) -> DemonstrationTask:
    """Reads the demonstrations and the model config, and makes the loss of fine-tuning."""
    longest = c.data.longest_row
    _, cfg = hf.read_config(c.model.path, longest=longest)
    if c.model.init == "pretrained" and request.machine is None:
        hf.check_weights(c.model.path, cfg, head="lm")
    tokenizer = read_tokenizer(c, cfg)
    training = read_demonstrations(
        c.data.train_files,
        tokenizer=tokenizer,
        max_length=longest,
        system_prompt=c.data.system_prompt,
        custom_cls=c.data.custom_cls,
        learn_turns=c.data.learn_turns,
        columns={"prompt": c.data.prompt_key, "response": c.data.response_key, "messages": c.data.messages_key},
        prompt_role=c.data.prompt_role,
    )
    mesh = request.mesh(c)
    options = sharding.compiler_options(mesh, c.model.compiler_options)
    cfg = pad_vocab(cfg, mesh.shape["tensor"])
    logprob = logprob_of_texts(c, cfg, mesh)
    steps, tokens_per_device = total_steps(c, len(training.demonstrations)), c.optim.max_tokens_per_device
    return DemonstrationTask(
        demonstrations=training.demonstrations,
        overlong=training.overlong,
        steps=steps,
        mesh=mesh,
        plan=plan_rows(
            c, mesh, tokens_per_device=tokens_per_device, sequences=c.data.train_batch_size, steps=steps, policy=cfg
        ),
        cfg=cfg,
        adapters=make_adapters(c),
        loss=CompiledLoss(update.make_accumulate(update.make_imitation_loss(logprob), mesh=mesh, options=options)),
    )


def train(config: FineTuning | ConfigDict) -> None:
    """Trains the model on all demonstrations, or resumes, and writes it."""
    c = settings.typed(config, FineTuning)
    require_loggers(c)
    require_resumable(c)
    task = prepare(c)
    demonstrations = task.demonstrations

    def draw(trainable: Trainable, learned: Params, indices: np.ndarray) -> supervised.ExampleBatch:
        trajectories = [as_trajectory(demonstrations[i], str(i)) for i in indices]
        rows = packing.pack(trajectories, range(len(trajectories)), task.plan)
        mini = batch.Mini(rows, batch.count(rows), sharding.rows_sharding(task.mesh))
        return supervised.ExampleBatch(mini, tokens=sum(len(t.tokens) for t in trajectories))

    objective = supervised.ExampleObjective(
        name="sft",
        head="lm",
        examples=len(demonstrations),
        checksum=checksum_of(array for one in demonstrations for array in (one.prompt, one.response, one.learn)),
        columns=SFT_COLUMNS,
        opening=f"{len(demonstrations)} demonstrations ({task.overlong} over-long ones left out)",
        draw=draw,
    )
    with memory_explained(c):
        supervised.train_on_examples(c, task, objective)
    print(escaped(f"model             {supervised.folder(c) / 'hf'}"))


def dry_run(c: FineTuning, request: DryRun = HERE) -> str:
    """Reports on a run with these settings; reads no weight."""
    from jppo.preflight import preview
    from jppo.preflight.checks import dry_run_of_one_model

    def describe(task: DemonstrationTask, micro_batches: int) -> tuple[list[str], dict[str, int]]:
        lines = [
            f"demonstrations   {len(task.demonstrations):,} ({task.overlong} over-long ones left out)",
            f"steps            {task.steps:,}, each of {c.data.train_batch_size:,} demonstrations, one optimizer step",
            f"rows             {preview.describe_shapes(task.plan)}",
            f"                 up to {micro_batches} micro-batches a step",
            f"to compile       {len(task.plan.shapes) + 2} programs for {len(task.plan.shapes)} shape(s)",
        ]
        return lines, {"sft gradient": micro_batches, "sft step": 1}

    return dry_run_of_one_model(c, request, prepare, _estimate, describe, head="lm")


def _estimate(c: FineTuning, task: DemonstrationTask) -> tuple["Estimate", int]:
    """Estimates a run's memory and counts the micro-batches of a step of its longest demonstrations."""
    from jppo.learner.programs import Program, update_programs
    from jppo.preflight import memory

    plan, shapes = task.plan, memory.largest_shapes(task.plan)
    how, state = memory.sketch_update(c, task.mesh, task.cfg, task.loss, name="sft", head="lm", adapters=task.adapters)
    rows = [packing.empty_rows(shape) for shape in shapes]
    programs = update_programs(how, state.policy, state.policy_opt, state, rows)

    def count_flop(program: Program) -> int:
        return memory.useful_flop(c, task.cfg, program.rows, task.adapters, head=True) if program.rows else 0

    moments = memory.account_for(programs, shapes, count_flop, memory.sampled_share(c))
    by_length = sorted((as_trajectory(example, "") for example in task.demonstrations), key=lambda t: -len(t.tokens))
    longest = by_length[: c.data.train_batch_size]
    packed = packing.pack(longest, range(len(longest)), plan)
    return memory.estimate_one_model(c, how, state, moments, packed), len(packed)


def as_trajectory(demonstration: Demonstration, uid: str) -> Trajectory:
    """Converts a demonstration to the layout of a sampled response, so that one packer serves both."""
    sampled = np.concatenate([np.zeros(len(demonstration.prompt), bool), demonstration.learn])
    return given_text(np.concatenate([demonstration.prompt, demonstration.response]), sampled, uid)


@settings.exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    """Fine-tunes a model on demonstrations, or prints its dry run."""
    run_training(argv, "jppo.sft", __doc__, FineTuning, dry_run=dry_run, train=train)


if __name__ == "__main__":
    main()
