"""The reference's log-probs of a step: of the model on the mesh, or of the servers at `ref.url`."""

from collections.abc import Sequence
from typing import Any

from jppo.learner import batch, ppo
from jppo.models.lora import Weights
from jppo.run.start import Run
from jppo.types import Batch, Trajectory


def add_reference(
    run: Run, data: Batch, micros: Any, trajectories: Sequence[Trajectory], sources: Sequence[str], policy: Weights
) -> tuple[Batch, dict[str, float]]:
    """Adds the log-probs, or the exact KL to the reference, to the batch; returns also metrics of servers.

    `sources`: each trajectory's data source.
    """
    learner = run.learner
    if learner.reference is not None:
        with run.timer("ref"):
            count = run.timer.part("micro-batches", len(micros))
            found = ppo.with_reference(learner.passes, learner.recipe, data, micros, policy, learner.reference, count)
            return found, {}
    if run.reference is not None:
        with run.timer("ref"):
            logprobs, metrics = run.reference.logprobs(trajectories, sources)
            return batch.with_reference_logprobs(data, logprobs), metrics
    return data, {}
