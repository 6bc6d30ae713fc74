"""The seconds of a step in which rollout servers sleep, wake, get the weights and are checked.

Bytes divided by assumed rates: figures that others published; none has been measured with jppo on a GPU.
"""

import dataclasses
from typing import Any

from jppo import plugins
from jppo.distributed.hosts import ALONE
from jppo.plugins.forecast.machines import HOST, Machine
from jppo.rollout.make import may_overlap
from jppo.run.agreement import PROBE_ROUNDS, PROBES
from jppo.run.make import wants_critic
from jppo.settings import Settings
from jppo.settings.rules_rollout import publish_via

GB = 1e9
# Rate or seconds, and its source.
CHECKSUM = 4 / 0.26 * GB, "assumed: crc32 of 0.26 s per GB on a CPU, four threads"
STREAM = GB / 0.63, "assumed: a stream to a server with its checksum, 0.63 s per GB on a CPU"
CHANGED = 0.01, "assumed: a publish of changes has 1% of the bytes, as bfloat16 weights at a learning rate of 1e-6"
COMPARE = 4 * 1.7 * GB, "assumed: 1.7 GB/s of weights compared by a thread of a CPU, four threads"
VERIFY = 4 * 2.2 * GB, "assumed: 2.2 GB/s of weights patched and checksummed by a thread of a CPU, four threads"
IPC = 60 * GB / 7, "assumed: 60 GB in 7 s by CUDA IPC, as slime's users published for a 30B model"
NCCL = 8 * GB, "assumed: 8 GB/s, as verl's users published for NCCL on 32 H100"
REQUESTS_S = 0.006, "assumed: two requests of 3 ms for each bucket"
WAKE_S = 0.8, "assumed: 0.1 to 0.8 s, vLLM's blog of 26 October 2025, and the copy of weights from the host at level 1"


@dataclasses.dataclass(frozen=True)
class ServerWork:
    """The work of a step with the servers of a run."""

    via: str  # as rollout.publish_via
    weights: int  # bytes of a publish
    policy: int  # bytes of the policy in a server
    width: int  # GPUs of a server
    servers: int  # of a host
    apart: bool  # on other machines
    sleep_level: int
    overlaps: bool  # the critic's update runs while the weights are sent
    prompts: int  # tokens of a check
    changes: bool = False  # alone are sent


def server_work(c: Settings, mesh: Any, weights: int, policy: int) -> ServerWork | None:
    """Returns a step's work with rollout servers, if any; `weights` are a publish's bytes, `policy` a server's."""
    r = c.rollout
    if r.name == "inprocess":
        return None
    hosts = len({device.process_index for device in mesh.devices.flat})
    return ServerWork(
        via=publish_via(r),
        weights=weights,
        policy=policy,
        width=r.tensor_model_parallel_size,
        servers=len(r.urls.split(",")) if r.urls else r.least_servers,
        apart=bool(r.urls),
        sleep_level=r.sleep_level,
        overlaps=hosts == 1 and wants_critic(c) and may_overlap(c, ALONE),
        prompts=PROBES * c.data.max_prompt_length,
        changes=r.publish_delta,
    )


def publish_seconds(work: ServerWork, machine: Machine) -> float:
    """Forecasts the seconds of a publish: gathering, sending and loading the weights."""
    chip, size = machine.chip, work.weights
    requests: int = -(-size // plugins.load("carriers.buckets").BUCKET)
    request_s = requests * REQUESTS_S[0]
    remote_share = (machine.groups - 1) / machine.groups  # of the weights, which a host gets from others
    gather_s = size * remote_share / machine.each / chip.network / chip.shares["network"].value
    if work.via in ("nccl", "ipc"):
        return gather_s + size / (NCCL if work.via == "nccl" else IPC)[0] + request_s
    gather_s += size / machine.each / HOST[0] + size / CHECKSUM[0]
    load_s = size / work.width / HOST[0]
    if work.via == "file":
        return gather_s + size / CHECKSUM[0] + load_s
    host_rate = machine.each * chip.network * chip.shares["network"].value  # of a host
    network_s = work.servers * size / host_rate if work.apart else 0.0
    if work.changes:
        return gather_s + size / COMPARE[0] + CHANGED[0] * network_s + size / VERIFY[0] + request_s + load_s
    sent_s = max(size / STREAM[0], network_s)
    return gather_s + sent_s + request_s + load_s


def server_seconds(work: ServerWork | None, machine: Machine, scoring: float, critic: float) -> dict[str, float]:
    """Forecasts the seconds of a step with servers by stage: sleep, wake, publish, check."""
    if work is None:
        return {}
    chip, weights_per_gpu = machine.chip, work.policy / work.width
    products = 2 * work.prompts * weights_per_gpu / 2 / chip.peak("bfloat16") / chip.shares["product"].value
    reads = PROBE_ROUNDS[0][0] * weights_per_gpu / chip.hbm / chip.shares["memory"].value
    publish_s = publish_seconds(work, machine)
    copy_s = weights_per_gpu / HOST[0] if work.sleep_level == 1 else 0.0
    stages = {
        "sleep": copy_s,
        "wake": WAKE_S[0] + copy_s if work.sleep_level else 0.0,
        "publish": max(0.0, publish_s - critic) if work.overlaps else publish_s,
        "check": products + reads + scoring,
    }
    return {name: seconds for name, seconds in stages.items() if seconds}


def server_rates(work: ServerWork | None) -> list[str]:
    """Formats the assumed rates of the stages with servers, with their sources."""
    if work is None:
        return []
    files = [("checksums", CHECKSUM)]
    stream = [("compare", COMPARE), ("verify", VERIFY)] if work.changes else [("stream", STREAM)]
    assumed = dict(file=files, tcp=[*files, *stream], nccl=[("publish", NCCL)], ipc=[("publish", IPC)])[work.via]
    lines = [f"{name:<16} {rate / GB:,.3g} GB/s, {source}" for name, (rate, source) in assumed]
    lines += [f"{'buckets':<16} {REQUESTS_S[1]}"] if work.via != "file" else []
    lines += [f"{'changes':<16} {CHANGED[1]}"] if work.changes else []
    return lines + ([f"{'wake':<16} {WAKE_S[1]}"] if work.sleep_level else [])
