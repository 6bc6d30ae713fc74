"""The seconds of a step in which servers sleep, wake, get the weights and are checked: bytes divided by assumed rates.

The rates are figures that others published; none has been measured with jppo on a GPU.
"""

import dataclasses
from typing import Any

from jppo.distributed.hosts import ALONE
from jppo.forecast.machines import HOST, Machine
from jppo.rollout.publish import may_overlap
from jppo.rollout.vllm.buckets import BUCKET
from jppo.run.agreement import LOOKS, PROBES
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
    """Returns a run's work with servers; None without. `weights` are the bytes of a publish, `policy` of a server's."""
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
        overlaps=hosts == 1 and c.algorithm.adv_estimator == "gae" and may_overlap(c, ALONE),
        prompts=PROBES * c.data.max_prompt_length,
        changes=r.publish_delta,
    )


def publish_seconds(work: ServerWork, machine: Machine) -> float:
    """Returns the seconds of a publish."""
    chip, size = machine.chip, work.weights
    requests = -(-size // BUCKET) * REQUESTS_S[0]
    share = (machine.groups - 1) / machine.groups  # of the weights, which a host gets from others
    gathered = size * share / machine.each / chip.network / chip.shares["network"].value
    if work.via in ("nccl", "ipc"):
        return gathered + size / (NCCL if work.via == "nccl" else IPC)[0] + requests
    gathered += size / machine.each / HOST[0] + size / CHECKSUM[0]
    load = size / work.width / HOST[0]
    if work.via == "file":
        return gathered + size / CHECKSUM[0] + load
    wire = machine.each * chip.network * chip.shares["network"].value  # of a host
    over = work.servers * size / wire if work.apart else 0.0
    if work.changes:
        return gathered + size / COMPARE[0] + CHANGED[0] * over + size / VERIFY[0] + requests + load
    sent = max(size / STREAM[0], over)
    return gathered + sent + requests + load


def server_seconds(work: ServerWork | None, machine: Machine, scoring: float, critic: float) -> dict[str, float]:
    """Returns the seconds of a step by stage; `scoring` of a log-probs micro-batch, `critic` of the critic's update."""
    if work is None:
        return {}
    chip, held = machine.chip, work.policy / work.width
    products = 2 * work.prompts * held / 2 / chip.peak("bfloat16") / chip.shares["product"].value
    reads = LOOKS[0][0] * held / chip.hbm / chip.shares["memory"].value
    publish = publish_seconds(work, machine)
    copied = held / HOST[0] if work.sleep_level == 1 else 0.0
    found = {
        "sleep": copied,
        "wake": WAKE_S[0] + copied if work.sleep_level else 0.0,
        "publish": max(0.0, publish - critic) if work.overlaps else publish,
        "check": products + reads + scoring,
    }
    return {name: seconds for name, seconds in found.items() if seconds}


def server_rates(work: ServerWork | None) -> list[str]:
    """Formats the assumed rates of the stages."""
    if work is None:
        return []
    files = [("checksums", CHECKSUM)]
    sent = [("compare", COMPARE), ("verify", VERIFY)] if work.changes else [("stream", STREAM)]
    via = dict(file=files, tcp=[*files, *sent], nccl=[("publish", NCCL)], ipc=[("publish", IPC)])[work.via]
    lines = [f"{name:<16} {rate / GB:,.3g} GB/s, {source}" for name, (rate, source) in via]
    lines += [f"{'buckets':<16} {REQUESTS_S[1]}"] if work.via != "file" else []
    lines += [f"{'changes':<16} {CHANGED[1]}"] if work.changes else []
    return lines + ([f"{'wake':<16} {WAKE_S[1]}"] if work.sleep_level else [])
