"""Dry runs on a described machine: `--dry_run --machine=8xH100`.

The mesh has the described devices, so XLA's compiler for them compiles every program; nothing is computed.
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax

from jppo import process, settings
from jppo.forecast import compilers, machines
from jppo.forecast.machines import GIB, Machine
from jppo.learner import sharding
from jppo.learner.make import make_mesh
from jppo.preflight import auto
from jppo.preflight.memory_budget import MemoryBudget, device_budgets
from jppo.preflight.programs import Estimate, announce
from jppo.settings import Common, Settings, UserError

C = TypeVar("C", bound=Common)
SMALLEST = 2048  # tokens per device of the smallest micro-batch tried


@dataclasses.dataclass(frozen=True)
class DryRun:
    """The options of `--dry_run`."""

    machine: Machine | None = None  # None: this one
    json: str = ""  # path of the JSON report; '' writes none
    rollout_tokens_per_s: float = 0.0

    def mesh(self, c: Common) -> Any:
        """Makes the config's mesh of the devices."""
        mesh = make_mesh(c, None if self.machine is None else devices_of(self.machine))
        process.prepare_process(c, sharding.platform(mesh))
        return mesh

    def write(self, said: dict[str, Any]) -> None:
        """Writes the JSON file, if one is requested."""
        if self.json:
            path = pathlib.Path(self.json)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(said, indent=1) + "\n")
            except OSError as e:
                raise UserError(f"--json={self.json}: cannot be written: {e.strerror}; name another file") from e


def read_request(switches: dict[str, Any], command: str, argv: Sequence[str]) -> DryRun:
    """Reads the command line's request; for a described machine, reruns the command where its compiler is installed."""
    name, rate = switches.get("machine"), switches.get("rollout_tokens_per_s", 0.0)
    if (name is not None or switches.get("json") or rate) and not switches.get("dry_run"):
        flag = "machine" if name is not None else "json" if switches.get("json") else "rollout_tokens_per_s"
        raise UserError(f"--{flag} belongs to --dry_run, which trains nothing; add --dry_run")
    if rate < 0 or (rate and not name):
        raise UserError(
            f"--rollout_tokens_per_s={rate:g} must be above 0 and is for a described machine; add --machine"
        )
    machine = None if name is None else machines.parse_machine(name)  # a script's empty variable is no machine
    if machine is not None and not compilers.present(machine):
        compilers.rerun(machine, command, argv)
    return DryRun(machine, switches.get("json", ""), rate)


def devices_of(machine: Machine) -> list[Any]:
    """Returns the machine's devices; raises UserError if the compiler does not know it."""
    try:
        return compilers.described(machine)
    except jax.errors.JaxRuntimeError as e:
        raise UserError(f"--machine={machine.name}: its compiler says: {' '.join(str(e).split())[:300]}") from e


def capacity(c: Common, machine: Machine) -> tuple[int, str]:
    """Returns the bytes of a device that the trainer may use, and the reason."""
    if machine.chip.platform == "tpu":
        return machine.chip.memory, "all that XLA gives a program"
    share = process.trainer_share(c) if isinstance(c, Settings) else process.DEFAULT_SHARE
    return int(share * machine.chip.memory), f"{share:.0%} of the memory, JAX's share of the GPU"


def budgets(c: Common, machine: Machine, found: Estimate) -> list[MemoryBudget]:
    """Returns the budgets of a described machine's devices, and its host's needs."""
    room, why = capacity(c, machine)
    said = "" if found.server is not None and found.server.sleeps else f" ({why})"
    where = f"each of {machine.devices} {machine.chip.kind}{said}"
    places = device_budgets(found, where, room, machine.chip.memory)
    waiting = {f"{about}, waiting": count for about, count in found.host.items()}
    return [*places, *([MemoryBudget("its host, for each device", waiting, None)] if waiting else [])]


def too_small(c: Common, machine: Machine, found: Estimate) -> MemoryBudget | None:
    """Returns the budget that is exceeded most; None where all fit."""
    over = [one for one in budgets(c, machine, found) if one.verdict == "FAIL"]
    return max(over, key=lambda one: one.needs - (one.has or 0), default=None)


def estimate_fits(c: Common, machine: Machine, found: Estimate) -> bool:
    """Whether all programs compile, and all memories hold what they must."""
    return not found.refused and too_small(c, machine, found) is None


def require_room(c: C, machine: Machine, found: Estimate, estimate: Callable[[C], Estimate | None]) -> None:
    """Raises UserError where the machine is too small, with the worst moment and changes that fit.

    `estimate` compiles the run with other settings; it returns None for invalid ones.
    """
    if estimate_fits(c, machine, found):
        return
    over = too_small(c, machine, found)
    if found.refused or over is None:
        what = f"{found.refused[0].name} is refused by the compiler: {found.refused[0].account.error}"  # type: ignore[union-attr]
    elif f"temporaries: {found.worst.name}" in over.parts:
        what = f"{found.worst.name} takes {over.needs / GIB:.1f} GiB of each device's {(over.has or 0) / GIB:.1f}"
    else:
        what = f"{over.where}: {over.needs / GIB:.1f} GiB of {(over.has or 0) / GIB:.1f}"
    for changes in [*shares(found, over), *remedies(c)]:
        other = settings.changed(c, changes)
        announce(f"it does not fit; trying {auto.as_arguments(changes)}")
        tried = estimate(other)
        if tried is not None and estimate_fits(other, machine, tried):
            raise UserError(f"{machine.name}: {what}; {auto.as_arguments(changes)} fits: {tried.peak / GIB:.1f} GiB")
    raise UserError(
        f"{machine.name}: {what}; neither model.remat=full, smaller micro-batches nor offload is enough: take more"
        " devices with mesh.fsdp=-1, or model.lora_rank"
    )


def shares(found: Estimate, over: MemoryBudget | None) -> Iterator[dict[str, Any]]:
    """Yields a smaller or larger share for servers, where theirs is what does not fit."""
    server = found.server
    if server is None or over is None or over.has is None or server.cache:
        return
    least = sum(server.least().values())
    fraction = 0.0
    if over.parts == server.least():  # their own share is too small
        fraction = math.ceil(100 * 1.1 * least * server.fraction / over.has) / 100
    elif server.awake(over.has).items() <= over.parts.items():
        fraction = math.floor(100 * (server.fraction - (over.needs - over.has) / over.has)) / 100
    if fraction * over.has >= least and fraction < 1.0:
        yield {"rollout.gpu_memory_utilization": fraction}


def remedies(c: Common) -> Iterator[dict[str, Any]]:
    """Yields cumulative changes that need less memory: recomputation, smaller micro-batches, offload."""
    changes: dict[str, Any] = {}
    if c.model.remat != "full":
        changes["model.remat"] = "full"
        yield dict(changes)
    section = "actor" if isinstance(c, Settings) else "optim"
    longest = c.data.longest_row
    tokens = settings.value_of(c, f"{section}.max_tokens_per_device")
    while tokens // 2 >= max(longest, SMALLEST):
        tokens //= 2
        changes[f"{section}.max_tokens_per_device"] = tokens
        yield dict(changes)
    optimizers = [f"{n}.optimizer_offload" for n, one in settings.optimizers(c).items() if not one.optimizer_offload]
    models = [f"{name}.param_offload" for name in ("actor", "critic", "ref")] if isinstance(c, Settings) else []
    for some in filter(None, (optimizers, models)):
        changes |= dict.fromkeys(some, True)
        yield dict(changes)
