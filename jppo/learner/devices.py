"""Peak FLOP/s and memory of the devices.

A device in the table has its vendor's figure. For any other, such as a CPU, a large matrix product is measured.
"""

import dataclasses
import functools
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jppo.learner import sharding

TERA, GIB = 1e12, 2**30
MEASURE_S = 0.25

# Peak TFLOP/s of one JAX device by the first words of its kind, longer ones first: dense products of bfloat16, and of
# float32 at the highest precision, as training uses them. On a GPU these are the plain FP32 units, not TF32. On
# a TPU a product takes six of bfloat16. None: the vendor gives no figure.
PEAKS: dict[str, tuple[float | None, float | None]] = {
    "NVIDIA B200": (2250.0, 75.0),
    "NVIDIA H200 NVL": (835.5, 60.0),
    "NVIDIA H200": (989.4, 67.0),
    "NVIDIA H100 NVL": (835.5, 60.0),
    "NVIDIA H100 PCIe": (756.0, 51.0),
    "NVIDIA H100": (989.4, 67.0),
    "NVIDIA A100": (312.0, 19.5),
    "NVIDIA L40S": (362.0, 91.6),
    "NVIDIA L4": (121.0, 30.3),
    "NVIDIA A40": (149.7, 37.4),
    "NVIDIA A30": (165.0, 10.3),
    "NVIDIA RTX A6000": (154.8, 38.7),
    "NVIDIA GeForce RTX 4090": (165.2, 82.6),
    "NVIDIA GeForce RTX 3090": (71.0, 35.6),
    "Tesla V100": (None, 15.7),
    "Tesla T4": (None, 8.1),
    "TPU v6 lite": (918.0, 153.0),
    "TPU v6e": (918.0, 153.0),
    "TPU v5 lite": (197.0, 32.8),
    "TPU v5e": (197.0, 32.8),
    "TPU v5p": (459.0, 76.5),
    "TPU v5": (459.0, 76.5),
    "TPU v4": (275.0, 45.8),
}


@dataclasses.dataclass(frozen=True)
class Peak:
    """The peak FLOP/s of all devices of a mesh together, and the source of the number."""

    flops_per_s: float
    source: str


def known_peak(kind: str, dtype: str) -> float | None:
    """Returns the vendor's peak FLOP/s for one device; None if the table has none, or for a part of a GPU."""
    for name, (bfloat16, float32) in PEAKS.items():
        if kind == name or (kind.startswith((f"{name} ", f"{name}-")) and " MIG " not in kind):
            rate = bfloat16 if dtype == "bfloat16" else float32
            return None if rate is None else rate * TERA
    return None


@functools.cache
def find_peak(mesh: Mesh, dtype: str) -> Peak:
    """Returns the peak for products of `dtype`: the vendor's, or the best of a short test, once a process."""
    kind, count = mesh.devices.flat[0].device_kind, mesh.devices.size
    rate = known_peak(kind, dtype)
    if rate is not None:
        return Peak(rate * count, f"the maker's for {count} x {kind}, {dtype}")
    own = sharding.own_part(mesh)  # measured on each host alone: no host waits for another
    multiply, flops = make_product(own, dtype)
    multiply()  # compiles
    best, end = 0.0, time.perf_counter() + MEASURE_S
    while best == 0.0 or time.perf_counter() < end:
        start = time.perf_counter()
        multiply()
        best = max(best, flops / (time.perf_counter() - start))
    best *= count / own.devices.size
    return Peak(best, f"of a large matrix product, measured, {dtype}")


def make_product(mesh: Mesh, dtype: str) -> tuple[Callable[[], Any], int]:
    """Compiles a large matrix product over all devices, square where they divide it; returns it and its FLOP."""
    n = 2048 if sharding.platform(mesh) == "cpu" else 8192
    rows = -(-n // mesh.devices.size) * mesh.devices.size
    split = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    whole = NamedSharding(mesh, PartitionSpec())
    draw = jax.random.normal(jax.random.key(0), (rows, n), jnp.dtype(dtype))
    a, b = jax.device_put(draw, split), jax.device_put(draw[:n], whole)
    multiply = jax.jit(jnp.dot, out_shardings=split)
    return lambda: jax.block_until_ready(multiply(a, b)), 2 * rows * n**2


def device_peak() -> int | None:
    """Returns the peak bytes in use of the fullest device since the start; None if no device reports them."""
    found = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [stats["peak_bytes_in_use"] for stats in found if "peak_bytes_in_use" in stats]
    return max(peaks) if peaks else None


def resident() -> int | None:
    """Returns the resident memory of this process in bytes; None if the system does not report it."""
    statm = pathlib.Path("/proc/self/statm")
    if not statm.is_file():
        return None
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def memory() -> dict[str, float]:
    """Returns memory metrics in GiB, without values that are not reported."""
    found = {"perf/max_memory_allocated_gb": device_peak(), "perf/cpu_memory_used_gb": resident()}
    return {name: size / GIB for name, size in found.items() if size is not None}
