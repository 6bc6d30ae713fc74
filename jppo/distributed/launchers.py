"""Joins the hosts of a run, by settings or by the environment of common launchers.

One process per host. JAX's devices must not be used before `join`.
"""

import contextlib
import ctypes
import dataclasses
import ipaddress
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any

import jax

from jppo.distributed.hosts import ALONE, LOST, RESUMES, Hosts
from jppo.errors import UserError

_POLL_S = 0.5
# Environment variables that make JAX's own detection find several processes.
DETECTED = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
POD = "TPU_WORKER_HOSTNAMES"


@dataclasses.dataclass(frozen=True)
class HostPlace:
    """The rank and coordinator of a host."""

    count: int
    rank: int | None = None  # None: JAX detects it, and the address
    address: str = ""  # of host 0's coordinator, HOST:PORT


def find_place(nnodes: int, node_rank: int, coordinator: str, env: Mapping[str, str]) -> HostPlace | None:
    """Returns this process's place from `trainer`'s settings (-1 and '': unset) or the environment; None: alone."""
    count, source = (nnodes, f"trainer.nnodes={nnodes}") if nnodes != -1 else _host_count(env)
    if count == 1:
        if node_rank > 0 or coordinator:
            raise UserError(
                f"trainer.node_rank={node_rank} and trainer.coordinator_address={coordinator!r} are for several"
                " hosts; set trainer.nnodes, or unset them"
            )
        return None
    if nnodes == -1 and not any(name in env for name in ("NNODES", "WORLD_SIZE")):
        return HostPlace(count)
    ranks = (name for name in ("NODE_RANK", "GROUP_RANK", "RANK") if name in env)  # the last two are torchrun's
    rank = node_rank if node_rank != -1 else next((_number(env, name, least=0) for name in ranks), None)
    address = coordinator
    if not address and env.get("MASTER_ADDR") and env.get("MASTER_PORT"):
        address = f"{env['MASTER_ADDR']}:{env['MASTER_PORT']}"
    if rank is None and not address and nnodes != -1:  # JAX may detect another launcher
        return HostPlace(count)
    missing = [
        *(["trainer.node_rank or NODE_RANK"] if rank is None else []),
        *(["trainer.coordinator_address, or MASTER_ADDR and MASTER_PORT"] if not address else []),
    ]
    if missing or rank is None:
        raise UserError(f"{source} asks for several hosts, and {' and '.join(missing)} is not set; set it on each")
    if not 0 <= rank < count:
        raise UserError(f"host {rank} of {source}: hosts are numbered from 0 to {count - 1}; fix NODE_RANK")
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UserError(f"the coordinator's address {address!r} must be HOST:PORT, the same on all hosts")
    return HostPlace(count, rank, address)


def join_launched(
    nnodes: int,
    node_rank: int,
    coordinator: str,
    *,
    join_timeout_s: float,
    host_timeout_s: float,
    end_timeout_s: float,
    env: Mapping[str, str] = os.environ,
) -> Hosts:
    """Returns the hosts of this run once all have joined; UserError if that fails."""
    place = find_place(nnodes, node_rank, coordinator, env)
    if place is None:
        return ALONE
    if place.rank:
        _await_coordinator(place.address, join_timeout_s)
    logging.getLogger("jax._src.distributed").setLevel(logging.ERROR)  # proxies are not used for our own hosts
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # `watchdog.py` handles SIGTERM
    known: dict[str, Any] = {}
    if place.rank is not None:
        known = dict(coordinator_address=place.address, num_processes=place.count, process_id=place.rank)
        known |= dict(cluster_detection_method="deactivate", coordinator_bind_address=_bind_address(place))
    text = f"not all of {place.count} hosts came together within trainer.join_timeout_s={join_timeout_s:g}"
    abort_message = _AbortMessage(2, text)
    try:
        jax.distributed.initialize(
            **known,
            initialization_timeout=max(1, int(join_timeout_s)),
            heartbeat_timeout_seconds=int(2 * host_timeout_s) + 30,  # `hosts.py` is faster, and names the host
            shutdown_timeout_seconds=max(1, int(end_timeout_s)),
        )
    except (RuntimeError, ValueError) as e:
        reason = " ".join(str(e).split())[:200]
        _exit(2, f"{text}: {reason}" if known else f"trainer.nnodes={place.count}: JAX found no other hosts: {reason}")
    from jax._src import distributed  # the store has no public name

    state = distributed.global_state
    if state.num_processes != place.count:
        _exit(2, f"trainer.nnodes={place.count}, but the launcher started {state.num_processes} processes; fix one")
    abort_message.explain(str(state.coordinator_address))
    return Hosts(
        state.process_id,
        place.count,
        store=state.client,
        timeout_s=host_timeout_s,
        end_timeout_s=end_timeout_s,
    )


def _host_count(env: Mapping[str, str]) -> tuple[int, str]:
    """Returns the number of hosts in the environment, and the variable for messages."""
    if "NNODES" in env:
        return _number(env, "NNODES", least=1), f"NNODES={env['NNODES']}"
    if "WORLD_SIZE" in env:
        size, local = _number(env, "WORLD_SIZE", least=1), env.get("LOCAL_WORLD_SIZE", "1")
        if size > 1 and local != "1":
            raise UserError(
                f"WORLD_SIZE={size} with LOCAL_WORLD_SIZE={local}: jppo runs one process per host with all"
                " of its devices; start one, as with torchrun --nproc-per-node=1"
            )
        return size, f"WORLD_SIZE={size}"
    for name in DETECTED:
        if name in env and (count := _number(env, name, least=1)) > 1:
            return count, f"{name}={count}"
    if (pod_hosts := len(env.get(POD, "").split(","))) > 1:
        return pod_hosts, f"{POD} of {pod_hosts} hosts"
    return 1, ""


def _number(env: Mapping[str, str], name: str, *, least: int) -> int:
    try:
        number = int(env[name])
    except ValueError:
        number = least - 1
    if number < least:
        raise UserError(f"the environment has {name}={env[name]!r}; it must be a whole number, {least} or more")
    return number


def _bind_address(place: HostPlace) -> str | None:
    """Returns the address at which host 0's coordinator listens, the given one; None: at all of its addresses."""
    host, _, port = place.address.rpartition(":")
    if place.rank:
        return None
    try:
        family, kind, _, _, socket_address = socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(socket_address)
    except OSError as e:  # behind address translation, or a name that is not resolvable here yet
        warning = f"{host} is not an address of host 0 itself ({e.strerror}): it listens at all of its addresses"
        print(f"warning: {warning}; keep other networks from port {port}", file=sys.stderr, flush=True)
        return None
    if ipaddress.ip_address(str(socket_address[0]).partition("%")[0]).is_loopback and not _names_loopback(host):
        warning = f"{host} is {socket_address[0]} here, as in /etc/hosts of Debian, where no other host can reach it"
        print(f"warning: {warning}: it listens at all of its addresses; give host 0's own", file=sys.stderr, flush=True)
        return None
    return place.address


def _names_loopback(host: str) -> bool:
    """Whether the loopback is meant: all processes run on this host."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return host.lower() == "localhost"


def _await_coordinator(address: str, timeout_s: float) -> None:
    """Returns when the coordinator listens; JAX itself would end the process without a message."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            _try_connect(address)
            return
        except OSError as e:
            if time.monotonic() > deadline:
                raise UserError(
                    f"no coordinator answers at {address} within trainer.join_timeout_s={timeout_s:g} ({e}); start host"
                    " 0, too, and check its address and port"
                ) from e
        time.sleep(_POLL_S)


def _try_connect(address: str) -> None:
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=5.0).close()


class _AbortMessage:
    """Prints a message when XLA aborts a process whose coordinator is gone, which Python cannot catch.

    Called from C in the aborting thread, without Python locks.
    """

    def __init__(self, status: int, message: str) -> None:
        self._status, self._message, self._coordinator = status, message, ""
        handler = ctypes.CFUNCTYPE(None, ctypes.c_int)
        self._handler = handler(self._on_abort)  # must live as long as the process
        libc = ctypes.CDLL(None)
        libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, handler], ctypes.c_void_p
        libc.signal(signal.SIGABRT, self._handler)
        _ABORT_MESSAGES.append(self)

    def explain(self, coordinator: str) -> None:
        """Attributes later aborts to the loss of `coordinator`, or to a crash."""
        self._coordinator = coordinator

    def _on_abort(self, _: int) -> None:
        """Prints the message and ends the process; returns for a crash that is not the coordinator's loss."""
        if self._coordinator:
            try:
                _try_connect(self._coordinator)
                signal.signal(signal.SIGABRT, signal.SIG_DFL)
                return  # a crash like any other
            except OSError:
                self._status = LOST
                self._message = f"host 0 is lost, which coordinates the run; {RESUMES}"
            except ValueError:  # only the main thread may set a handler; its own abort proceeds anyway
                return
        _exit(self._status, self._message)


_ABORT_MESSAGES: list[_AbortMessage] = []


def _exit(status: int, message: str) -> None:
    sys.stdout.flush()
    os.write(2, f"error: {message}\n".encode())
    os._exit(status)
