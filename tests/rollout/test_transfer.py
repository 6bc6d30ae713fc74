import dataclasses
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from jppo.rollout.vllm import layout, transfer
from jppo.rollout.vllm.transfer import Address, Sender

TENSORS = {
    "a": np.arange(700_000, dtype=np.float32),
    "none": np.zeros((0, 3), np.float32),
    "b": np.array([1.5, -2.0], np.float16),
    "c": np.arange(300_000, dtype=np.float32),
}


@pytest.fixture
def written():
    fd = os.memfd_create("test")
    yield fd, layout.write(fd, TENSORS.items())
    os.close(fd)


@pytest.fixture
def sender():
    made = Sender("127.0.0.1", timeout_s=5.0)
    yield made
    made.close()


def arrived(data, entries):
    return {e.name: bytes(data[e.offset : e.offset + e.nbytes]) for e in entries}


SENT = {name: tensor.tobytes() for name, tensor in TENSORS.items()}


def refusal(address, entries) -> str:
    with pytest.raises(layout.WeightsRefused) as caught:
        transfer.receive(address, entries)
    return str(caught.value)


def test_every_byte_arrives(sender, written):
    address = sender.offer(*written)
    assert arrived(transfer.receive(address, written[1]), written[1]) == SENT


def test_several_pull_at_the_same_time(sender, written, monkeypatch):
    """Each waits until all of them are in the middle: nothing may serve one after the other."""
    together, real = threading.Barrier(4), transfer._receive_one

    def one(connection, entry, view, deadline):
        if entry.name == "b":
            together.wait(5)
        real(connection, entry, view, deadline)

    monkeypatch.setattr(transfer, "_receive_one", one)
    address = sender.offer(*written)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: arrived(transfer.receive(address, written[1]), written[1]), range(4)))
    assert found == [SENT] * 4


def test_a_wrong_token_gets_no_byte_of_them(sender, written):
    address = sender.offer(*written)
    wrong = dataclasses.replace(address, token="0" * 32)
    assert "rejects the token" in refusal(wrong, written[1])
    with socket.create_connection((address.host, address.port), timeout=5) as connection:
        connection.sendall(b"0" * 32)
        assert connection.makefile("rb").read() == transfer.NO
    assert transfer.receive(address, written[1])


def test_a_token_is_of_one_publish(sender, written):
    fd, entries = written
    first = sender.offer(fd, entries)
    sender.withdraw(fd)
    second = sender.offer(fd, entries)
    assert first.token != second.token and len(first.token) == transfer.TOKEN_BYTES
    assert "rejects the token" in refusal(first, entries)
    assert transfer.receive(second, entries)


def test_the_last_one_can_still_be_had_beside_the_next(sender, written):
    """A server that was started again gets what the others have, while the next one is offered to them."""
    fd = os.memfd_create("next")
    entries = layout.write(fd, [("a", TENSORS["a"] + 1)])
    first, second = sender.offer(*written), sender.offer(fd, entries)
    assert arrived(transfer.receive(first, written[1]), written[1]) == SENT
    assert arrived(transfer.receive(second, entries), entries) == {"a": (TENSORS["a"] + 1).tobytes()}
    sender.withdraw(fd)
    os.close(fd)
    assert arrived(transfer.receive(first, written[1]), written[1]) == SENT


def test_bytes_that_are_not_what_was_written_are_refused(sender, written):
    fd, entries = written
    address = sender.offer(fd, entries)
    os.pwrite(fd, b"x", entries[3].offset + 1_000_001)
    assert "c has a different checksum" in refusal(address, entries)


def test_a_tensor_of_another_publish_is_refused(sender, written):
    fd, entries = written
    address = sender.offer(fd, entries)
    other = [*entries[:2], dataclasses.replace(entries[2], crc32=1), entries[3]]
    assert "b has a header with another length or checksum" in refusal(address, other)


def test_a_file_that_is_cut_is_refused(sender, written):
    fd, entries = written
    address = sender.offer(fd, entries)
    os.truncate(fd, entries[3].offset + 5)
    assert "broke off in c: the connection was closed" in refusal(address, entries)


def test_nobody_there_says_what_to_set(sender, written):
    address = sender.offer(*written)
    sender.close()
    assert "set rollout.publish_host to its address" in refusal(address, written[1])


def fake(behave):
    """A trainer that does as told with one connection; its address."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve():
        with listening, listening.accept()[0] as connection:
            connection.recv(transfer.TOKEN_BYTES)
            behave(connection)

    threading.Thread(target=serve, daemon=True).start()
    return Address("127.0.0.1", listening.getsockname()[1], "0" * 32, timeout_s=0.5)


def test_a_connection_that_ends_in_a_tensor_is_refused(written):
    _, entries = written

    def cut(connection):
        header = transfer.HEADER.pack(entries[0].nbytes, entries[0].crc32)
        connection.sendall(transfer.YES + header + SENT["a"][:1000])

    assert "broke off in a: the connection was closed" in refusal(fake(cut), entries)
    assert "broke off before the first tensor" in refusal(fake(lambda connection: None), entries)


def test_a_trainer_that_drips_is_refused_in_time(written):
    _, entries = written
    over = threading.Event()

    def drip(connection):
        header = transfer.HEADER.pack(entries[0].nbytes, entries[0].crc32)
        connection.sendall(transfer.YES + header)
        while not over.wait(0.05):
            connection.send(b"0")

    began = time.monotonic()
    assert "did not arrive within 0.5 s: in a from 127.0.0.1" in refusal(fake(drip), entries)
    assert time.monotonic() - began < 3
    over.set()


def test_a_file_that_is_about_to_be_written_again_is_given_no_longer(sender, written):
    address = sender.offer(*written)
    with socket.create_connection((address.host, address.port), timeout=5) as slow:
        slow.sendall(address.token.encode())
        assert slow.recv(1) == transfer.YES
        sender.withdraw(written[0])
        rest = 0
        while more := slow.recv(1 << 16):
            rest += len(more)
    assert rest < sum(map(len, SENT.values()))


def test_nothing_is_left_open(written):
    before = set(os.listdir("/proc/self/fd"))
    sender = Sender("127.0.0.1", timeout_s=5.0)
    for _ in range(3):
        transfer.receive(sender.offer(*written), written[1]).close()
    sender.close()
    sender.close()
    deadline = time.monotonic() + 5
    while set(os.listdir("/proc/self/fd")) != before:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_idle_connections_take_a_bounded_number_of_threads(monkeypatch):
    monkeypatch.setattr(transfer, "CONNECTIONS", 20)
    sender = Sender("127.0.0.1", timeout_s=5.0)
    before = threading.active_count()
    idle = [socket.create_connection(("127.0.0.1", sender._port)) for _ in range(100)]
    try:
        for connection in idle[20:]:  # those beyond the bound are sent away at once
            connection.settimeout(5.0)
            assert connection.recv(1) == b""
        assert threading.active_count() - before <= 20
    finally:
        for connection in idle:
            connection.close()
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert threading.active_count() <= before  # and when they have gone there is room again
    sender.close()
