"""Rollout servers from the settings: their start, or the addresses of running ones; and served references."""

import dataclasses
import pathlib
import sys
from collections.abc import Callable
from typing import Any

from jppo.distributed.hosts import ALONE, Hosts
from jppo.errors import UserError
from jppo.models import hf
from jppo.rollout.make import server_threads
from jppo.rollout.servers.fleet import ServerEngine
from jppo.rollout.servers.member import ServerSettings
from jppo.rollout.servers.repair import Lookup, address_lookup
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
    by_name: dict[str, Any] = {
        f.name: getattr(r, f.name) for f in dataclasses.fields(ServerSettings) if hasattr(r, f.name)
    }
    return dataclasses.replace(
        ServerSettings(**by_name, max_model_len=c.data.longest_row, vocab_size=cfg.vocab_size),
        servers=r.least_servers,
        devices=tuple(texts.entries(r.devices)),
        omp_threads=server_threads(r, cfg),
        publish_via=publish_via(r),
        max_positions=max(c.model.max_position_embeddings, 0),
        lora_rank=c.model.lora_rank if r.lora_sync == "adapter" else 0,
        head_sizes=cfg.head_sizes,
        latent=cfg.latent_sizes,
        delta=cfg.delta_kind,
        experts=(cfg.num_layers, moe.active, moe.count) if r.routing_replay and moe is not None else None,
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
    return start_servers(c, run, hosts, start_vllm)


def start_servers(c: Loop, run: pathlib.Path, hosts: Hosts, start: Callable[..., ServerEngine]) -> ServerEngine:
    """Starts this host's servers by `start` without waiting, or attaches to running ones."""
    r = c.rollout
    run.mkdir(parents=True, exist_ok=True)
    if r.publish_via == "auto":
        print(f"rollout: weights go by {publish_via(r)}", file=sys.stderr, flush=True)
    model_dir = str(hf.resolve_directory(c.model.path, weights=False))
    return start(model_dir, str(run), settings=server_settings(c), urls=attached_urls(r.urls, hosts))


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
