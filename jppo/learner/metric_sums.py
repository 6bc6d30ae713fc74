"""Metrics over groups of devices, micro-batches and mini-batches: sums, except of extremes (`_max`, `_min`)."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from jppo.models import router
from jppo.types import Array


def of_groups(name: str, each: Array) -> Array:
    """Combines a metric of each group of devices."""
    reduce = jnp.max if name.endswith("_max") else jnp.min if name.endswith("_min") else jnp.sum
    return reduce(each, axis=0)


def of_update(history: list[tuple[list[dict[str, Any]], dict[str, Any]]], name: str) -> dict[str, float]:
    """Sums metrics over micro-batches, except extremes, and averages them over mini-batches."""
    minis = []
    for sums, stats in history:
        total = {key: sum(part[key] for part in sums) for key in sums[0] if not key.endswith(("_max", "_min"))}
        extremes = router.load_metrics(total.pop(router.LOAD)) if router.LOAD in total else {}
        mini = {key: float(value) for key, value in total.items()} | extremes
        mini |= {key: float(max(part[key] for part in sums)) for key in sums[0] if key.endswith("_max")}
        mini |= {key: float(min(part[key] for part in sums)) for key in sums[0] if key.endswith("_min")}
        minis.append(mini | {f"{name}/{key}": float(value) for key, value in stats.items()})
    out = {key: float(np.mean([mini[key] for mini in minis])) for key in minis[0]}
    out |= {key: max(mini[key] for mini in minis) for key in out if key.endswith("_max")}
    out |= {key: min(mini[key] for mini in minis) for key in out if key.endswith("_min")}
    return out
