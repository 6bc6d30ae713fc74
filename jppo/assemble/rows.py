"""How a run packs its rows: the kind, and the shapes that it will see."""

import math
from typing import Any

import jax
from ml_collections import ConfigDict

from jppo.learner import packing, prefix, sharding
from jppo.models import cost
from jppo.models.families import ModelConfig


def packing_kind(c: ConfigDict) -> str:
    """How rows are packed. Shared rows pay with a fused kernel for segments: else their mask costs a row's square."""
    if c.data.packing != "auto":
        return c.data.packing
    return "segments" if jax.default_backend() == "tpu" and c.model.attention in ("auto", "splash") else "buckets"


def make_plan(
    c: ConfigDict, mesh: Any, *, tokens_per_device: int, sequences: int, even: float = math.inf
) -> packing.Plan:
    """The shapes of rows that the run will see; `even`, for prompts that are shared, as in `packing.Plan`."""
    multiple, length_multiple = sharding.row_multiple(mesh), sharding.length_multiple(mesh)
    longest = c.data.max_prompt_length + c.data.max_response_length
    kind, row, of_device = packing_kind(c), c.data.max_tokens_per_row, tokens_per_device * length_multiple
    if row == -1:
        row = min(_longest_row(c, even), of_device) if kind == "prefix" else longest
    return packing.make_plan(
        kind,
        max_length=longest,
        row_lengths=c.data.row_lengths,
        max_tokens_per_row=row,
        tokens_per_micro=of_device * multiple,
        sequences=sequences,
        row_multiple=multiple,
        length_multiple=length_multiple,
        even=even,
    )


def _longest_row(c: ConfigDict, even: float) -> int:
    d = c.data
    return prefix.longest_row(
        prompt=d.max_prompt_length, response=d.max_response_length, samples=c.rollout.n, even=even
    )


def plan_of_run(c: ConfigDict, mesh: Any, policy: ModelConfig) -> packing.Plan:
    """The shapes of rows of a PPO run."""
    sequences = max(c.actor.ppo_mini_batch_size, critic_mini_batch_size(c))
    how = dict[str, Any](tokens_per_device=c.actor.max_tokens_per_device, sequences=sequences)
    return make_plan(c, mesh, **how, even=cost.even_row(policy))


def critic_mini_batch_size(c: ConfigDict) -> int:
    """Sequences in an optimizer step of the critic."""
    own = c.critic.ppo_mini_batch_size
    return c.actor.ppo_mini_batch_size if own is None else own


def sequences_of_step(c: ConfigDict) -> int:
    """How many trajectories a step has."""
    return c.data.train_batch_size * c.rollout.n
