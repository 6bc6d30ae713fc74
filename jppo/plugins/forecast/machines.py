"""Machines by their common names, with the vendors' figures: the one table of assumed rates.

    8xH100       eight GPUs of one host
    4x8xH100     four such hosts
    v5p-64       a TPU slice; as Google counts, v4 and v5p by cores (two a chip), v5e and v6e by chips
    2xv6e-256    two slices
    v5litepod-8  Google's accelerator type of v5e-8

Peak FLOP/s are in `jppo/learner/sharding.py`, by the kind of device. All figures are of one JAX device.
"""

import dataclasses
import math
import re
from typing import Literal

from jppo.errors import UserError
from jppo.learner import sharding

Kind = Literal["product", "attention", "memory", "link", "network", "program"]


@dataclasses.dataclass(frozen=True)
class Share:
    """A share of a vendor's rate."""

    value: float
    source: str


_MAMF = "of cuBLAS at its best shape, ml-engineering's table of achievable matmul FLOP/s"
_STREAM = Share(0.85, "assumed: long streams; copies of 32 MiB reach 83 % on v6e")
_ICI = Share(0.8, "assumed: large messages of ICI")
_DCN = Share(0.7, "assumed: as between hosts of GPUs")
_MXU = Share(0.9, "827 of 918 TFLOP/s, bfloat16, 8192 x 8192 x 8192 on v6e, Google's tpu-recipes, microbenchmarks")
_ATTENTION = "assumed: splash attention, heads of 128"
_HOSTS = Share(0.73, "36.5 of 50 GB/s a GPU, all-reduce of four hosts of B200, ml-engineering, network")

_STEP = Share(0.75, "of a whole step: MaxText's Llama2-7B on 8 H100, 492 TFLOP/s a GPU")
_TPU_STEP = Share(0.85, "of a whole step: MaxText's Llama3.1-8B on v6e-8, 413 TFLOP/s a chip")

_GPU: dict[Kind, Share] = {"program": _STEP, "memory": _STREAM, "network": _HOSTS}
_TPU: dict[Kind, Share] = {"program": _TPU_STEP, "product": _MXU, "memory": _STREAM, "link": _ICI, "network": _DCN}
SHARES: dict[str, dict[Kind, Share]] = {
    "hopper": _GPU
    | {
        "product": Share(0.80, f"794.5 of 989 TFLOP/s {_MAMF}"),
        "attention": Share(
            0.53, "cuDNN at 4,096 tokens and heads of 128: 609 TFLOP/s forward, 499 backward, arXiv:2407.08608"
        ),
        "link": Share(0.80, "361 of 450 GB/s, NCCL's all-gather on 8 H200, ml-engineering, network"),
    },
    "blackwell": _GPU
    | {
        "product": Share(0.78, f"1,745 of 2,250 TFLOP/s {_MAMF}"),
        "attention": Share(0.5, "assumed: as on Hopper"),
        "link": Share(0.82, "741 of 900 GB/s, NCCL's all-reduce of 4 GiB on 8 B200, ml-engineering, network"),
    },
    "ampere": _GPU
    | {
        "product": Share(0.87, f"271 of 312 TFLOP/s {_MAMF}"),
        "attention": Share(0.5, "50 to 73 % of an A100, FlashAttention-2, arXiv:2307.08691; the lower end"),
        "link": Share(0.78, "235 of 300 GB/s, NCCL's all-reduce on 8 A100, ml-engineering, network"),
    },
    "ada": _GPU
    | {
        "product": Share(0.8, "assumed: as on Hopper"),
        "attention": Share(0.5, "assumed: as on Ampere"),
        "link": Share(0.8, "assumed: large messages by PCIe"),
    },
    "turing": _GPU
    | {
        "product": Share(0.8, "assumed: as on Hopper"),
        "attention": Share(0.5, "assumed: as on Ampere"),
        "link": Share(0.8, "assumed: large messages by PCIe"),
    },
    # Heads of 128 fill a matrix unit of 128 x 128, and half of one of 256 x 256.
    "tpu128": _TPU | {"attention": Share(0.6, f"{_ATTENTION}, which fill the matrix unit")},
    "tpu256": _TPU | {"attention": Share(0.45, f"{_ATTENTION}, which fill half of the matrix unit of v6e")},
}


GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One JAX device; rates in bytes/s, in one direction."""

    kind: str  # as JAX calls it
    platform: str  # 'gpu' or 'tpu'
    memory: int  # bytes that programs may use
    hbm: float  # bandwidth of its memory
    link: float  # of a GPU to the others of its host; of a TPU along one torus axis, one way
    network: float  # of a device to other hosts (GPU) or slices (TPU)
    source: str  # of the figures
    generation: str  # of its shares in SHARES

    @property
    def shares(self) -> dict[Kind, Share]:
        return SHARES[self.generation]

    def peak(self, dtype: str) -> float:
        """Returns the vendor's FLOP/s of dense products; without bfloat16, XLA's are of float32."""
        rate = sharding.known_peak(self.kind, dtype) or sharding.known_peak(self.kind, "float32")
        assert rate is not None, self.kind
        return rate


@dataclasses.dataclass(frozen=True)
class Gpu(Chip):
    """A GPU, with the figures of XLA's GPU compiler."""

    capability: tuple[int, int] = (0, 0)
    cores: int = 0  # streaming multiprocessors
    fpus: int = 128  # of a core
    clock_ghz: float = 0.0
    l2: int = 0
    shared: int = 0  # bytes of shared memory of a core
    threads: int = 2048  # of a core
    total: int = 0  # bytes of its memory


@dataclasses.dataclass(frozen=True)
class Tpu(Chip):
    """A TPU chip."""

    dimensions: int = 2  # of its torus
    wrapped: int = 16  # chips from which on an axis closes to a ring
    cores: int = 1  # counted per chip in a slice's name
    topology: str = ""  # libtpu's name


_NVLINK = "NVIDIA's data sheet; one direction of NVLink; network: 400 Gb/s a GPU, as in DGX H100"
_NVLINK5 = "DGX B200's data sheet; one direction of NVLink; network: 400 Gb/s a GPU; memory as XLA describes it"
_BOOK = "Google's TPU pages and 'How to Scale Your Model' (jax-ml.github.io/scaling-book); memory by XLA's limit"
_PCIE = "NVIDIA's data sheet; PCIe 4.0 x16; network: 100 Gb/s a host, assumed"
_PCIE8 = "NVIDIA's data sheet; PCIe 4.0 x8; network: as of an L4"
_PCIE3 = "NVIDIA's data sheet; PCIe 3.0 x16; network: as of an L4"


def _gpu(kind: str, total: int, hbm: float, link: float, network: float, source: str, **figures: object) -> Gpu:
    # By default JAX's allocator takes three quarters of a GPU; next to servers the share differs.
    return Gpu(kind, "gpu", total, hbm, link, network, source, total=total, **figures)  # type: ignore[arg-type]


_HOPPER = dict(generation="hopper", capability=(9, 0), cores=132, clock_ghz=1.98, l2=50 * 2**20, shared=233472)
_BLACKWELL = dict(generation="blackwell", capability=(10, 0), cores=148, clock_ghz=1.965, l2=132644864, shared=233472)
_AMPERE = dict(generation="ampere", capability=(8, 0), cores=108, fpus=64, clock_ghz=1.41, l2=40 * 2**20, shared=167936)
_ADA = dict(generation="ada", capability=(8, 9), shared=102400, threads=1536)
_TURING = dict(generation="turing", capability=(7, 5), fpus=64, shared=65536, threads=1024)
_DGX_A100 = "NVIDIA's data sheet; one direction of NVLink; network: 200 Gb/s a GPU, as in DGX A100"

GPUS: dict[str, Gpu] = {
    "H100": _gpu("NVIDIA H100 80GB HBM3", 84978434048, 3.35e12, 450e9, 50e9, _NVLINK, **_HOPPER),
    "H200": _gpu("NVIDIA H200", 150754820096, 4.8e12, 450e9, 50e9, _NVLINK, **_HOPPER),
    "B200": _gpu("NVIDIA B200", 191514411008, 7.67e12, 900e9, 50e9, _NVLINK5, **_BLACKWELL),
    "A100-40GB": _gpu("NVIDIA A100-SXM4-40GB", 42505076736, 1.555e12, 300e9, 25e9, _DGX_A100, **_AMPERE),
    "A100-80GB": _gpu("NVIDIA A100-SXM4-80GB", 85197848576, 2.039e12, 300e9, 25e9, _DGX_A100, **_AMPERE),
    "L4": _gpu("NVIDIA L4", 24152899584, 0.3e12, 31.5e9, 1.5e9, _PCIE, cores=58, clock_ghz=2.04, l2=48 * 2**20, **_ADA),
    "RTX-4090": _gpu(
        "NVIDIA GeForce RTX 4090", 25757220864, 1.008e12, 31.5e9, 1.5e9, _PCIE,
        cores=128, clock_ghz=2.52, l2=72 * 2**20, **_ADA,
    ),
    "RTX-4060": _gpu(
        "NVIDIA GeForce RTX 4060", 8585740288, 0.272e12, 15.75e9, 1.5e9, _PCIE8,
        cores=24, clock_ghz=2.46, l2=24 * 2**20, **_ADA,
    ),
    "T4": _gpu(
        "Tesla T4", 16106127360, 0.32e12, 15.75e9, 1.5e9, _PCIE3, cores=40, clock_ghz=1.59, l2=4 * 2**20, **_TURING
    ),
}  # fmt: skip

TPUS: dict[str, Tpu] = {
    "v4": Tpu(
        "TPU v4", "tpu", int(30.75 * GIB), 1.228e12, 45e9, 3.125e9, _BOOK, "tpu128",
        dimensions=3, wrapped=4, cores=2, topology="v4",
    ),
    "v5e": Tpu("TPU v5 lite", "tpu", int(15.75 * GIB), 0.819e12, 45e9, 3.125e9, _BOOK, "tpu128", topology="v5e"),
    "v5p": Tpu(
        "TPU v5", "tpu", int(95.74 * GIB), 2.765e12, 90e9, 6.25e9, _BOOK, "tpu128",
        dimensions=3, wrapped=4, cores=2, topology="v5p",
    ),
    "v6e": Tpu("TPU v6 lite", "tpu", int(31.25 * GIB), 1.64e12, 90e9, 12.5e9, _BOOK, "tpu256", topology="v6e"),
}  # fmt: skip

# Bytes/s between a device and its host's memory, for offloaded models and optimizers.
HOST = (25e9, "assumed: half of PCIe 5.0 x16, as all devices of a host copy together")

_FLAT = {1: (1, 1), 4: (2, 2), 8: (2, 4), 16: (4, 4), 32: (4, 8), 64: (8, 8), 128: (8, 16), 256: (16, 16)}


@dataclasses.dataclass(frozen=True)
class Machine:
    """A number of identical devices and their topology."""

    name: str
    chip: Chip
    groups: int  # hosts of GPUs, or slices of TPUs
    each: int  # devices of a group
    shape: tuple[int, ...] = ()  # of a slice's torus

    @property
    def devices(self) -> int:
        return self.groups * self.each

    def __str__(self) -> str:
        return f"{self.name}: {self.devices} x {self.chip.kind}"


def known_names() -> str:
    """Returns examples of machines' names, for errors and --help."""
    gpus = ", ".join(GPUS)
    return (
        f"{gpus} (8xH100: a host of eight, 4x8xH100: four hosts), v4-8, v5e-16, v5p-64, v6e-8 (2xv6e-256: two slices)"
    )


def parse_machine(name: str) -> Machine:
    """Parses a machine's name; raises UserError with the known ones."""
    match = re.fullmatch(r"(?:(\d+)x)?(?:(\d+)x)?([A-Za-z][\w\-]*)", name.strip())
    counts = [int(n) for n in match.groups()[:2] if n] if match else []
    if match is None or 0 in counts:
        raise UserError(f"--machine={name}: no such machine; known are {known_names()}")
    chip = next((gpu for label, gpu in GPUS.items() if label.lower() == match[3].lower()), None)
    if chip is not None:
        hosts, gpus = ([1, 1] + counts)[-2:] if len(counts) > 1 else (1, counts[0] if counts else 1)
        return Machine(name, chip, hosts, gpus)
    slice_ = re.fullmatch(r"(v\d+[ep]?)-(\d+)", match[3].lower().replace("v5litepod", "v5e"))
    if slice_ is None or slice_[1] not in TPUS or len(counts) > 1:
        raise UserError(f"--machine={name}: no such machine; known are {known_names()}")
    tpu, size = TPUS[slice_[1]], int(slice_[2])
    shape = _slice_shape(tpu, size)
    if shape is None:
        sizes = ", ".join(f"{slice_[1]}-{n}" for n in range(1, 513) if _slice_shape(tpu, n) is not None)
        raise UserError(f"--machine={name}: no slice has that size; there are {sizes}")
    return Machine(name, tpu, counts[0] if counts else 1, math.prod(shape), shape)


def _slice_shape(tpu: Tpu, size: int) -> tuple[int, ...] | None:
    """Returns the torus shape of a TPU slice by the number in its name; None if that size does not exist."""
    if tpu.dimensions == 2:
        return _FLAT.get(size)
    if size % (4 * tpu.cores) or size > 1024 * tpu.cores:  # at least a host, 2x2x1
        return None
    chips, shape = size // tpu.cores, [2, 2, 1]
    while math.prod(shape) < chips:
        shape[shape.index(min(shape))] *= 2
    return tuple(sorted(shape) if chips > 4 else shape) if math.prod(shape) == chips else None


def target_config(gpu: Gpu, cudnn: str) -> str:
    """Returns XLA's GPU target description, a text GpuTargetConfigProto, with a version of cuDNN."""
    major, minor = gpu.capability
    dnn = dict(zip(("major", "minor", "patch"), cudnn.split("."), strict=False))
    return f"""
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {gpu.shared}
  threads_per_core_limit: {gpu.threads}
  core_count: {gpu.cores}
  fpus_per_core: {gpu.fpus}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {int(gpu.hbm)}
  l2_cache_size: {gpu.l2}
  clock_rate_ghz: {gpu.clock_ghz}
  device_memory_size: {gpu.total}
  shared_memory_per_block_optin: {gpu.shared - 1024}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ {" ".join(f"{name}: {number}" for name, number in dnn.items())} }}
device_description_str: "{gpu.kind}"
"""
