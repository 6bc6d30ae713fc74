"""Metrics that know how they add: over groups of devices, over a mini-batch's parts, and over mini-batches.

Within a mini-batch a metric is a sum, since each token's share is of the whole mini-batch; across mini-batches it is
the mean. The largest and the smallest stay so.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jppo.models.router import load_extremes
from jppo.types import Array

Kind = Literal["sum", "max", "min"]
# How groups of devices, the parts of a mini-batch, and mini-batches are joined.
JOINS: dict[Kind, tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]] = {
    "sum": (jnp.sum, sum, np.mean),
    "max": (jnp.max, max, max),
    "min": (jnp.min, min, min),
}


@functools.partial(jax.tree_util.register_dataclass, data_fields=["value"], meta_fields=["kind"])
@dataclasses.dataclass(frozen=True)
class Stat:
    """A metric of a part of a mini-batch."""

    value: Array
    kind: Kind = "sum"


Stats = Mapping[str, Stat]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Outputs:
    """The outputs of a loss for a micro-batch, besides its value."""

    stats: dict[str, Stat]
    rows: dict[str, Array] = dataclasses.field(default_factory=dict)  # by token, [R, T]
    load: tuple[Array, ...] = ()  # [layers, E], the tokens of each expert relative to all, of a mixture


def stats_of(values: Mapping[str, Array]) -> dict[str, Stat]:
    """Wraps values as metrics that are summed over a mini-batch."""
    return {name: Stat(x) for name, x in values.items()}


def join_groups(by_group: Outputs) -> Outputs:
    """Joins the outputs of groups of devices for their rows of a micro-batch; the first axis is the group."""
    return Outputs(
        {name: Stat(JOINS[x.kind][0](x.value, axis=0), x.kind) for name, x in by_group.stats.items()},
        {name: x.reshape(-1, *x.shape[2:]) for name, x in by_group.rows.items()},
        tuple(jnp.sum(x, axis=0) for x in by_group.load),
    )


def join_parts(parts: Sequence[Outputs]) -> dict[str, Stat]:
    """Joins the metrics of a mini-batch's micro-batches, which are on the host."""
    joined = {
        name: Stat(np.asarray(JOINS[stat.kind][1](part.stats[name].value for part in parts)), stat.kind)
        for name, stat in parts[0].stats.items()
    }
    if parts[0].load:
        largest, smallest = load_extremes(np.sum([part.load[0] for part in parts], axis=0))
        joined |= {"actor/expert_load_max": Stat(largest, "max"), "actor/expert_load_min": Stat(smallest, "min")}
        joined["actor/experts_dropped"] = Stat(np.zeros(()))  # by construction (`experts.py`)
    return joined


def join_stages(*stages: Mapping[str, float]) -> dict[str, float]:
    """Returns the metrics of all stages of a step; raises ValueError for a name that two of them have."""
    joined = dict[str, float]()
    for stage in stages:
        if common := joined.keys() & stage.keys():
            raise ValueError(f"two stages of a step have one metric: {min(common)}")
        joined |= stage
    return joined


def average(minis: Sequence[Stats]) -> dict[str, float]:
    """Returns the metrics of an update from those of its mini-batches."""
    return {
        name: float(JOINS[stat.kind][2]([float(mini[name].value) for mini in minis])) for name, stat in minis[0].items()
    }
