"""Direct preference optimisation: python -m jppo.dpo --config=configs/tinystories_dpo.py

Trains a policy on preference pairs to prefer the chosen response, as far as `dpo.beta` lets it leave the initial
policy, by DPO's loss or IPO's. No reward model and no sampling: a pair needs its log-probs by the policy and by the
initial one. The result is an HF directory, RUN_DIR/hf. The same command resumes a killed run from its last checkpoint
(trainer.save_freq). Settings are given as --config.SECTION.NAME=VALUE. --dry_run prints them with the run's derived
sizes and memory, and stops. --dry_run --machine=8xH100 does so for a described machine.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from jppo import settings
from jppo.data.preferences import PairSet
from jppo.data.prompts import Messages
from jppo.data.rows import Row
from jppo.data.tokenizer import Renderer, encode_all
from jppo.errors import UserError
from jppo.learner import preference
from jppo.learner.make import logprob_of_texts
from jppo.learner.trainable import Trainable
from jppo.models.config import pad_vocab
from jppo.models.lora import Weights
from jppo.preflight.request import HERE, DryRun
from jppo.run import pairs, supervised
from jppo.run.command import run_training
from jppo.runlog.console import DPO_COLUMNS
from jppo.settings import PreferenceTuning
from jppo.types import Array, Params, Rows, Trajectory, given_text


def prepare(c: PreferenceTuning, request: DryRun = HERE) -> pairs.PairTask:
    """Reads the pairs and the model config, and makes the loss of DPO."""
    _, cfg, tokenizer = supervised.read_model(c, "lm", weights=request.machine is None)
    if tokenizer.eos_token_id is None:
        raise UserError("the tokenizer has no end token to end responses with; set eos_token in its config")
    render = Renderer(tokenizer)

    def prompt_ids(messages: Messages) -> list[int]:
        text = messages if isinstance(messages, str) else render(messages, Row("a pair", 0, {}))
        return encode_all(tokenizer, [text], add_special_tokens=isinstance(messages, str))[0]

    def encode(messages: Messages, response: str) -> list[int]:
        answer = encode_all(tokenizer, [response], add_special_tokens=False)[0]
        return [*prompt_ids(messages), *answer, tokenizer.eos_token_id]

    starts = lambda messages: len(prompt_ids(messages))  # noqa: E731
    training, held_out = pairs.read_pair_sets(c, tokenizer, encode=encode, starts=starts)
    mesh = request.mesh(c)
    cfg = pad_vocab(cfg, mesh.shape["tensor"])
    logprob = logprob_of_texts(c, cfg, mesh)

    def logprobs(policy: Weights, rows: Rows) -> Array:
        return logprob(policy, rows).logprob

    loss, count = preference.make_pullback(logprobs), len(training.pairs)
    return pairs.PairTask(
        name="dpo",
        pairs=training,
        held_out=held_out,
        sequence=as_trajectory,
        scores=preference.make_scores(logprobs, mesh=mesh),
        slope=preference.make_dpo_slope(c.dpo.loss_type, beta=c.dpo.beta),
        **supervised.task_fields(c, mesh, cfg, loss, head="lm", examples=count, sequences=2),
    )


def train(config: PreferenceTuning | ConfigDict) -> None:
    """Trains the policy by DPO on all pairs, or resumes, tests on held-out pairs, and writes the model."""
    c = settings.typed(config, PreferenceTuning)
    initial: list[Any] = []  # the log-probs of all pairs by the initial policy, or the means to compute them

    def begin(task: pairs.PairTask, model: Trainable, params: Params) -> None:
        """Computes or keeps the log-probs of the pairs by the initial policy, before it is trained."""

        def logprobs(pair_set: PairSet, indices: Sequence[int], params: Params) -> np.ndarray:
            rows = pairs.pack_pairs(task, [pair_set.pairs[i] for i in indices])
            return np.asarray(pairs.score_pairs(task, model, params, rows, len(indices)))

        if c.dpo.reference == "mesh":
            copy = jax.tree.map(jnp.copy, params)
            initial[:] = [lambda pair_set, indices: logprobs(pair_set, indices, copy)]
            return
        stored = {}
        for pair_set in (task.pairs, task.held_out):
            index_blocks = pairs.pair_blocks(c, len(pair_set.pairs))
            blocks = [logprobs(pair_set, indices, params).reshape(2, -1) for indices in index_blocks]
            stored[id(pair_set)] = np.concatenate(blocks, axis=1)
        initial[:] = [lambda pair_set, indices: stored[id(pair_set)][:, list(indices)].reshape(-1)]

    def loss_inputs(task: pairs.PairTask, pair_set: PairSet, indices: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the initial log-probs and the token counts of these pairs' responses."""
        batch = [pair_set.pairs[i] for i in indices]
        tokens = [len(p.chosen) - p.starts[0] for p in batch] + [len(p.rejected) - p.starts[1] for p in batch]
        return initial[0](pair_set, indices), np.array(tokens, np.float32)

    pairs.train_on_pairs(c, prepare, DPO_COLUMNS, loss_inputs, begin)


def dry_run(c: PreferenceTuning, request: DryRun = HERE) -> str:
    """Reports on a run with these settings; reads no weight."""
    return pairs.dry_run_of_pairs(c, request, prepare)


def as_trajectory(ids: np.ndarray, start: int) -> Trajectory:
    """Converts prompt and response to the layout of a sampled response, so that one packer serves both."""
    return given_text(ids, np.arange(len(ids)) >= start)


@settings.exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    """Trains a policy on preference pairs, or prints its dry run."""
    run_training(argv, "jppo.dpo", __doc__, PreferenceTuning, dry_run=dry_run, train=train)


if __name__ == "__main__":
    main()
