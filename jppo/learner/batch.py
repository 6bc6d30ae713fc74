"""A step's batch: mini-batches of micro-batches of rows, and passes over all of them."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jppo.learner import packing, sharding
from jppo.structs import Array, Rows, Trajectory

Nested = list[list[Any]]  # [mini-batch][micro-batch]


def make(
    trajectories: Sequence[Trajectory], *, mini_batch_size: int, plan: packing.Plan, mesh: Mesh
) -> tuple[list[list[Rows]], list[Array]]:
    """Mini-batches in the order of the trajectories, packed and on their devices, and the tokens each trains on."""
    minis = []
    for start in range(0, len(trajectories), mini_batch_size):
        part = trajectories[start : start + mini_batch_size]
        minis.append(packing.pack(part, range(start, start + len(part)), plan))
    tokens = [jnp.float32(max(1, sum(int(np.sum(rows.mask)) for rows in mini))) for mini in minis]
    return [[sharding.put_rows(rows, mesh) for rows in mini] for mini in minis], tokens


def each(fn: Callable[..., Any], *nested: Nested) -> Nested:
    """fn over the micro-batches that stand in the same place; returns when the device is done."""
    out = [[fn(*micro) for micro in zip(*mini, strict=True)] for mini in zip(*nested, strict=True)]
    return jax.block_until_ready(out)


def flat(nested: Nested) -> list[Any]:
    """All micro-batches of all mini-batches."""
    return [micro for mini in nested for micro in mini]
