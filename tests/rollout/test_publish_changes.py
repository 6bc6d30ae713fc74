"""Publishes of changes, and the faults of a publish, by the engine in vLLM's worker and real sockets."""

import itertools
import re

import numpy as np
import pytest

from jppo.plugins.carriers import buckets, transports
from jppo.rollout.protocol import RolloutError
from jppo.rollout.publish import Repeatable
from jppo.rollout.servers import repair
from jppo.rollout.vllm import layout
from jppo.rollout.vllm.client import start_vllm
from tests.plugins.carriers.test_nccl import UPDATE, engine, library, needs_cc, works  # noqa: F401 (fixtures)
from tests.rollout.conftest import INFO
from tests.rollout.test_fleet import serve, until

LIMITS = dict(request_timeout_s=8.0, health_timeout_s=5.0, max_restarts=3)


def published_share(sampler):
    found = sampler.metrics()
    return found["rollout/published_mb"] / found["rollout/published_whole_mb"]


class Run:
    """A trainer of two servers, the first of two workers; version 7 was published to them."""

    def __init__(self, fakes, new, start):
        self.fakes, self.new, self._start = fakes, new, start
        self.now = {name: tensor.copy() for name, tensor in new.tensors.items()}
        self.version, self.rng = 6, np.random.default_rng(0)
        for fake in fakes:
            self.restart(fake)
        self.attach()
        assert self.publish() == 1.0, "no server has a base yet"

    def attach(self):
        self.sampler = self._start()

    def restart(self, fake):
        serve(fake)
        works(fake, [self.new(rank) for rank in range(2 - self.fakes.index(fake))])
        fake.answers["jppo_info"] = (200, {"results": [INFO | {"buckets": True}]})

    def publish(self):
        """Publishes the next version, bits of a few elements flipped; returns the share of the bytes that were sent."""
        for tensor in self.now.values():
            words = tensor.reshape(-1).view(np.uint32)  # any bits: NaN and -0.0 too
            where = self.rng.random(len(words)) < 0.02
            words ^= np.where(where, self.rng.integers(0, 1 << 32, len(words), np.uint64), 0).astype(np.uint32)
        self.version += 1
        sent = {name: tensor.copy() for name, tensor in self.now.items()}
        self.sampler.metrics()
        self.sampler.load(Repeatable(lambda: iter(sent.items())), version=self.version)
        until(lambda: all(member.up for member in self.sampler.members))
        return published_share(self.sampler)

    def equal(self):
        """Whether each worker has loaded every bit, and proves it."""
        digest = layout.digest(buckets.checksummed(list(self.now.items()))[0])
        return all(
            worker.base.digest == digest
            and worker.loaded.keys() == self.now.keys()
            and all(worker.loaded[n].numpy().tobytes() == x.tobytes() for n, x in self.now.items())
            for fake in self.fakes
            for worker in fake.engines
        )


@pytest.fixture
def run(fakes, settings, monkeypatch, engine):  # noqa: F811
    monkeypatch.setattr(repair, "POLL_S", 0.05)
    monkeypatch.setattr(repair, "PROBE_S", 0.05)
    monkeypatch.setattr(buckets, "BUCKET", 9000)
    monkeypatch.setattr(layout, "BLOCK", 600)
    engines = []

    def start():
        how = dict(settings=settings(publish_via="tcp", publish_delta=True, **LIMITS))
        engines.append(start_vllm("model", "run", urls=[fake.url for fake in fakes], **how))
        return engines[-1].ready(eos_token_ids=[2], decode=str)

    yield Run(fakes, engine, start)
    for each in engines:
        each.close()


pytestmark = [pytest.mark.vllm, needs_cc]


def test_the_weights_are_bit_equal_after_100_publishes_of_changes(run):
    shares = []
    for _ in range(100):
        shares.append(run.publish())
        assert run.equal()
    assert max(shares) < 0.1


def flips_a_bit_of_the_base(run, _):
    (_, data), *_ = run.fakes[0].engines[1].base._buckets
    data[5] ^= 1


def flips_a_bit_on_the_way(run, patch):
    calls, receive_one = itertools.count(), transports._receive_one

    def spoiled(connection, entry, view, deadline):
        receive_one(connection, entry, view, deadline)
        if next(calls) == 3:
            layout.check_sum(entry, entry.crc32 ^ 1)

    patch.setattr(transports, "_receive_one", spoiled)


def encodes_another_value(run, patch):
    encode = layout.encode_block
    patch.setattr(layout, "encode_block", lambda new, positions: encode(new ^ 1, positions))


def cuts_the_connection(run, patch):
    calls, fill = itertools.count(), transports._fill

    def cut(connection, view, deadline):
        if next(calls) == 12:
            connection.close()
        return fill(connection, view, deadline)

    patch.setattr(transports, "_fill", cut)


def takes_another_base(run, patch):
    patch.setattr(buckets.Pass, "ask", lambda self, endpoint: self.have_base.add(endpoint.url))
    run.fakes[1].engines[0].base.digest = "0123abcd"


def loads_a_file(run, _):
    from jppo.plugins.carriers.weight_engine import Receiver

    worker = Receiver()
    worker.weight_transfer_engine = run.fakes[1].engines[0]
    assert not worker.jppo_load(version=1, path="not checked")["ok"]


def is_of_an_older_jppo(run, _):
    state = run.fakes[1].answers["jppo_transfer"][1]

    def older(body):
        return {"results": [{k: v for k, v in worker.items() if k != "base"} for worker in state(body)["results"]]}

    run.fakes[1].answers["jppo_transfer"] = (200, older)


def was_restarted(run, _):
    run.fakes[0].answers["/health"] = (503, None)
    until(lambda: not run.sampler.members[0].up)
    run.restart(run.fakes[0])
    run.fakes[0].answers["/health"] = (200, None)
    until(lambda: run.sampler.members[0].up)


def is_killed(route, nth):
    def kill(run, _):
        fake, calls = run.fakes[1], itertools.count(1)
        good = fake.answers[route][1]

        def once(body):
            if next(calls) == nth:
                run.restart(fake)
                raise ConnectionAbortedError
            return good(body)

        fake.answers[route] = (200, once)

    return kill


def gets_another_trainer(run, _):
    run.sampler.close()
    run.attach()


FAULTS = {  # what happens, whether a refusal is reported, and the bounds of the share of the bytes that are sent
    "bit of the base": (flips_a_bit_of_the_base, "different checksum", 0.3, 1),
    "bit on the way": (flips_a_bit_on_the_way, "different checksum", 0.3, 1),
    "value": (encodes_another_value, "different checksum", 0.5, 1),
    "cut": (cuts_the_connection, "broke off", 0.3, 1),
    "base": (takes_another_base, "digest 0123abcd|here are 0123abcd", 0.3, 1),
    "file": (loads_a_file, "", 0.3, 1),
    "older": (is_of_an_older_jppo, "", 0.3, 1),
    "restarted": (was_restarted, "", 0, 0.1),
    "killed in a bucket": (is_killed(UPDATE, 2), "", 0.3, 1),
    "killed in the load": (is_killed("/finish_weight_update", 1), "", 0.3, 1),
    "trainer": (gets_another_trainer, "", 1, 1),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_caught_and_all_weights_are_sent_to_that_server(run, fault, monkeypatch, capfd):
    break_, said, least, most = FAULTS[fault]
    assert run.publish() < 0.1 and run.equal()
    with monkeypatch.context() as patch:
        break_(run, patch)
        share = run.publish()
    assert run.equal() and least <= share <= most
    err = capfd.readouterr().err

    assert ("instead of their changes" in err) == bool(said) and re.search(said, err)
    assert (run.publish() < 0.1) == (fault != "older") and run.equal()


def test_each_server_that_refuses_changes_is_named(run, capfd):
    for fake in run.fakes:
        (_, data), *_ = fake.engines[-1].base._buckets
        data[5] ^= 1
    run.publish()
    lines = [line for line in capfd.readouterr().err.splitlines() if "instead of their changes" in line]
    assert len(lines) == 2 and all(sum(fake.url in line for line in lines) == 1 for fake in run.fakes)
    assert run.equal()


def test_a_refused_publish_changes_no_server_and_the_next_one_is_whole(run):
    run.publish()
    before = [{n: x.numpy().copy() for n, x in worker.loaded.items()} for f in run.fakes for worker in f.engines]
    name = next(iter(run.now))
    with pytest.raises(RolloutError, match=f"{name} has shape"):
        other = run.now | {name: run.now[name][:-1]}
        run.sampler.load(Repeatable(lambda: iter(other.items())), version=run.version + 1)
    after = [worker.loaded for fake in run.fakes for worker in fake.engines]
    assert all(np.array_equal(a[n], b[n], equal_nan=True) for a, b in zip(after, before, strict=True) for n in b)
    assert run.publish() == 1.0 and run.equal()
    assert run.publish() < 0.1 and run.equal()
