"""Publishing by buckets, against fakes that stage as vLLM's worker does; test_carriers.py is of all carriers."""

import dataclasses
import socket
import subprocess
import sys

import numpy as np
import pytest

from jppo.errors import UserError
from jppo.plugins.carriers import buckets, transports
from jppo.rollout.protocol import RolloutError
from jppo.rollout.publish import Repeatable
from jppo.rollout.servers import repair
from jppo.rollout.servers.member import State
from jppo.rollout.vllm import layout
from jppo.rollout.vllm.client import start_vllm
from jppo.rollout.vllm.layout import Staging
from jppo.settings import default
from jppo.settings.rules_rollout import publish_via
from tests.rollout.conftest import INFO
from tests.rollout.test_fleet import PROMPTS, SAMPLING, asked, serve, until, whole

TENSORS = {f"w{i}": np.arange(i, i + 250, dtype=np.float32) for i in range(5)}  # 1,000 bytes each
SHAPES = {name: tensor.shape for name, tensor in TENSORS.items()}
BEGIN, UPDATE, STATE = ["jppo_transfer", "/start_weight_update"], "/update_weights", "jppo_transfer"
TAKE = ["/pause?mode=wait", "/finish_weight_update", STATE, "/update_weight_version", "/resume"]
ORDER = [*BEGIN, *[UPDATE, STATE] * 4, *TAKE]  # three buckets and the digest


def changed(by):
    return {name: tensor + by for name, tensor in TENSORS.items()}


def stages(fake):
    """Lets a fake stage buckets; `fake.model` is what it has loaded."""
    fake.shapes, fake.staging, fake.model, fake.active = SHAPES, Staging(SHAPES), {}, False

    def answering(do):
        return 200, lambda body: do(body) or {}

    def start(_):
        assert not fake.active, "vLLM answers 500 to a second start"
        fake.staging, fake.active = Staging(fake.shapes), True

    def update(body):
        assert fake.active
        info = body["update_info"]
        if "digest" in info:
            return fake.staging.finish(info["version"], info["digest"])
        entries = layout.unpack_entries(info["entries"])
        fake.staging.add(
            info["version"], entries, lambda: transports.receive(transports.Address(**info["address"]), entries)
        )

    def finish(_):
        fake.active = False
        for entries, data in fake.staging.take_buckets():
            fake.model |= {e.name: np.frombuffer(data, e.dtype, e.nbytes // 4, e.offset) for e in entries}

    def state(body):
        if body["kwargs"].get("abandon"):
            fake.staging, fake.active = Staging(fake.shapes), False
        return {"results": [{"ok": fake.staging.error is None, "error": fake.staging.error}]}

    fake.answers |= {
        "/start_weight_update": answering(start),
        UPDATE: answering(update),
        "/finish_weight_update": answering(finish),
        STATE: (200, state),
    }


@pytest.fixture
def made(fakes, settings, monkeypatch):
    """A maker of samplers over fakes that version 7 was published to, in buckets of two tensors."""
    monkeypatch.setattr(repair, "POLL_S", 0.05)
    monkeypatch.setattr(repair, "PROBE_S", 0.05)
    monkeypatch.setattr(buckets, "BUCKET", 2000)
    engines = []

    def make(count=2, **info):
        for fake in fakes:
            serve(fake)
            stages(fake)
            fake.answers["jppo_info"] = (200, {"results": [INFO | {"buckets": True} | info]})
        urls = [fake.url for fake in fakes[:count]]
        limits = dict(request_timeout_s=5.0, health_timeout_s=5.0, max_restarts=3)
        how = dict(settings=settings(publish_via="tcp", **limits), urls=urls)
        engines.append(start_vllm("model", "run", **how))
        sampler = engines[-1].ready(eos_token_ids=[2], decode=str)
        sampler.load(Repeatable(lambda: iter(TENSORS.items())), version=7)
        for fake in fakes:
            fake.asked.clear(), fake.bodies.clear()
        return sampler

    yield make
    for engine in engines:
        engine.close()


def has(fake, tensors):
    return set(fake.model) == set(tensors) and all(np.array_equal(fake.model[n], tensors[n]) for n in tensors)


def test_the_order_of_a_publish_and_every_byte(made, fakes):
    made().load(changed(1).items(), version=8)
    for fake in fakes:
        assert asked(fake, ORDER) == ORDER and fake.version == "8"
        assert has(fake, changed(1))


def test_bytes_that_are_lost_on_the_way_are_refused(made, fakes, monkeypatch):
    sampler, real = made(), buckets.checksummed

    def spoiled(bucket):
        entries, views = real(bucket)
        return entries, [*views[:-1], views[-1][:-1]]

    monkeypatch.setattr(buckets, "checksummed", spoiled)
    with pytest.raises(RolloutError, match="broke off in w1"):
        sampler.load(changed(1).items(), version=8)
    assert all(has(fake, TENSORS) for fake in fakes)


def overwritten():
    """As an array of JAX after its donation."""
    yield "w0", TENSORS["w0"]
    raise RuntimeError("Array has been deleted with shape=float32[250].")


def test_a_server_restarted_during_the_update_waits_for_the_next_publish(made, fakes):
    sampler, source = made(), [lambda: iter(changed(1).items())]
    sampler.load(Repeatable(lambda: source[0]()), version=8)
    source[0] = overwritten
    fakes[0].answers["/health"] = (503, None)
    until(lambda: not sampler.members[0].up)
    serve(fakes[0])
    stages(fakes[0])
    fakes[0].answers["/health"] = (200, None)
    until(lambda: sampler.members[0].state is State.WITHOUT_WEIGHTS)
    assert not fakes[0].model and whole(sampler.generate(PROMPTS, SAMPLING, version=8)), "the other one answers"
    sampler.load(changed(2).items(), version=9)
    assert all(member.up for member in sampler.members)
    assert all(has(fake, changed(2)) for fake in fakes)


def test_a_tensor_that_is_overwritten_before_it_is_sent_waits_too(made, fakes, monkeypatch):
    """As one that is sent from the device."""
    sampler = made(1)
    sampler.load(Repeatable(lambda: iter(changed(1).items())), version=8)

    def describe(_):
        raise RuntimeError("Array has been deleted with shape=float32[250].")

    with monkeypatch.context() as patched:
        patched.setattr(buckets, "checksummed", describe)
        fakes[0].answers["/health"] = (503, None)
        until(lambda: not sampler.members[0].up)
        fakes[0].answers["/health"] = (200, None)
        until(lambda: sampler.members[0].state is State.WITHOUT_WEIGHTS)
    sampler.load(changed(2).items(), version=9)
    assert has(fakes[0], changed(2))


def test_weights_of_all_hosts_cannot_be_sent_again_and_the_last_server_ends_the_run(made, fakes):
    sampler = made(1)
    sampler.load(iter(changed(1).items()), version=8)
    fakes[0].answers["/health"] = (503, None)
    until(lambda: not sampler.members[0].up)
    fakes[0].answers["/health"] = (200, None)
    with pytest.raises(RolloutError, match=r"gathered from all hosts and not kept; .* this host's last server"):
        sampler.generate(PROMPTS, SAMPLING, version=8)


def test_an_error_of_another_kind_while_gathering_ends_the_publish(made, fakes):
    def broken():
        yield "w0", TENSORS["w0"]
        raise RuntimeError("out of memory")

    sampler = made()
    with pytest.raises(RuntimeError, match="out of memory"):
        sampler.load(broken(), version=8)
    sampler.load(changed(1).items(), version=8)  # the publish that was left is abandoned
    assert all(has(fake, changed(1)) for fake in fakes)


def test_at_most_a_bucket_and_the_next_tensor_are_held(made):
    alive, most = set(), 0

    class Tensor(np.ndarray):
        def __del__(self):
            alive.discard(id(self))

    def tensors():
        nonlocal most
        for name in TENSORS:
            tensor = np.full(250, 3, np.float32).view(Tensor)
            alive.add(id(tensor))
            most = max(most, len(alive))
            yield name, tensor
            del tensor

    made(1).load(tensors(), version=8)
    assert most == 3


def test_a_server_without_the_engine_is_refused_with_the_command_that_has_it(made):
    with pytest.raises(
        UserError, match=r"takes files, rollout\.publish_via is tcp; start it by .*python -m jppo\.serve "
    ):
        made(1, buckets=False)


def test_a_host_that_is_not_this_machine_is_the_users_fault():
    for host in ("203.0.113.7", "no-such-host.invalid"):
        with pytest.raises(UserError, match=f"rollout.publish_host='{host}'"):
            buckets.Tcp(host, 1.0)


@pytest.mark.parametrize(
    "urls, via",
    [
        ("", "file"),
        ("http://127.0.0.1:8000, http://localhost:8001", "file"),
        ("http://127.0.0.1:8000,http://10.0.0.2:8000", "tcp"),
        ("dns://servers.example:8000", "tcp"),
    ],
)
def test_auto_takes_the_way_that_the_addresses_allow(urls, via):
    c = default()
    c.rollout.publish_via, c.rollout.urls = "auto", urls
    assert publish_via(c.rollout) == via
    c.rollout.name = "sglang"
    assert publish_via(c.rollout) == "file"


class TestStaging:
    """The worker's side, step by step."""

    ENTRIES = buckets.checksummed(list(TENSORS.items()))[0]

    def staging(self, *parts):
        made = Staging(SHAPES)
        for part in parts:
            made.add(8, part, lambda: "bytes")
        return made

    def test_a_complete_publish_is_taken_once(self):
        made = self.staging(self.ENTRIES[:2], self.ENTRIES[2:])
        made.finish(8, layout.digest(self.ENTRIES))
        assert made.error is None
        assert [(len(entries), data) for entries, data in made.take_buckets()] == [(2, "bytes"), (3, "bytes")]
        assert made.take_buckets() == [] and made.error == "it is not complete"

    def test_nothing_incomplete_is_taken(self):
        assert self.staging(self.ENTRIES).take_buckets() == []
        assert Staging(SHAPES).take_buckets() == []

    @pytest.mark.parametrize("change", [{"crc32": 5}, {"dtype": "float16"}])
    def test_other_tensors_than_were_sent_are_refused(self, change):
        made = self.staging([dataclasses.replace(self.ENTRIES[0], **change)], self.ENTRIES[1:])
        made.finish(8, layout.digest(self.ENTRIES))
        assert "digest" in made.error and made.take_buckets() == []

    def test_tensors_in_another_order_are_refused(self):
        made = self.staging(self.ENTRIES[2:], self.ENTRIES[:2])
        made.finish(8, layout.digest(self.ENTRIES))
        assert "digest" in made.error

    def test_a_bucket_of_another_publish_is_refused_but_fetched(self):
        made, fetched = self.staging(self.ENTRIES[:2]), []
        made.add(9, self.ENTRIES[2:], lambda: fetched.append(1))
        assert "version 9 came into the publish of version 8" in made.error and fetched == [1] and made.buckets == []

    def test_nothing_heals_a_refused_publish(self):
        made = self.staging(self.ENTRIES[:2], self.ENTRIES[:1], self.ENTRIES)
        made.finish(8, layout.digest(self.ENTRIES))
        assert made.error.startswith("w0 given twice") and made.take_buckets() == []

    def test_a_bucket_after_the_end_is_refused(self):
        made = self.staging(self.ENTRIES)
        made.finish(8, layout.digest(self.ENTRIES))
        made.add(8, [], lambda: None)
        assert made.error and made.take_buckets() == []


HOST = """
import os, sys, types
os.environ["XLA_FLAGS"] = ""  # one device
import jax
import jax.experimental.multihost_utils
jax.config.update("jax_cpu_collectives_implementation", "gloo")
rank, port = map(int, sys.argv[1:])
jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jppo.rollout import publish
from jppo.models import decoder, config_reader, hf_write, placing
from jppo.rollout.protocol import RolloutError
from jppo.plugins.carriers import buckets
from jppo.rollout.servers.member import ServerSettings
from jppo.rollout.vllm.client import start_vllm
from tests.plugins.carriers import test_buckets as t
from tests.rollout.conftest import FakeServer, INFO

cfg = config_reader.parse_config(dict(model_type="qwen2", vocab_size=64, hidden_size=16, intermediate_size=32,
    num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64,
    rope_theta=1e4, rms_norm_eps=1e-6, tie_word_embeddings=True, hidden_act="silu"), path="m")
values = decoder.init_params(cfg, jax.random.key(3), head="lm", param_dtype="float32")
whole = dict(hf_write.hf_tensors(values, cfg))
mesh = Mesh(np.array(jax.devices()), ("fsdp",))
def on(x):
    axis = next((i for i, n in enumerate(x.shape) if n % 2 == 0), None)
    return PartitionSpec(*[None] * (axis or 0), "fsdp") if axis is not None else PartitionSpec()
shared = jax.tree.map(lambda x: placing.put(np.asarray(x), NamedSharding(mesh, on(x))), values)
assert any(not x.is_fully_addressable and not x.is_fully_replicated for x in jax.tree.leaves(shared))

t.SHAPES = {name: tensor.shape for name, tensor in whole.items()}
buckets.BUCKET = 4096
fake = t.serve(FakeServer())
t.stages(fake)
fake.answers["jppo_info"] = (200, {"results": [INFO | {"buckets": True}]})
if rank == 1:
    good, calls = fake.answers[t.UPDATE][1], []
    def once(body):
        calls.append(body)
        if len(calls) == 2:
            raise ConnectionAbortedError
        return good(body)
    fake.answers[t.UPDATE] = (200, once)
made = ServerSettings(max_model_len=64, vocab_size=1000, max_num_seqs=8, publish_via="tcp",
    request_timeout_s=10.0, health_timeout_s=5.0, max_restarts=2)
engine = start_vllm("m", "run", settings=made, urls=[fake.url])
sampler = engine.ready(eos_token_ids=[2], decode=str)
hosts = types.SimpleNamespace(count=2, together=lambda work: work())
how = publish.PublishSettings(dtype="float32", on_device=False, adapters=None, base="m", on_update="wait")
publish._load(how, sampler, shared, cfg, hosts, version=7)
if rank == 1:
    try:
        sampler.generate(t.PROMPTS, t.SAMPLING, version=7)
    except RolloutError as e:
        assert "gathered from all hosts" in str(e)
        print("ended")
else:
    assert set(fake.model) == set(whole) and len(fake.asked) > 12
    assert all(np.array_equal(fake.model[n].reshape(whole[n].shape), whole[n]) for n in whole)
    print("whole")
jax.experimental.multihost_utils.sync_global_devices("end")
engine.close()
fake.close()
"""


@pytest.mark.slow
def test_each_host_gathers_each_bucket_and_sends_it_to_its_own_servers():
    """The second one's only server breaks in the second bucket: the first one's publish is whole."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-c", HOST]
    hosts = [subprocess.Popen([*command, str(rank), str(port)], stdout=subprocess.PIPE, text=True) for rank in range(2)]
    try:
        said = [host.communicate(timeout=120)[0].split()[-1:] for host in hosts]  # after Gloo's own words
    finally:
        for host in hosts:
            host.kill()
    assert said == [["whole"], ["ended"]]
