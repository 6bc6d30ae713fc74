"""The arrays of a checkpoint: names, structure, checksums, and the conversions of keys and copies that orbax needs."""

import json
import pathlib
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jppo.settings import UserError

LARGE = 2**26  # bytes of an array that all devices should help to copy


def named(tree: Any) -> list[tuple[str, Any]]:
    """Returns the leaves of a tree with their names in a checkpoint, in order."""
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree.leaves_with_path(tree)]


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def plain(leaf: Any) -> jax.Array:
    """Returns the leaf as numbers: random keys as their data."""
    return jax.random.key_data(leaf) if _is_key(leaf) else jnp.asarray(leaf)


def one_copy(array: jax.Array) -> jax.Array:
    """Returns a small replicated array as one device's copy; others unchanged.

    Otherwise orbax lets each device copy a part, which takes a program for each shape and device.
    """
    small = array.is_fully_addressable and array.is_fully_replicated and array.nbytes < LARGE
    return array.addressable_data(0) if small else array


def rewrapped(array: jax.Array, saved: dict[str, Any]) -> jax.Array:
    """Returns a saved array as its leaf: the data of a random key as the key."""
    return jax.random.wrap_key_data(array, impl=saved["impl"]) if "impl" in saved else array


def target(leaf: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape, dtype and sharding in which a leaf is read, as numbers."""
    plain = jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf
    return jax.ShapeDtypeStruct(plain.shape, plain.dtype, sharding=leaf.sharding)


def description(leaf: Any, checksum: int) -> dict[str, Any]:
    """Returns what a checkpoint records about an array; with the implementation of a random key, to rebuild it."""
    impl = {"impl": str(jax.random.key_impl(leaf))} if _is_key(leaf) else {}
    return _describe(leaf) | impl | {"checksum": checksum}


def _describe(leaf: Any) -> dict[str, Any]:
    return {"shape": list(leaf.shape), "dtype": str(leaf.dtype)}


def check_structure(path: pathlib.Path, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raises UserError where the names, shapes or dtypes of a checkpoint are not those that are wanted."""
    remedy = "resume with the settings of that run, or start a new run with another trainer.run_dir"
    for name in sorted(saved.keys() ^ wanted.keys()):
        where = "the checkpoint only" if name in saved else "the model or optimizer of this run only"
        raise UserError(f"{path} does not fit this run: {name} is in {where}; {remedy}")
    for name, leaf in wanted.items():
        now, then = _describe(leaf), {key: saved[name][key] for key in ("shape", "dtype")}
        if now != then:
            raise UserError(f"{path} does not fit this run: {name} was saved as {then}, now it is {now}; {remedy}")


def checksum_of_all(tree: Any) -> int:
    """Returns one checksum of all arrays of a tree."""
    arrays = {str(number): leaf for number, leaf in enumerate(jax.tree.leaves(tree))}
    return sum(checksum for _, checksum in examined(arrays).values()) % 2**32


def nonfinite(arrays: Mapping[str, jax.Array]) -> list[str]:
    """Returns the names of arrays with NaN or infinities."""
    return [name for name, (finite, _) in examined(arrays).items() if not finite]


def text_checksum(content: Mapping[str, Any]) -> int:
    """Returns the checksum of a JSON object, the same after it is written and read: a number as a key becomes text."""
    return zlib.crc32(json.dumps(json.loads(json.dumps(content)), sort_keys=True).encode())


def examined(arrays: Mapping[str, jax.Array]) -> dict[str, tuple[bool, int]]:
    """Returns for each array whether it is finite, and its checksum; copies offloaded ones to the devices one by one.

    The checksum is the sum of the array's bits, word by word, modulo 2^32: the same for any sharding.
    """
    together: dict[Any, list[str]] = {}  # names whose arrays one program can take
    for name, array in arrays.items():
        offloaded = "host" in (array.sharding.memory_kind or "")
        together.setdefault(name if offloaded else frozenset(array.sharding.device_set), []).append(name)
    found = dict[str, tuple[bool, int]]()
    for names in together.values():
        # One after another: exchanges of several programs at once can wait for each other on a CPU.
        verdicts = jax.device_get(_examine([_on_device(arrays[name]) for name in names]))
        found |= {name: (bool(finite), int(bits)) for name, (finite, bits) in zip(names, verdicts, strict=True)}
    return {name: found[name] for name in arrays}


def _on_device(array: jax.Array) -> jax.Array:
    if "host" in (array.sharding.memory_kind or ""):
        array = jax.device_put(array, array.sharding.with_memory_kind("device"))
    return array


@jax.jit
def _examine(arrays: list[jax.Array]) -> list[tuple[jax.Array, jax.Array]]:
    def sum_of_bits(array: jax.Array) -> jax.Array:
        whole = array.astype(jnp.uint8) if array.dtype == jnp.bool_ else array
        bits = jax.lax.bitcast_convert_type(whole, jnp.dtype(f"uint{8 * whole.dtype.itemsize}"))
        return jnp.sum(bits, dtype=jnp.uint32)

    return [(jnp.isfinite(array).all(), sum_of_bits(array)) for array in arrays]
