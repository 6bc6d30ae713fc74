"""The rollout engine from the settings: its kind, the in-process one, its publishes. `servers/make.py` has servers."""

import functools
import os
import pathlib
from typing import TYPE_CHECKING, TypeVar, cast

import jax.numpy as jnp
from jax.sharding import Mesh

from jppo import process, settings
from jppo.distributed.hosts import ALONE, Hosts
from jppo.errors import UserError
from jppo.learner import cost, sharding
from jppo.learner.make import kept_tokens, make_mesh
from jppo.learner.ppo import Learner
from jppo.models import cache, hf
from jppo.models.config import ModelConfig, pad_vocab
from jppo.models.lora import Lora
from jppo.rollout.inprocess import InprocessEngine, InprocessSettings, PolicySampler, cached_dtype
from jppo.rollout.publish import PolicyPublisher, PublishSettings, publish_policy
from jppo.settings import Loop, Rollout, Settings, parts, texts

if TYPE_CHECKING:
    from jppo.rollout.servers.fleet import ServerEngine

L = TypeVar("L", bound=Loop)

SMALL = 2e7  # FLOP of a token


def with_servers(c: L, mesh: Mesh) -> L:
    """Returns the settings with the number of this host's servers, if `rollout.servers` leaves it open."""
    r, first_device = c.rollout, mesh.devices.flat[0]
    if r.name in ("vllm", "sglang") and not r.urls and first_device.platform == "tpu":
        raise UserError(
            f"rollout.name={r.name!r} starts servers on this machine, whose TPUs the trainer holds; set"
            " rollout.name=inprocess, or rollout.urls to servers on other machines"
        )
    count = 1
    if r.name != "inprocess" and not r.urls and sharding.platform(mesh) == "gpu":
        local_gpus = sum(device.process_index == first_device.process_index for device in mesh.devices.flat)
        gpus = len(texts.entries(r.devices)) or local_gpus
        count = gpus // r.tensor_model_parallel_size
        if not count:
            raise UserError(
                f"rollout.tensor_model_parallel_size={r.tensor_model_parallel_size} must be at most {gpus}, the number"
                f" of GPUs that servers have here; try {gpus}, or list more in rollout.devices"
            )
    if r.servers > 0:
        return c
    return settings.changed(c, {"rollout.servers": count})


def describe_servers(c: Loop, mesh: Mesh) -> str:
    """Returns a line on the servers that each host starts; '' if it starts none."""
    r = c.rollout
    if r.name not in ("vllm", "sglang") or r.urls:
        return ""
    if sharding.platform(mesh) == "cpu":
        _, cfg = hf.read_config(c.model.path)
        servers = f"{r.servers} server(s) a host, each with {server_threads(r, cfg)} thread(s)"
        if r.dtype == "bfloat16" and r.name == "vllm" and settings.cpu_dtype() != "bfloat16":
            servers += (
                "; warning: rollout.dtype=bfloat16 takes many times as long as float32 on this CPU, which has no"
                " instructions for it (avx512_bf16, amx_bf16)"
            )
        return servers
    return f"{r.servers} server(s) a host, each on {r.tensor_model_parallel_size} device(s)"


def server_threads(r: Rollout, cfg: ModelConfig) -> int:
    """Returns the threads of a server on a CPU: its share of the cores, or half of it where the trainer works, too.

    More than one make a small model no faster, and slower where other programs use the cores.
    """
    if r.omp_threads > 0:
        return r.omp_threads
    if (from_environment := os.environ.get("OMP_NUM_THREADS", "")).isdigit():
        return max(1, int(from_environment))
    if cost.forward(cfg, [1], head_tokens=1) < SMALL:
        return 1
    share = len(os.sched_getaffinity(0)) // r.least_servers
    return max(1, share if r.mode == "sync" else share // 2)


def open_engine(c: Loop, run: pathlib.Path, hosts: Hosts = ALONE) -> "ServerEngine | InprocessEngine":
    """Starts this host's engine by `rollout.name`; logs go to the folder `run`."""
    engine = parts.ENGINES.find(c.rollout.name, "rollout.name")(c, run, hosts)
    for method in ("ready", "close"):
        if not callable(getattr(engine, method, None)):
            raise UserError(
                f"rollout.name={c.rollout.name!r} returns {type(engine).__name__}, which has no {method}(); return an"
                " engine as in docs/extending.md"
            )
    return cast("ServerEngine | InprocessEngine", engine)


def start_inprocess(c: Loop, run: pathlib.Path, hosts: Hosts = ALONE) -> InprocessEngine:
    """Makes the in-process engine on this host's devices; starts nothing."""
    return InprocessEngine(inprocess_settings(c, make_mesh(c)))


def inprocess_settings(c: Loop, mesh: Mesh) -> InprocessSettings:
    """Makes the engine's settings: rows, lengths, shardings."""
    r = c.rollout
    _, cfg = hf.read_config(c.model.path, longest=c.data.longest_row)
    tensor_parallel, mesh = mesh.shape["tensor"], sharding.own_part(mesh)
    longest, row_multiple = c.data.longest_row, sharding.whole_row_multiple(mesh)
    rows = min(r.max_num_seqs, -(-c.sequences_of_step // row_multiple) * row_multiple)
    on_cpu = sharding.platform(mesh) == "cpu"
    room = r.cache_on_cpu if on_cpu else max(r.kv_cache_memory_bytes, 0) * mesh.size
    if room:
        dtype = cached_dtype(mesh, r.dtype)
        rows = min(rows, room // cache.cache_row_bytes(cfg, length=longest, dtype=dtype))
    if rows < row_multiple:
        within = f", within rollout.kv_cache_memory_bytes={room // (1 if on_cpu else mesh.size)}," if room else ""
        raise UserError(
            f"rollout.max_num_seqs={r.max_num_seqs} rows of {longest} tokens{within} must be at least {row_multiple},"
            " one for each device that shares them; raise what is too low"
        )
    return InprocessSettings(
        cfg=pad_vocab(cfg, tensor_parallel),
        rows=rows // row_multiple * row_multiple,
        row_multiple=row_multiple,
        max_prompt_length=longest - 1 if r.multi_turn.enable or r.agent else c.data.max_prompt_length,  # of a prefill
        max_model_len=longest,
        dtype=r.dtype,
        by_row=sharding.whole_rows_sharding(mesh),
        of_cache=sharding.cache_sharding(mesh, cache.cache_heads(cfg)),
        cut=bool(settings.cuts(r) or settings.cuts(r.val_kwargs)),
        experts=r.routing_replay,
        kept=kept_tokens(c, cfg),
    )


def make_publisher(
    c: Settings, learner: Learner, sampler: PolicySampler, adapters: Lora | None = None, hosts: Hosts = ALONE
) -> PolicyPublisher:
    publish = functools.partial(publish_policy, make_publish_settings(c, adapters), learner, sampler, hosts=hosts)
    return PolicyPublisher(publish, early=learner.critic is not None and may_overlap(c, hosts))


def make_publish_settings(c: Loop, adapters: Lora | None) -> PublishSettings:
    """Makes the settings of each publish of a policy that has `adapters`, or none."""
    r = c.rollout
    return PublishSettings(
        dtype=published_dtype(c),
        on_device=r.publish_via in ("nccl", "ipc"),
        adapters=adapters if r.lora_sync == "adapter" else None,
        base=c.model.path,
        on_update=r.on_update,
    )


def published_dtype(c: Loop) -> str:
    """Returns the dtype of published weights: the policy's, or the servers' if that is no larger.

    Rounded on the device to nearest even, as vLLM would: the same bits, sooner.
    """
    policy_dtype, server_dtype = c.model.param_dtype, c.rollout.dtype
    return server_dtype if jnp.dtype(server_dtype).itemsize <= jnp.dtype(policy_dtype).itemsize else policy_dtype


def may_overlap(c: Settings, hosts: Hosts) -> bool:
    """Whether servers may get the policy while the critic learns.

    Not with several hosts: their exchanges would mix. Not with sleeping servers: they would wake on a GPU in use. Not
    in asynchronous mode: responses are in flight.
    """
    served = c.rollout.name != "inprocess"
    return hosts.count == 1 and served and c.rollout.mode == "sync" and not c.rollout.sleep_level


def servers_gpu_share(c: Loop) -> float:
    """Returns the fraction of the trainer's GPU that servers started here take; 0.0 if they take none of it."""
    r = c.rollout
    on_trainer_gpu = r.name != "inprocess" and not r.urls and not process.servers_apart(r.devices)
    return r.gpu_memory_utilization if on_trainer_gpu else 0.0


def share_gpu(c: Loop) -> None:
    """Leaves their share of the trainer's GPU to the servers that are started here."""
    process.share_gpu(servers_gpu_share(c), sleeping=c.rollout.sleep_level > 0)
