"""SGLang's engine from the settings."""

import pathlib

from jppo.distributed.hosts import ALONE, Hosts
from jppo.plugins.sglang.client import start_sglang
from jppo.rollout.servers.fleet import ServerEngine
from jppo.rollout.servers.make import start_servers
from jppo.settings import Loop


def start_engine(c: Loop, run: pathlib.Path, hosts: Hosts = ALONE) -> ServerEngine:
    """Starts this host's SGLang servers, or attaches to running ones (`start_servers`)."""
    return start_servers(c, run, hosts, start_sglang)
