"""The memory of a run's servers on the trainer's GPUs.

vLLM takes a fraction of the whole GPU while it is awake, or a cache of given bytes beside what it needs anyway. What is
computed here by a rule of thumb is named so in the report; `ASLEEP` and `GRAPHS` are figures of others.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp

from jppo import process
from jppo.learner import sharding
from jppo.models import cache
from jppo.models.config import ModelConfig
from jppo.preflight.finding import GIB
from jppo.settings import Settings

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
    row = cache.cache_row_bytes(policy, length=c.data.longest_row, dtype=r.dtype)
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
