"""Two hosts as threads of one process, over a store in memory; real ones are in tests/test_hosts.py."""

import pathlib
import threading
import time

import jax
import numpy as np
import pytest

from jppo.distributed import hosts as module
from jppo.distributed.hosts import ALONE, Elsewhere, Hosts, Stopped, own_folder
from jppo.errors import UserError
from jppo.rollout.protocol import RolloutError
from jppo.run.agreement import Mismatch


class Store:
    """What JAX's coordinator keeps, for the threads of one process."""

    def __init__(self):
        self.found, self.changed = {}, threading.Condition()

    def key_value_set(self, key, text, allow_overwrite=False):
        with self.changed:
            assert allow_overwrite or key not in self.found
            self.found[key] = text
            self.changed.notify_all()

    def blocking_key_value_get(self, key, timeout_ms):
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.found, timeout_ms / 1000):
                raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: {key}")
            return self.found[key]

    def key_value_delete(self, key):
        with self.changed:
            self.found.pop(key)

    def key_value_dir_get(self, key):
        with self.changed:
            return [(name, text) for name, text in self.found.items() if name.startswith(key)]


def both(*does):
    """What each of the hosts returned or raised."""
    store, out = Store(), [None] * len(does)

    def run(rank):
        host = Hosts(rank, len(does), store=store)
        try:
            out[rank] = does[rank](host)
        except (Exception, SystemExit) as e:
            out[rank] = e

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(does))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    return out, store


def fail(error):
    raise error


def test_one_host_agrees_with_itself():
    assert ALONE.gather(lambda: (1, 2)) == [(1, 2)] and ALONE.together(lambda: 3) == 3
    assert ALONE.share(5) == range(5) and ALONE.first
    with pytest.raises(KeyError), ALONE:
        ALONE.together(lambda: fail(KeyError("as it is")))


@pytest.mark.parametrize("count", [0, 1, 2, 5, 8])
def test_the_shares_are_all_of_it(count):
    shares = [Hosts(rank, 3).share(count) for rank in range(3)]
    assert [i for share in shares for i in share] == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_the_first_host_logs_in_the_run_folder_and_each_other_in_its_own():
    run = pathlib.Path("runs/a")
    found = [own_folder(host, run) for host in (ALONE, Hosts(0, 3), Hosts(1, 3), Hosts(2, 3))]
    assert list(map(str, found)) == ["runs/a", "runs/a", "runs/a/host-1", "runs/a/host-2"]


def test_results_come_in_the_order_of_the_hosts_turn_by_turn():
    def one(host):
        time.sleep(0.05 * (1 - host.rank))
        return [host.gather(lambda turn=turn: [host.rank, turn]) for turn in range(3)]

    out, store = both(one, one)
    assert out[0] == out[1] == [[[0, turn], [1, turn]] for turn in range(3)]
    assert len(store.found) == 2  # what was read by all is gone, but for the last turn


def test_what_fails_alike_fails_on_all_and_ends_none():
    def one(host):
        with pytest.raises((OSError, Elsewhere), match="no room") as found:
            host.alike(lambda: host.rank or fail(OSError("no room")))
        host.alike(lambda: None)
        return type(found.value), str(found.value), host.gather(lambda: host.rank)

    out, store = both(one, one)
    assert out == [(OSError, "no room", [0, 1]), (Elsewhere, "host 0: no room", [0, 1])]
    assert not [key for key in store.found if "ending" in key], "no host was told to end"


def test_what_each_keeps_need_not_be_sent():
    out, _ = both(lambda host: host.together(object), lambda host: host.together(object))
    assert all(type(one) is object for one in out)


@pytest.mark.parametrize(
    "raised, heard",
    [
        (UserError("no such file"), UserError),
        (RolloutError("a run cannot go on"), RolloutError),
        (Mismatch("of one kind"), RolloutError),
        (KeyError("nobody expects it"), Elsewhere),
    ],
)
def test_an_error_of_one_is_an_error_of_all(raised, heard):
    good, bad = (lambda host: host.together(lambda: "done")), (lambda host: host.together(lambda: fail(raised)))
    (first, second), _ = both(good, bad)
    assert second is raised
    assert type(first) is heard and str(first) == f"host 1: {raised}"


def test_of_two_errors_all_take_the_first_hosts():
    out, _ = both(*[lambda host: host.together(lambda: fail(UserError(f"of {host.rank}")))] * 2)
    assert [str(e) for e in out] == ["of 0", "host 0: of 0"]


def test_who_only_heard_of_an_end_is_not_its_cause():
    heard = Stopped(1, "host 1: the server is gone", heard=True)
    out, _ = both(
        lambda host: host.together(lambda: fail(heard)),
        lambda host: host.together(lambda: fail(RolloutError("the server is gone"))),
    )
    assert type(out[0]) is RolloutError and str(out[0]) == "host 1: the server is gone"


def test_a_stop_of_one_stops_all_with_its_exit_code():
    out, _ = both(
        lambda host: host.together(lambda: None), lambda host: host.together(lambda: fail(Stopped(130, "interrupted")))
    )
    assert [(e.status, e.why) for e in out] == [(130, "host 1: interrupted"), (130, "interrupted")]


def test_a_stop_may_break_off_what_a_host_does_by_itself_only():
    def one(host):
        return host.working, host.together(lambda: host.working), host.working

    assert both(one, one)[0] == [(False, True, False)] * 2


def signing(store, rank, left, **limits):
    host = Hosts(rank, 2, store=store, **limits)
    host.leave = lambda status, why: (left.append((rank, status, why)), host._ended.set())
    thread = threading.Thread(target=host._watch_hosts, daemon=True)
    thread.start()
    return host, thread


def test_a_host_that_gives_no_sign_is_lost_and_one_that_does_is_not(monkeypatch):
    monkeypatch.setattr(module, "_POLL_S", 0.02)
    store, left = Store(), []
    (_, waiting), (second, _) = (signing(store, rank, left, timeout_s=2.0) for rank in (0, 1))
    time.sleep(3.0)
    assert left == []
    second._ended.set()
    waiting.join(60)
    assert left == [(0, 1, "host 1 is lost: no sign of it within trainer.host_timeout_s=2")]


def test_who_is_ending_or_gone_is_heard(monkeypatch):
    monkeypatch.setattr(module, "_POLL_S", 0.02)
    store, left = Store(), []
    (first, _), (second, waiting) = (signing(store, rank, left, timeout_s=30.0) for rank in (0, 1))
    first.tell(Stopped(0, "stopped by SIGTERM"))
    deadline = time.monotonic() + 60
    while second.heard() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    told = second.heard()
    assert (told.status, told.why, told.heard) == (0, "host 0: stopped by SIGTERM", True)
    assert first.heard() is None
    store.key_value_set("jppo/gone/0", "KeyError: 'x'")
    waiting.join(60)
    first._ended.set()
    assert left == [(1, 1, "host 0 failed: KeyError: 'x'")]


def test_bytes_longer_than_a_message_arrive_whole_from_every_host(monkeypatch):
    monkeypatch.setattr(module, "_CHUNK", 4)
    each = [b"0123456789", b"abc", b""]
    sent = []

    def gathered(piece):  # this host, the first, sends a piece; the others' are added
        at = 4 * len(sent)
        sent.append(bytes(piece[: max(0, len(each[0]) - at)]))
        return np.stack([np.frombuffer(x[at : at + 4].ljust(4, b"\0"), np.uint8) for x in each])

    monkeypatch.setattr(module.multihost_utils, "process_allgather", gathered)
    assert module._exchange_bytes(each[0], [10, 3, 0]) == each
    assert sent == [b"0123", b"4567", b"89"]
