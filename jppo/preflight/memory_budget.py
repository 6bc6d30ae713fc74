"""Memory budgets: the bytes that a run needs in each memory of a machine, those that are there, and settings that fit.

Memory chooses `model.remat=auto` and `actor.max_tokens_per_device=-1`: candidates are compiled as the run would compile
them, least recomputation first; the first that fits is selected.
"""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from jppo import settings
from jppo.distributed.hosts import ALONE, Hosts
from jppo.errors import UserError, expanded
from jppo.learner import sharding
from jppo.preflight import memory
from jppo.preflight.accelerators import gpus
from jppo.preflight.finding import GIB, Verdict
from jppo.preflight.programs import Estimate, announce
from jppo.rollout.make import published_dtype
from jppo.run.inputs import Inputs
from jppo.runlog import durable_files
from jppo.settings import Settings, Training
from jppo.settings.rules_rollout import publish_via

C = TypeVar("C", bound=Training)
MIB = 2**20
TIGHT = 0.9  # warning threshold, of the free memory
CONTEXT = GIB  # assumed: CUDA's context, cuBLAS and cuDNN of a process of JAX
SMALLEST = 2048  # tokens per device of the smallest micro-batch tried
REMATS = ("none", "dots", "attention", "full")  # in order of recomputation
FEW, MOST = 4096, 32768  # tokens of a device's micro-batch: fewer only if nothing else fits; never more
CHOSEN = ("model.remat", "actor.max_tokens_per_device")
CHOICE = "auto.json"  # of the run folder


@dataclasses.dataclass(frozen=True)
class MemoryBudget:
    """The bytes needed in one memory, by part, against its capacity."""

    where: str
    parts: dict[str, int]
    has: int | None  # None: unknown

    @property
    def needs(self) -> int:
        return sum(self.parts.values())

    @property
    def verdict(self) -> Verdict:
        """FAIL where it does not fit, WARN where it barely fits."""
        if self.has is None or self.needs <= TIGHT * self.has:
            return "OK"
        return "WARN" if self.needs <= self.has else "FAIL"


def _device_parts(estimate: Estimate) -> dict[str, int]:
    """Returns a device's bytes at the peak of the estimate, by part."""
    worst = estimate.worst
    parts = estimate.parts | {"sum of gradients": worst.gradients, f"temporaries: {worst.name}": worst.temporaries}
    parts |= {"brought from the host for it": worst.brought, "compiled programs": estimate.code}
    return {about: count for about, count in parts.items() if count}


def device_budgets(estimate: Estimate, where: str, room: int | None, total: int | None) -> list[MemoryBudget]:
    """Returns needed and available bytes of a device: at its peak, and at each moment with a server beside the trainer.

    `room` is what JAX may use of its `total` bytes.
    """
    server, trainer_parts = estimate.server, _device_parts(estimate)
    if server is None or total is None:
        return [MemoryBudget(where, trainer_parts, room)]
    context = {"CUDA, of the trainer": CONTEXT}
    share = MemoryBudget(
        f"{server.name}'s share, {server.fraction:.0%} of a GPU", server.least(), int(server.fraction * total)
    )
    if not server.sleeps:
        return [MemoryBudget(where, trainer_parts, room), share]
    permanent = {"models and optimizers": sum(estimate.parts.values()), "compiled programs": estimate.code}
    scoring = max((moment.needs for moment in estimate.moments if moment.name == "log-probs"), default=0)
    awake = permanent | {"log-probs, compared with the server's": scoring} | context
    return [
        share,
        MemoryBudget(f"{where}, while the servers are awake", awake | server.awake(total), total),
        MemoryBudget(f"{where}, while they sleep", trainer_parts | context | server.asleep(), total),
    ]


def machine_budgets(estimate: Estimate, mesh: Any, *, host: dict[str, int]) -> list[MemoryBudget]:
    """Returns the budgets of this machine's devices and host; on a CPU they are one."""
    parts = _device_parts(estimate)
    device, resident, free = mesh.devices.flat[0], sharding.resident(), host_room()
    count = sum(d.process_index == device.process_index for d in mesh.devices.flat)
    program = {"the trainer's program": resident} if resident is not None else {}
    room = None if free is None or resident is None else free + resident
    host = {f"{about}, waiting": count * bytes_ for about, bytes_ in estimate.host.items()} | host
    if device.platform == "cpu":
        all_devices = {about: count * bytes_ for about, bytes_ in parts.items()}
        where = "this machine" if count == 1 else f"this machine, its {count} devices together"
        return [MemoryBudget(where, all_devices | program | host, room)]
    totals = [] if estimate.server is None else [gpu.memory for gpu in gpus() if gpu.memory is not None]
    return [
        *device_budgets(
            estimate, f"each of {count} {device.device_kind}", device_room(mesh), min(totals, default=None)
        ),
        MemoryBudget("this machine", program | host, room),
    ]


def host_parts(c: Settings, inputs: Inputs, mesh: Any) -> dict[str, int]:
    """Returns the bytes on the host outside the trainer: published weights, and vLLM's memory on a CPU."""
    r, parts = c.rollout, dict[str, int]()
    if r.name == "inprocess":
        return parts
    if publish_via(r) != "file":  # staged by servers on this machine, and the trainer's copy
        staged = 0 if r.urls else r.least_servers * r.tensor_model_parallel_size
        parts["published weights"] = (staged + r.publish_delta) * memory.engine_bytes(inputs.policy, published_dtype(c))
    elif not r.publish_dir:  # two files in shared memory, written in turn
        parts["published weights"] = 2 * memory.engine_bytes(inputs.policy, published_dtype(c))
    if r.name == "vllm" and not r.urls and sharding.platform(mesh) == "cpu":  # SGLang's are on a GPU
        parts |= {
            "vLLM: weights": r.least_servers * memory.engine_bytes(inputs.policy, r.dtype),
            "vLLM: cache": r.least_servers * r.cache_on_cpu,
        }
    return parts


def budget_lines(room: MemoryBudget) -> list[str]:
    """Formats a budget: its parts, their sum and its verdict."""
    widest = max(len(about) for about in room.parts)
    lines = [f"memory of {room.where}, MiB"]
    lines += [f"  {about:<{widest}}  {count / MIB:>10,.0f}" for about, count in room.parts.items()]
    limit = "" if room.has is None else f"  of {room.has / MIB:,.0f}: {room.verdict}"
    return [*lines, f"  {'together':<{widest}}  {room.needs / MIB:>10,.0f}{limit}"]


def device_room(mesh: Any) -> int | None:
    """Returns the bytes that JAX may use of a mesh device, as it reports; None on a CPU."""
    stats = mesh.local_devices[0].memory_stats()
    return stats.get("bytes_limit") if stats else None


def available_memory(proc: pathlib.Path, cgroup: pathlib.Path) -> int | None:
    """Returns the available bytes of the machine and its container; None if neither reports any."""
    rooms = []
    if (meminfo := proc / "meminfo").is_file():
        lines = dict(line.split(":") for line in meminfo.read_text().splitlines())
        rooms.append(int(lines["MemAvailable"].split()[0]) * 1024)
    limit, usage = cgroup / "memory.max", cgroup / "memory.current"
    if limit.is_file() and usage.is_file() and (limit_text := limit.read_text().strip()) != "max":
        rooms.append(int(limit_text) - int(usage.read_text()))
    return min(rooms, default=None)


def host_room() -> int | None:
    return available_memory(pathlib.Path("/proc"), pathlib.Path("/sys/fs/cgroup"))


def fewest_tokens(c: Training) -> int:
    """Returns the tokens per device of the smallest micro-batch: one of the longest rows, on the devices that share it.

    Where mesh.sequence is the remaining devices, their number is unknown, and the row is counted whole.
    """
    return -(-max(c.data.longest_row, c.data.max_tokens_per_row) // max(1, c.mesh.sequence))


def remedies(c: Training) -> Iterator[dict[str, Any]]:
    """Yields cumulative changes that need less memory: recomputation, smaller micro-batches, offload."""
    changes: dict[str, Any] = {}
    if c.model.remat != "full":
        changes["model.remat"] = "full"
        yield dict(changes)
    section = "actor" if isinstance(c, Settings) else "optim"
    tokens = settings.value_of(c, f"{section}.max_tokens_per_device")
    while tokens // 2 >= max(fewest_tokens(c), SMALLEST):
        tokens //= 2
        changes[f"{section}.max_tokens_per_device"] = tokens
        yield dict(changes)
    optimizers = [
        f"{n}.optimizer_offload" for n, optimizer in settings.optimizers(c).items() if not optimizer.optimizer_offload
    ]
    models = [f"{name}.param_offload" for name in ("actor", "critic", "ref")] if isinstance(c, Settings) else []
    for names in filter(None, (optimizers, models)):
        changes |= dict.fromkeys(names, True)
        yield dict(changes)


def candidates(c: Settings) -> Iterator[dict[str, Any]]:
    """Yields the values to try for the settings that memory chooses, in order."""
    remats = REMATS if c.model.remat == "auto" else (c.model.remat,)
    tokens = [c.actor.max_tokens_per_device]
    if tokens == [-1]:
        sizes = [fewest_tokens(c)]
        while sizes[0] * 2 <= MOST:
            sizes.insert(0, sizes[0] * 2)
        tokens = sizes
    large = [size for size in tokens if size >= FEW] or tokens[:1]
    for remat in remats:
        for size in large:
            yield dict(zip(CHOSEN, (remat, size), strict=True))
    for size in tokens[len(large) :]:
        yield dict(zip(CHOSEN, (remats[-1], size), strict=True))


def as_arguments(changes: dict[str, Any]) -> str:
    return " ".join(f"--config.{name}={value}" for name, value in changes.items())


def first_candidate(c: Settings) -> Settings:
    """Returns the config of the first candidate, for programs without gradients."""
    return settings.changed(c, next(candidates(c)))


def read_choice(c: Settings) -> Settings:
    """Returns the config with the choice that its run folder has; of the first candidate without one."""
    chosen = durable_files.read_json(expanded(c.trainer.run_dir) / CHOICE).get("chosen")
    return settings.changed(c, chosen or next(candidates(c)))


def first_fitting(c: Settings, fits: Callable[[Settings], bool]) -> dict[str, Any]:
    """Returns the first candidate that fits; raises UserError if none does."""
    count = 0
    for changes in candidates(c):
        candidate = settings.changed(c, changes)
        settings.check(candidate)
        count += 1
        announce(f"trying {as_arguments(changes)}")
        if fits(candidate):
            return changes
    raise UserError(
        f"model.remat={c.model.remat} actor.max_tokens_per_device={c.actor.max_tokens_per_device}: none of {count}"
        " candidates fits the memory, by the dry run's account; set actor.optimizer_offload=True, spread the models by"
        " mesh.fsdp, or train adapters by model.lora_rank"
    )


def settle(
    c: Settings, mesh: Any, run: pathlib.Path, fits: Callable[[Settings], bool], hosts: Hosts = ALONE
) -> tuple[Settings, str]:
    """Chooses the settings that memory decides, and returns the config and a line; a resumed run keeps its choice.

    The choice and the conditions that it depends on are recorded in the run folder, `auto.json`.
    """
    device = mesh.devices.flat[0].device_kind
    conditions: dict[str, Any] = {
        "asked": {name: settings.value_of(c, name) for name in CHOSEN},
        "mesh": dict(mesh.shape),
    }
    conditions |= {"device": device, "attempts": [*candidates(c)]}

    def decide() -> dict[str, Any]:
        """Returns the choice that the run folder has for these conditions, or makes it and writes it there."""
        path = run / CHOICE
        saved = durable_files.read_json(path)
        if saved.get("about") == conditions and set(saved.get("chosen") or ()) == set(CHOSEN):
            return dict(saved["chosen"])
        chosen = first_fitting(c, fits)
        if hosts.first:
            durable_files.write_text(path, json.dumps({"chosen": chosen, "about": conditions}, indent=1) + "\n")
        return chosen

    changes = hosts.gather(decide)[0]
    choice = ", ".join(f"{name}={value}" for name, value in changes.items())
    return settings.changed(c, changes), f"chosen by the memory of {device}: {choice}"
