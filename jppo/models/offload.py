"""Arrays that wait in the host's memory and come to their devices for as long as they are used.

Where an array waits is a fact of the array: its memory kind. So whoever uses one asks for it with `to_device`, which
gives what is there already as it is, and no program is ever called with an array that waits.
"""

from typing import Any

import jax

KINDS = ("pinned_host", "unpinned_host")  # of the host's memory, what a device copies from quickest first


def host_kind(device: jax.Device) -> str | None:
    """The memory of the host that arrays of this device may wait in; None where its backend has none."""
    known = {memory.kind for memory in device.addressable_memories()}
    return next((kind for kind in KINDS if kind in known), None)


def waits(array: Any) -> bool:
    """Whether the array lies in the host's memory."""
    return isinstance(array, jax.Array) and array.sharding.memory_kind in KINDS


def to_host(tree: Any) -> Any:
    """The arrays in the host's memory, each shard beside its device; the same bits."""
    return jax.tree.map(_to_host, tree)


def to_device(tree: Any) -> Any:
    """The arrays on their devices; one that stands in the tree twice is there once."""
    moved: dict[int, jax.Array] = {}

    def move(x: Any) -> Any:
        if not waits(x):
            return x
        if id(x) not in moved:
            moved[id(x)] = jax.device_put(x, on_device(x.sharding))
        return moved[id(x)]

    return jax.tree.map(move, tree)


def take(tree: Any) -> Any:
    """The arrays on their devices, to be donated; what waited in the host's memory is given up."""
    out = jax.block_until_ready(to_device(tree))
    for x in jax.tree.leaves(tree):
        if waits(x):
            x.delete()
    return out


def put_back(tree: Any, like: Any) -> Any:
    """The arrays where those of `like` lie or lay: those that came from the host's memory wait there again."""
    return jax.tree.map(lambda x, old: _to_host(x) if waits(old) else x, tree, like)


def shapes(tree: Any) -> Any:
    """The arrays as a program sees them that will be called with them on their devices."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on_device(x.sharding)), tree)


def on_device(sharding: jax.sharding.Sharding) -> jax.sharding.Sharding:
    """The same shards in the memory of their devices."""
    return sharding.with_memory_kind("device")


def _to_host(x: jax.Array) -> jax.Array:
    kind = host_kind(next(iter(x.sharding.device_set)))
    assert kind is not None, "asked for where there is such a memory only"
    return jax.device_put(x, x.sharding.with_memory_kind(kind))
