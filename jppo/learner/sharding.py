"""The device mesh: rules from logical axes to mesh axes, compiler options, and checks that it suits a model."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jppo.learner import optim
from jppo.models import placing
from jppo.models.config import ModelConfig
from jppo.models.sequence_parallel import COLUMNS, EXPERT, POSITIONS, WHOLE, dividing, row_axes
from jppo.models.sequence_parallel import ROWS as ROW_AXES
from jppo.settings import UserError
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
    said = " ".join(f"mesh.{axis}={size}" for axis, size in zip(AXES, sizes, strict=True))
    if sizes.count(-1) > 1 or any(s == 0 or s < -1 for s in sizes):
        raise UserError(f"{said}: sizes must be 1 or more, and one of them may be -1; try mesh.data=-1")
    known = int(np.prod([s for s in sizes if s > 0]))
    filled = [devices // known if s == -1 else s for s in sizes]
    if int(np.prod(filled)) != devices:
        fitting = _fitting(devices, sizes)
        raise UserError(f"{said}: their product must be the {devices} devices there are; try {fitting}")
    return tuple(filled)


def _fitting(devices: int, sizes: list[int]) -> str:
    """Returns the axes with the fewest changes that make a mesh of so many devices."""
    for i in range(len(AXES)):  # the remaining factor goes to one axis, data first
        others = int(np.prod([s for j, s in enumerate(sizes) if j != i and s > 0]))
        if devices % others == 0:
            found = [devices // others if j == i else max(1, s) for j, s in enumerate(sizes)]
            return " ".join(f"mesh.{axis}={size}" for axis, size in zip(AXES, found, strict=True))
    return "mesh.data=-1 and 1 for the other axes"


def platform(mesh: Mesh) -> str:
    """Returns 'cpu', 'gpu' or 'tpu' for the mesh's devices, which need not be this machine's."""
    name = mesh.devices.flat[0].platform
    return "gpu" if name in ("cuda", "rocm") else str(name)


def make_mesh(shape: tuple[int, ...], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Makes a mesh by the sizes of AXES, the last 1 by default; XLA chooses shardings that the inputs leave open."""
    sizes = dict.fromkeys(AXES, 1) | dict(zip(AXES, shape, strict=False))
    near = tuple(sizes[axis] for axis in _NEAR_LAST)
    types = (AxisType.Auto,) * len(AXES)
    if devices is not None and devices[0].platform == "tpu":
        return Mesh(_on_torus(near, devices), _NEAR_LAST, axis_types=types)
    return jax.make_mesh(near, _NEAR_LAST, axis_types=types, devices=devices)


def _on_torus(near: tuple[int, ...], devices: Sequence[jax.Device]) -> np.ndarray:
    """Arranges TPUs in such a shape: axes along the torus, which may be cut; several slices share `data` alone."""
    slices = len({getattr(device, "slice_index", None) or 0 for device in devices})
    if slices == 1:
        return mesh_utils.create_device_mesh(near, devices, allow_split_physical_axes=True)
    if near[0] % slices:
        raise UserError(
            f"mesh.data={near[0]}: must be a multiple of the {slices} slices, between which only gradients are"
            f" exchanged; try mesh.data={slices} mesh.fsdp=-1"
        )
    inside, between = (near[0] // slices, *near[1:]), (slices, *(1 for _ in near[1:]))
    return mesh_utils.create_hybrid_device_mesh(inside, between, devices, allow_split_physical_axes=True)


def own_part(mesh: Mesh) -> Mesh:
    """Returns the part of the mesh on this host's devices; all of it with one host."""
    return mesh.local_mesh if mesh.is_multi_process else mesh


def row_multiple(mesh: Mesh) -> int:
    """Returns the divisor of a batch's row counts."""
    return _parts(mesh, ROW_AXES)


def length_multiple(mesh: Mesh) -> int:
    """Returns the divisor of a batch's row lengths."""
    return int(mesh.shape[POSITIONS])


def whole_row_multiple(mesh: Mesh) -> int:
    """Returns the divisor of row counts whose positions stay together."""
    return _parts(mesh, WHOLE.rows)


def _parts(mesh: Mesh, axes: tuple[str, ...]) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


def param_shardings(mesh: Mesh, axes: Params, shapes: Params) -> Params:
    """Makes a NamedSharding for each parameter, from its logical axes (a tuple of names) by RULES."""

    def sharding(names: tuple[str | None, ...], leaf: Any) -> NamedSharding:
        spec: list[tuple[str, ...]] = []
        for name, size in zip(names, leaf.shape, strict=True):
            free = tuple(axis for axis in RULES[name] if not any(axis in axes for axes in spec))
            spec.append(dividing(mesh, free, size))
        return NamedSharding(mesh, PartitionSpec(*(axes or None for axes in spec)))

    return jax.tree.map(sharding, axes, shapes, is_leaf=lambda x: isinstance(x, tuple))


def optimizer_shardings(tx: optax.GradientTransformation, shapes: Params, shardings: Params) -> Any:
    """Shards the optimizer's state as its parameters, a factored leaf by its remaining axes; counts are replicated."""
    whole = replicated(jax.tree.leaves(shardings)[0].mesh)

    def place(leaf: Any, shape: Any, sharding: NamedSharding) -> NamedSharding:
        axes = next(iter(axes_of(leaf.shape, shape.shape)), ())
        return NamedSharding(sharding.mesh, PartitionSpec(*(sharding.spec[axis] for axis in axes)))

    return optim.map_state(place, jax.eval_shape(tx.init, shapes), shapes, shardings, other=lambda _: whole)


def axes_of(part: tuple[int, ...], shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Returns candidates for the parameter axes of an optimizer state's leaf, by their sizes; [] if none fit."""
    found = itertools.combinations(range(len(shape)), len(part))
    return [axes for axes in found if tuple(shape[axis] for axis in axes) == part]


def replicated(mesh: Mesh) -> NamedSharding:
    """Replicates on every device."""
    return NamedSharding(mesh, PartitionSpec())


def rows_sharding(mesh: Mesh) -> NamedSharding:
    """Shards rows [R, T, ...] over data, fsdp and expert, their positions over sequence."""
    return NamedSharding(mesh, ROWS)


def whole_rows_sharding(mesh: Mesh) -> NamedSharding:
    """Shards rows [R, ...] whose positions stay on one device over sequence, too."""
    return NamedSharding(mesh, WHOLE_ROWS)


def cache_sharding(mesh: Mesh, kv_heads: int) -> NamedSharding:
    """Shards keys and values [R, T, K, A] as their rows, and their heads as the parameters' heads."""
    return NamedSharding(mesh, PartitionSpec(*WHOLE_ROWS, None, dividing(mesh, RULES["kv_heads"], kv_heads) or None))


def put_rows(rows: Rows, mesh: Mesh) -> Rows:
    """Puts a micro-batch on its devices."""
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
            said = f"the {H} attention heads and the MLP's width of {F} {model}"
            _refuse(f"mesh.tensor={tensor}", said, math.gcd(H, F))
    if (H // tensor) % sequence:
        rest = f" that are left by mesh.tensor={tensor}" if tensor > 1 else ""
        _refuse(f"mesh.sequence={sequence}", f"the {H // tensor} attention heads {model}{rest}", H // tensor)
    if cfg.experts is not None and cfg.experts.count % expert:
        _refuse(f"mesh.expert={expert}", f"the {cfg.experts.count} experts {model}", cfg.experts.count)
    if D % math.prod(mesh.shape[axis] for axis in COLUMNS):
        named = [f"mesh.{axis}={mesh.shape[axis]}" for axis in COLUMNS if axis == "fsdp" or mesh.shape[axis] > 1]
        _refuse(" times ".join(named), f"the width of {D} {model}", D)


def _refuse(said: str, what: str, size: int) -> None:
    fitting = [str(n) for n in range(1, min(size, 64) + 1) if size % n == 0]
    raise UserError(f"{said} must divide {what}; {', '.join(fitting)} would")
