"""FLOP utilisation (MFU) of the stages that are passes of a single model."""

from collections.abc import Mapping, Sequence

from jax.sharding import Mesh

from jppo.learner import cost, sharding
from jppo.learner.ppo import ModelConfigs, StepLearner
from jppo.types import Trajectory

# Metrics by verl's names, and the stages that they are of.
STAGES = {"perf/mfu/actor": "update_actor", "perf/mfu/critic": "update_critic", "perf/mfu/actor_infer": "old_log_prob"}


def introduce_peak(mesh: Mesh, dtype: str) -> str:
    """Describes the peak FLOP/s behind perf/mfu, for the console."""
    peak = sharding.find_peak(mesh, dtype)  # if measured, once per process
    return f"perf/mfu is relative to {peak.flops_per_s / 1e12:,.3g} TFLOP/s, {peak.source}"


def utilisation(
    learner: StepLearner,
    inputs: ModelConfigs,
    trajectories: Sequence[Trajectory],
    seconds: Mapping[str, float],
    *,
    step: int,
    dtype: str,
) -> dict[str, float]:
    """Returns MFU by metric, of the stages of a step that took these `seconds` by name."""
    flops = _count(learner, inputs, trajectories, step)
    rate = sharding.find_peak(learner.mesh, dtype).flops_per_s
    measured = {name: stage for name, stage in STAGES.items() if stage in flops and stage in seconds}
    return {name: flops[stage] / seconds[stage] / rate for name, stage in measured.items()}


def _count(learner: StepLearner, inputs: ModelConfigs, trajectories: Sequence[Trajectory], step: int) -> dict[str, int]:
    """Counts FLOP per stage over a step's batch; the language head counts sampled tokens only."""
    lengths = [len(t.tokens) for t in trajectories]
    sampled = sum(int(t.sampled.sum()) for t in trajectories)
    epoch_flop = cost.update(
        inputs.policy, lengths, head_tokens=sampled, adapters=inputs.adapters, frozen=inputs.frozen
    )
    flops = {"update_actor": learner.actor_epochs.of_step(step) * epoch_flop}
    if not learner.recipe.bypass:
        flops["old_log_prob"] = cost.forward(inputs.policy, lengths, head_tokens=sampled, adapters=inputs.adapters)
    if inputs.critic is not None:
        epoch_flop = cost.update(
            inputs.critic, lengths, head_tokens=0, adapters=inputs.critic_adapters, frozen=inputs.critic_frozen
        )
        flops["update_critic"] = learner.critic_epochs.of_step(step) * epoch_flop
    return flops
