"""Multi-host start from settings or launcher, and checks that the hosts agree."""

import pathlib
import uuid
import zlib
from typing import Any

from jppo.distributed.hosts import Hosts
from jppo.distributed.launchers import join_launched
from jppo.errors import expanded
from jppo.run.inputs import Inputs
from jppo.run.resume import data_checksums
from jppo.settings import Settings, UserError, table

# Settings that may differ between hosts.
OWN = ("trainer.node_rank", "rollout.urls", "rollout.python", "rollout.publish_host", "rollout.devices", "rollout.port")
# Settings with different effects on each host.
NOT_SHARED = {
    "rollout.partial": "takes the responses that are there first, on each host others",
    "reward.model.normalize": "keeps the mean of the scores that it has seen, on each host others",
}


def join_hosts(c: Settings) -> Hosts:
    """Joins all hosts of the run and waits for them."""
    t = c.trainer
    return join_launched(
        t.nnodes,
        t.node_rank,
        t.coordinator_address,
        join_timeout_s=t.join_timeout_s,
        host_timeout_s=t.host_timeout_s,
        end_timeout_s=t.stop_timeout_s,
    )


def require_shareable(c: Settings, hosts: Hosts) -> None:
    """Raises UserError for settings that multi-host runs exclude or that differ between hosts."""
    if hosts.count == 1:
        return
    mine = table.by_name(c)
    for name, why in NOT_SHARED.items():
        if mine[name]:
            raise UserError(f"{name}=True {why}; leave it at False with trainer.nnodes={hosts.count}")
    if (via := mine["rollout.publish_via"]) in ("nccl", "ipc"):
        raise UserError(f"rollout.publish_via={via!r} is for one host, and this run has {hosts.count}; set it to tcp")
    alike = {name: repr(value) for name, value in mine.items() if name not in OWN}
    for rank, other in enumerate(hosts.gather(lambda: alike)):
        for name, value in alike.items():
            if (there := other.get(name)) != value:
                raise UserError(f"{name} is {there} on host {rank} and {value} on host {hosts.rank}; set it alike")


def require_alike(c: Settings, hosts: Hosts, inputs: Inputs) -> None:
    """Raises UserError where hosts read different data or do not share the run folder."""
    if hosts.count == 1:
        return
    of_val = zlib.crc32(b"".join(p.ids.tobytes() + p.ground_truth.encode() for p in inputs.val.prompts))
    sums: dict[str, Any] = {"data.train_files": data_checksums(inputs.train), "data.val_files": of_val}
    for rank, other in enumerate(hosts.gather(lambda: sums)):
        for name, value in sums.items():
            if other[name] != value:
                raise UserError(f"{name}: host {rank} has read other rows than host {hosts.rank}; give all the same")
    folder = expanded(c.trainer.run_dir)
    mark = hosts.gather(lambda: _mark(folder) if hosts.first else None)[0]
    seen = hosts.gather(lambda: (folder / mark).exists())
    hosts.together(lambda: (folder / mark).unlink() if hosts.first else None)
    if not all(seen):
        raise UserError(
            f"trainer.run_dir={c.trainer.run_dir}: host {seen.index(False)} does not see what host 0 writes there;"
            " name a folder that all hosts share, where checkpoints are written by all"
        )


def summed_over_hosts(hosts: Hosts, metrics: dict[str, float]) -> dict[str, float]:
    """Sums the counts of all hosts."""
    of_all = hosts.gather(lambda: metrics)
    return {name: float(sum(one[name] for one in of_all)) for name in metrics}


def _mark(folder: pathlib.Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    mark = f".hosts-{uuid.uuid4().hex[:8]}"
    (folder / mark).touch()
    return mark
