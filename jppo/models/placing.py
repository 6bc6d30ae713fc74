"""Arrays to devices and back, on one host or several, and their offload to host memory.

With several hosts, every host holds the same values and puts its part on its own devices. All take part in a fetch.
Offloaded arrays move to their devices while in use. An array's memory kind says whether it is offloaded. `to_device`
returns arrays that are already there unchanged. It is called before each use, so that no program gets an offloaded
array.
"""

import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

KINDS = ("pinned_host", "unpinned_host")  # kinds of host memory, the fastest for device copies first


def put(tree: Any, sharding: Any) -> Any:
    """Puts values that every host has on the devices, by one sharding or by a tree of them."""
    if sharding is not None and not isinstance(sharding, jax.sharding.Sharding):
        return jax.tree.map(put, tree, sharding)
    if sharding is None or sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)

    def put_one(x: Any) -> jax.Array:
        if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
            key: jax.Array = jax.random.wrap_key_data(put_one(jax.random.key_data(x)), impl=jax.random.key_impl(x))
            return key
        values = np.asarray(x)
        return jax.make_array_from_callback(values.shape, sharding, lambda part: values[part])

    return jax.tree.map(put_one, tree)


def whole_array(array: jax.Array) -> jax.Array:
    """Gathers the array, so that this host has all of it."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return array
    assert isinstance(array.sharding, NamedSharding)
    out: jax.Array = _replicate(array.sharding.mesh)(array)
    return out


def fetch(tree: Any) -> Any:
    """Copies the values to the host."""
    return jax.device_get(jax.tree.map(lambda x: whole_array(x) if isinstance(x, jax.Array) else x, tree))


def local(tree: Any, mesh: Mesh) -> Any:
    """Copies arrays to `mesh`, this host's part of theirs; one at a time is whole on each device."""

    def copy(x: jax.Array) -> jax.Array:
        assert isinstance(x.sharding, NamedSharding)
        sharding = NamedSharding(mesh, x.sharding.spec)
        out: jax.Array = jax.block_until_ready(jax.device_put(whole_array(x).addressable_data(0), sharding))
        return out

    return jax.tree.map(copy, tree)


@functools.cache
def _replicate(mesh: Any) -> Any:
    return jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))


def host_kind(device: jax.Device) -> str | None:
    """Returns the memory kind for arrays offloaded from this device; None if its backend has none."""
    known = {memory.kind for memory in device.addressable_memories()}
    return next((kind for kind in KINDS if kind in known), None)


def is_offloaded(array: Any) -> bool:
    """Whether the array, or its shape, is offloaded to host memory."""
    sharding = getattr(array, "sharding", None)
    return sharding is not None and sharding.memory_kind in KINDS


def to_host(tree: Any) -> Any:
    """Offloads the arrays, or their shapes, to host memory, shard by shard; the same bits."""

    def move(x: Any) -> Any:
        if isinstance(x, jax.ShapeDtypeStruct):
            assert x.sharding is not None
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding.with_memory_kind(KINDS[0]))
        kind = host_kind(next(iter(x.sharding.device_set)))
        assert kind is not None, "asked for where there is such a memory only"
        return jax.device_put(x, x.sharding.with_memory_kind(kind))

    return jax.tree.map(move, tree)


def to_device(tree: Any) -> Any:
    """Moves the arrays to their devices; an array that is in the tree twice is moved once."""
    moved: dict[int, jax.Array] = {}

    def move(x: Any) -> Any:
        if not is_offloaded(x):
            return x
        if id(x) not in moved:
            moved[id(x)] = jax.device_put(x, on_device(x.sharding))
        return moved[id(x)]

    return jax.tree.map(move, tree)


def take(tree: Any) -> Any:
    """Moves arrays to their devices, for a program that overwrites them; offloaded originals are deleted."""
    out = jax.block_until_ready(to_device(tree))
    for x in jax.tree.leaves(tree):
        if is_offloaded(x):
            x.delete()
    return out


def put_back(tree: Any, like: Any) -> Any:
    """Moves the arrays back to the memory of those in `like`: arrays that were offloaded are offloaded again."""
    return jax.tree.map(lambda x, old: to_host(x) if is_offloaded(old) else x, tree, like)


def mesh_of(tree: Any) -> Mesh:
    sharding = jax.tree.leaves(tree)[0].sharding
    assert isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh)
    return sharding.mesh


def shapes(tree: Any, place: jax.sharding.Sharding) -> Any:
    """Returns arrays of the host as shapes with this sharding."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree)


def zeros_of(tree: Any) -> Any:
    """Replaces shapes by arrays of zeros with their shardings; arrays stay."""

    def make(x: Any) -> Any:
        return put(np.zeros(x.shape, x.dtype), x.sharding) if isinstance(x, jax.ShapeDtypeStruct) else x

    return jax.tree.map(make, tree)


def on_device_shapes(tree: Any) -> Any:
    """Returns the abstract arguments of a program that is called with the arrays on their devices.

    Values of the host, which have no sharding, stay as they are.
    """

    def describe(x: Any) -> Any:
        sharding = getattr(x, "sharding", None)
        return x if sharding is None else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on_device(sharding))

    return jax.tree.map(describe, tree)


def on_device(sharding: jax.sharding.Sharding) -> jax.sharding.Sharding:
    """Returns the same sharding in device memory."""
    return sharding.with_memory_kind("device")


def are_shapes(tree: Any) -> bool:
    """Whether the tree has shapes in place of arrays, as for a forecast."""
    return any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(tree))
