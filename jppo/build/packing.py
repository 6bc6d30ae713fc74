"""How a run packs its rows: the kind, and the shapes that it will see."""

from typing import Any

from ml_collections import ConfigDict

from jppo.learner import packing, prefix, sharding
from jppo.models import attention, cost
from jppo.models.families import ModelConfig


def packing_kind(c: ConfigDict, mesh: Any) -> str:
    """How rows are packed. Shared rows pay with a fused kernel for segments: else their mask costs a row's square."""
    if c.data.packing != "auto":
        return c.data.packing
    return "segments" if sharding.platform(mesh) == "tpu" and c.model.attention in ("auto", "splash") else "buckets"


def shared_prompts(c: ConfigDict, mesh: Any) -> tuple[int, int] | None:
    """The longest prompt and response where prompts are there once for several responses."""
    return (c.data.max_prompt_length, c.data.max_response_length) if packing_kind(c, mesh) == "prefix" else None


def make_plan(
    c: ConfigDict,
    mesh: Any,
    *,
    tokens_per_device: int,
    sequences: int,
    more: int = 0,
    policy: ModelConfig | None = None,
) -> packing.Plan:
    """The shapes of rows that the run will see; `more`: tokens of a sequence beside prompt and response.

    Where prompts are shared, what they cost the policy decides.
    """
    multiple, length_multiple = sharding.row_multiple(mesh), sharding.length_multiple(mesh)
    row, of_device, shared = c.data.max_tokens_per_row, tokens_per_device * length_multiple, shared_prompts(c, mesh)
    how = dict[str, Any]()
    if shared is not None and policy is not None:
        if row == -1:
            row = min(of_device, prefix.longest_row(*shared, samples=c.rollout.n))

        def price(length: int) -> float:
            return cost.price(policy, attention.computed(length, shared) / length)

        how = dict(price=price, shared=shared)
    longest = c.data.max_prompt_length + c.data.max_response_length + more
    return packing.make_plan(
        packing_kind(c, mesh),
        max_length=longest,
        row_lengths=c.data.row_lengths,
        max_tokens_per_row=longest if row == -1 else row,
        tokens_per_micro=of_device * multiple,
        sequences=sequences,
        row_multiple=multiple,
        length_multiple=length_multiple,
        **how,
    )


def plan_of_run(c: ConfigDict, mesh: Any, policy: ModelConfig) -> packing.Plan:
    """The shapes of rows of a PPO run."""
    sequences = max(c.actor.ppo_mini_batch_size, critic_mini_batch_size(c))
    return make_plan(c, mesh, tokens_per_device=c.actor.max_tokens_per_device, sequences=sequences, policy=policy)


def critic_mini_batch_size(c: ConfigDict) -> int:
    """Sequences in an optimizer step of the critic."""
    own = c.critic.ppo_mini_batch_size
    return c.actor.ppo_mini_batch_size if own is None else own


def sequences_of_step(c: ConfigDict) -> int:
    """How many trajectories a step has."""
    return c.data.train_batch_size * c.rollout.n


def batch_shape(c: ConfigDict, mesh: Any) -> tuple[int, int]:
    """A step's flat batch [B, L]: its trajectories, padded to what the devices share, by the longest response."""
    devices = sharding.whole_row_multiple(mesh)
    return -(-sequences_of_step(c) // devices) * devices, c.data.max_response_length
