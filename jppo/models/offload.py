"""Offloading of arrays to host memory; they move to their devices while in use.

An array's memory kind says whether it is offloaded. `to_device` returns arrays that are already there unchanged.
It is called before each use, so that no program gets an offloaded array.
"""

from typing import Any

import jax

KINDS = ("pinned_host", "unpinned_host")  # kinds of host memory, the fastest for device copies first


def host_kind(device: jax.Device) -> str | None:
    """Returns the memory kind for arrays offloaded from this device; None if its backend has none."""
    known = {memory.kind for memory in device.addressable_memories()}
    return next((kind for kind in KINDS if kind in known), None)


def waits(array: Any) -> bool:
    """Whether the array is offloaded to host memory."""
    return isinstance(array, jax.Array) and array.sharding.memory_kind in KINDS


def to_host(tree: Any) -> Any:
    """Offloads the arrays to host memory, shard by shard; the same bits."""
    return jax.tree.map(_to_host, tree)


def to_device(tree: Any) -> Any:
    """Moves the arrays to their devices; an array that is in the tree twice is moved once."""
    moved: dict[int, jax.Array] = {}

    def move(x: Any) -> Any:
        if not waits(x):
            return x
        if id(x) not in moved:
            moved[id(x)] = jax.device_put(x, on_device(x.sharding))
        return moved[id(x)]

    return jax.tree.map(move, tree)


def take(tree: Any) -> Any:
    """Moves the arrays to their devices, to be donated; offloaded originals are deleted."""
    out = jax.block_until_ready(to_device(tree))
    for x in jax.tree.leaves(tree):
        if waits(x):
            x.delete()
    return out


def put_back(tree: Any, like: Any) -> Any:
    """Moves the arrays back to the memory of those in `like`: arrays that were offloaded are offloaded again."""
    return jax.tree.map(lambda x, old: _to_host(x) if waits(old) else x, tree, like)


def shapes(tree: Any) -> Any:
    """Returns the abstract arguments of a program that is called with the arrays on their devices."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on_device(x.sharding)), tree)


def on_device(sharding: jax.sharding.Sharding) -> jax.sharding.Sharding:
    """Returns the same sharding in device memory."""
    return sharding.with_memory_kind("device")


def _to_host(x: jax.Array) -> jax.Array:
    kind = host_kind(next(iter(x.sharding.device_set)))
    assert kind is not None, "asked for where there is such a memory only"
    out: jax.Array = jax.device_put(x, x.sharding.with_memory_kind(kind))
    return out
