"""The mesh, and the one table of rules from logical axes to mesh axes."""

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
from jppo.models.spread import COLUMNS, POSITIONS, WHOLE, dividing, row_axes
from jppo.models.spread import ROWS as ROW_AXES
from jppo.settings import UserError
from jppo.types import Params, Rows

AXES = ("data", "fsdp", "tensor", "sequence")
_NEAR_LAST = ("data", "fsdp", "sequence", "tensor")  # devices beside each other are those that exchange most
ROWS = PartitionSpec(ROW_AXES, POSITIONS)  # the batch [R, T, ...]
WHOLE_ROWS = PartitionSpec(WHOLE.rows)  # rows whose positions stay together

# Logical axis of a parameter -> mesh axes. An axis that a dimension doesn't divide by leaves it whole.
RULES: dict[str | None, tuple[str, ...]] = {
    "vocab": ("tensor",),
    "embed": COLUMNS,
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "layers": (),
    "norm": (),
    None: (),
}


def mesh_shape(devices: int, *, data: int, fsdp: int, tensor: int, sequence: int = 1) -> tuple[int, int, int, int]:
    """The sizes of the axes, one of which may be -1: all that is left. UserError where they do not fit."""
    sizes = [data, fsdp, tensor, sequence]
    said = " ".join(f"mesh.{axis}={size}" for axis, size in zip(AXES, sizes, strict=True))
    if sizes.count(-1) > 1 or any(s == 0 or s < -1 for s in sizes):
        raise UserError(f"{said}: sizes must be 1 or more, and one of them may be -1; try mesh.data=-1")
    known = int(np.prod([s for s in sizes if s > 0]))
    filled = [devices // known if s == -1 else s for s in sizes]
    if int(np.prod(filled)) != devices:
        fitting = _fitting(devices, sizes)
        raise UserError(f"{said}: their product must be the {devices} devices there are; try {fitting}")
    return filled[0], filled[1], filled[2], filled[3]


def _fitting(devices: int, sizes: list[int]) -> str:
    """The same axes with the fewest changes that make a mesh of so many devices."""
    for i in range(len(AXES)):  # what is left goes to one axis, data first
        others = int(np.prod([s for j, s in enumerate(sizes) if j != i and s > 0]))
        if devices % others == 0:
            found = [devices // others if j == i else max(1, s) for j, s in enumerate(sizes)]
            return " ".join(f"mesh.{axis}={size}" for axis, size in zip(AXES, found, strict=True))
    return "mesh.data=-1 and 1 for the other axes"


def platform(mesh: Mesh) -> str:
    """'cpu', 'gpu' or 'tpu': of the mesh's devices, which need not be this machine's."""
    name = mesh.devices.flat[0].platform
    return "gpu" if name in ("cuda", "rocm") else str(name)


def make_mesh(shape: tuple[int, ...], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh by the sizes of AXES, the last 1 where left out; XLA places what the shardings of inputs leave open."""
    sizes = dict.fromkeys(AXES, 1) | dict(zip(AXES, shape, strict=False))
    near = tuple(sizes[axis] for axis in _NEAR_LAST)
    types = (AxisType.Auto,) * len(AXES)
    if devices is not None and devices[0].platform == "tpu":
        return Mesh(_on_torus(near, devices), _NEAR_LAST, axis_types=types)
    return jax.make_mesh(near, _NEAR_LAST, axis_types=types, devices=devices)


def _on_torus(near: tuple[int, ...], devices: Sequence[jax.Device]) -> np.ndarray:
    """TPUs in such a shape: axes along the torus, which may be cut; several slices share `data` alone."""
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
    """The part of the mesh that is this host's devices: all of it where there is one host."""
    return mesh.local_mesh if mesh.is_multi_process else mesh


def row_multiple(mesh: Mesh) -> int:
    """Row counts of a batch must be multiples of it."""
    return _parts(mesh, ROW_AXES)


def length_multiple(mesh: Mesh) -> int:
    """Row lengths of a batch must be multiples of it."""
    return mesh.shape[POSITIONS]


def whole_row_multiple(mesh: Mesh) -> int:
    """Row counts where positions stay together must be multiples of it."""
    return _parts(mesh, WHOLE.rows)


def _parts(mesh: Mesh, axes: tuple[str, ...]) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


def param_shardings(mesh: Mesh, axes: Params, shapes: Params) -> Params:
    """A NamedSharding for each parameter, from its logical axes (a tuple of names) by RULES."""

    def sharding(names: tuple[str | None, ...], leaf: Any) -> NamedSharding:
        spec = [dividing(mesh, RULES[name], size) or None for name, size in zip(names, leaf.shape, strict=True)]
        return NamedSharding(mesh, PartitionSpec(*spec))

    return jax.tree.map(sharding, axes, shapes, is_leaf=lambda x: isinstance(x, tuple))


def optimizer_shardings(tx: optax.GradientTransformation, shapes: Params, shardings: Params) -> Any:
    """The optimizer's state is sharded as its parameters, a factored leaf by the axes it has; counts are replicated."""
    whole = replicated(jax.tree.leaves(shardings)[0].mesh)

    def place(leaf: Any, shape: Any, sharding: NamedSharding) -> NamedSharding:
        axes = next(iter(axes_of(leaf.shape, shape.shape)), ())
        return NamedSharding(sharding.mesh, PartitionSpec(*(sharding.spec[axis] for axis in axes)))

    return optim.map_state(place, jax.eval_shape(tx.init, shapes), shapes, shardings, other=lambda _: whole)


def axes_of(part: tuple[int, ...], shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The axes of a parameter that a leaf of the optimizer's state may have, by their sizes; [] where it has others."""
    found = itertools.combinations(range(len(shape)), len(part))
    return [axes for axes in found if tuple(shape[axis] for axis in axes) == part]


def replicated(mesh: Mesh) -> NamedSharding:
    """On every device, whole."""
    return NamedSharding(mesh, PartitionSpec())


def rows_sharding(mesh: Mesh) -> NamedSharding:
    """Rows [R, T, ...] are spread over data and fsdp, their positions over sequence."""
    return NamedSharding(mesh, ROWS)


def whole_rows_sharding(mesh: Mesh) -> NamedSharding:
    """Rows [R, ...] that no device has a part of only are spread over sequence, too."""
    return NamedSharding(mesh, WHOLE_ROWS)


def cache_sharding(mesh: Mesh, kv_heads: int) -> NamedSharding:
    """Keys and values [R, T, K, A] lie where their rows are, and their heads where those of the parameters are."""
    return NamedSharding(mesh, PartitionSpec(*WHOLE_ROWS, None, dividing(mesh, RULES["kv_heads"], kv_heads) or None))


def put_rows(rows: Rows, mesh: Mesh) -> Rows:
    """A micro-batch on its devices."""
    placed: Rows = placing.put(rows, rows_sharding(mesh))
    return placed


def constrain_to_rows(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    """The function that keeps activations [R, T, D] spread as the rows are."""

    def constrain(x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(row_axes(), POSITIONS)))

    return constrain


def join_positions(mesh: Mesh | None) -> Callable[[Any], Any]:
    """The function that puts the positions of each [R, T] together, for what walks along them."""
    if mesh is None or mesh.shape[POSITIONS] == 1:
        return lambda tree: tree
    rows = NamedSharding(mesh, PartitionSpec(ROW_AXES))
    return lambda tree: jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, rows) if x.ndim == 2 else x, tree)
