"""Packing of a run's rows: the kind and the row shapes."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jppo.learner import devices, packing, prefix, sharding
from jppo.models import attention, cost
from jppo.models.config import ModelConfig
from jppo.settings import Common, Settings, UserError, has_branches

# Four row lengths instead of one are up to 21 further programs, some seconds each, and save at most 3/8 of the entries.
WORTH_S = 300.0  # assumed, as the next two
REACHED, CPU_FLOPS = 0.4, 1e11  # share of a device's peak; rate of all cores of a CPU


def packing_kind(c: Common, mesh: Any) -> str:
    """Returns the packing kind. Shared rows need a fused segment kernel: else their mask is quadratic."""
    if c.data.packing != "auto":
        return c.data.packing
    return "segments" if sharding.platform(mesh) == "tpu" and c.model.attention in ("auto", "splash") else "buckets"


def shared_prompts(c: Common, mesh: Any) -> tuple[int, int] | None:
    """Returns the longest prompt and response where n responses share one prompt."""
    return (c.data.max_prompt_length, c.data.max_response_length) if packing_kind(c, mesh) == "prefix" else None


def row_lengths(c: Common, mesh: Any, policy: ModelConfig, sequences: int) -> int:
    """Returns `data.row_lengths`; if it is open, 1 for a run whose `sequences` take little time at full length."""
    if c.data.row_lengths != -1:
        return c.data.row_lengths
    learned = 3 * sequences * cost.forward(policy, [c.data.longest_row], head_tokens=c.data.max_response_length)
    peak = devices.known_peak(mesh.devices.flat[0].device_kind, c.model.compute_dtype)
    rate = CPU_FLOPS if peak is None else mesh.size * peak * REACHED
    return 4 if learned / rate > WORTH_S else 1


def make_plan(
    c: Common,
    mesh: Any,
    *,
    tokens_per_device: int,
    sequences: int,
    steps: int,
    policy: ModelConfig,
    more: int = 0,
    sizes: Sequence[int] = (),
) -> packing.Plan:
    """Plans the row shapes of a run of `steps` batches; `more` is extra tokens per sequence beyond prompt and response.

    With shared prompts, the policy's cost model sets the lengths. `sizes` is as in `packing.make_plan`.
    """
    multiple, length_multiple = sharding.row_multiple(mesh), sharding.length_multiple(mesh)
    row, of_device, shared = c.data.max_tokens_per_row, tokens_per_device * length_multiple, shared_prompts(c, mesh)
    how = dict[str, Any]()
    if shared is not None and isinstance(c, Settings):
        if row == -1:
            row = min(of_device, prefix.longest_row(*shared, samples=c.rollout.n))

        def price(length: int) -> float:
            return cost.price(policy, attention.computed(length, shared) / length)

        how = dict(price=price, shared=shared)
    longest = c.data.longest_row + more
    return packing.make_plan(
        packing_kind(c, mesh),
        max_length=longest,
        row_lengths=row_lengths(c, mesh, policy, steps * sequences_of_step(c)),
        max_tokens_per_row=longest if row == -1 else row,
        tokens_per_micro=of_device * multiple,
        sequences=sequences,
        row_multiple=multiple,
        length_multiple=length_multiple,
        sizes=sizes,
        **how,
    )


def plan_of_run(c: Settings, mesh: Any, policy: ModelConfig, steps: int) -> packing.Plan:
    """Plans the row shapes of a PPO run of `steps`."""
    sizes = (c.actor.ppo_mini_batch_size, critic_mini_batch_size(c))
    plan = make_plan(
        c, mesh, tokens_per_device=c.actor.max_tokens_per_device, sequences=max(sizes), steps=steps,
        policy=policy, sizes=() if has_branches(c.rollout) else sizes,
    )  # fmt: skip
    return dataclasses.replace(plan, experts=replayed(c, policy))


def replayed(c: Settings, policy: ModelConfig) -> tuple[int, int] | None:
    """Returns the layers and the active experts of each token if experts are replayed; UserError without any."""
    if not c.rollout.routing_replay:
        return None
    if policy.experts is None:
        raise UserError(
            f"rollout.routing_replay=True: the {policy.family} model of model.path has no experts; set it to False"
        )
    return policy.num_layers, policy.experts.active


def critic_mini_batch_size(c: Settings) -> int:
    """Returns the critic's sequences per optimizer step."""
    own = c.critic.ppo_mini_batch_size
    return c.actor.ppo_mini_batch_size if own is None else own


def critic_epochs(c: Settings, step: int) -> int:
    """Returns the critic's epochs over the batch of a step; in its warm-up they may be more."""
    of_warmup, own, actors = c.critic.warmup_epochs, c.critic.ppo_epochs, c.actor.ppo_epochs
    if step < c.trainer.critic_warmup and of_warmup is not None:
        return int(of_warmup)
    return int(actors if own is None else own)


def sequences_of_step(c: Common) -> int:
    """Returns the trajectories per step."""
    return c.data.train_batch_size * (c.rollout.n if isinstance(c, Settings) else 1)


def most_sequences(c: Settings) -> int:
    """Returns the most trajectories of a step, the branches of episodes included."""
    return sequences_of_step(c) * (c.rollout.agent_branches if has_branches(c.rollout) else 1)


def batch_shape(c: Settings, mesh: Any) -> tuple[int, int]:
    """Returns a step's flat batch [B, L]: trajectories with branches, padded for the mesh, by the longest response."""
    devices = sharding.whole_row_multiple(mesh)
    return -(-most_sequences(c) // devices) * devices, c.data.max_response_length
