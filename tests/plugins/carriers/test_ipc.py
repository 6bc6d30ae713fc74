"""Weights by CUDA IPC against jppo's engine in vLLM's worker, both over a library on shared memory (fake_cuda.c)."""

import ctypes
import shutil
import subprocess
import sys
import zlib

import jax
import numpy as np
import pytest

from jppo.errors import UserError
from jppo.plugins.carriers import buckets, device_carriers, transports
from jppo.rollout.protocol import RolloutError
from jppo.rollout.vllm.client import start_vllm
from tests.plugins.carriers.test_nccl import UPDATE, engine, has, library, source, works  # noqa: F401 (fixtures)
from tests.rollout.test_fleet import PROMPTS, SAMPLING, asked, serve, whole

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")

LIMITS = dict(request_timeout_s=8.0, health_timeout_s=5.0, max_restarts=3)


@pytest.fixture(scope="session")
def cuda(tmp_path_factory):
    made = tmp_path_factory.mktemp("cuda") / "libcuda.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", made, "tests/rollout/fake_cuda.c", "-lpthread", "-lrt"], check=True)
    return str(made)


@pytest.fixture
def gpu(cuda, monkeypatch):
    """A maker of GPUs, which the workers use too."""
    real = transports.CudaDevice
    monkeypatch.setattr(transports, "CudaDevice", lambda number: real(number, library=cuda))
    return transports.CudaDevice


@pytest.fixture
def made(fakes, settings, monkeypatch, engine, gpu):  # noqa: F811
    """A sampler over two fakes, of two workers and of one, and its carrier; version 7 was published."""
    monkeypatch.setattr(buckets, "BUCKET", 4000)
    for fake, count in zip(fakes, (2, 1), strict=True):
        serve(fake)
        works(fake, [engine(rank) for rank in range(count)])
    carrier = device_carriers.Ipc([(jax.devices()[1], gpu(1)), (jax.devices()[0], gpu(0))])
    monkeypatch.setattr(device_carriers, "make_ipc_carrier", lambda: carrier)
    started = start_vllm(
        "model", "run", settings=settings(publish_via="ipc", **LIMITS), urls=[fake.url for fake in fakes],
    )  # fmt: skip
    sampler = started.ready(eos_token_ids=[2], decode=str)
    sampler.load(source(engine, 0), version=7)
    for fake in fakes:
        fake.asked.clear()
    yield sampler, carrier
    started.close()


def untouched(fakes, tensors):
    return all(has(worker, 0, tensors) for fake in fakes for worker in fake.engines)


@pytest.mark.vllm
def test_all_memory_is_freed(made, fakes, engine, cuda):  # noqa: F811
    sampler, _ = made
    sampler.load(source(engine, 1), version=8)
    assert all(has(worker, 1, engine.tensors) for fake in fakes for worker in fake.engines)
    assert len(asked(fakes[0], [UPDATE])) > 3 and whole(sampler.generate(PROMPTS, SAMPLING, version=8))
    lib = ctypes.CDLL(cuda)
    assert (lib.fake_regions(0), lib.fake_regions(1)) == (2, 0), "a buffer for each GPU, and none is open"
    sampler.close()
    assert lib.fake_regions(0) == 0


@pytest.mark.vllm
def test_a_server_on_another_gpu_names_both_and_the_remedy(made, fakes, engine):  # noqa: F811
    sampler, carrier = made
    carrier.close()
    carrier._gpus = carrier._gpus[:1]
    with pytest.raises(RolloutError, match=f"the server is on GPU {'28' * 16}, the trainer on {'29' * 16}; set .* tcp"):
        sampler.load(source(engine, 1), version=8)
    assert untouched(fakes, engine.tensors)


@pytest.mark.vllm
def test_a_buffer_that_was_freed_is_refused(made, fakes, engine):  # noqa: F811
    sampler, carrier = made
    uuid = carrier._gpus[1][1].uuid
    size, address, _ = carrier._buffers[uuid]
    carrier._buffers[uuid] = size, address, (b"/jppo-fake-cuda-gone".ljust(56, b"\0") + bytes(8)).hex()
    with pytest.raises(RolloutError, match="cuIpcOpenMemHandle_v2 failed with 400"):
        sampler.load(source(engine, 1), version=8)
    assert untouched(fakes, engine.tensors)


def test_another_process_reads_the_buffer_until_it_is_freed(cuda):
    """Without JAX, torch or vLLM: the binding alone."""
    gpu = transports.CudaDevice(0, library=cuda)
    address, handle = gpu.allocate(4096)
    sent = np.random.default_rng(0).integers(0, 256, 4000).astype(np.uint8)
    gpu.copy(address + 64, sent.ctypes.data, 4000)
    gpu.wait()
    program = f"""
import ctypes, sys, zlib
from jppo.plugins.carriers import transports
gpu, data = transports.CudaDevice(0, library={cuda!r}), ctypes.create_string_buffer(4000)
with gpu.opened({handle!r}) as address:
    gpu.copy(ctypes.addressof(data), address + 64, 4000)
    gpu.wait()
print(gpu.uuid, zlib.crc32(data.raw), gpu._lib.fake_regions(1))
assert "jax" not in sys.modules and "torch" not in sys.modules
"""

    def read():
        return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

    assert read().stdout.split() == [gpu.uuid, str(zlib.crc32(sent)), "0"]
    gpu.free(address)
    assert "cuIpcOpenMemHandle_v2 failed with 400 (invalid resource handle)" in read().stderr


def test_the_library_of_these_tests_sees_a_missing_wait_and_a_copy_beyond_the_end(cuda):
    """Otherwise the tests above would prove less."""
    gpu = transports.CudaDevice(0, library=cuda)
    address, _ = gpu.allocate(64)
    data = np.ones(65, np.uint8)
    with pytest.raises(transports.CudaError, match="cuMemcpyDtoD_v2 failed with 1"):
        gpu.copy(address, data.ctypes.data, 65)
    gpu.copy(address, data.ctypes.data, 64)
    with pytest.raises(transports.CudaError, match="cuMemFree_v2 failed with 1"):
        gpu.free(address)
    gpu.wait()
    gpu.free(address)


def test_without_a_gpu_or_its_driver_the_setting_is_refused(monkeypatch):
    with pytest.raises(UserError, match=r"publish_via='ipc' shares memory of GPUs: JAX runs on a cpu; .* file or tcp"):
        device_carriers.make_ipc_carrier()
    with pytest.raises(transports.CudaError, match="the driver of CUDA cannot be used: /nowhere"):
        transports.CudaDevice(0, library="/nowhere/libcuda.so.1")
