"""The publish as every carrier must make it: all servers get every byte, or none changes; test_real_vllm.py has vLLM.

Servers are fakes with jppo's own checks: the file's and the socket's by `layout.py`; by NCCL and CUDA IPC the engine in
vLLM's worker, over the libraries of test_nccl.py and test_ipc.py.
"""

import os

import jax
import numpy as np
import pytest

from jppo.plugins.carriers import buckets, device_carriers, transports
from jppo.rollout.protocol import RolloutError
from jppo.rollout.publish import Repeatable
from jppo.rollout.servers import repair
from jppo.rollout.vllm import layout, publish
from jppo.rollout.vllm.client import start_vllm
from tests.plugins.carriers import test_buckets
from tests.plugins.carriers.test_buckets import TENSORS, stages
from tests.plugins.carriers.test_ipc import cuda, gpu  # noqa: F401 (fixtures)
from tests.plugins.carriers.test_nccl import JOIN, UPDATE, communicator, engine, library, needs_cc, works  # noqa: F401 (fixtures)
from tests.rollout.conftest import INFO
from tests.rollout.test_fleet import PROMPTS, SAMPLING, asked, serve, until, whole

FINISH = "/finish_weight_update"
ON_DEVICES = ("nccl", "ipc")
CARRIERS = ["file", "tcp", *(pytest.param(name, marks=(pytest.mark.vllm, needs_cc)) for name in ON_DEVICES)]

LIMITS = dict(request_timeout_s=8.0, health_timeout_s=5.0, max_restarts=3)


def maps(fake):
    """Lets a fake check a file and load it; `fake.model` is what it has loaded."""
    fake.shapes, fake.model, fake.checked = test_buckets.SHAPES, {}, None

    def check(body):
        entries, path, fake.checked = layout.unpack_entries(body["kwargs"]["entries"]), body["kwargs"]["path"], None
        try:
            fake.checked = path, entries, layout.map_checked(path, entries, fake.shapes)
        except layout.WeightsRefused as e:
            return {"results": [{"ok": False, "error": str(e)}]}
        return {"results": [{"ok": True, "error": None}]}

    def load(body):
        path, entries, data = fake.checked
        assert path == body["kwargs"]["path"]
        fake.model = {e.name: np.frombuffer(data, e.dtype, e.nbytes // 4, e.offset).reshape(e.shape) for e in entries}
        return {"results": [{"ok": True, "error": None}]}

    fake.answers |= {"jppo_check": (200, check), "jppo_load": (200, load)}


class Way:
    """A carrier, its sampler and its servers; version 7 was published."""

    def __init__(self, carrier, fakes, sampler, tensors, restart):
        self.carrier, self.fakes, self.sampler, self.tensors, self.restart = carrier, fakes, sampler, tensors, restart
        self.name = list(tensors)[3]

    def load(self, items, version):
        items = list(items)
        put = jax.device_put if self.carrier in ON_DEVICES else np.asarray
        self.sampler.load(Repeatable(lambda: ((name, put(x)) for name, x in items)), version=version)

    def changed(self, by):
        return {name: tensor + by for name, tensor in self.tensors.items()}

    def models(self, fake):
        if self.carrier in ON_DEVICES:
            return [{name: x.numpy() for name, x in worker.loaded.items()} for worker in fake.engines]
        return [fake.model]

    def has(self, by):
        """Whether every worker of every server has loaded these tensors, and no other."""
        sent = self.changed(by)
        return all(
            model.keys() == sent.keys() and all(np.array_equal(model[name], x) for name, x in sent.items())
            for fake in self.fakes
            for model in self.models(fake)
        )

    def expects_another_shape(self, fake):
        """Gives the server another model than the trainer's; of several workers, the last."""
        other = {self.name: (3,)}
        if self.carrier in ON_DEVICES:
            fake.engines[-1]._expected = fake.engines[-1]._expected | other
        else:
            fake.shapes = fake.shapes | other


@pytest.fixture(params=CARRIERS)
def way(request, fakes, settings, monkeypatch):
    """A maker of ways; of two servers, the first has two workers where workers are vLLM's."""
    carrier, engines = request.param, []
    monkeypatch.setattr(repair, "POLL_S", 0.05)
    monkeypatch.setattr(repair, "PROBE_S", 0.05)
    monkeypatch.setattr(buckets, "BUCKET", 4000 if carrier in ON_DEVICES else 2000)
    new = request.getfixturevalue("engine") if carrier in ON_DEVICES else None
    if carrier == "nccl":
        lib = request.getfixturevalue("library")
        made = device_carriers.Nccl(lambda: communicator(lib), jax.devices()[0])
        monkeypatch.setattr(device_carriers, "make_nccl_carrier", lambda: made)
    elif carrier == "ipc":
        gpus = request.getfixturevalue("gpu")
        made = device_carriers.Ipc([(jax.devices()[1], gpus(1)), (jax.devices()[0], gpus(0))])
        monkeypatch.setattr(device_carriers, "make_ipc_carrier", lambda: made)

    def restart(fake):
        serve(fake)
        if carrier in ON_DEVICES:
            works(fake, [new(rank) for rank in range(2 - fakes.index(fake))])
        else:
            {"file": maps, "tcp": stages}[carrier](fake)
        fake.answers["jppo_info"] = (200, {"results": [INFO | {"buckets": True}]})

    def make(count=2):
        for fake in fakes:
            restart(fake)
        engines.append(
            start_vllm(
                "model", "run", settings=settings(publish_via=carrier, **LIMITS),
                urls=[fake.url for fake in fakes[:count]],
            )
        )  # fmt: skip
        sampler = engines[-1].ready(eos_token_ids=[2], decode=str)
        made = Way(carrier, fakes[:count], sampler, new.tensors if new else TENSORS, restart)
        made.load(made.tensors.items(), 7)
        for fake in fakes:
            fake.asked.clear()
        return made

    yield make
    for each in engines:
        each.close()


def test_every_worker_gets_every_byte_and_its_label(way, fakes):
    way = way()
    way.load(way.changed(1).items(), 8)
    assert way.has(1) and [fake.version for fake in fakes] == ["8", "8"] and way.sampler.version == 8
    assert whole(way.sampler.generate(PROMPTS, SAMPLING, version=8))
    assert not asked(fakes[0], [JOIN]), "the communicator is joined once"
    if way.carrier != "file":
        assert len(asked(fakes[0], [UPDATE])) > 3, "in several buckets"


FAULTS = {
    "missing": (lambda t, n: [item for item in t.items() if item[0] != n], "{} missing"),
    "shape": (lambda t, n: (t | {n: t[n][:-1]}).items(), "{} has shape"),
    "dtype": (lambda t, n: (t | {n: t[n].astype(np.int32)}).items(), "{} has dtype int32"),
    "unknown": (lambda t, n: (t | {"w9": t[n]}).items(), "w9 not in the served model"),
    "twice": (lambda t, n: [*t.items(), (n, t[n])], "{} given twice"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_publish_is_refused_by_name_before_any_model_is_touched(way, fault):
    way, (break_, said) = way(), FAULTS[fault]
    with pytest.raises(RolloutError, match=f"refused version 8 of the weights: {said.format(way.name)}"):
        way.load(break_(way.changed(1), way.name), 8)
    assert way.has(0) and way.sampler.version == 7
    assert not any(asked(fake, ["/pause?mode=wait", FINISH, "jppo_load"]) for fake in way.fakes)
    assert whole(way.sampler.generate(PROMPTS, SAMPLING, version=7))
    way.load(way.changed(2).items(), 8)
    assert way.has(2)


@pytest.mark.parametrize("which", [0, 1])
def test_a_refusal_by_one_worker_touches_no_server(way, fakes, which):
    way = way()
    way.expects_another_shape(fakes[which])
    with pytest.raises(RolloutError, match=rf"{fakes[which].url} refused version 8 .*{way.name} has shape"):
        way.load(way.changed(1).items(), 8)
    assert way.has(0) and [fake.version for fake in fakes] == ["7", "7"]


def test_bytes_that_change_on_the_way_are_refused(way, monkeypatch):
    way, write, describe = way(), publish.Buffers.write, buckets.checksummed

    def spoiled_file(self, tensors):
        parcel = write(self, tensors)
        with open(parcel.path, "r+b") as file:
            was = os.pread(file.fileno(), 1, 10)[0]
            os.pwrite(file.fileno(), bytes([was ^ 1]), 10)
        return parcel

    def spoiled_bucket(bucket):
        entries, views = describe(bucket)
        last = bytearray(views[-1])
        last[10] ^= 1
        return entries, [*views[:-1], memoryview(last)]

    def one_byte_less(self, to, origin, nbytes):
        self._call("cuMemcpyDtoD_v2", to, origin, nbytes - 1)

    if way.carrier == "ipc":
        monkeypatch.setattr(type(transports.CudaDevice(0)), "copy", one_byte_less)
    monkeypatch.setattr(publish.Buffers, "write", spoiled_file)
    monkeypatch.setattr(buckets, "checksummed", spoiled_bucket)
    if way.carrier == "nccl":
        monkeypatch.setattr(device_carriers, "_checksum", lambda array: 17)
    with pytest.raises(RolloutError, match="different checksum"):
        way.load(way.changed(1).items(), 8)
    assert way.has(0)


BREAKS = {  # the route at which it breaks, and at which call
    "file": {"first": ("jppo_check", 1), "second": ("/pause?mode=wait", 1), "last": ("/update_weight_version", 1)},
    **{name: {"first": (UPDATE, 1), "second": (UPDATE, 2), "last": (UPDATE, 4)} for name in ("tcp", *ON_DEVICES)},
}


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("at", ["first", "second", "last", "take"])
def test_a_server_that_breaks_in_a_publish_gets_all_of_it_afterwards(way, at, count):
    way = way(count)
    fake, calls = way.fakes[-1], []
    route, nth = (BREAKS[way.carrier] | {"take": ("jppo_load" if way.carrier == "file" else FINISH, 1)})[at]
    good = fake.answers[route][1]

    def break_once(body):
        calls.append(body)
        if len(calls) == nth:
            way.restart(fake)
            fake.answers[route] = (200, good) if route.startswith("/pause") else fake.answers[route]
            raise ConnectionAbortedError
        return good(body)

    fake.answers[route] = (200, break_once)
    way.load(way.changed(1).items(), 8)
    assert whole(way.sampler.generate(PROMPTS, SAMPLING, version=8))
    until(lambda: all(member.up for member in way.sampler.members))
    assert way.has(1) and len(calls) == nth
    alone = way.carrier != "nccl" or at == "take" or count == 1  # a broadcast fails for all
    assert way.sampler.metrics()["rollout/restarts"] == (1 if alone else 2)


def test_a_server_that_was_restarted_gets_the_weights_again(way, fakes):
    way = way()
    fakes[0].answers["/health"] = (503, None)
    until(lambda: not way.sampler.members[0].up)
    way.restart(fakes[0])
    fakes[0].answers["/health"] = (200, None)
    until(lambda: way.sampler.members[0].up)
    assert way.has(0)
    way.load(way.changed(1).items(), 8)
    assert way.has(1)
