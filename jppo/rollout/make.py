"""The rollout engine from the settings: its kind, its servers, its start, its publishes."""

import functools
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax.numpy as jnp
from jax.sharding import Mesh

from jppo import process, settings
from jppo.distributed.hosts import ALONE, Hosts
from jppo.errors import UserError
from jppo.learner import cost, sharding
from jppo.learner.make import kept_tokens, make_mesh
from jppo.learner.ppo import Learner
from jppo.models import attention, hf
from jppo.models.config import ModelConfig, pad_vocab
from jppo.models.lora import Lora
from jppo.rollout.inprocess import InprocessEngine, InprocessSettings, Source
from jppo.rollout.publish import PolicyPublisher, PublishSettings, publish_policy
from jppo.rollout.servers.fleet import ServerEngine
from jppo.rollout.servers.member import CONNECTIONS, ServerLimits
from jppo.rollout.servers.repair import Lookup, address_lookup
from jppo.rollout.sglang.client import start_sglang
from jppo.rollout.vllm.arguments import ServerSettings
from jppo.rollout.vllm.client import ServedReferences, start_vllm
from jppo.settings import Loop, Rollout, Settings, parts, texts
from jppo.settings.rules_rollout import publish_via

L = TypeVar("L", bound=Loop)

SMALL = 2e7  # FLOP of a token


def served_reference(c: Settings, tokenizer: Any, hosts: Hosts = ALONE) -> ServedReferences | None:
    """Attaches to the servers of ref.url and checks them; None without one."""
    if not c.ref.url:
        return None
    if hosts.count > 1:
        raise UserError(f"ref.url={c.ref.url!r} is for one host, and this run has {hosts.count}; set ref.path")
    urls, timeout_s = texts.addresses_by_source(c.ref.url), c.rollout.request_timeout_s
    return ServedReferences(urls, longest=c.data.longest_row, tokenizer=tokenizer, timeout_s=timeout_s)


def with_servers(c: L, mesh: Mesh) -> L:
    """Returns the settings with the number of this host's servers, if `rollout.servers` leaves it open."""
    r, first = c.rollout, mesh.devices.flat[0]
    if r.name in ("vllm", "sglang") and not r.urls and first.platform == "tpu":
        raise UserError(
            f"rollout.name={r.name!r} starts servers on this machine, whose TPUs the trainer holds; set"
            " rollout.name=inprocess, or rollout.urls to servers on other machines"
        )
    count = 1
    if r.name != "inprocess" and not r.urls and sharding.platform(mesh) == "gpu":
        local = sum(device.process_index == first.process_index for device in mesh.devices.flat)
        gpus = len(texts.entries(r.devices)) or local
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
    if (given := os.environ.get("OMP_NUM_THREADS", "")).isdigit():
        return max(1, int(given))
    if cost.forward(cfg, [1], head_tokens=1) < SMALL:
        return 1
    share = len(os.sched_getaffinity(0)) // r.least_servers
    return max(1, share if r.mode == "sync" else share // 2)


def server_settings(c: Loop) -> ServerSettings:
    """Makes the settings of each server."""
    r, (_, cfg) = c.rollout, hf.read_config(c.model.path)
    moe = cfg.experts
    return ServerSettings(
        python=r.python,
        servers=r.least_servers,
        port=r.port,
        dtype=r.dtype,
        max_model_len=c.data.longest_row,
        vocab_size=cfg.vocab_size,
        max_positions=max(c.model.max_position_embeddings, 0),
        max_num_seqs=r.max_num_seqs,
        enforce_eager=r.enforce_eager,
        gpu_memory_utilization=r.gpu_memory_utilization,
        kv_cache_memory_bytes=r.cache_on_cpu,
        cache_given=r.kv_cache_memory_bytes > 0,
        omp_threads=server_threads(r, cfg),
        start_timeout_s=r.start_timeout_s,
        tensor_model_parallel_size=r.tensor_model_parallel_size,
        devices=tuple(texts.entries(r.devices)),
        engine_args=r.engine_args,
        sleeps=r.sleep_level > 0,
        lora_rank=c.model.lora_rank if r.lora_sync == "adapter" else 0,
        head_sizes=cfg.head_sizes,
        latent=cfg.latent_sizes,
        delta=cfg.delta_kind,
        publish_via=publish_via(r),
        publish_delta=r.publish_delta,
        experts=(cfg.num_layers, moe.active, moe.count) if r.routing_replay and moe is not None else None,
        kept=r.mask_replay,
        quantization=r.quantization,
    )


def require_routing(c: Loop) -> None:
    """Raises UserError if config.json leaves out fields without which vLLM takes another routing, without an error."""
    config, cfg = hf.read_config(c.model.path)
    if cfg.experts is None or not cfg.experts.routing.corrected:
        return
    for key, value in {"scoring_func": cfg.experts.routing.scoring, "topk_method": "noaux_tc"}.items():
        if config.get(key) != value:
            raise UserError(
                f"{c.model.path}: config.json has no {key}, and vLLM would choose other experts; add {key}={value!r}"
                " or set rollout.name=inprocess"
            )


def open_engine(c: Loop, run: pathlib.Path, hosts: Hosts = ALONE) -> ServerEngine | InprocessEngine:
    """Starts this host's engine by `rollout.name`; logs go to the folder `run`."""
    engine = parts.ENGINES.find(c.rollout.name, "rollout.name")(c, run, hosts)
    for method in ("ready", "close"):
        if not callable(getattr(engine, method, None)):
            raise UserError(
                f"rollout.name={c.rollout.name!r} returns {type(engine).__name__}, which has no {method}(); return an"
                " engine as in docs/extending.md"
            )
    return cast(ServerEngine | InprocessEngine, engine)


def start_engine(c: Loop, run: pathlib.Path, hosts: Hosts = ALONE) -> ServerEngine:
    """Starts this host's servers without waiting, or attaches to running ones."""
    r = c.rollout
    run.mkdir(parents=True, exist_ok=True)
    start: Callable[..., ServerEngine] = start_sglang
    if r.publish_via == "auto":
        print(f"rollout: weights go by {publish_via(r)}", file=sys.stderr, flush=True)
    if r.name == "vllm":
        require_routing(c)
        start = functools.partial(start_vllm, publish_host=r.publish_host)
    return start(
        str(hf.resolve_directory(c.model.path, weights=False)),
        str(run),
        settings=server_settings(c),
        urls=attached(r.urls, hosts),
        limits=ServerLimits(
            request_timeout_s=r.request_timeout_s,
            health_timeout_s=r.health_timeout_s,
            max_restarts=r.max_restarts,
            sleep_level=r.sleep_level,
            connections=connections(c),
        ),
        publish_dir=r.publish_dir,
    )


def connections(c: Loop) -> int:
    """Returns the largest number of requests in flight at one server."""
    asked: int = c.rollout.max_concurrent_requests
    return asked if asked > 0 else max(CONNECTIONS, c.rollout.max_num_seqs)


def start_inprocess(c: Loop, run: pathlib.Path, hosts: Hosts = ALONE) -> InprocessEngine:
    """Makes the in-process engine on this host's devices; starts nothing."""
    return InprocessEngine(inprocess_settings(c, make_mesh(c)))


def inprocess_settings(c: Loop, mesh: Mesh) -> InprocessSettings:
    """Makes the engine's settings: rows, lengths, shardings."""
    r = c.rollout
    _, cfg = hf.read_config(c.model.path, longest=c.data.longest_row)
    width, mesh = mesh.shape["tensor"], sharding.own_part(mesh)
    longest, share = c.data.longest_row, sharding.whole_row_multiple(mesh)
    rows = min(r.max_num_seqs, -(-c.sequences_of_step // share) * share)
    if sharding.platform(mesh) == "cpu":
        rows = min(rows, r.cache_on_cpu // attention.cache_row_bytes(cfg, length=longest, dtype=r.dtype))
    if rows < share:
        raise UserError(
            f"rollout.max_num_seqs={r.max_num_seqs} rows of {longest} tokens, within rollout.kv_cache_memory_bytes="
            f"{r.cache_on_cpu} on a CPU, must be at least {share}, one for each device that shares them; raise"
            " what is too low"
        )
    return InprocessSettings(
        cfg=pad_vocab(cfg, width),
        rows=rows // share * share,
        row_multiple=share,
        max_prompt_length=longest - 1 if r.multi_turn.enable or r.agent else c.data.max_prompt_length,  # of a prefill
        max_model_len=longest,
        dtype=r.dtype,
        by_row=sharding.whole_rows_sharding(mesh),
        of_cache=sharding.cache_sharding(mesh, attention.cache_heads(cfg)),
        cut=bool(settings.cuts(r) or settings.cuts(r.val_kwargs)),
        experts=r.routing_replay,
        kept=kept_tokens(c, cfg),
    )


def make_publisher(
    c: Settings, learner: Learner, sampler: Source, adapters: Lora | None = None, hosts: Hosts = ALONE
) -> PolicyPublisher:
    """Makes the publisher of a run's policies."""
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
    """Returns the dtype of published weights: the policy's, or the servers' if smaller.

    Rounded on the device to nearest even, as vLLM would: the same bits, sooner.
    """
    ours, theirs = c.model.param_dtype, c.rollout.dtype
    return theirs if jnp.dtype(theirs).itemsize < jnp.dtype(ours).itemsize else ours


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
    here = r.name != "inprocess" and not r.urls and not process.servers_apart(r.devices)
    return r.gpu_memory_utilization if here else 0.0


def share_gpu(c: Loop) -> None:
    """Leaves their share of the trainer's GPU to the servers that are started here."""
    process.share_gpu(servers_gpu_share(c), sleeping=c.rollout.sleep_level > 0)


def attached(urls: str, hosts: Hosts) -> list[str] | Lookup:
    """Returns the addresses of this host's running servers, or their look-up; [] if servers are started."""
    place = texts.lookup_place(urls)
    if place is None:
        return own_urls(hosts, texts.entries(urls))
    if hosts.count > 1:
        raise UserError(
            f"rollout.urls={urls!r} is looked up by one host, and this run has {hosts.count}; list the addresses"
        )
    return address_lookup(place)


def own_urls(hosts: Hosts, urls: list[str]) -> list[str]:
    """Returns this host's share of the servers in the settings."""
    if urls and len(urls) < hosts.count:
        raise UserError(
            f"rollout.urls names {len(urls)} server(s), and each of {hosts.count} hosts needs one; name more, or start"
            " them here by leaving it empty"
        )
    share = hosts.share(len(urls))
    return urls[share.start : share.stop]
