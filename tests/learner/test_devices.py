"""Peaks: the maker's where the device is known, else measured."""

import pathlib
import types

import jax
import numpy as np
import pytest

from jppo.learner import sharding


@pytest.mark.parametrize(
    "kind,bfloat16,float32",
    [
        ("NVIDIA H100 80GB HBM3", 989.4e12, 67e12),
        ("NVIDIA H100 PCIe", 756e12, 51e12),
        ("NVIDIA H200", 989.4e12, 67e12),
        ("NVIDIA A100-SXM4-80GB", 312e12, 19.5e12),
        ("NVIDIA L4", 121e12, 30.3e12),
        ("NVIDIA L40S", 362e12, 91.6e12),
        ("Tesla V100-SXM2-16GB", None, 15.7e12),
        ("TPU v5 lite", 197e12, 32.8e12),
        ("TPU v5", 459e12, 76.5e12),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None, None),
        ("NVIDIA H20", None, None),
        ("cpu", None, None),
    ],
)
def test_a_device_is_known_by_its_kind_and_the_dtype_counts(kind, bfloat16, float32):
    for dtype, rate in (("bfloat16", bfloat16), ("float16", bfloat16), ("float32", float32)):
        assert sharding.known_peak(kind, dtype) == (None if rate is None else pytest.approx(rate))
    names = list(sharding.PEAKS)
    assert not [a for i, a in enumerate(names) if any(b.startswith(a) for b in names[i + 1 :])], "longer names first"


def test_what_is_not_known_is_measured_once(monkeypatch):
    mesh, made = sharding.mesh_of_shape((8, 1, 1)), []
    make_product = sharding.make_product

    def spied(*args):
        made.append(make_product(*args))
        return made[0]

    sharding.find_peak.cache_clear()
    monkeypatch.setattr(sharding, "make_product", spied)
    found = sharding.find_peak(mesh, "float32")
    assert found.flops_per_s > 1e8 and "measured by a large matrix product, float32" in found.source
    assert sharding.find_peak(mesh, "float32") is found and len(made) == 1
    assert made[0][1] == 2 * 2048**3


def test_a_known_device_is_not_measured(monkeypatch):
    known = types.SimpleNamespace(device_kind="NVIDIA H200")
    mesh = types.SimpleNamespace(devices=np.asarray([known] * 4))
    monkeypatch.setattr(sharding, "make_product", None)
    found = sharding.find_peak.__wrapped__(mesh, "bfloat16")
    assert found == sharding.Peak(pytest.approx(4 * 989.4e12), "the maker's for 4 x NVIDIA H200, bfloat16")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_product_goes_over_any_number_of_devices(dtype):
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:3]).reshape(3, 1, 1), ("data", "fsdp", "tensor"))
    multiply, flops = sharding.make_product(mesh, dtype)
    out = multiply()
    assert (out.shape, out.dtype, out.sharding.num_devices) == ((2049, 2048), dtype, 3) and flops == 2 * 2049 * 2048**2
    # On a CPU, a product of bfloat16 with a result of bfloat16 is the slow kind, which the decoder avoids.
    assert "preferred_element_type=float32" in str(jax.make_jaxpr(multiply)())


def test_memory_is_what_is_said(monkeypatch):
    found = sharding.memory()
    assert set(found) == {"perf/cpu_memory_used_gb"}
    status = pathlib.Path("/proc/self/status").read_text()
    here = int(status.split("VmRSS:")[1].split()[0]) / 2**20
    assert found["perf/cpu_memory_used_gb"] == pytest.approx(here, rel=0.05)
    peaks = [types.SimpleNamespace(memory_stats=lambda n=n: {"peak_bytes_in_use": n}) for n in (2**30, 3 * 2**30)]
    monkeypatch.setattr(sharding.jax, "local_devices", lambda: peaks)
    assert sharding.memory()["perf/max_memory_allocated_gb"] == 3.0


def test_the_best_of_all_products_within_the_time_is_the_peak(monkeypatch):
    mesh, clock, seconds = sharding.mesh_of_shape((8, 1, 1)), [0.0], iter([9.0, 0.1, 0.05, 0.2, 0.01])

    def multiply():  # compiles in 9 s; the time is over after the fourth
        clock[0] += next(seconds)

    monkeypatch.setattr(sharding, "make_product", lambda *_: (multiply, 1000))
    monkeypatch.setattr(sharding.time, "perf_counter", lambda: clock[0])
    assert sharding.find_peak.__wrapped__(mesh, "float32").flops_per_s == pytest.approx(1000 / 0.05)
    assert list(seconds) == [0.01]
