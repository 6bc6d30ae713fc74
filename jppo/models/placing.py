"""Arrays to devices and back, on one host or several.

With several hosts, every host holds the same values and puts its part on its own devices. All take part in a fetch.
"""

import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def put(tree: Any, sharding: Any) -> Any:
    """Puts values that every host has on the devices, by one sharding or by a tree of them."""
    if sharding is not None and not isinstance(sharding, jax.sharding.Sharding):
        return jax.tree.map(put, tree, sharding)
    if sharding is None or sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)

    def place(x: Any) -> jax.Array:
        if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
            key: jax.Array = jax.random.wrap_key_data(place(jax.random.key_data(x)), impl=jax.random.key_impl(x))
            return key
        values = np.asarray(x)
        return jax.make_array_from_callback(values.shape, sharding, lambda part: values[part])

    return jax.tree.map(place, tree)


def whole(array: jax.Array) -> jax.Array:
    """Gathers the array, so that this host has all of it."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return array
    assert isinstance(array.sharding, NamedSharding)
    out: jax.Array = _everywhere(array.sharding.mesh)(array)
    return out


def fetch(tree: Any) -> Any:
    """Copies the values to the host."""
    return jax.device_get(jax.tree.map(lambda x: whole(x) if isinstance(x, jax.Array) else x, tree))


def local(tree: Any, mesh: Mesh) -> Any:
    """Copies the arrays to `mesh`, this host's part; one at a time is whole on each device."""

    def copy(x: jax.Array) -> jax.Array:
        assert isinstance(x.sharding, NamedSharding)
        at = NamedSharding(mesh, x.sharding.spec)
        out: jax.Array = jax.block_until_ready(jax.device_put(whole(x).addressable_data(0), at))
        return out

    return jax.tree.map(copy, tree)


@functools.cache
def _everywhere(mesh: Any) -> Any:
    return jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))
