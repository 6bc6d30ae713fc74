"""The memories of a machine: the bytes that a run needs in each, by part, and those that are there."""

import dataclasses
import os
import pathlib
from typing import Any, Literal

from jppo.forecast.machines import Machine
from jppo.learner import devices, sharding
from jppo.preflight import described_machine, memory
from jppo.preflight.programs import Estimate
from jppo.rollout.publish import published_dtype
from jppo.run.inputs import Inputs
from jppo.settings import Common, Settings
from jppo.settings.rules_rollout import publish_via

MIB = 2**20
TIGHT = 0.9  # warning threshold, of the free memory
Verdict = Literal["OK", "WARN", "FAIL"]


@dataclasses.dataclass(frozen=True)
class MemoryBudget:
    """The bytes needed in one memory, by part, against its capacity."""

    where: str
    parts: dict[str, int]
    has: int | None  # None: unknown

    @property
    def needs(self) -> int:
        """All parts together."""
        return sum(self.parts.values())

    @property
    def verdict(self) -> Verdict:
        """FAIL where it does not fit, WARN where it barely fits."""
        if self.has is None or self.needs <= TIGHT * self.has:
            return "OK"
        return "WARN" if self.needs <= self.has else "FAIL"


def device_parts(found: Estimate) -> dict[str, int]:
    """Returns a device's bytes at the peak, by part."""
    worst = found.worst
    parts = found.parts | {"sum of gradients": worst.gradients, f"temporaries: {worst.name}": worst.temporaries}
    parts |= {"brought from the host for it": worst.brought, "compiled programs": found.code}
    return {about: count for about, count in parts.items() if count}


def machine_budgets(found: Estimate, mesh: Any, *, host: dict[str, int]) -> list[MemoryBudget]:
    """Returns the rooms of devices and host; on a CPU they are one."""
    parts = device_parts(found)
    device, taken, free = mesh.devices.flat[0], devices.resident(), host_room()
    count = sum(d.process_index == device.process_index for d in mesh.devices.flat)
    program = {"the trainer's program": taken} if taken is not None else {}
    room = None if free is None or taken is None else free + taken
    host = {f"{about}, waiting": count * bytes_ for about, bytes_ in found.host.items()} | host
    if device.platform == "cpu":
        here = {about: count * bytes_ for about, bytes_ in parts.items()}
        where = "this machine" if count == 1 else f"this machine, its {count} devices together"
        return [MemoryBudget(where, here | program | host, room)]
    return [
        MemoryBudget(f"each of {count} {device.device_kind}", parts, device_room(mesh)),
        MemoryBudget("this machine", program | host, room),
    ]


def described_rooms(c: Common, machine: Machine, found: Estimate) -> list[MemoryBudget]:
    """Returns the budgets of a described machine's devices, and its host's needs."""
    room, why = described_machine.capacity(c, machine)
    places = [MemoryBudget(f"each of {machine.devices} {machine.chip.kind} ({why})", device_parts(found), room)]
    waiting = {f"{about}, waiting": count for about, count in found.host.items()}
    return [*places, *([MemoryBudget("its host, for each device", waiting, None)] if waiting else [])]


def host_parts(c: Settings, inputs: Inputs, mesh: Any) -> dict[str, int]:
    """Returns host bytes outside the trainer: published weights, and vLLM's memory on a CPU."""
    r, parts = c.rollout, dict[str, int]()
    if r.name == "inprocess":
        return parts
    if publish_via(r) != "file":  # staged by servers on this machine until they load it
        staged = 0 if r.urls else r.servers * r.tensor_model_parallel_size
        parts["published weights"] = staged * memory.served(inputs.policy, published_dtype(c))
    elif not r.publish_dir:  # two files in shared memory, written in turn
        parts["published weights"] = 2 * memory.served(inputs.policy, published_dtype(c))
    if r.name == "vllm" and not r.urls and sharding.platform(mesh) == "cpu":  # SGLang's are on a GPU
        parts |= {
            "vLLM: weights": r.servers * memory.served(inputs.policy, r.dtype),
            "vLLM: cache": r.servers * r.kv_cache_memory_bytes,
        }
    return parts


def of_servers(c: Settings, inputs: Inputs, mesh: Any) -> MemoryBudget | None:
    """Returns the servers' share of a GPU; None without one."""
    limit = device_room(mesh)
    share = os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION")
    name = {"vllm": "vLLM", "sglang": "SGLang"}.get(c.rollout.name)
    if name is None or c.rollout.urls or limit is None or share is None or sharding.platform(mesh) != "gpu":
        return None
    weights = memory.served(inputs.policy, c.rollout.dtype)
    has = int(c.rollout.gpu_memory_utilization * limit / float(share))
    return MemoryBudget(f"{name}'s share of a GPU, {c.rollout.gpu_memory_utilization:.0%}", {"weights": weights}, has)


def budget_lines(room: MemoryBudget) -> list[str]:
    """Formats a room, its sum and its verdict last."""
    widest = max(len(about) for about in room.parts)
    lines = [f"memory of {room.where}, MiB"]
    lines += [f"  {about:<{widest}}  {count / MIB:>10,.0f}" for about, count in room.parts.items()]
    said = "" if room.has is None else f"  of {room.has / MIB:,.0f}: {room.verdict}"
    return [*lines, f"  {'together':<{widest}}  {room.needs / MIB:>10,.0f}{said}"]


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
    limit, used = cgroup / "memory.max", cgroup / "memory.current"
    if limit.is_file() and used.is_file() and (most := limit.read_text().strip()) != "max":
        rooms.append(int(most) - int(used.read_text()))
    return min(rooms, default=None)


def host_room() -> int | None:
    """Returns the available bytes of this machine."""
    return available_memory(pathlib.Path("/proc"), pathlib.Path("/sys/fs/cgroup"))
