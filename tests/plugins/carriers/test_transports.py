import contextlib
import dataclasses
import errno
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from jppo.plugins.carriers import buckets, transports
from jppo.plugins.carriers.transports import Address, Sender
from jppo.rollout.vllm import layout

TENSORS = {
    "a": np.arange(700_000, dtype=np.float32),
    "none": np.zeros((0, 3), np.float32),
    "b": np.array([1.5, -2.0], np.float16),
    "c": np.arange(300_000, dtype=np.float32),
}


@pytest.fixture
def bucket():
    """The entries and the bytes of TENSORS."""
    return buckets.checksummed(list(TENSORS.items()))


@pytest.fixture(params=["", "127.0.0.1"])
def sender(request):
    made = Sender(request.param, timeout_s=60.0)
    yield made
    made.close()


def arrived(data, entries):
    return {e.name: bytes(data[e.offset : e.offset + e.nbytes]) for e in entries}


SENT = {name: tensor.tobytes() for name, tensor in TENSORS.items()}


def refusal(address, entries) -> str:
    with pytest.raises(layout.WeightsRefused) as caught:
        transports.receive(address, entries)
    return str(caught.value)


def test_every_byte_arrives(sender, bucket):
    with sender.offer(*bucket) as address:
        assert arrived(transports.receive(address, bucket[0]), bucket[0]) == SENT


def test_several_pull_at_the_same_time(sender, bucket, monkeypatch):
    """Each waits until all of them are in the middle: nothing may serve one after the other."""
    together, real = threading.Barrier(4), transports._receive_one

    def one(connection, entry, view, deadline):
        if entry.name == "b":
            together.wait(60)
        real(connection, entry, view, deadline)

    monkeypatch.setattr(transports, "_receive_one", one)
    with sender.offer(*bucket) as address, ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: arrived(transports.receive(address, bucket[0]), bucket[0]), range(4)))
    assert found == [SENT] * 4


def test_a_wrong_token_gets_no_byte_of_them(sender, bucket):
    with sender.offer(*bucket) as address:
        wrong = dataclasses.replace(address, token="0" * 32)
        assert "rejects the token" in refusal(wrong, bucket[0])
        with transports._connect(address) as connection:
            connection.sendall(b"0" * 32)
            assert connection.makefile("rb").read() == transports.NO
        with transports._connect(address) as connection:  # one that ends in its middle is read no further
            connection.sendall(address.token[:5].encode())
            connection.shutdown(socket.SHUT_WR)
            assert connection.makefile("rb").read() == transports.NO
        assert transports.receive(address, bucket[0])


def test_a_token_is_of_one_offer(sender, bucket):
    with sender.offer(*bucket) as first:
        pass
    with sender.offer(*bucket) as second:
        assert first.token != second.token and len(first.token) == transports.TOKEN_BYTES
        assert "rejects the token" in refusal(first, bucket[0])
        assert transports.receive(second, bucket[0])


def test_two_buckets_are_offered_at_the_same_time(sender, bucket):
    """A restarted server gets its weights while the next ones go to the others."""
    entries, views = buckets.checksummed([("a", TENSORS["a"] + 1)])
    with sender.offer(*bucket) as first:
        with sender.offer(entries, views) as second:
            assert arrived(transports.receive(first, bucket[0]), bucket[0]) == SENT
            assert arrived(transports.receive(second, entries), entries) == {"a": (TENSORS["a"] + 1).tobytes()}
        assert arrived(transports.receive(first, bucket[0]), bucket[0]) == SENT


def test_bytes_that_changed_after_the_checksum_are_refused(sender, bucket):
    entries, views = bucket
    changed = bytearray(views[3])
    changed[1_000_001] ^= 1
    with sender.offer(entries, [*views[:3], memoryview(changed)]) as address:
        assert "c has a different checksum" in refusal(address, entries)


def test_a_tensor_of_another_bucket_is_refused(sender, bucket):
    entries, views = bucket
    other = [*entries[:2], dataclasses.replace(entries[2], crc32=1), entries[3]]
    with sender.offer(entries, views) as address:
        assert "b has a header with another length or checksum" in refusal(address, other)


def test_a_tensor_that_is_cut_is_refused(sender, bucket):
    entries, views = bucket
    with sender.offer(entries, [*views[:3], views[3][:5]]) as address:
        assert "broke off in c: the connection was closed" in refusal(address, entries)


def test_nobody_there_says_what_to_set(sender, bucket):
    with sender.offer(*bucket) as address:
        sender.close()
        assert "set rollout.publish_host to its address" in refusal(address, bucket[0])


def fake(behave, timeout_s=60.0):
    """A trainer that does as told with one connection; its address."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve():
        with listening, listening.accept()[0] as connection:
            connection.recv(transports.TOKEN_BYTES)
            behave(connection)

    threading.Thread(target=serve, daemon=True).start()
    return Address("127.0.0.1", listening.getsockname()[1], "0" * 32, timeout_s)


def test_a_connection_that_ends_in_a_tensor_is_refused(bucket):
    entries, _ = bucket

    def cut(connection):
        header = transports.HEADER.pack(entries[0].nbytes, entries[0].crc32)
        connection.sendall(transports.YES + header + SENT["a"][:1000])

    assert "broke off in a: the connection was closed" in refusal(fake(cut), entries)
    assert "broke off before the first tensor" in refusal(fake(lambda connection: None), entries)


def test_a_trainer_that_drips_is_refused_in_time(bucket):
    entries, _ = bucket
    over = threading.Event()

    def drip(connection):
        header = transports.HEADER.pack(entries[0].nbytes, entries[0].crc32)
        connection.sendall(transports.YES + header)
        with contextlib.suppress(OSError):  # it is refused
            for _ in range(50):  # after the last one the connection ends, which is another refusal
                time.sleep(0.05)
                connection.send(b"0")
        connection.close()
        over.set()

    assert "did not arrive within 0.5 s: in a from 127.0.0.1" in refusal(fake(drip, 0.5), entries)
    assert over.wait(60)


def test_a_bucket_whose_offer_has_ended_is_sent_no_longer(sender, bucket):
    with contextlib.ExitStack() as stack:
        with sender.offer(*bucket) as address:
            slow = stack.enter_context(transports._connect(address))
            slow.sendall(address.token.encode())
            assert slow.recv(1) == transports.YES
        rest = 0
        while more := slow.recv(1 << 16):
            rest += len(more)
    assert rest < sum(map(len, SENT.values()))


def test_a_connection_that_cannot_be_accepted_for_a_moment_ends_nothing(sender, bucket, monkeypatch):
    left, real = [2], socket.socket.accept

    def accept(listening):
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(errno.EMFILE, "Too many open files")
        return real(listening)

    monkeypatch.setattr(socket.socket, "accept", accept)
    with sender.offer(*bucket) as address:
        for _ in range(2):  # the first is of the call before
            assert arrived(transports.receive(address, bucket[0]), bucket[0]) == SENT
    assert left[0] < 0


def test_nothing_is_left_open(bucket):
    before = set(os.listdir("/proc/self/fd"))
    sender = Sender("127.0.0.1", timeout_s=60.0)
    for _ in range(3):
        with sender.offer(*bucket) as address:
            transports.receive(address, bucket[0]).close()
    sender.close()
    sender.close()
    deadline = time.monotonic() + 60
    while set(os.listdir("/proc/self/fd")) != before:
        assert time.monotonic() < deadline
        time.sleep(0.01)


FLOOD = """
import os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
name, port, kind = sys.argv[1], int(sys.argv[2]), sys.argv[3]
held = []
print("floods", flush=True)
while True:
    one = socket.socket(socket.AF_INET if port else socket.AF_UNIX)
    one.settimeout(60)
    try:
        one.connect((name, port) if port else f"\\0{name}")
        one.sendall({"silent": b"", "drips": b"0", "wrong": b"0" * 32}[kind])
    except OSError:
        continue
    held = [*held[-700:], one]
    if len(held) == 600: print("held", flush=True)
"""


@pytest.mark.parametrize("kind", ["silent", "drips", "wrong"])
def test_another_user_who_holds_all_connections_keeps_no_worker_out(sender, bucket, kind):
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    with sender.offer(*bucket) as address:
        command = [sys.executable, "-c", FLOOD, address.host, str(address.port), kind]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as flood:
            assert [flood.stdout.readline() for _ in range(2)] == ["floods\n", "held\n"]
            try:
                before = threading.active_count()
                for _ in range(10):
                    assert arrived(transports.receive(address, bucket[0]), bucket[0]) == SENT
                assert threading.active_count() <= before + 1
            finally:
                flood.kill()


def test_a_connection_without_a_token_is_closed_in_time(sender, bucket, monkeypatch):
    monkeypatch.setattr(transports, "HELLO_S", 2.0)
    with (
        sender.offer(*bucket) as address,
        transports._connect(address) as silent,
        transports._connect(address) as slow,
    ):
        slow.sendall(address.token[:5].encode())
        time.sleep(0.1)
        slow.sendall(address.token[5:].encode())
        assert slow.recv(1) == transports.YES  # so both were accepted
        monkeypatch.setattr(transports, "HELLO_S", 3600.0)
        with transports._connect(address) as patient:
            assert silent.recv(1) == b""
            patient.sendall(address.token.encode())
            assert patient.recv(1) == transports.YES


def test_connections_without_a_token_take_a_bounded_number_of_files_and_no_threads(monkeypatch):
    monkeypatch.setattr(transports, "UNKNOWN", 20)
    monkeypatch.setattr(transports, "HELLO_S", 3600.0)
    sender = Sender("127.0.0.1", timeout_s=60.0)
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    idle = [socket.create_connection(("127.0.0.1", sender._port)) for _ in range(100)]
    try:
        for connection in idle[:80]:  # the oldest made room
            connection.settimeout(60.0)
            assert connection.recv(1) == b""
        assert threading.active_count() <= threads and len(os.listdir("/proc/self/fd")) <= files + 100 + 20 + 5
    finally:
        for connection in idle:
            connection.close()
    sender.close()
