"""The memories of a machine: the bytes that a run needs in each, by part, and those that are there."""

import dataclasses
import pathlib
from typing import Any, Literal

from jppo.learner import sharding
from jppo.preflight import memory
from jppo.preflight.gpus import CONTEXT, gpus
from jppo.preflight.programs import Estimate
from jppo.rollout.publish import published_dtype
from jppo.run.inputs import Inputs
from jppo.settings import Settings
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


def device_budgets(found: Estimate, where: str, room: int | None, total: int | None) -> list[MemoryBudget]:
    """Returns a device's budgets: of its peak, and of each moment at which a server holds memory beside the trainer.

    `room` is what JAX may use of its `total` bytes.
    """
    server, ours = found.server, device_parts(found)
    if server is None or total is None:
        return [MemoryBudget(where, ours, room)]
    context = {"CUDA, of the trainer": CONTEXT}
    share = MemoryBudget(
        f"{server.name}'s share, {server.fraction:.0%} of a GPU", server.least(), int(server.fraction * total)
    )
    if not server.sleeps:
        return [MemoryBudget(where, ours, room), share]
    held = {"models and optimizers": sum(found.parts.values()), "compiled programs": found.code}
    scoring = max((one.needs for one in found.moments if one.name == "log-probs"), default=0)
    awake = held | {"log-probs, compared with the server's": scoring} | context
    return [
        share,
        MemoryBudget(f"{where}, while the servers are awake", awake | server.awake(total), total),
        MemoryBudget(f"{where}, while they sleep", ours | context | server.asleep(), total),
    ]


def machine_budgets(found: Estimate, mesh: Any, *, host: dict[str, int]) -> list[MemoryBudget]:
    """Returns the rooms of devices and host; on a CPU they are one."""
    parts = device_parts(found)
    device, taken, free = mesh.devices.flat[0], sharding.resident(), host_room()
    count = sum(d.process_index == device.process_index for d in mesh.devices.flat)
    program = {"the trainer's program": taken} if taken is not None else {}
    room = None if free is None or taken is None else free + taken
    host = {f"{about}, waiting": count * bytes_ for about, bytes_ in found.host.items()} | host
    if device.platform == "cpu":
        here = {about: count * bytes_ for about, bytes_ in parts.items()}
        where = "this machine" if count == 1 else f"this machine, its {count} devices together"
        return [MemoryBudget(where, here | program | host, room)]
    totals = [] if found.server is None else [gpu.memory for gpu in gpus() if gpu.memory is not None]
    return [
        *device_budgets(found, f"each of {count} {device.device_kind}", device_room(mesh), min(totals, default=None)),
        MemoryBudget("this machine", program | host, room),
    ]


def host_parts(c: Settings, inputs: Inputs, mesh: Any) -> dict[str, int]:
    """Returns host bytes outside the trainer: published weights, and vLLM's memory on a CPU."""
    r, parts = c.rollout, dict[str, int]()
    if r.name == "inprocess":
        return parts
    if publish_via(r) != "file":  # staged by servers on this machine, and the trainer's copy
        staged = 0 if r.urls else r.least_servers * r.tensor_model_parallel_size
        parts["published weights"] = (staged + r.publish_delta) * memory.served(inputs.policy, published_dtype(c))
    elif not r.publish_dir:  # two files in shared memory, written in turn
        parts["published weights"] = 2 * memory.served(inputs.policy, published_dtype(c))
    if r.name == "vllm" and not r.urls and sharding.platform(mesh) == "cpu":  # SGLang's are on a GPU
        parts |= {
            "vLLM: weights": r.least_servers * memory.served(inputs.policy, r.dtype),
            "vLLM: cache": r.least_servers * r.cache_on_cpu,
        }
    return parts


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
