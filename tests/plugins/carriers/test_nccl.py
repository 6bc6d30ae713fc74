"""Weights by NCCL against vLLM's own worker code, both over a library whose ranks check each other (fake_nccl.c)."""

import base64
import contextlib
import ctypes
import shutil
import subprocess
import threading
import time
import types

import jax
import numpy as np
import pytest

from jppo.errors import UserError
from jppo.plugins.carriers import buckets, device_carriers
from jppo.rollout.protocol import RolloutError
from jppo.rollout.publish import Repeatable
from jppo.rollout.vllm.client import start_vllm
from tests.rollout.conftest import INFO
from tests.rollout.test_fleet import asked, serve

needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
pytestmark = needs_cc
JOIN, UPDATE = "/init_weight_transfer_engine", "/update_weights"

LIMITS = dict(request_timeout_s=8.0, health_timeout_s=5.0, max_restarts=3)


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    made = tmp_path_factory.mktemp("nccl") / "libnccl.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", made, "tests/rollout/fake_nccl.c", "-lpthread"], check=True)
    return str(made)


@pytest.fixture
def engine(library, monkeypatch):
    """A maker of `weight_engine.StagedEngine`s, whose workers join by vLLM's communicator on the CPU."""
    pytest.importorskip("vllm")
    import torch
    import transformers
    from vllm.distributed.device_communicators import pynccl
    from vllm.distributed.weight_transfer import nccl_common

    from jppo.plugins.carriers import weight_engine

    monkeypatch.setenv("VLLM_NCCL_SO_PATH", library)
    stream = types.SimpleNamespace(cuda_stream=None, synchronize=lambda: None)
    join, cpu = pynccl.PyNcclCommunicator.from_unique_id_bytes, torch.device("cpu")
    monkeypatch.setattr(weight_engine.worker, "config_set", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(pynccl, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.accelerator, "device_index", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda: (1 << 40, 1 << 40))
    monkeypatch.setattr(
        nccl_common,
        "uid_init_process_group",
        lambda unique_id, rank, ranks, _: join(unique_id, rank, ranks, cpu, library_path=library),
    )
    config = transformers.Qwen2Config(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.Qwen2ForCausalLM(config)

    def make(rank=0):
        class Engine(weight_engine.StagedEngine):
            def _reload_weights(self, *, weights_iterator):
                self.loaded = {name: tensor.clone() for name, tensor in weights_iterator}

        parallel = types.SimpleNamespace(data_parallel_index=0, world_size=2, rank=rank)
        about = types.SimpleNamespace(parallel_config=parallel, model_config=types.SimpleNamespace(hf_config=config))
        made = Engine(None, about, cpu, model)
        assert not made.supports_draft_weight_update, "vLLM asks; a publish has no draft model"
        made.loaded = {}
        return made

    make.tensors = {name: p.detach().numpy() for name, p in model.named_parameters()}
    return make


def works(fake, engines):
    """Lets a fake server have these workers, as vLLM calls them: all at the same time."""
    fake.engines = engines

    def on_all(do):
        failed = []

        def one(engine):
            try:
                do(engine)
            except BaseException as e:
                failed.append(e)

        threads = [threading.Thread(target=one, args=(engine,)) for engine in fake.engines]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            raise ConnectionAbortedError from failed[0]
        return {}

    def state(body):
        if body["kwargs"].get("abandon"):
            on_all(lambda engine: engine.start_weight_update())
        from jppo.plugins.carriers.weight_engine import Receiver

        workers = [types.SimpleNamespace(weight_transfer_engine=engine) for engine in fake.engines]
        nccl = body["kwargs"].get("nccl", False)
        return {"results": [Receiver.jppo_transfer(worker, nccl=nccl) for worker in workers]}

    fake.answers |= {
        "/start_weight_update": (200, lambda _: on_all(lambda engine: engine.start_weight_update())),
        JOIN: (200, lambda body: on_all(lambda e: e.init_transfer_engine(e.parse_init_info(body["init_info"])))),
        UPDATE: (200, lambda body: on_all(lambda engine: engine.update_weights(body["update_info"]))),
        "/finish_weight_update": (200, lambda _: on_all(lambda engine: engine.finish_weight_update())),
        "jppo_transfer": (200, state),
        "jppo_info": (200, {"results": [INFO | {"buckets": True}]}),
    }


@pytest.fixture
def made(fakes, settings, monkeypatch, engine, library):
    """A sampler over two fakes, of two workers and of one; version 7 was published."""
    monkeypatch.setattr(buckets, "BUCKET", 4000)
    for fake, count in zip(fakes, (2, 1), strict=True):
        serve(fake)
        works(fake, [engine(rank) for rank in range(count)])
    monkeypatch.setattr(
        buckets, "Tcp", lambda *_: device_carriers.Nccl(lambda: communicator(library), jax.devices()[0])
    )
    started = start_vllm(
        "model", "run", settings=settings(publish_via="tcp", **LIMITS), urls=[fake.url for fake in fakes],
    )  # fmt: skip
    sampler = started.ready(eos_token_ids=[2], decode=str)
    sampler.load(source(engine, 0), version=7)
    for fake in fakes:
        fake.asked.clear()
    yield sampler
    started.close()


def communicator(library):
    return device_carriers.Communicator(0, nccl=library, cuda=library)


def source(engine, by, dtype=np.float32):
    values = {name: (tensor + by).astype(dtype) for name, tensor in engine.tensors.items()}
    return Repeatable(lambda: ((name, jax.device_put(value)) for name, value in values.items()))


def has(engine, by, tensors):
    loaded = {name: tensor.float().numpy() for name, tensor in engine.loaded.items()}
    return set(loaded) == set(tensors) and all(np.array_equal(loaded[n], tensors[n] + by) for n in tensors)


@pytest.mark.vllm
def test_bfloat16_has_a_checksum_too(made, fakes, engine):
    import ml_dtypes

    made.load(source(engine, 0, ml_dtypes.bfloat16), version=8)
    name, tensor = next(iter(fakes[0].engines[1].loaded.items()))
    assert np.array_equal(tensor.float().numpy(), engine.tensors[name].astype(ml_dtypes.bfloat16).astype(np.float32))


@pytest.mark.vllm
def test_another_nccl_is_named_before_anything_is_sent(made, fakes, engine, monkeypatch):
    """NCCL itself would end the join of all with an error that names no versions."""
    monkeypatch.setattr(device_carriers.Communicator, "version", lambda _: 22705)
    with pytest.raises(RolloutError, match=f"has NCCL 22705 and {fakes[0].url} has 23203, .* install the same"):
        made.load(source(engine, 1), version=8)
    assert not any(asked(fake, (JOIN, UPDATE)) for fake in fakes)


@pytest.mark.vllm
def test_a_restarted_server_makes_all_join_again(made, fakes, engine):
    works(fakes[0], [engine(0), engine(1)])
    made.load(source(engine, 2), version=8)
    assert [len(asked(fake, [JOIN])) for fake in fakes] == [1, 1]
    assert all(has(worker, 2, engine.tensors) for fake in fakes for worker in fake.engines)


@pytest.mark.vllm
def test_a_gpu_without_room_names_the_bucket_and_the_remedy(made, fakes, engine, monkeypatch):
    import torch

    real, name = torch.empty, next(iter(engine.tensors))

    def full(*size, dtype=None, **how):
        if dtype == torch.uint8:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(*size, dtype=dtype, **how)

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(RolloutError, match=rf"no room for a bucket of \d+ bytes, {name} to .*lower rollout.gpu_memory"):
        made.load(source(engine, 1), version=8)
    assert all(has(worker, 0, engine.tensors) for fake in fakes for worker in fake.engines)


@pytest.mark.vllm
def test_a_trainer_that_is_killed_in_a_broadcast_leaves_no_worker_waiting(library, engine, monkeypatch):
    """The library alone lets a rank wait for an hour."""
    from jppo.plugins.carriers import weight_engine
    from jppo.rollout.vllm import layout

    monkeypatch.setattr(weight_engine, "BROADCAST_S", 0.3)
    monkeypatch.setattr(ctypes.c_int.in_dll(ctypes.CDLL(library), "seconds"), "value", 3600)
    trainer, worker = communicator(library), engine()
    unique_id, one = trainer.unique_id(), np.ones(1, np.float32)
    about = {"nccl_unique_id_b64": base64.b64encode(unique_id).decode(), "rank_offset": 1, "world_size": 2}
    joins = threading.Thread(target=trainer.join, args=(unique_id, 2, one.ctypes.data))
    joins.start()
    worker.init_transfer_engine(worker.parse_init_info(about))
    joins.join()
    name, tensor = next(iter(engine.tensors.items()))
    entries = layout.pack_bytes(layout.lay_out([(name, "float32", tensor.shape, tensor.nbytes, 0)]))
    update = {"version": 8, "entries": entries}
    updates = threading.Thread(target=worker.update_weights, args=(update,), daemon=True)
    updates.start()  # and the trainer sends nothing
    updates.join(60)
    assert not updates.is_alive() and worker.group == ""
    assert worker.staging.error.startswith("a broadcast by NCCL did not end within 0.3 s: the trainer was killed")
    worker.start_weight_update()
    assert worker.staging.error is None


@pytest.mark.parametrize("fault", ["no warm-up", "another count", "another root", "another rank", ""])
def test_the_library_of_these_tests_sees_a_wrong_order(library, fault):
    """Otherwise the tests above would prove nothing."""
    trainer = communicator(library)
    unique_id, data, failed = trainer.unique_id(), np.zeros(64, np.uint8), []
    address = data.ctypes.data

    def calls(one, rank, *, warm=True, count=64, root=0):
        comm = device_carriers._P()
        try:
            one._call(
                "ncclCommInitRank", ctypes.byref(comm), 2, device_carriers.UniqueId.from_buffer_copy(unique_id), rank
            )
            if warm:
                one._call(
                    "ncclAllReduce", address, address, 1, device_carriers.FLOAT32, device_carriers.SUM, comm, None
                )
            one._call("ncclBroadcast", address, address, count, device_carriers.UINT8, root, comm, None)
        except RolloutError as e:
            failed.append(str(e))

    thread = threading.Thread(target=calls, args=(communicator(library), 0 if fault == "another rank" else 1))
    thread.start()
    calls(trainer, 0, warm=fault != "no warm-up", count=32 if "count" in fault else 64, root=int("root" in fault))
    thread.join()
    assert bool(failed) is bool(fault) and all("differ" in e or "missing" in e for e in failed)


def test_a_join_that_ends_after_the_trainer_gave_up_leaves_its_communicator(library):
    """Otherwise the next publish would use it."""
    trainer, other, one, failed = communicator(library), communicator(library), np.ones(1, np.float32), []
    unique_id = trainer.unique_id()

    def join():
        try:
            trainer.join(unique_id, 2, one.ctypes.data)
        except RolloutError as e:
            failed.append(str(e))

    thread = threading.Thread(target=join)
    thread.start()
    time.sleep(0.1)
    trainer.abort()
    comm = device_carriers._P()
    other._call("ncclCommInitRank", ctypes.byref(comm), 2, device_carriers.UniqueId.from_buffer_copy(unique_id), 1)
    thread.join()
    assert failed == ["rollout.publish_via='nccl': the servers joined after the trainer had given up"]
    with pytest.raises(RolloutError, match="ncclBroadcast failed"):
        trainer.broadcast(one.ctypes.data, 4)


def test_a_failure_beside_a_refusal_gives_the_communicator_up_too():
    """The refusal is what the run reports; another publish must not use a communicator that failed."""
    gave_up = []

    def fail():
        raise RolloutError("the broadcast failed")

    def beside(number):
        return device_carriers.run_alongside(fail, timeout_s=60.0, give_up=lambda: gave_up.append(number))

    with pytest.raises(RolloutError, match="refused"), beside(1):
        raise RolloutError("refused")
    with pytest.raises(RolloutError, match="the broadcast failed"), beside(2):
        pass
    assert gave_up == [1, 2]


def test_without_the_library_the_setting_is_refused():
    with pytest.raises(UserError, match=r"publish_via='nccl': .*; install JAX for CUDA"):
        device_carriers.Communicator(0, nccl="/nowhere/libnccl.so.2")
