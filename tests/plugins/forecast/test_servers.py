"""Seconds in which servers sleep, wake, get the weights and are checked; against arithmetic by hand."""

import dataclasses

import pytest

from jppo.plugins.forecast import machines
from jppo.plugins.forecast.servers import IPC, WAKE_S, ServerWork, publish_seconds, server_rates, server_seconds

# Qwen2.5-7B in bfloat16, four servers on two GPUs each: docs/scaling.md, publishing a large model.
WORK = ServerWork(
    via="file", weights=15_230_000_000, policy=15_230_000_000, width=2, servers=4, apart=False, sleep_level=2,
    overlaps=False, prompts=16 * 1024,
)  # fmt: skip
HOST = machines.parse_machine("8xH100")
NETWORK = HOST.chip.shares["network"].value


def work(**changes):
    return dataclasses.replace(WORK, **changes)


@pytest.mark.parametrize(
    "changes, seconds",
    [
        # an eighth of the weights from each GPU to the host, two checksums by four threads, half of them to each GPU
        ({}, 15.23 / 8 / 25 + 2 * 15.23 * 0.26 / 4 + 15.23 / 2 / 25),
        # one checksum, a stream to each server, 76 buckets of 192 MiB
        ({"via": "tcp"}, 15.23 / 8 / 25 + 15.23 * 0.26 / 4 + 15.23 * 0.63 + 76 * 0.006 + 15.23 / 2 / 25),
        # checksum, comparison and verification by four threads, a hundredth of the bytes to each of four servers
        (
            {"via": "tcp", "changes": True, "apart": True},
            15.23 / 8 / 25
            + 15.23 * (0.26 / 4 + 1 / 1.7 / 4 + 1 / 2.2 / 4 + 0.01 * 4 / (8 * 50 * NETWORK) + 1 / 2 / 25)
            + 76 * 0.006,
        ),
        ({"via": "nccl"}, 15.23 / 8 + 76 * 0.006),
        ({"via": "ipc"}, 15.23 * 7 / 60 + 76 * 0.006),
        ({"weights": 10_000_000}, 0.01 / 8 / 25 + 2 * 0.01 * 0.26 / 4 + 0.01 / 2 / 25),  # adapters
    ],
)
def test_a_publish_is_its_bytes_over_its_links(changes, seconds):
    assert publish_seconds(work(**changes), HOST) == pytest.approx(seconds)


def test_hosts_gather_the_parts_of_others_first():
    four = machines.parse_machine("4x8xH100")
    more = publish_seconds(WORK, four) - publish_seconds(WORK, HOST)
    assert more == pytest.approx(15.23 * 3 / 4 / 8 / (50 * four.chip.shares["network"].value))


def test_many_servers_elsewhere_are_bound_by_the_network():
    fast, slow = (publish_seconds(work(via="tcp", apart=True, servers=n), HOST) for n in (1, 256))
    assert slow - fast == pytest.approx(256 * 15.23 / (8 * 50 * HOST.chip.shares["network"].value) - 15.23 * 0.63)


def test_stages_of_a_step():
    found = server_seconds(WORK, HOST, scoring=0.5, critic=3.0)
    assert list(found) == ["wake", "publish", "check"], "level 2 drops the weights, which takes no time"
    assert found["wake"] == WAKE_S[0] and found["publish"] == publish_seconds(WORK, HOST)
    reads = 4 * 7.615e9 / (3.35e12 * 0.85)
    products = 2 * 16 * 1024 * 7.615e9 / 2 / (989.4e12 * 0.8)
    assert found["check"] == pytest.approx(0.5 + reads + products)
    first = server_seconds(work(sleep_level=1), HOST, scoring=0.5, critic=3.0)
    assert first["sleep"] == pytest.approx(7.615 / 25) and first["wake"] == pytest.approx(WAKE_S[0] + 7.615 / 25)
    awake = server_seconds(work(sleep_level=0, overlaps=True), HOST, scoring=0.5, critic=3.0)
    assert list(awake) == ["check"], "sent while the critic learns"
    assert server_seconds(None, HOST, scoring=0.5, critic=3.0) == {}


def test_every_rate_is_named_an_assumption():
    lines = server_rates(work(via="ipc"))
    assert f"{IPC[0] / 1e9:.3g} GB/s" in lines[0] and len(lines) == 3
    assert all("assumed" in line for via in ("file", "tcp", "nccl") for line in server_rates(work(via=via)))
    assert server_rates(None) == []
