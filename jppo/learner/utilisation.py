"""FLOP utilisation (MFU) of a step's passes."""

from collections.abc import Mapping, Sequence

from jax.sharding import Mesh

from jppo.learner.model_configs import ModelConfigs
from jppo.learner.recipe import critic_epochs
from jppo.learner.sharding import find_peak
from jppo.models import cost
from jppo.settings import Settings
from jppo.types import Trajectory

# verl's names for the stages that are passes of a single model.
STAGES = {"perf/mfu/actor": "update_actor", "perf/mfu/critic": "update_critic", "perf/mfu/actor_infer": "old_log_prob"}


def introduce_peak(c: Settings, mesh: Mesh) -> str:
    """Describes the peak FLOP/s behind perf/mfu, for the console."""
    found = find_peak(mesh, c.model.compute_dtype)  # if measured, once per process
    return f"FLOP utilisation is of {found.flops_per_s / 1e12:,.3g} TFLOP/s, {found.source}"


def stage_flops(c: Settings, inputs: ModelConfigs, trajectories: Sequence[Trajectory], epochs: int) -> dict[str, int]:
    """Counts FLOP per stage over the batch, of the critic in so many epochs; the head counts sampled tokens only."""
    lengths = [len(t.tokens) for t in trajectories]
    sampled = sum(int(t.sampled.sum()) for t in trajectories)
    policy, how = inputs.policy, inputs.adapters
    found = {"update_actor": c.actor.ppo_epochs * cost.update(policy, lengths, head_tokens=sampled, adapters=how)}
    if c.algorithm.old_logprob != "bypass":
        found["old_log_prob"] = cost.forward(policy, lengths, head_tokens=sampled, adapters=how)
    if inputs.critic is not None:
        once = cost.update(inputs.critic, lengths, head_tokens=0, adapters=inputs.critic_adapters)
        found["update_critic"] = epochs * once
    return found


def utilisation(
    c: Settings,
    inputs: ModelConfigs,
    mesh: Mesh,
    trajectories: Sequence[Trajectory],
    seconds: Mapping[str, float],
    *,
    step: int,
) -> dict[str, float]:
    """Returns MFU by stage, for the stages that ran in this step."""
    epochs = critic_epochs(c, step)
    flops, rate = stage_flops(c, inputs, trajectories, epochs), find_peak(mesh, c.model.compute_dtype).flops_per_s
    took_place = {name: stage for name, stage in STAGES.items() if stage in flops and stage in seconds}
    return {name: flops[stage] / seconds[stage] / rate for name, stage in took_place.items()}
