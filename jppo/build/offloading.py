"""What of a run waits on the host between its uses, by its settings, and what comes to the devices for which stage."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from ml_collections import ConfigDict

from jppo.build.inputs import Inputs
from jppo.learner.ppo import Recipe
from jppo.models import offload
from jppo.settings import UserError

SETTINGS = {
    "policy": ("actor", "param_offload"),
    "policy's optimizer": ("actor", "optimizer_offload"),
    "critic": ("critic", "param_offload"),
    "critic's optimizer": ("critic", "optimizer_offload"),
    "reference": ("ref", "param_offload"),
    "optimizer": ("optim", "optimizer_offload"),
}


def asked(c: ConfigDict) -> list[str]:
    """The parts that are to wait, as SETTINGS names them."""
    there = {part: getattr(c, section, None) for part, (section, _) in SETTINGS.items()}
    return [part for part, (_, leaf) in SETTINGS.items() if there[part] is not None and getattr(there[part], leaf)]


def require_host(c: ConfigDict, device: jax.Device) -> None:
    """UserError where something is to wait on the host and the devices have no memory of it to be fed from."""
    for part in asked(c):
        if offload.host_kind(device) is None:
            known = ", ".join(memory.kind for memory in device.addressable_memories())
            raise UserError(
                f"{'.'.join(SETTINGS[part])}=True: {device.device_kind} has no memory of the host to copy from"
                f" ({offload.KINDS[0]}), only {known}; leave it at False"
            )


def introduce(c: ConfigDict, inputs: Inputs | None, device: jax.Device) -> str | None:
    """What waits where, as a line; None where nothing does. `inputs` of PPO say what there is."""
    parts = asked(c)
    if inputs is not None and inputs.critic is None:
        parts = [part for part in parts if not part.startswith("critic")]
    if inputs is not None and inputs.reference is None:
        parts = [part for part in parts if part != "reference"]
    if not parts:
        return None
    same = "; a CPU's is the same memory, so that nothing is gained" if device.platform == "cpu" else ""
    return f"waiting in {offload.host_kind(device)} memory between their uses: {', '.join(parts)}{same}"


@dataclasses.dataclass(frozen=True)
class Brought:
    """Bytes that come to a device for a stage, and are gone after it."""

    logprob: int
    reference: int
    values: int
    actor: int  # for the whole of the update; the optimizer comes for its steps
    critic: int


def brought(
    c: ConfigDict,
    recipe: Recipe,
    size: Callable[[Any], int],
    *,
    policy: Any,
    critic: Any,
    reference: Any,
    shared_trunk: bool,
    own_reference: bool,
) -> Brought:
    """What comes when; policy and critic are `Trained`, or None. A base that two of them have is there once."""
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
