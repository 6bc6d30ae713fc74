"""Offload to host memory: the offloaded parts of a run, and what each stage copies to the devices."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jppo.learner.model_configs import ModelConfigs
from jppo.learner.ppo import Recipe
from jppo.models import placing
from jppo.settings import Common, Settings, UserError

SETTINGS = {
    "policy": ("actor", "param_offload"),
    "policy's optimizer": ("actor", "optimizer_offload"),
    "critic": ("critic", "param_offload"),
    "critic's optimizer": ("critic", "optimizer_offload"),
    "reference": ("ref", "param_offload"),
    "optimizer": ("optim", "optimizer_offload"),
}


def offloaded_parts(c: Common) -> list[str]:
    """Returns the parts to offload, named as in SETTINGS."""
    there = {part: getattr(c, section, None) for part, (section, _) in SETTINGS.items()}
    return [part for part, (_, leaf) in SETTINGS.items() if there[part] is not None and getattr(there[part], leaf)]


def require_host(c: Common, device: jax.Device) -> None:
    """Raises UserError where a part is to be offloaded and the devices have no host memory kind."""
    for part in offloaded_parts(c):
        if placing.host_kind(device) is None:
            known = ", ".join(memory.kind for memory in device.addressable_memories())
            raise UserError(
                f"{'.'.join(SETTINGS[part])}=True: {device.device_kind} has no memory of the host to copy from"
                f" ({placing.KINDS[0]}), only {known}; leave it at False"
            )


def describe_offload(c: Common, inputs: ModelConfigs | None, device: jax.Device) -> str | None:
    """Returns a line on the offloaded parts; None without any. `inputs` of PPO tell which parts exist."""
    parts = offloaded_parts(c)
    if inputs is not None and inputs.critic is None:
        parts = [part for part in parts if not part.startswith("critic")]
    if inputs is not None and inputs.reference is None:
        parts = [part for part in parts if part != "reference"]
    if not parts:
        return None
    same = "; on a CPU that is the same memory, and nothing is gained" if device.platform == "cpu" else ""
    return f"offloaded to {placing.host_kind(device)} memory between their uses: {', '.join(parts)}{same}"


@dataclasses.dataclass(frozen=True)
class Brought:
    """Bytes that are copied to a device for a stage and freed after it."""

    logprob: int
    reference: int
    values: int
    actor: int  # for the whole update; the optimizer comes for its steps
    critic: int


def brought(
    c: Settings,
    recipe: Recipe,
    size: Callable[[Any], int],
    *,
    policy: Any,
    critic: Any,
    reference: Any,
    shared_trunk: bool,
    own_reference: bool,
) -> Brought:
    """Computes the bytes per stage; policy and critic are `Trained`, or None. A shared base counts once."""
    of_policy = size((policy.learned, policy.base)) if c.actor.param_offload else 0
    of_reference = of_critic = 0
    if reference is not None and (c.ref.param_offload if own_reference else c.actor.param_offload):
        of_reference = size(reference)
    if critic is not None:
        of_critic += size(critic.learned) if c.critic.param_offload else 0
        of_critic += size(critic.base) if (c.actor if shared_trunk else c.critic).param_offload else 0
    beside = of_reference if own_reference else 0
    return Brought(
        logprob=of_policy,
        reference=of_policy + beside if recipe.in_reward(policy) is not None else of_reference,
        values=of_critic,
        actor=of_policy + (beside if recipe.in_loss(reference) is not None else 0),
        critic=of_critic,
    )
