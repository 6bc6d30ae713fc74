"""The range of float16: a weight beyond it is an error, since a cast would make it infinite."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jppo.errors import UserError
from jppo.models import placing

LARGEST = 65504.0


def require_range(name: str, largest: float, setting: str) -> None:
    """Raises UserError for a tensor whose largest weight is beyond float16; `setting` is the remedy.

    One that is infinite already is no matter of the dtype.
    """
    if LARGEST < largest < math.inf:
        raise UserError(
            f"{name} has a weight of {largest:g}, and the largest float16 is {LARGEST:g}; set {setting} to bfloat16 or"
            " float32"
        )


def require_range_of_all(weights: Any, setting: str) -> None:
    """Raises UserError for a tree of weights with one beyond float16."""
    for path, x in jax.tree.leaves_with_path(weights):
        if jnp.issubdtype(x.dtype, jnp.floating):
            largest = float(placing.fetch(_largest(placing.to_device(x))))
            require_range(jax.tree_util.keystr(path, simple=True, separator="."), largest, setting)


def within_range(tensors: Iterable[tuple[str, Any]], setting: str) -> Iterator[tuple[str, Any]]:
    """Yields named host arrays; raises UserError for one with a weight beyond float16."""
    for name, x in tensors:
        require_range(name, float(np.max(np.abs(x), initial=0)), setting)
        yield name, x


@jax.jit
def _largest(x: jax.Array) -> jax.Array:
    return jnp.max(jnp.abs(x), initial=0).astype(jnp.float32)
