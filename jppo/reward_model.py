"""Training of a reward model: python -m jppo.reward_model --config=configs/tinystories_reward_model.py

Trains on preference pairs to score the chosen response higher, with the packing and optimizer of PPO. The model's
scalar head is read at the last token. The result is an HF directory, RUN_DIR/hf, a sequence classifier with one label:
reward.model.path of a PPO run. The same command resumes a killed run from its last checkpoint (trainer.save_freq).
Settings are given as --config.SECTION.NAME=VALUE. --dry_run prints them with the run's derived sizes and memory, and
stops. --dry_run --machine=8xH100 does so for a described machine.
"""

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from jppo import settings
from jppo.data.preferences import Encode, PairSet
from jppo.learner import preference, score
from jppo.learner.make import make_decoder
from jppo.models import hf_write
from jppo.models.config import pad_vocab
from jppo.plugins.reward_models.classifier import without_padding
from jppo.plugins.reward_models.model import Texts
from jppo.preflight.request import HERE, DryRun
from jppo.rewards.parts import Sample
from jppo.run import pairs, supervised
from jppo.run.command import run_training
from jppo.runlog.console import REWARD_MODEL_COLUMNS
from jppo.settings import PairTraining
from jppo.types import Prompt, Trajectory, given_text


def prepare(c: PairTraining, request: DryRun = HERE) -> pairs.PairTask:
    """Reads the pairs and the model config, and makes the loss of a reward model."""
    config_dict, cfg, tokenizer = supervised.read_model(c, "value", weights=request.machine is None)
    changes = hf_write.classifier_changes(c.model.path, pad_token_id=tokenizer.pad_token_id)
    training, held_out = pairs.read_pair_sets(
        c,
        tokenizer,
        encode=make_encode(tokenizer, (config_dict | changes).get("pad_token_id")),
        margin=c.loss.margin,
        margin_column=c.loss.margin_column,
    )
    mesh = request.mesh(c)
    # Random, unlike a critic's: nothing subtracts the first scores, and equal ones would order no pair.
    std = (cfg.hidden_size + 1) ** -0.5
    cfg = dataclasses.replace(pad_vocab(cfg, mesh.shape["tensor"]), value_head_std=std)
    value = score.make_value(make_decoder(c, cfg, mesh))
    loss, count = preference.make_pullback(value), len(training.pairs)
    return pairs.PairTask(
        name="rm",
        pairs=training,
        held_out=held_out,
        changes=changes,  # of a sequence classifier
        sequence=as_trajectory,
        scores=preference.make_scores(value, mesh=mesh),
        slope=preference.make_slope(center=c.loss.center_rewards_coefficient),
        # `as_trajectory` adds a token
        **supervised.task_fields(c, mesh, cfg, loss, head="value", examples=count, sequences=2, extra=1),
    )


def make_encode(tokenizer: Any, pad_token_id: int | None) -> Encode:
    """Makes the function that tokenises prompt and response as a PPO run's reward model reads them."""
    texts = Texts(tokenizer, max_length=sys.maxsize)
    nothing = np.zeros(0, np.int32)

    def encode(messages: str | list[dict[str, str]], response: str) -> list[int]:
        ids, _ = texts.read(Sample(Prompt("", "", messages, nothing, "", {}), response, 0, "stop"))
        return without_padding(ids, pad_token_id)

    return encode


def train(config: PairTraining | ConfigDict) -> None:
    """Trains a reward model on all pairs, or resumes, tests on held-out pairs, and writes the model."""
    pairs.train_on_pairs(settings.typed(config, PairTraining), prepare, REWARD_MODEL_COLUMNS, loss_inputs)


def loss_inputs(_: pairs.PairTask, pair_set: PairSet, indices: Sequence[int]) -> tuple[np.ndarray]:
    """Returns what the loss needs besides the scores: the margins of these pairs."""
    return (pairs.margins([pair_set.pairs[i] for i in indices]),)


def dry_run(c: PairTraining, request: DryRun = HERE) -> str:
    """Reports on a run with these settings; reads no weight."""
    return pairs.dry_run_of_pairs(c, request, prepare)


def as_trajectory(ids: np.ndarray, _: int = 0) -> Trajectory:
    """Converts a text to the layout of a sampled response, so that one packer serves both.

    The packer drops the last token, the prediction target. A score needs all tokens, so one is appended. Only its
    position is used, as the one entry in the mask.
    """
    return given_text(np.append(ids, 0), np.arange(len(ids) + 1) == len(ids))


@settings.exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    """Trains a reward model on preference pairs, or prints its dry run."""
    run_training(argv, "jppo.reward_model", __doc__, PairTraining, dry_run=dry_run, train=train)


if __name__ == "__main__":
    main()
