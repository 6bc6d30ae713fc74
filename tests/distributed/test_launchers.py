"""Where a process stands among the hosts: each launcher's environment, and what is wrong with it."""

import re
import socket
import time

import pytest

from jppo.distributed import launchers
from jppo.distributed.hosts import ALONE
from jppo.distributed.launchers import HostPlace, find_place, join_launched
from jppo.errors import UserError

MASTER = {"MASTER_ADDR": "node-a", "MASTER_PORT": "29500"}
ALL = {"NNODES": "4", "NODE_RANK": "2", **MASTER}


@pytest.mark.parametrize(
    "settings, env, place",
    [
        ((-1, -1, ""), {}, None),
        ((-1, -1, ""), ALL, HostPlace(4, 2, "node-a:29500")),
        ((-1, -1, ""), {"NNODES": "1"}, None),
        ((1, -1, ""), ALL, None),  # a setting is stronger
        ((2, 1, "node-b:1"), {}, HostPlace(2, 1, "node-b:1")),
        ((2, 0, ""), ALL, HostPlace(2, 0, "node-a:29500")),
        ((-1, 0, "node-c:7"), ALL, HostPlace(4, 0, "node-c:7")),
        ((-1, -1, ""), {"WORLD_SIZE": "3", "RANK": "1", **MASTER}, HostPlace(3, 1, "node-a:29500")),
        (
            (-1, -1, ""),
            {"WORLD_SIZE": "3", "RANK": "1", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "1", **MASTER},
            HostPlace(3, 1, "node-a:29500"),
        ),
        ((-1, -1, ""), {"WORLD_SIZE": "1", "RANK": "0"}, None),
        ((-1, -1, ""), {"SLURM_STEP_NUM_TASKS": "2"}, HostPlace(2)),
        ((-1, -1, ""), {"SLURM_STEP_NUM_TASKS": "1"}, None),
        ((-1, -1, ""), {"OMPI_COMM_WORLD_SIZE": "8"}, HostPlace(8)),
        ((-1, -1, ""), {"TPU_WORKER_HOSTNAMES": "a,b"}, HostPlace(2)),
        ((-1, -1, ""), {"TPU_WORKER_HOSTNAMES": "localhost"}, None),
        ((2, -1, ""), {}, HostPlace(2)),  # JAX looks
    ],
)
def test_where_a_process_stands(settings, env, place):
    assert find_place(*settings, env) == place


@pytest.mark.parametrize(
    "settings, env, said",
    [
        ((-1, -1, ""), {"NNODES": "2"}, "NNODES=2 asks .* NODE_RANK and .* MASTER_ADDR and MASTER_PORT is not set"),
        ((-1, -1, ""), {"NNODES": "2", **MASTER}, "trainer.node_rank or NODE_RANK is not set"),
        ((-1, -1, ""), {"NNODES": "2", "NODE_RANK": "0"}, "MASTER_PORT is not set"),
        ((-1, -1, ""), {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "a"}, "MASTER_PORT is not set"),
        ((2, 1, ""), {}, "trainer.nnodes=2 asks .*coordinator_address"),
        ((-1, -1, ""), ALL | {"NODE_RANK": "4"}, "host 4 of NNODES=4: hosts are numbered from 0 to 3"),
        ((-1, -1, ""), ALL | {"NODE_RANK": "two"}, "NODE_RANK='two'; it must be a whole number, 0 or more"),
        ((-1, -1, ""), ALL | {"NNODES": "0"}, "NNODES='0'; it must be a whole number, 1 or more"),
        ((-1, -1, ""), ALL | {"MASTER_PORT": "http"}, "'node-a:http' must be HOST:PORT"),
        ((-1, -1, "node-a"), ALL, "'node-a' must be HOST:PORT"),
        ((-1, -1, ""), {"WORLD_SIZE": "16", "RANK": "3", "LOCAL_WORLD_SIZE": "8", **MASTER}, "one process per host"),
        ((-1, 1, ""), {}, "trainer.node_rank=1 .* set trainer.nnodes"),
        ((1, -1, "a:1"), {}, "trainer.coordinator_address='a:1' .* set trainer.nnodes"),
    ],
)
def test_half_an_environment_is_one_line(settings, env, said):
    with pytest.raises(UserError, match=said) as e:
        find_place(*settings, env)
    assert "\n" not in str(e.value)


LIMITS = dict(join_timeout_s=0.3, host_timeout_s=1.0, end_timeout_s=1.0)


def test_one_host_joins_nobody():
    assert join_launched(-1, -1, "", **LIMITS, env={}) is ALONE


def test_a_coordinator_that_does_not_answer_has_a_deadline():
    with socket.socket() as bound:  # nobody listens
        bound.bind(("127.0.0.1", 0))
        address, began = f"127.0.0.1:{bound.getsockname()[1]}", time.monotonic()
        with pytest.raises(UserError, match=re.escape(address) + " within trainer.join_timeout_s=0.3"):
            join_launched(2, 1, address, **LIMITS, env={})
        assert time.monotonic() - began >= 0.3


def test_the_coordinator_listens_at_the_address_that_is_named(capsys):
    assert launchers._bind_address(HostPlace(2, 0, "127.0.0.1:1234")) == "127.0.0.1:1234"
    assert launchers._bind_address(HostPlace(2, 0, "localhost:1234")) == "localhost:1234"
    assert launchers._bind_address(HostPlace(2, 1, "192.0.2.1:1234")) is None and capsys.readouterr().err == ""
    assert launchers._bind_address(HostPlace(2, 0, "192.0.2.1:1234")) is None  # an example's address: not ours
    assert "192.0.2.1 is not an address of host 0 itself" in capsys.readouterr().err


@pytest.mark.parametrize("at", ["127.0.1.1", "::1"])
def test_a_name_that_is_the_loopback_here_does_not_keep_other_hosts_out(monkeypatch, capsys, at):
    family = socket.AF_INET6 if ":" in at else socket.AF_INET
    found = [(family, socket.SOCK_STREAM, 6, "", (at, 0, 0, 0) if ":" in at else (at, 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert launchers._bind_address(HostPlace(2, 0, "node-a:1234")) is None
    assert f"node-a is {at} here" in capsys.readouterr().err
