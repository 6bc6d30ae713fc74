"""The mesh, and the one table of rules from logical axes to mesh axes."""

from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jppo.config import UserError
from jppo.models import placing
from jppo.structs import Params, Rows

AXES = ("data", "fsdp", "tensor")
ROWS = PartitionSpec(("data", "fsdp"))  # the batch

# Logical axis of a parameter -> mesh axis. An axis that a dimension doesn't divide by leaves it whole.
RULES = {
    "vocab": "tensor",
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "layers": None,
    "norm": None,
    None: None,
}


def mesh_shape(devices: int, *, data: int, fsdp: int, tensor: int) -> tuple[int, int, int]:
    """The sizes of the axes, one of which may be -1: all that is left. UserError where they do not fit."""
    sizes = [data, fsdp, tensor]
    said = f"mesh.data={data} mesh.fsdp={fsdp} mesh.tensor={tensor}"
    if sizes.count(-1) > 1 or any(s == 0 or s < -1 for s in sizes):
        raise UserError(f"{said}: sizes must be 1 or more, and one of them may be -1; try mesh.data=-1")
    known = int(np.prod([s for s in sizes if s > 0]))
    filled = [devices // known if s == -1 else s for s in sizes]
    if int(np.prod(filled)) != devices:
        raise UserError(f"{said}: their product must be the {devices} devices there are; try mesh.data=-1")
    return filled[0], filled[1], filled[2]


def make_mesh(shape: tuple[int, int, int]) -> Mesh:
    """A mesh of all devices, with XLA placing what the shardings of inputs leave open."""
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def own_part(mesh: Mesh) -> Mesh:
    """The part of the mesh that is this host's devices: all of it where there is one host."""
    return mesh.local_mesh if mesh.is_multi_process else mesh


def row_multiple(mesh: Mesh) -> int:
    """Row counts must be multiples of it."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def param_shardings(mesh: Mesh, axes: Params, shapes: Params) -> Params:
    """A NamedSharding for each parameter, from its logical axes (a tuple of names) by RULES."""

    def sharding(names: tuple[str | None, ...], leaf: Any) -> NamedSharding:
        rules = [RULES[name] for name in names]
        spec = [r if r and d % mesh.shape[r] == 0 else None for r, d in zip(rules, leaf.shape, strict=True)]
        return NamedSharding(mesh, PartitionSpec(*spec))

    return jax.tree.map(sharding, axes, shapes, is_leaf=lambda x: isinstance(x, tuple))


def optimizer_shardings(tx: optax.GradientTransformation, shapes: Params, shardings: Params) -> Any:
    """The optimizer's state lies where its parameters lie; its counters everywhere."""
    whole = replicated(jax.tree.leaves(shardings)[0].mesh)
    state = jax.eval_shape(tx.init, shapes)
    return optax.tree_utils.tree_map_params(tx, lambda _, s: s, state, shardings, transform_non_params=lambda _: whole)


def replicated(mesh: Mesh) -> NamedSharding:
    """On every device, whole."""
    return NamedSharding(mesh, PartitionSpec())


def rows_sharding(mesh: Mesh) -> NamedSharding:
    """Rows are spread over data and fsdp."""
    return NamedSharding(mesh, ROWS)


def cache_sharding(mesh: Mesh, kv_heads: int) -> NamedSharding:
    """Keys and values [R, T, K, A] lie where their rows are, and their heads where those of the parameters are."""
    axis = RULES["kv_heads"]
    return NamedSharding(mesh, PartitionSpec(*ROWS, None, axis if axis and kv_heads % mesh.shape[axis] == 0 else None))


def put_rows(rows: Rows, mesh: Mesh) -> Rows:
    """A micro-batch on its devices."""
    placed: Rows = placing.put(rows, rows_sharding(mesh))
    return placed


def constrain_to_rows(mesh: Mesh) -> Any:
    """The function that keeps activations [R, T, D] spread as the rows are."""
    sharding = rows_sharding(mesh)
    return lambda x: jax.lax.with_sharding_constraint(x, sharding)
