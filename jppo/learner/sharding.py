"""The device mesh: rules from logical axes to mesh axes, compiler options, its devices, and whether it suits a model.

A device in the table of peak FLOP/s and memory has its vendor's figure. For any other, such as a CPU, a large matrix
product is measured.
"""

import dataclasses
import functools
import itertools
import math
import os
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jppo.errors import UserError
from jppo.learner import optim
from jppo.models import placing
from jppo.models.config import ModelConfig
from jppo.models.fused import capability
from jppo.models.kernels import Quantized, einsum
from jppo.models.sequence_parallel import COLUMNS, EXPERT, POSITIONS, WHOLE, fit_axes, row_axes
from jppo.models.sequence_parallel import ROWS as ROW_AXES
from jppo.types import Params, Rows

AXES = ("data", "fsdp", "tensor", "sequence", "expert")
_NEAR_LAST = ("data", "fsdp", "expert", "sequence", "tensor")  # adjacent devices communicate most
ROWS = PartitionSpec(ROW_AXES, POSITIONS)  # the batch [R, T, ...]
WHOLE_ROWS = PartitionSpec(WHOLE.rows)  # rows whose positions stay on one device

# Logical axis of a parameter -> mesh axes. A dimension that the mesh axes do not divide stays whole. An axis shards the
# first dimension that has it.
RULES: dict[str | None, tuple[str, ...]] = {
    "vocab": ("tensor",),
    "embed": COLUMNS,
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "layers": (),
    "experts": (EXPERT,),
    "norm": (),
    None: (),
}

# Compiler options of the passes by platform, after compilers' forecasts, not measured. On GPUs a lower threshold for
# combining reduce-scatters gained nothing.
_COMPILER_OPTIONS: dict[str, dict[str, Any]] = {
    # XLA would write a product with a gathered kernel as a loop over its shards, with operands read from HBM in each
    # iteration: log-probs of a 7B model on v6e-16 moved 270 GiB that way, 51 GiB without it.
    "tpu": {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"},
}


def mesh_shape(
    devices: int, *, data: int, fsdp: int, tensor: int, sequence: int = 1, expert: int = 1
) -> tuple[int, ...]:
    """Returns the sizes of AXES, one of which may be -1: the remaining devices. UserError if they do not fit."""
    sizes = [data, fsdp, tensor, sequence, expert]
    settings = " ".join(f"mesh.{axis}={size}" for axis, size in zip(AXES, sizes, strict=True))
    if sizes.count(-1) > 1 or any(s == 0 or s < -1 for s in sizes):
        unset = sorted((size == -1, i) for i, size in enumerate(sizes) if size < 1)  # the last of them may stay open
        suggestion = " ".join(f"mesh.{AXES[i]}={-1 if (left, i) == unset[-1] else 1}" for left, i in unset)
        raise UserError(f"{settings}: sizes must be 1 or more, and one of them may be -1; try {suggestion}")
    given_product = int(np.prod([s for s in sizes if s > 0]))
    full_sizes = [devices // given_product if s == -1 else s for s in sizes]
    if int(np.prod(full_sizes)) != devices:
        suggestion = _suggest_mesh(devices, sizes)
        raise UserError(f"{settings}: their product must be the {devices} devices there are; try {suggestion}")
    return tuple(full_sizes)


def _suggest_mesh(devices: int, sizes: list[int]) -> str:
    """Returns settings of a mesh of so many devices, with the fewest changes to `sizes`, for an error's remedy."""
    for i in range(len(AXES)):  # the remaining factor goes to one axis, data first
        others = int(np.prod([s for j, s in enumerate(sizes) if j != i and s > 0]))
        if devices % others == 0:
            fitted = [devices // others if j == i else max(1, s) for j, s in enumerate(sizes)]
            return " ".join(f"mesh.{axis}={size}" for axis, size in zip(AXES, fitted, strict=True))
    return "mesh.data=-1 and 1 for the other axes"


def platform(mesh: Mesh) -> str:
    """Returns 'cpu', 'gpu' or 'tpu' for the mesh's devices, which need not be this machine's."""
    name = mesh.devices.flat[0].platform
    return "gpu" if name in ("cuda", "rocm") else str(name)


def mesh_of_shape(shape: tuple[int, ...], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Makes a mesh by the sizes of AXES, the last 1 by default; XLA chooses shardings that the inputs leave open."""
    sizes = dict.fromkeys(AXES, 1) | dict(zip(AXES, shape, strict=False))
    ordered_sizes = tuple(sizes[axis] for axis in _NEAR_LAST)
    types = (AxisType.Auto,) * len(AXES)
    if devices is not None and devices[0].platform == "tpu":
        return Mesh(_arrange_torus(ordered_sizes, devices), _NEAR_LAST, axis_types=types)
    return jax.make_mesh(ordered_sizes, _NEAR_LAST, axis_types=types, devices=devices)


def _arrange_torus(ordered_sizes: tuple[int, ...], devices: Sequence[jax.Device]) -> np.ndarray:
    """Arranges TPUs in a mesh with their torus in mind; several slices are divided by the axis `data` alone."""
    slices = len({getattr(device, "slice_index", None) or 0 for device in devices})
    if slices == 1:
        return mesh_utils.create_device_mesh(ordered_sizes, devices, allow_split_physical_axes=True)
    if ordered_sizes[0] % slices:
        raise UserError(
            f"mesh.data={ordered_sizes[0]}: must be a multiple of the {slices} slices, between which only gradients are"
            f" exchanged; try mesh.data={slices} mesh.fsdp=-1"
        )
    inside, between = (ordered_sizes[0] // slices, *ordered_sizes[1:]), (slices, *(1 for _ in ordered_sizes[1:]))
    return mesh_utils.create_hybrid_device_mesh(inside, between, devices, allow_split_physical_axes=True)


def own_part(mesh: Mesh) -> Mesh:
    """Returns the part of the mesh on this host's devices; all of it with one host."""
    return mesh.local_mesh if mesh.is_multi_process else mesh


def row_multiple(mesh: Mesh) -> int:
    """Returns the divisor of a batch's row counts."""
    return math.prod(mesh.shape[axis] for axis in ROW_AXES)


def length_multiple(mesh: Mesh) -> int:
    """Returns the divisor of a batch's row lengths."""
    return int(mesh.shape[POSITIONS])


def whole_row_multiple(mesh: Mesh) -> int:
    """Returns the divisor of row counts whose positions stay together."""
    return math.prod(mesh.shape[axis] for axis in WHOLE.rows)


def param_shardings(mesh: Mesh, axes: Params, shapes: Params) -> Params:
    """Makes a NamedSharding for each parameter, from its logical axes (a tuple of names) by RULES."""

    def shard_param(names: tuple[str | None, ...], leaf: Any) -> Any:
        if isinstance(leaf, Quantized):
            codes, scales = (shard_param(names, part) for part in (leaf.codes, leaf.scales))
            return dataclasses.replace(leaf, codes=codes, scales=scales)
        spec: list[tuple[str, ...]] = []
        for name, size in zip(names, leaf.shape, strict=True):
            unused_axes = tuple(axis for axis in RULES[name] if not any(axis in axes for axes in spec))
            spec.append(fit_axes(mesh, unused_axes, size))
        return NamedSharding(mesh, PartitionSpec(*(axes or None for axes in spec)))

    return jax.tree.map(shard_param, axes, shapes, is_leaf=lambda x: isinstance(x, tuple))


def optimizer_shardings(tx: optax.GradientTransformation, shapes: Params, shardings: Params) -> Any:
    """Shards the optimizer's state as its parameters, a factored leaf by its remaining axes; counts are replicated."""
    counts_sharding = replicated(jax.tree.leaves(shardings)[0].mesh)

    def shard_leaf(leaf: Any, shape: Any, sharding: NamedSharding) -> NamedSharding:
        axes = next(iter(axes_of(leaf.shape, shape.shape)), ())
        return NamedSharding(sharding.mesh, PartitionSpec(*(sharding.spec[axis] for axis in axes)))

    return optim.map_state(
        shard_leaf, jax.eval_shape(tx.init, shapes), shapes, shardings, other=lambda _: counts_sharding
    )


def axes_of(leaf_shape: tuple[int, ...], shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Finds the parameter's axes that a leaf of its optimizer state may have, by equal sizes: all choices, or []."""
    candidates = itertools.combinations(range(len(shape)), len(leaf_shape))
    return [axes for axes in candidates if tuple(shape[axis] for axis in axes) == leaf_shape]


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding that copies an array to every device."""
    return NamedSharding(mesh, PartitionSpec())


def rows_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of rows [R, T, ...]: over data, fsdp and expert, their positions over sequence."""
    return NamedSharding(mesh, ROWS)


def whole_rows_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of rows [R, ...] whose positions stay on one device: over all these axes."""
    return NamedSharding(mesh, WHOLE_ROWS)


def cache_sharding(mesh: Mesh, kv_heads: int) -> NamedSharding:
    """Returns the sharding of cached keys and values [R, K, S, A]: rows as rows, heads as the parameters' heads."""
    return NamedSharding(mesh, PartitionSpec(*WHOLE_ROWS, fit_axes(mesh, RULES["kv_heads"], kv_heads) or None))


def put_rows(rows: Rows, mesh: Mesh) -> Rows:
    placed: Rows = placing.put(rows, rows_sharding(mesh))
    return placed


def constrain_to_rows(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    """Makes the function that keeps activations [R, T, D] sharded as the rows."""

    def constrain(x: jax.Array) -> jax.Array:
        out: jax.Array = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(row_axes(), POSITIONS)))
        return out

    return constrain


def compiler_options(mesh: Mesh, kind: str) -> dict[str, Any] | None:
    """Returns the compiler options of passes for the mesh's platform if `kind` is 'auto', or None."""
    return _COMPILER_OPTIONS.get(platform(mesh)) if kind == "auto" else None


def require_divisible(cfg: ModelConfig, mesh: Mesh) -> None:
    """Raises UserError with the valid sizes where the mesh cannot shard heads, MLP, experts or width.

    Padding makes the vocabulary divisible; key/value heads are repeated.
    """
    tensor, sequence, expert = (mesh.shape[axis] for axis in ("tensor", "sequence", "expert"))
    if cfg.delta is not None and sequence > 1:
        raise UserError(
            f"mesh.sequence={sequence}: the states of a {cfg.family} model's gated delta nets are not passed between"
            " the devices that share a row; use mesh.sequence=1"
        )
    H, D = cfg.num_heads, cfg.hidden_size
    model = f"of the {cfg.family} model"
    for F in cfg.mlp_widths:
        if H % tensor or F % tensor:
            heads_and_mlp = f"the {H} attention heads and the MLP's width of {F} {model}"
            _refuse_size(f"mesh.tensor={tensor}", heads_and_mlp, math.gcd(H, F))
    if (H // tensor) % sequence:
        left_note = f" that are left by mesh.tensor={tensor}" if tensor > 1 else ""
        _refuse_size(f"mesh.sequence={sequence}", f"the {H // tensor} attention heads {model}{left_note}", H // tensor)
    if cfg.experts is not None and cfg.experts.count % expert:
        _refuse_size(f"mesh.expert={expert}", f"the {cfg.experts.count} experts {model}", cfg.experts.count)
    if D % math.prod(mesh.shape[axis] for axis in COLUMNS):
        settings = [f"mesh.{axis}={mesh.shape[axis]}" for axis in COLUMNS if axis == "fsdp" or mesh.shape[axis] > 1]
        _refuse_size(" times ".join(settings), f"the width of {D} {model}", D)


def _refuse_size(setting: str, divided: str, size: int) -> None:
    fitting = [str(n) for n in range(1, min(size, 64) + 1) if size % n == 0]
    raise UserError(f"{setting} must divide {divided}; {', '.join(fitting)} would")


BFLOAT16_FROM = (8, 0)  # compute capability of the first NVIDIA GPUs with products of bfloat16


def fastest_dtype(device: jax.Device) -> str:
    """Returns the dtype of the fastest products on a GPU or TPU: bfloat16, on older GPUs float16."""
    return "float16" if (0, 0) < capability(device) < BFLOAT16_FROM else "bfloat16"


TERA, GIB = 1e12, 2**30
MEASURE_S = 0.25

# Peak TFLOP/s of one JAX device by the first words of its kind, longer ones first: dense products of bfloat16 or
# float16, and of float32 at the highest precision, as training uses them. On a GPU these are the plain FP32 units, not
# TF32. On a TPU a product takes six of bfloat16. None: the vendor gives no figure.
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
    "NVIDIA GeForce RTX 4060": (30.2, 15.1),
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
            rate = float32 if dtype == "float32" else bfloat16
            return None if rate is None else rate * TERA
    return None


@functools.cache
def find_peak(mesh: Mesh, dtype: str) -> Peak:
    """Returns the peak for products of `dtype`: the vendor's, or the best of a short test, once a process."""
    kind, count = mesh.devices.flat[0].device_kind, mesh.devices.size
    rate = known_peak(kind, dtype)
    if rate is not None:
        return Peak(rate * count, f"the maker's for {count} x {kind}, {dtype}")
    own_mesh = own_part(mesh)  # measured on each host alone: no host waits for another
    multiply, flops = make_product(own_mesh, dtype)
    multiply()  # compiles
    best_rate, end = 0.0, time.perf_counter() + MEASURE_S
    while best_rate == 0.0 or time.perf_counter() < end:
        start = time.perf_counter()
        multiply()
        best_rate = max(best_rate, flops / (time.perf_counter() - start))
    best_rate *= count / own_mesh.devices.size
    return Peak(best_rate, f"measured by a large matrix product, {dtype}")


def make_product(mesh: Mesh, dtype: str) -> tuple[Callable[[], Any], int]:
    """Compiles a large matrix product over all devices, square where they divide it; returns it and its FLOP."""
    n = 2048 if platform(mesh) == "cpu" else 8192
    rows = -(-n // mesh.devices.size) * mesh.devices.size
    split_sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    replicated_sharding = NamedSharding(mesh, PartitionSpec())
    draw = jax.random.normal(jax.random.key(0), (rows, n), jnp.dtype(dtype))
    a, b = jax.device_put(draw, split_sharding), jax.device_put(draw[:n], replicated_sharding)
    multiply = jax.jit(lambda a, b: einsum("mk,kn->mn", a, b, jnp.dtype(dtype)), out_shardings=split_sharding)
    return lambda: jax.block_until_ready(multiply(a, b)), 2 * rows * n**2


def device_peak() -> int | None:
    """Returns the peak bytes in use of the fullest device since the start; None if no device reports them."""
    reports = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [stats["peak_bytes_in_use"] for stats in reports if "peak_bytes_in_use" in stats]
    return max(peaks) if peaks else None


def resident() -> int | None:
    """Returns the resident memory of this process in bytes; None if the system does not report it."""
    statm = pathlib.Path("/proc/self/statm")
    if not statm.is_file():
        return None
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def memory() -> dict[str, float]:
    """Returns memory metrics in GiB, without values that are not reported."""
    sizes = {"perf/max_memory_allocated_gb": device_peak(), "perf/cpu_memory_used_gb": resident()}
    return {name: size / GIB for name, size in sizes.items() if size is not None}
