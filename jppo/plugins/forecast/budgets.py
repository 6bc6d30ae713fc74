"""The memory that a run needs on a described machine (`--dry_run --machine=8xH100`), and settings that fit."""

import math
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from jppo import process, settings
from jppo.errors import UserError
from jppo.plugins.forecast.machines import GIB, Machine
from jppo.preflight import memory_budget
from jppo.preflight.memory_budget import MemoryBudget
from jppo.preflight.programs import Estimate, announce
from jppo.rollout.make import servers_gpu_share
from jppo.settings import Settings, Training

C = TypeVar("C", bound=Training)


def capacity(c: Training, machine: Machine) -> tuple[int, str]:
    """Returns the bytes of a device that the trainer may use, and the reason."""
    if machine.chip.platform == "tpu":
        return machine.chip.memory, "all that XLA gives a program"
    share = process.DEFAULT_SHARE
    if isinstance(c, Settings):
        share = process.trainer_share(servers_gpu_share(c), sleeping=c.rollout.sleep_level > 0)
    return int(share * machine.chip.memory), f"{share:.0%} of the memory, JAX's share of the GPU"


def described_budgets(c: Training, machine: Machine, estimate: Estimate) -> list[MemoryBudget]:
    """Returns the memory budgets of a machine that is only described: of its devices, and its host's needs."""
    room, share = capacity(c, machine)
    reason = "" if estimate.server is not None and estimate.server.sleeps else f" ({share})"
    where = f"each of {machine.devices} {machine.chip.kind}{reason}"
    budgets = memory_budget.device_budgets(estimate, where, room, machine.chip.memory)
    waiting = {f"{about}, waiting": count for about, count in estimate.host.items()}
    return [*budgets, *([MemoryBudget("its host, for each device", waiting, None)] if waiting else [])]


def _most_exceeded(c: Training, machine: Machine, estimate: Estimate) -> MemoryBudget | None:
    """Returns the budget that is exceeded most; None where all fit."""
    exceeded = [budget for budget in described_budgets(c, machine, estimate) if budget.verdict == "FAIL"]
    return max(exceeded, key=lambda budget: budget.needs - (budget.has or 0), default=None)


def estimate_fits(c: Training, machine: Machine, estimate: Estimate) -> bool:
    """Whether all programs compile, and all memories hold what they must."""
    return not estimate.refused and _most_exceeded(c, machine, estimate) is None


def require_room(c: C, machine: Machine, estimated: Estimate, estimate: Callable[[C], Estimate | None]) -> None:
    """Raises UserError where the machine is too small, with the worst moment and changes that fit.

    `estimate` compiles the run with other settings; it returns None for invalid ones.
    """
    if estimate_fits(c, machine, estimated):
        return
    exceeded = _most_exceeded(c, machine, estimated)
    if estimated.refused or exceeded is None:
        problem = f"{estimated.refused[0].name} is refused by the compiler: {estimated.refused[0].compiled.error}"
    elif f"temporaries: {estimated.worst.name}" in exceeded.parts:
        device_gib = (exceeded.has or 0) / GIB
        problem = f"{estimated.worst.name} takes {exceeded.needs / GIB:.1f} GiB of each device's {device_gib:.1f}"
    else:
        problem = f"{exceeded.where}: {exceeded.needs / GIB:.1f} GiB of {(exceeded.has or 0) / GIB:.1f}"
    for changes in [*_server_shares(estimated, exceeded), *memory_budget.remedies(c)]:
        changed = settings.changed(c, changes)
        arguments = memory_budget.as_arguments(changes)
        announce(f"it does not fit; trying {arguments}")
        tried = estimate(changed)
        if tried is not None and estimate_fits(changed, machine, tried):
            raise UserError(f"{machine.name}: {problem}; {arguments} fits: {tried.peak / GIB:.1f} GiB")
    raise UserError(
        f"{machine.name}: {problem}; neither model.remat=full, smaller micro-batches nor offload is enough: take more"
        " devices with mesh.data=1 mesh.fsdp=-1, or model.lora_rank"
    )


def _server_shares(estimate: Estimate, exceeded: MemoryBudget | None) -> Iterator[dict[str, Any]]:
    """Yields a smaller or larger share of the GPU for servers, where theirs is what does not fit."""
    server = estimate.server
    if server is None or exceeded is None or exceeded.has is None or server.cache:
        return
    minimum = sum(server.least().values())
    fraction = 0.0
    if exceeded.parts == server.least():  # their own share is too small
        fraction = math.ceil(100 * 1.1 * minimum * server.fraction / exceeded.has) / 100
    elif server.awake(exceeded.has).items() <= exceeded.parts.items():
        fraction = math.floor(100 * (server.fraction - (exceeded.needs - exceeded.has) / exceeded.has)) / 100
    if fraction * exceeded.has >= minimum and fraction < 1.0:
        yield {"rollout.gpu_memory_utilization": fraction}
