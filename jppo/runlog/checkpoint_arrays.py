"""The arrays of a checkpoint: names, structure, checksums, orbax's conversions; and reading one, or a field of it."""

import dataclasses
import json
import logging
import pathlib
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from jppo.errors import UserError

LARGE = 2**26  # bytes of an array that all devices should help to copy


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """Returns the leaves of a tree with their names in a checkpoint, in order."""
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree.leaves_with_path(tree)]


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def as_numbers(leaf: Any) -> jax.Array:
    """Returns the leaf as numbers: random keys as their data."""
    return jax.random.key_data(leaf) if _is_key(leaf) else jnp.asarray(leaf)


def one_copy(array: jax.Array) -> jax.Array:
    """Returns one device's copy of a small replicated array, for a cheaper save; other arrays unchanged.

    Otherwise orbax lets each device copy a part, which takes a program for each shape and device.
    """
    small = array.is_fully_addressable and array.is_fully_replicated and array.nbytes < LARGE
    return array.addressable_data(0) if small else array


def _as_leaf(array: jax.Array, saved: dict[str, Any]) -> jax.Array:
    """Returns a saved array as its leaf: the data of a random key as the key."""
    return jax.random.wrap_key_data(array, impl=saved["impl"]) if "impl" in saved else array


def _target(leaf: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape, dtype and sharding in which a leaf is read, as numbers."""
    plain = jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf
    return jax.ShapeDtypeStruct(plain.shape, plain.dtype, sharding=leaf.sharding)


def description(leaf: Any, checksum: int) -> dict[str, Any]:
    """Returns the table's entry of an array: shape, dtype, checksum, and the implementation of a random key."""
    impl = {"impl": str(jax.random.key_impl(leaf))} if _is_key(leaf) else {}
    return _describe(leaf) | impl | {"checksum": checksum}


def _describe(leaf: Any) -> dict[str, Any]:
    return {"shape": list(leaf.shape), "dtype": str(leaf.dtype)}


def _check_structure(path: pathlib.Path, saved: dict[str, Any], expected: dict[str, Any]) -> None:
    """Raises UserError where the names, shapes or dtypes of a checkpoint are not those of the run's state."""
    remedy = "resume with the settings of that run, or start a new run with another trainer.run_dir"
    for name in sorted(saved.keys() ^ expected.keys()):
        side = "the checkpoint only" if name in saved else "the model or optimizer of this run only"
        raise UserError(f"{path} does not fit this run: {name} is in {side}; {remedy}")
    for name, leaf in expected.items():
        form, stored = _describe(leaf), {key: saved[name][key] for key in ("shape", "dtype")}
        if form != stored:
            raise UserError(f"{path} does not fit this run: {name} was saved as {stored}, now it is {form}; {remedy}")


def checksum_of_all(tree: Any) -> int:
    """Returns one checksum of all arrays of a tree."""
    arrays = {str(number): leaf for number, leaf in enumerate(jax.tree.leaves(tree))}
    return sum(checksum for _, checksum in examine(arrays).values()) % 2**32


def nonfinite(arrays: Mapping[str, jax.Array]) -> list[str]:
    """Returns the names of arrays with NaN or infinities."""
    return [name for name, (finite, _) in examine(arrays).items() if not finite]


def text_checksum(content: Mapping[str, Any]) -> int:
    """Returns the checksum of a JSON object, the same after it is written and read: a number as a key becomes text."""
    return zlib.crc32(json.dumps(json.loads(json.dumps(content)), sort_keys=True).encode())


def examine(arrays: Mapping[str, jax.Array]) -> dict[str, tuple[bool, int]]:
    """Returns for each array whether it is finite, and its checksum; offloaded ones are copied one by one.

    The checksum is the sum of the array's bits, word by word, modulo 2^32: the same for any sharding.
    """
    batches: dict[Any, list[str]] = {}  # names whose arrays one program can take
    for name, array in arrays.items():
        offloaded = "host" in (array.sharding.memory_kind or "")
        batches.setdefault(name if offloaded else frozenset(array.sharding.device_set), []).append(name)
    checks = dict[str, tuple[bool, int]]()
    for names in batches.values():
        # One after another: exchanges of several programs at once can wait for each other on a CPU.
        verdicts = jax.device_get(_examine([_on_device(arrays[name]) for name in names]))
        checks |= {name: (bool(finite), int(bits)) for name, (finite, bits) in zip(names, verdicts, strict=True)}
    return {name: checks[name] for name in arrays}


def _on_device(array: jax.Array) -> jax.Array:
    """Returns the array on its devices, for one that is offloaded to the host."""
    if "host" in (array.sharding.memory_kind or ""):
        array = jax.device_put(array, array.sharding.with_memory_kind("device"))
    return array


@jax.jit
def _examine(arrays: list[jax.Array]) -> list[tuple[jax.Array, jax.Array]]:
    """Returns for each array whether it is finite, [] bool, and the sum of its bits, [] u32."""

    def sum_of_bits(array: jax.Array) -> jax.Array:
        words = array.astype(jnp.uint8) if array.dtype == jnp.bool_ else array
        bits = jax.lax.bitcast_convert_type(words, jnp.dtype(f"uint{8 * words.dtype.itemsize}"))
        return jnp.sum(bits, dtype=jnp.uint32)

    return [(jnp.isfinite(array).all(), sum_of_bits(array)) for array in arrays]


@dataclasses.dataclass(frozen=True)
class Restored:
    """The contents of a checkpoint."""

    step: int
    state: Any  # like `like`, with its shardings
    meta: dict[str, Any]
    missing: tuple[str, ...] = ()  # optional fields that were not saved: they are `like`'s


class Damaged(UserError):
    """A checkpoint is unreadable, or its arrays differ from the saved ones."""


def require_checkpoint(path: pathlib.Path) -> None:
    """UserError if `path` is not a checkpoint that a run can resume from."""
    if not path.is_dir():
        raise UserError(f"trainer.resume_mode={path}: no such checkpoint; use auto, disable, or RUN/checkpoints/STEP")


def restore(
    path: pathlib.Path,
    like: Any,
    *,
    fits: Callable[[dict[str, Any]], None] | None = None,
    optional: Sequence[str] = (),
) -> Restored:
    """Reads the checkpoint at `path` into the structure, shapes, dtypes and shardings of `like`.

    `like` holds arrays or `jax.ShapeDtypeStruct`s with shardings; its `optional` fields hold arrays, which stay
    where the checkpoint has nothing for the field. `fits` sees the meta first and raises what speaks against it. A
    checkpoint of another structure is a user's error.
    """
    require_checkpoint(path)
    silence_orbax()
    with checkpointer() as reader:
        content = _read_content(reader, path)
        if fits is not None:
            fits(content["meta"])
        saved = content["arrays"]
        missing = tuple(field for field in optional if not any(_in_field(name, field) for name in saved))
        leaf_of = dict(named_leaves(like))
        expected = {
            name: leaf for name, leaf in leaf_of.items() if not any(_in_field(name, field) for field in missing)
        }
        arrays = _read_arrays(reader, path, expected, saved)
    leaves = [_as_leaf(arrays[name], saved[name]) if name in expected else leaf for name, leaf in leaf_of.items()]
    state = jax.tree.unflatten(jax.tree.structure(like), leaves)
    kept_fields = tuple(field for field in missing if any(_in_field(name, field) for name in leaf_of))
    return Restored(content["step"], state, content["meta"], kept_fields)


def restore_field(path: pathlib.Path, field: str, like: Callable[[dict[str, Any]], Any]) -> Restored:
    """Reads one field of a saved state; `like` makes its structure from the meta."""
    silence_orbax()
    with checkpointer() as reader:
        content = _read_content(reader, path)
        tree = like(content["meta"])
        expected = {f".{field}{name}": leaf for name, leaf in named_leaves(tree)}
        saved = {name: item for name, item in content["arrays"].items() if _in_field(name, field)}
        if not saved:
            raise UserError(f"{path} has no {field}; name a run that trains one, or the model in its run's hf/")
        arrays = _read_arrays(reader, path, expected, saved)
    return Restored(
        content["step"], jax.tree.unflatten(jax.tree.structure(tree), [arrays[n] for n in expected]), content["meta"]
    )


def _read_content(reader: ocp.AsyncCheckpointer, path: pathlib.Path) -> dict[str, Any]:
    """Reads step, meta and the table of arrays; Damaged if they are not what was saved."""
    content = _read_items(reader, path.absolute(), about=ocp.args.JsonRestore())["about"]
    if not isinstance(content, dict) or not {"step", "meta", "arrays", "checksum"} <= content.keys():
        raise Damaged(f"{path} is damaged: its about/ lacks step, meta, arrays or their checksum; use another")
    if content.pop("checksum") != text_checksum(content):
        raise Damaged(f"{path} is damaged: its about/ differs from what was saved; use another")
    return content


def _read_arrays(
    reader: ocp.AsyncCheckpointer, path: pathlib.Path, expected: dict[str, Any], saved: dict[str, Any]
) -> dict[str, jax.Array]:
    """Reads the `expected` leaves as arrays; Damaged if these differ from the `saved` ones, or are not finite."""
    _check_structure(path, saved, expected)
    targets = {name: _target(leaf) for name, leaf in expected.items()}
    restore_args = ocp.checkpoint_utils.construct_restore_args(targets)
    arguments = ocp.args.PyTreeRestore(targets, restore_args=restore_args, partial_restore=True)
    arrays: dict[str, jax.Array] = _read_items(reader, path.absolute(), state=arguments)["state"]
    checks = examine(arrays)
    changed = [name for name, (_, checksum) in checks.items() if checksum != saved[name]["checksum"]]
    if changed:
        summary = f"{len(changed)} arrays differ from the saved ones, {changed[0]} among them"
        raise Damaged(f"{path} is damaged: {summary}; use another")
    if nonfinite_names := [name for name, (finite, _) in checks.items() if not finite]:
        raise Damaged(f"{path} holds values that are not finite numbers, in {nonfinite_names[0]} first; use another")
    return arrays


def _in_field(name: str, field: str) -> bool:
    return name == f".{field}" or name.startswith((f".{field}.", f".{field}["))


def checkpointer() -> ocp.AsyncCheckpointer:
    """Returns orbax's reader and writer, whose saves make their folders in the calling thread.

    Otherwise a thread makes them, and if it fails, the others wait 300 s for its signal.
    """
    options = ocp.options.AsyncOptions(create_directories_asynchronously=False)
    handler = ocp.CompositeCheckpointHandler(composite_options=ocp.CompositeOptions(async_options=options))
    return ocp.AsyncCheckpointer(handler, async_options=options)


def silence_orbax() -> None:
    """Silences orbax, which logs a save in several lines and a failure with tracebacks of every thread."""
    logging.getLogger("absl").addFilter(_not_orbax)
    if sys.unraisablehook is not _filter_unraisable:
        global _other_hook
        _other_hook, sys.unraisablehook = sys.unraisablehook, _filter_unraisable


_other_hook = sys.unraisablehook


def _not_orbax(record: logging.LogRecord) -> bool:
    return "orbax" not in record.pathname


def _filter_unraisable(unraisable: Any) -> None:
    """Filters errors of orbax's coroutines and of its closed event loop; the save or read that failed has reported."""
    loop_closed = isinstance(unraisable.exc_value, RuntimeError) and str(unraisable.exc_value) == "Event loop is closed"
    code = getattr(unraisable.object, "cr_code", None)
    if not loop_closed and not (code is not None and "orbax" in code.co_filename):
        _other_hook(unraisable)


def _read_items(reader: ocp.AsyncCheckpointer, path: pathlib.Path, **items: ocp.args.CheckpointArgs) -> Any:
    """Reads parts of a checkpoint, `state` or `about`, by orbax; Damaged if that fails."""
    try:
        return reader.restore(path, args=ocp.args.Composite(**items))
    except Exception as e:  # orbax and tensorstore raise anything, even a plain Exception
        problem = f"{path} is no readable checkpoint: {', '.join(items)}/ is missing or damaged"
        raise Damaged(f"{problem} ({type(e).__name__}); use another") from e
