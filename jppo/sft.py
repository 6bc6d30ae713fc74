"""Supervised fine-tuning: python -m jppo.sft --config=configs/quickstart_sft.py

Next-token training on the responses of (prompt, response) pairs, with the model, packing and optimizer of PPO. The
result is an HF directory, RUN_DIR/hf, to start PPO from. The same command resumes a killed run from its last checkpoint
(trainer.save_freq). Settings are given as --config.SECTION.NAME=VALUE. --dry_run prints them with the run's derived
sizes and memory, and stops. --dry_run --machine=8xH100 does so for a described machine.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from ml_collections import ConfigDict

from jppo import settings
from jppo.data.sft import Demonstration, read_demonstrations
from jppo.errors import escaped
from jppo.learner import batch, packing, sharding, update
from jppo.learner.make import logprob_of_texts
from jppo.learner.trainable import Trainable
from jppo.models.config import pad_vocab
from jppo.preflight.request import HERE, DryRun
from jppo.run import supervised
from jppo.run.command import run_training
from jppo.run.out_of_memory import memory_explained
from jppo.run.resume import checksum_of, require_resumable
from jppo.runlog.console import SFT_COLUMNS
from jppo.runlog.make import require_loggers
from jppo.settings import FineTuning
from jppo.types import Params, Rows, Trajectory, given_text


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemonstrationTask(supervised.Task):
    """The inputs of a run, before it loads the model."""

    demonstrations: list[Demonstration]
    overlong: int  # excluded demonstrations

    def pack(self, indices: Sequence[int]) -> list[Rows]:
        """Packs the demonstrations with these indices."""
        trajectories = [as_trajectory(self.demonstrations[i], str(i)) for i in indices]
        return packing.pack(trajectories, range(len(trajectories)), self.plan)


def prepare(c: FineTuning, request: DryRun = HERE) -> DemonstrationTask:
    """Reads the demonstrations and the model config, and makes the loss of fine-tuning."""
    _, cfg, tokenizer = supervised.read_model(c, "lm", weights=request.machine is None)
    training = read_demonstrations(
        c.data.train_files,
        tokenizer=tokenizer,
        max_length=c.data.longest_row,
        system_prompt=c.data.system_prompt,
        custom_cls=c.data.custom_cls,
        learn_turns=c.data.learn_turns,
        columns={"prompt": c.data.prompt_key, "response": c.data.response_key, "messages": c.data.messages_key},
        prompt_role=c.data.prompt_role,
    )
    mesh = request.mesh(c)
    cfg = pad_vocab(cfg, mesh.shape["tensor"])
    loss, count = update.make_imitation_loss(logprob_of_texts(c, cfg, mesh)), len(training.demonstrations)
    return DemonstrationTask(
        name="sft",
        demonstrations=training.demonstrations,
        overlong=training.overlong,
        **supervised.task_fields(c, mesh, cfg, loss, head="lm", examples=count),
    )


def train(config: FineTuning | ConfigDict) -> None:
    """Trains the model on all demonstrations, or resumes, and writes it."""
    c = settings.typed(config, FineTuning)
    require_loggers(c)
    require_resumable(c)
    task = prepare(c)
    demonstrations = task.demonstrations

    def draw_batch(trainable: Trainable, learned: Params, indices: np.ndarray) -> supervised.ExampleBatch:
        rows = task.pack([*indices])
        mini = batch.Mini(rows, batch.count(rows), sharding.rows_sharding(task.mesh))
        return supervised.ExampleBatch(mini, tokens=sum(map(_length, (demonstrations[i] for i in indices))))

    objective = supervised.ExampleObjective(
        examples=len(demonstrations),
        checksum=checksum_of(array for one in demonstrations for array in (one.prompt, one.response, one.learn)),
        columns=SFT_COLUMNS,
        opening=f"{len(demonstrations)} demonstrations ({task.overlong} over-long ones left out)",
        draw=draw_batch,
    )
    with memory_explained(c):
        supervised.train_on_examples(c, task, objective)
    print(escaped(f"model             {supervised.folder(c) / 'hf'}"))


def dry_run(c: FineTuning, request: DryRun = HERE) -> str:
    """Reports on a run with these settings; reads no weight."""
    from jppo.preflight.checks import dry_run_of_one_model

    def describe(task: DemonstrationTask) -> list[str]:
        return [f"demonstrations   {len(task.demonstrations):,} ({task.overlong} over-long ones left out)"]

    def pack_longest(task: DemonstrationTask) -> list[Rows]:
        numbers = range(len(task.demonstrations))
        longest = sorted(numbers, key=lambda i: _length(task.demonstrations[i]), reverse=True)
        return task.pack(longest[: c.data.train_batch_size])

    return dry_run_of_one_model(c, request, prepare, describe, pack_longest, noun="demonstrations")


def _length(demonstration: Demonstration) -> int:
    return len(demonstration.prompt) + len(demonstration.response)


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
