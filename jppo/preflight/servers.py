"""A run's servers in its forecasts: their memory on the trainer's GPUs, and their seconds of a step.

vLLM takes a fraction of the whole GPU while it is awake, or a cache of given bytes beside what it needs anyway. What is
computed here by a rule of thumb is named so in the report; `ASLEEP` and `GRAPHS` are figures of others. In a step
servers sleep, wake, get the weights and are checked: bytes divided by assumed rates. The rates are figures that others
published; none has been measured with jppo on a GPU.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp

from jppo import plugins, process
from jppo.distributed.hosts import ALONE
from jppo.forecast.machines import GIB, HOST, Machine
from jppo.learner import sharding
from jppo.models import attention
from jppo.models.config import ModelConfig
from jppo.rollout.make import may_overlap
from jppo.run.agreement import PROBE_ROUNDS, PROBES
from jppo.run.make import wants_critic
from jppo.settings import Settings
from jppo.settings.rules_rollout import publish_via

ASLEEP = int(1.2 * GIB)  # 1.14 of each GPU beside a sleeping server: vllm-project/vllm issue 32714
GRAPHS = int(1.4 * GIB)  # a capture's 1,503,657,984 bytes, which stay in sleep: vllm-project/vllm issue 47654
PREFILL = 8192  # tokens of a pass of vLLM's server on a GPU of 70 GiB or more; fewer on others


@dataclasses.dataclass(frozen=True)
class ServerMemory:
    """A server's bytes on a GPU of the trainer's."""

    name: str  # of the engine
    sleeps: bool
    fraction: float  # of the GPU that it takes while awake, where the cache is not given in bytes
    cache: int  # 0: whatever the fraction leaves
    weights: int
    working: int  # of a pass, by a rule of thumb
    graphs: int
    response: int  # cache of one response

    def least(self) -> dict[str, int]:
        """Returns the bytes, by part, without which the server does not start."""
        parts = {"weights": self.weights, "passes, by a rule of thumb": self.working, "CUDA graphs": self.graphs}
        cache = {"cache": self.cache} if self.cache else {"cache of one response": self.response}
        return {about: count for about, count in (parts | cache).items() if count}

    def awake(self, total: int) -> dict[str, int]:
        """Returns the bytes by part while the server samples, on a GPU of `total` bytes.

        With a cache of a given size they are counted, with what a sleeping server holds too; else it takes a fraction.
        """
        if self.cache:
            return {f"{self.name}: {about}": count for about, count in self.least().items()} | {self.name: ASLEEP}
        return {f"{self.name} awake, {self.fraction:.0%} of the GPU": int(self.fraction * total)}

    def asleep(self) -> dict[str, int]:
        """Returns the bytes that a sleeping server keeps."""
        return {f"{self.name} asleep": ASLEEP + self.graphs}


def server_memory(c: Settings, policy: ModelConfig, weights: int, mesh: Any) -> ServerMemory | None:
    """Returns the memory of the servers on one of the trainer's GPUs; None where they have none there.

    `weights` are the bytes of the whole policy in a server.
    """
    r, name = c.rollout, {"vllm": "vLLM", "sglang": "SGLang"}.get(c.rollout.name)
    if name is None or r.urls or sharding.platform(mesh) != "gpu" or process.servers_apart(r.devices):
        return None
    own_devices = [device for device in mesh.devices.flat if device.process_index == mesh.devices.flat[0].process_index]
    width, item_bytes = r.tensor_model_parallel_size, int(jnp.dtype(r.dtype).itemsize)
    count = -(-r.least_servers * width // len(own_devices))  # servers on one GPU
    hidden = PREFILL * (2 * policy.intermediate_size + 4 * policy.hidden_size) * item_bytes
    logits = r.max_num_seqs * policy.vocab_size * (item_bytes + 8)  # two more in float32 while they are sampled
    row = attention.cache_row_bytes(policy, length=c.data.longest_row, dtype=r.dtype)
    return ServerMemory(
        name,
        sleeps=r.sleep_level > 0,
        fraction=min(1.0, count * r.gpu_memory_utilization),
        cache=count * max(r.kv_cache_memory_bytes, 0),
        weights=count * weights // width,
        working=count * (hidden + logits) // width,
        graphs=0 if r.enforce_eager else count * GRAPHS,
        response=count * row // width,
    )


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
