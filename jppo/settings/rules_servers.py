"""Rules of rollout servers: the transport of weights, addresses, secrets."""

import re

from jppo.errors import UserError
from jppo.settings import texts
from jppo.settings.table import Settings
from jppo.settings.table_rollout import Rollout

SECRET = re.compile(r"--(?:[\w.-]*[-_.])?(?:api[-_]key|token|password|secret)(?=[\s=]|$)", re.IGNORECASE)


def publish_via(r: Rollout) -> str:
    """Returns the transport of weights; `auto` is the file's unless a server is at another address."""
    if r.publish_via != "auto":
        return str(r.publish_via)
    return "tcp" if r.name == "vllm" and texts.remote_urls(r.urls) else "file"


def check_publish(r: Rollout) -> None:
    """Raises a UserError for a transport of weights that the servers do not have."""
    resolved = publish_via(r)
    via = f"rollout.publish_via={r.publish_via!r}" + (f" (here {resolved})" if r.publish_via == "auto" else "")
    if r.publish_via in ("tcp", "nccl", "ipc") and r.name == "sglang":
        raise UserError(
            f"{via} is for vLLM, and rollout.name='sglang' reads directories; use file and a rollout.publish_dir that"
            " trainer and servers share"
        )
    if r.publish_via == "nccl" and r.sleep_level:
        raise UserError(
            f"{via} needs servers on other GPUs than the trainer's, and rollout.sleep_level={r.sleep_level} is for"
            " servers on the same; use file, or give them rollout.devices and set sleep_level to 0"
        )
    if r.publish_via == "ipc" and r.urls:
        raise UserError(
            f"{via} is for servers that are started here, on the trainer's GPUs; leave rollout.urls empty, or take tcp"
        )
    if r.publish_host in ("0.0.0.0", "::"):
        raise UserError(
            f"rollout.publish_host={r.publish_host!r} is no address that a server can reach; give the trainer's own"
        )
    away = [url for url in texts.remote_urls(r.urls) if not url.startswith("file:")]
    if resolved == "tcp" and away and not r.publish_host:
        raise UserError(
            f"{via} needs the trainer's address for the server at {away[0]}; set rollout.publish_host to the address of"
            " this machine as seen from there"
        )
    if resolved != "file" and r.lora_sync == "adapter" and not r.publish_dir:
        raise UserError(
            f"{via} sends whole weights, and rollout.lora_sync='adapter' a folder of adapters; name one that trainer"
            " and servers share by rollout.publish_dir, or take merge"
        )


def check_secrets(config: Settings) -> None:
    """Raises a UserError for secrets, which would be printed and saved, without showing them."""
    r = config.rollout
    place = texts.lookup_place(r.urls)
    urls = [("rollout.urls", url) for url in texts.entries(r.urls) if place is None]
    if config.ref.url:
        urls.append(("ref.url", config.ref.url))
    for name, url in urls:
        if re.search("[@?#]", url):
            token = "the servers' token belongs into JPPO_SERVER_TOKEN in the environment"
            way = token if name == "rollout.urls" else "leave it out"
            raise UserError(f"{name} has a password or a query in it, and settings are printed and saved; {way}")
        if not texts.is_url(url):
            raise UserError(f"{name}: {url!r} is no address; write it like http://127.0.0.1:8000")
    if len({url.rstrip("/") for url in texts.entries(r.urls)}) < len(texts.entries(r.urls)):
        raise UserError(f"rollout.urls={r.urls!r}: a server is given twice; name it once")
    if found := SECRET.search(r.engine_args):
        raise UserError(
            f"rollout.engine_args has {found[0]}, and settings are printed and saved; leave it out: a server that is"
            " started here has a random token, and other secrets belong in the environment, as HF_TOKEN"
        )
