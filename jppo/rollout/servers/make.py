"""Rollout servers from the settings: their start, or the addresses of running ones; and served references."""

import functools
import pathlib
import sys
from collections.abc import Callable
from typing import Any

from jppo.distributed.hosts import ALONE, Hosts
from jppo.errors import UserError
from jppo.models import hf
from jppo.rollout.make import server_threads
from jppo.rollout.servers.fleet import ServerEngine
from jppo.rollout.servers.member import CONNECTIONS, ServerLimits
from jppo.rollout.servers.repair import Lookup, address_lookup
from jppo.rollout.vllm.arguments import ServerSettings
from jppo.rollout.vllm.client import ServedReferences, start_vllm
from jppo.settings import Loop, Settings, texts
from jppo.settings.rules_rollout import publish_via


def open_reference(c: Settings, tokenizer: Any, hosts: Hosts = ALONE) -> ServedReferences | None:
    """Attaches to the servers of ref.url and checks them; None without one."""
    if not c.ref.url:
        return None
    if hosts.count > 1:
        raise UserError(f"ref.url={c.ref.url!r} is for one host, and this run has {hosts.count}; set ref.path")
    urls, timeout_s = texts.addresses_by_source(c.ref.url), c.rollout.request_timeout_s
    return ServedReferences(urls, longest=c.data.longest_row, tokenizer=tokenizer, timeout_s=timeout_s)


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


def start_vllm_engine(c: Loop, run: pathlib.Path, hosts: Hosts = ALONE) -> ServerEngine:
    """Starts this host's vLLM servers, or attaches to running ones (`start_servers`)."""
    require_routing(c)
    return start_servers(c, run, hosts, functools.partial(start_vllm, publish_host=c.rollout.publish_host))


def start_servers(c: Loop, run: pathlib.Path, hosts: Hosts, start: Callable[..., ServerEngine]) -> ServerEngine:
    """Starts this host's servers by `start` without waiting, or attaches to running ones."""
    r = c.rollout
    run.mkdir(parents=True, exist_ok=True)
    if r.publish_via == "auto":
        print(f"rollout: weights go by {publish_via(r)}", file=sys.stderr, flush=True)
    return start(
        str(hf.resolve_directory(c.model.path, weights=False)),
        str(run),
        settings=server_settings(c),
        urls=attached_urls(r.urls, hosts),
        limits=ServerLimits(
            request_timeout_s=r.request_timeout_s,
            health_timeout_s=r.health_timeout_s,
            max_restarts=r.max_restarts,
            sleep_level=r.sleep_level,
            connections=max_connections(c),
            start_timeout_s=r.start_timeout_s,
        ),
        publish_dir=r.publish_dir,
    )


def max_connections(c: Loop) -> int:
    """Returns the largest number of requests in flight at one server."""
    asked: int = c.rollout.max_concurrent_requests
    return asked if asked > 0 else max(CONNECTIONS, c.rollout.max_num_seqs)


def attached_urls(urls: str, hosts: Hosts) -> list[str] | Lookup:
    """Returns the addresses of this host's running servers, or their look-up; [] if servers are started."""
    place = texts.lookup_place(urls)
    if place is None:
        return host_urls(hosts, texts.entries(urls))
    if hosts.count > 1:
        raise UserError(
            f"rollout.urls={urls!r} is looked up by one host, and this run has {hosts.count}; list the addresses"
        )
    return address_lookup(place)


def host_urls(hosts: Hosts, urls: list[str]) -> list[str]:
    """Returns this host's share of the servers in the settings."""
    if urls and len(urls) < hosts.count:
        raise UserError(
            f"rollout.urls names {len(urls)} server(s), and each of {hosts.count} hosts needs one; name more, or start"
            " them here by leaving it empty"
        )
    share = hosts.share(len(urls))
    return urls[share.start : share.stop]
