"""What the settings of the rollouts' engine may be together."""

import re
import urllib.parse

import ml_collections

from jppo.config.defaults import default
from jppo.errors import UserError

# Settings of `rollout` for a server; what the trainer's own engine has no use for.
OF_SERVERS = (
    "python",
    "urls",
    "servers",
    "port",
    "publish_via",
    "publish_dir",
    "gpu_memory_utilization",
    "omp_threads",
    "tensor_model_parallel_size",
    "devices",
    "engine_args",
    "sleep_level",
    "start_timeout_s",
    "request_timeout_s",
    "health_timeout_s",
    "max_restarts",
)
LARGEST_SERVED_RANK = 512  # of adapters in vLLM
SECRET = re.compile(r"--(?:[\w.-]*[-_.])?(?:api[-_]key|token|password|secret)(?=[\s=]|$)", re.IGNORECASE)


def check_engine(config: ml_collections.ConfigDict) -> None:
    """UserError where the engine cannot do, in training, what it is asked for, or where nobody reads it."""
    if config.rollout.name == "inprocess":
        _check_inprocess(config)
    if config.rollout.name == "sglang":
        _check_sglang(config)
    _check_mode(config)
    _check_adapters(config)


def check_publish(r: ml_collections.ConfigDict) -> None:
    """UserError where weights cannot go as they are asked to."""
    if r.publish_via == "tcp" and r.name == "sglang":
        raise UserError(
            "rollout.publish_via='tcp' is of vLLM's workers, and rollout.name='sglang' reads directories; take file and"
            " a rollout.publish_dir that trainer and servers share"
        )
    if r.publish_via == "file" and r.publish_host:
        raise UserError(
            f"rollout.publish_host={r.publish_host!r} is read for rollout.publish_via=tcp only, and that is 'file'; set"
            " it, or leave the host empty"
        )
    if r.publish_host in ("0.0.0.0", "::"):
        raise UserError(
            f"rollout.publish_host={r.publish_host!r} is no address that a server could ask; give the trainer's own"
        )
    if r.publish_via == "tcp" and r.lora_sync == "adapter" and not r.publish_dir:
        raise UserError(
            "rollout.publish_via='tcp' hands over whole weights, and rollout.lora_sync='adapter' adapters in a folder;"
            " name one that trainer and servers share by rollout.publish_dir, or take merge"
        )


def check_secrets(r: ml_collections.ConfigDict) -> None:
    """UserError where a setting holds what must not be printed and saved; it is not shown."""
    for url in filter(None, map(str.strip, r.urls.split(","))):
        try:
            at = urllib.parse.urlsplit(url)
            fit = at.scheme in ("http", "https") and at.hostname is not None and (at.port or 1) > 0
        except ValueError:
            at, fit = None, False
        if "@" in url or (at is not None and (at.query or at.fragment)):
            raise UserError(
                "rollout.urls has a password or a query in it, and settings are printed and saved; give the servers'"
                " token by JPPO_SERVER_TOKEN in the environment"
            )
        if not fit:
            raise UserError(f"rollout.urls={r.urls!r}: {url!r} is no address; write it like http://127.0.0.1:8000")
    if found := SECRET.search(r.engine_args):
        raise UserError(
            f"rollout.engine_args has {found[0]}, and settings are printed and saved; leave it out: a server that is"
            " started here has a random token, and what else is secret belongs in the environment, as HF_TOKEN"
        )


def _check_inprocess(config: ml_collections.ConfigDict) -> None:
    usual = default()
    for name in OF_SERVERS:
        if (value := config.rollout[name]) != (was := usual.rollout[name]):
            raise UserError(
                f"rollout.{name}={value!r} is of servers, and rollout.name='inprocess' starts none; leave it at"
                f" {was!r}, or take rollout.name=vllm"
            )
    if config.rollout.lora_sync == "adapter":
        raise UserError(
            "rollout.lora_sync='adapter' hands adapters to a server, and rollout.name='inprocess' samples from the"
            " trainer's own; take rollout.lora_sync=merge, or rollout.name=vllm"
        )


def _check_sglang(config: ml_collections.ConfigDict) -> None:
    r = config.rollout
    if r.lora_sync == "adapter":
        raise UserError(
            "rollout.lora_sync='adapter' is for rollout.name=vllm; rollout.name='sglang' is given whole weights: take"
            " rollout.lora_sync=merge"
        )
    if r.on_update == "keep":
        raise UserError(
            "rollout.on_update='keep' is for rollout.name=vllm; rollout.name='sglang' names one version of the weights"
            " for a whole response, so that none may be kept over an update: take wait or abort"
        )


def _check_mode(config: ml_collections.ConfigDict) -> None:
    r, usual = config.rollout, default().rollout
    if r.mode == "sync":
        for name in ("max_staleness", "on_update", "partial"):
            if r[name] != usual[name]:
                raise UserError(
                    f"rollout.{name}={r[name]!r} is of asynchronous training, and rollout.mode='sync'; set it to async,"
                    f" or leave the other at {usual[name]!r}"
                )
        return
    if r.sleep_level:
        raise UserError(
            f"rollout.sleep_level={r.sleep_level} puts the servers to sleep while the trainer learns, when"
            " rollout.mode='async' has them sample; set one of them back"
        )
    if r.name == "inprocess" and (r.on_update != "wait" or r.partial):
        raise UserError(
            f"rollout.on_update={r.on_update!r} with rollout.partial={r.partial}: rollout.name='inprocess' samples"
            " between the updates, so that none meets a response under way; leave them at 'wait' and False"
        )
    if r.partial and r.on_update == "wait":
        raise UserError(
            "rollout.partial=True lets responses go on over updates, and rollout.on_update='wait' waits for their end;"
            " take abort or keep"
        )
    if r.partial and r.max_staleness < 2:
        raise UserError(
            f"rollout.partial=True with rollout.max_staleness={r.max_staleness}: a response that goes on in the next"
            " step is two updates old; set it to 2 or more"
        )


def _check_adapters(config: ml_collections.ConfigDict) -> None:
    if config.rollout.sleep_level and config.rollout.lora_sync == "adapter":
        raise UserError(
            f"rollout.sleep_level={config.rollout.sleep_level} needs whole weights after each step, and"
            " rollout.lora_sync='adapter' sends adapters alone; take merge, or set the level to 0"
        )
    if config.rollout.lora_sync == "merge":
        return
    rank, said = config.model.lora_rank, f"rollout.lora_sync={config.rollout.lora_sync!r}"
    if rank == 0:
        raise UserError(f"{said} publishes adapters, and model.lora_rank=0 trains none; set it, or take merge")
    if config.rollout.on_update == "keep":
        raise UserError(
            f"{said} with rollout.on_update='keep': a response that the server keeps goes on by the adapters that it"
            " began with, under the new version's name; take abort or wait, or rollout.lora_sync=merge"
        )
    if rank > LARGEST_SERVED_RANK:
        raise UserError(
            f"model.lora_rank={rank}: vLLM serves adapters of rank {LARGEST_SERVED_RANK} at most; lower it, or set"
            " rollout.lora_sync=merge"
        )
