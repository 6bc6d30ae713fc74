"""Hugging Face model directories: reading and writing, by the table of `params.py`."""

import contextlib
import functools
import json
import math
import os
import pathlib
import re
import shutil
import uuid
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jppo.errors import expanded
from jppo.models import families, lora, offload, params, placing, tensorfile
from jppo.models.decoder import init_head
from jppo.models.families import ModelConfig
from jppo.models.params import Entry, Head
from jppo.settings import UserError
from jppo.types import Params

T = TypeVar("T")
# Other files of a model directory besides weights and config.json: copied unchanged.
_COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
AHEAD = 1 << 26  # bytes of tensors in flight from the device while earlier ones are used
_BUFFERS = re.compile(r".*\.(rotary_emb\.inv_freq|masked_bias)$")  # stored by old versions of transformers


def resolve(path: str | os.PathLike, *, weights: bool) -> pathlib.Path:
    """Returns a model's local directory: `path` itself, or the hub's copy under that name."""
    directory = expanded(path)
    if directory.is_dir():
        return directory
    remedy = "give the path of a directory with config.json, the tokenizer and *.safetensors"
    name = os.fspath(path)
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name):
        raise UserError(f"model path {name!r} is not a directory; {remedy}")
    import huggingface_hub  # only for a hub name

    sought = ["config.json", *_COMPANIONS, *(["*.safetensors", tensorfile.INDEX] if weights else [])]
    try:
        return pathlib.Path(huggingface_hub.snapshot_download(name, allow_patterns=sought))
    except (OSError, ValueError) as e:  # no network, no such model, no access, no valid name
        reason = str(e).split("\n")[0]
        raise UserError(
            f"model {name!r} is no directory here, and {sought[0]} of a hub model of that name could not be "
            f"fetched ({type(e).__name__}: {reason}); {remedy}"
        ) from e


def read_config(path: str | os.PathLike) -> tuple[dict[str, Any], ModelConfig]:
    """Reads a model's config.json, parsed, and as ModelConfig."""
    file = resolve(path, weights=False) / "config.json"
    if not file.is_file():
        raise UserError(f"{file} is missing; a model directory must hold it")
    try:
        config = json.loads(file.read_text())
    except (ValueError, RecursionError) as e:
        raise UserError(f"{file} is no JSON: {e}") from e
    if not isinstance(config, dict):
        raise UserError(f"{file} must hold a JSON object, not {type(config).__name__}")
    return config, families.from_hf(config, path=file)


def load_params(
    path: str | os.PathLike,
    cfg: ModelConfig,
    *,
    head: Head,
    param_dtype: Any,
    shardings: Params | None = None,
    key: jax.Array | None = None,
) -> Params:
    """Loads the parameters of a checkpoint, each tensor from a memory map straight into its shards.

    The host holds one tensor at a time besides the shards. Without shardings they go to the default device. A value
    model takes `score.weight` if the checkpoint has it (a sequence classifier), else it draws the score from `key`.
    Its unused language head is not read.
    """
    entries, slots = _find(path, cfg, head)
    out = params.tree(entries, lambda entry: _read(entry, slots, param_dtype, _sharding(shardings, entry.path)))
    if head == "value" and "score.weight" not in slots:
        if key is None:
            raise ValueError(f"{path} has no score.weight: a value model needs a key to draw one")
        place = _sharding(shardings, ("score", "kernel"))
        out |= placing.put(init_head(cfg, key, head=head, param_dtype=param_dtype), place)
    return out


def _sharding(shardings: Params | None, path: tuple[str, ...]) -> Any:
    return None if shardings is None else params.get(shardings, path)


def check_weights(path: str | os.PathLike, cfg: ModelConfig, *, head: Head) -> None:
    """Raises UserError for a missing, extra, misshapen or truncated tensor; reads headers only."""
    _find(path, cfg, head)


def _find(
    path: str | os.PathLike, cfg: ModelConfig, head: Head
) -> tuple[tuple[Entry, ...], dict[str, tensorfile.Slot]]:
    """Finds the parameters that the checkpoint holds (not a score yet to be drawn), and their places."""
    directory = resolve(path, weights=True)
    slots = {name: slot for name, slot in tensorfile.slots(directory).items() if not _BUFFERS.match(name)}
    entries = params.table(cfg, head=head)
    if head == "value" and "score.weight" not in slots:
        entries = tuple(entry for entry in entries if entry.hf != "score.weight")
    if head == "value" and not cfg.tie_word_embeddings:
        slots.pop("lm_head.weight", None)
    slots = _one_name_each(entries, slots)
    _check_names(directory, entries, slots)
    return entries, slots


def _one_name_each(entries: tuple[Entry, ...], slots: dict[str, tensorfile.Slot]) -> dict[str, tensorfile.Slot]:
    """Renames a matrix stored under its alias to its own name; removes a second copy."""
    slots = dict(slots)
    for entry in entries:
        if entry.alias is None or entry.alias not in slots:
            continue
        second = slots.pop(entry.alias)
        first = slots.setdefault(entry.hf, second)
        if first is second:
            continue
        same = first.shape == second.shape and first.code == second.code
        if not (same and _same_bits(tensorfile.read(first, entry.hf), tensorfile.read(second, entry.alias))):
            raise UserError(
                f"{second.file}: {entry.alias} differs from {entry.hf}, but config.json ties them; "
                "set tie_word_embeddings to false there"
            )
    return slots


def _same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return np.array_equal(a.view(np.uint8), b.view(np.uint8))


def _check_names(directory: pathlib.Path, entries: tuple[Entry, ...], slots: dict[str, tensorfile.Slot]) -> None:
    shapes = {name: entry.hf_shape for entry in entries for name in entry.hf_names}
    missing, left = sorted(set(shapes) - set(slots)), sorted(set(slots) - set(shapes))
    if missing:
        raise UserError(f"{directory} lacks {_some(missing)}, which its config.json asks for")
    if left:
        raise UserError(f"{slots[left[0]].file} holds {_some(left)}, which its config.json has no place for")
    for name, shape in shapes.items():
        if slots[name].shape != shape:
            found = list(slots[name].shape)
            raise UserError(f"{slots[name].file}: {name} has shape {found}, config.json asks for {list(shape)}")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more tensors" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _read(entry: Entry, slots: dict[str, tensorfile.Slot], dtype: Any, sharding: Any) -> jax.Array:
    """Reads one parameter, filled tensor by tensor in its shards."""
    out = jax.jit(functools.partial(jnp.zeros, entry.shape, dtype), out_shardings=sharding)()
    for i, name in enumerate(entry.hf_names):
        tensor = params.from_hf(entry, tensorfile.read(slots[name], name))
        if entry.padding and sharding is not None:  # else no mesh divides it, and each device would get all of it
            tensor = np.pad(tensor, [(0, entry.padding)] + [(0, 0)] * (tensor.ndim - 1))
        piece = tensor[None] if entry.stacked else tensor
        out = _fill(out, placing.put(piece, _of_piece(sharding, piece.shape)), i if entry.stacked else 0)
        out.block_until_ready()  # one tensor on the host at a time
    return out


def _of_piece(sharding: Any, shape: tuple[int, ...]) -> Any:
    """Returns the sharding of a tensor that becomes part of a parameter: the parameter's, where its shape allows."""
    if sharding is None:
        return None
    spec = [
        None if axes is None or n % _parts(sharding, axes) else axes
        for n, axes in zip(shape, sharding.spec, strict=False)
    ]
    return jax.NamedSharding(sharding.mesh, jax.P(*spec))


def _parts(sharding: Any, axes: str | tuple[str, ...]) -> int:
    return math.prod(sharding.mesh.shape[axis] for axis in ((axes,) if isinstance(axes, str) else axes))


@functools.partial(jax.jit, donate_argnums=0)
def _fill(out: jax.Array, piece: jax.Array, first: jax.Array | int) -> jax.Array:
    """Writes the piece into `out` from index `first` of its first axis on."""
    return jax.lax.dynamic_update_slice(out, piece.astype(out.dtype), (first,) + (0,) * (out.ndim - 1))


@functools.partial(jax.jit, static_argnames=("entry", "dtype"))
def _export(
    array: jax.Array, beside: dict[str, jax.Array] | None, layer: jax.Array | int, *, entry: Entry, dtype: np.dtype
) -> jax.Array:
    """Converts one layer (of an unstacked parameter: all of it) to HF's tensor, its adapter merged."""
    if entry.stacked:
        array, beside = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, layer, 1), (array, beside))
    if beside is not None:
        array = lora.merge(entry, array, beside)
    tensor = params.to_hf(entry, array).astype(dtype)
    return tensor[0] if entry.stacked else tensor


def hf_tensors(
    model: lora.Weights, cfg: ModelConfig, *, head: Head = "lm", dtype: Any = None
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields a model's tensors under HF's names, in the order of `hf_shapes`; a tied matrix once, as the embedding.

    Adapters are merged. Each tensor is made on the device, in `dtype` (None: unchanged), and fetched while earlier ones
    are used. `AHEAD` bytes, or the largest tensor and one more, are in flight.
    """
    coming: deque[tuple[str, jax.Array]] = deque()
    for name, tensor in _on_device(model, cfg, head, dtype):
        tensor = placing.whole(tensor)
        tensor.copy_to_host_async()
        coming.append((name, tensor))
        del tensor  # else it would be kept until the next one is made
        while len(coming) > 2 and sum(array.nbytes for _, array in coming) > AHEAD:
            yield _fetched(*coming.popleft())
    while coming:
        yield _fetched(*coming.popleft())


def _fetched(name: str, tensor: jax.Array) -> tuple[str, np.ndarray]:
    return name, np.asarray(tensor)


def _on_device(model: lora.Weights, cfg: ModelConfig, head: Head, dtype: Any) -> Iterator[tuple[str, jax.Array]]:
    """Yields HF's tensors on the device; arrays already in HF's layout are not copied."""
    for entry in params.table(cfg, head=head):
        array, beside = lora.parts(entry, model)
        cast = array.dtype if dtype is None else np.dtype(dtype)
        alike = entry.letters == "".join(entry.hf_letters) and array.shape == entry.hf_shape
        if alike and beside is None and array.dtype == cast:
            yield entry.hf, _apart(array)
            continue
        for layer, name in enumerate(entry.hf_names):
            yield name, _export(array, beside, layer, entry=entry, dtype=cast)


def _apart(array: jax.Array) -> jax.Array:
    """Returns the array as a new object: an array caches its host copy, and this one is short-lived."""
    shards = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


def stored_tensors(path: str | os.PathLike, cfg: ModelConfig) -> Iterator[tuple[str, np.ndarray]]:
    """Yields a checkpoint's tensors as `hf_tensors` would, straight from its files, without a device."""
    entries, slots = _find(path, cfg, "lm")
    for entry in entries:
        for name in entry.hf_names:
            tensor = tensorfile.read(slots[name], name)
            yield name, tensor.astype(np.float32) if tensor.dtype == np.float64 else tensor


def hf_shapes(cfg: ModelConfig, *, head: Head = "lm") -> dict[str, tuple[int, ...]]:
    """Returns the names and shapes that `hf_tensors` yields, in its order."""
    return {name: entry.hf_shape for entry in params.table(cfg, head=head) for name in entry.hf_names}


def save(
    out_dir: str | os.PathLike,
    model: lora.Weights,
    cfg: ModelConfig,
    *,
    source: str | os.PathLike,
    dtype: Any,
    head: Head = "lm",
    changes: Mapping[str, Any] | None = None,
    max_shard_bytes: int = 5 * 10**9,
    write: bool = True,
) -> pathlib.Path:
    """Writes a model directory atomically; config, with `changes`, and tokenizer are `source`'s.

    A host with `write` False writes nothing, but takes part in fetching the tensors.
    """
    out, kind = pathlib.Path(out_dir), np.dtype(dtype)
    with fetched_by_all(hf_tensors(model, cfg, head=head, dtype=kind)) as tensors:
        if write:
            _save(out, tensors, cfg, source, kind, head, changes or {}, max_shard_bytes)
    return out


def classifier_changes(path: str | os.PathLike, *, pad_token_id: int | None) -> dict[str, Any]:
    """Returns config.json's changes for a one-label sequence classifier made from the model at `path`.

    transformers scores several texts at once only if it knows their padding token.
    """
    config, _ = read_config(path)
    named = {"gemma3_text": "Gemma3TextForCausalLM"}.get(config["model_type"])  # whose classifier has the longer name
    names = [named] if named else config.get("architectures") or []
    said: dict[str, Any] = {
        "architectures": [
            re.sub("ForCausalLM$", "ForSequenceClassification", name) for name in names if isinstance(name, str)
        ],
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
    }
    if config.get("pad_token_id") is None and pad_token_id is not None:
        said["pad_token_id"] = pad_token_id
    return said


@contextlib.contextmanager
def fetched_by_all(tensors: Iterator[T]) -> Iterator[Iterator[T]]:
    """Exhausts the iterator after the block, even on errors, if there are other hosts, which would wait."""
    try:
        yield tensors
    finally:
        if jax.process_count() > 1:
            deque(tensors, maxlen=0)


def _save(
    out: pathlib.Path,
    tensors: Iterator[tuple[str, np.ndarray]],
    cfg: ModelConfig,
    source: str | os.PathLike,
    kind: np.dtype,
    head: Head,
    changes: Mapping[str, Any],
    max_shard_bytes: int,
) -> None:
    origin = resolve(source, weights=False)
    config, _ = read_config(origin)
    with in_place_of(out) as tmp:
        stale = {"torch_dtype", "tie_word_embeddings"}  # rewritten
        config = {k: v for k, v in config.items() if k not in stale}
        config |= {"dtype": kind.name, "tie_word_embeddings": cfg.tie_word_embeddings, **changes}
        (tmp / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        for name in _COMPANIONS:
            if (origin / name).is_file():
                shutil.copyfile(origin / name, tmp / name)
        _write_shards(tmp, hf_shapes(cfg, head=head), kind, tensors, max_shard_bytes)


def adapter_tensors(
    learned: Params, cfg: ModelConfig, how: lora.Lora, *, head: Head = "lm"
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the learned weights of a model with adapters, under peft's names."""
    for entry in lora.table(cfg, how, head=head):
        array = offload.to_device(params.get(learned, entry.path))
        for layer, name in enumerate(entry.hf_names):
            yield name, placing.fetch(_export(array, None, layer, entry=entry, dtype=np.dtype(array.dtype)))


def save_adapter(
    out_dir: str | os.PathLike,
    learned: Params,
    cfg: ModelConfig,
    how: lora.Lora,
    *,
    head: Head = "lm",
    base: str,
    write: bool = True,
) -> pathlib.Path:
    """Writes adapters as a directory for peft and vLLM with the base model `base`, atomically.

    `write` as in `save`.
    """
    arrays = (array for _, array in adapter_tensors(learned, cfg, how, head=head))
    with fetched_by_all(arrays):
        if write:
            with in_place_of(pathlib.Path(out_dir)) as tmp:
                settings = lora.peft_config(how, head=head, base=base)
                (tmp / "adapter_config.json").write_text(json.dumps(settings, indent=2) + "\n")
                shapes = {name: e.hf_shape for e in lora.table(cfg, how, head=head) for name in e.hf_names}
                tensorfile.write(tmp / "adapter_model.safetensors", shapes, np.dtype(np.float32), arrays)
    return pathlib.Path(out_dir)


@contextlib.contextmanager
def in_place_of(out: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a folder to write to, which replaces `out` once it is complete."""
    out.parent.mkdir(parents=True, exist_ok=True)
    tmp = out.parent / f".{out.name}.{uuid.uuid4().hex[:8]}"
    tmp.mkdir()
    try:
        yield tmp
        _replace(out, tmp)
    finally:
        shutil.rmtree(tmp, ignore_errors=True)


def _replace(out: pathlib.Path, new: pathlib.Path) -> None:
    """Moves `new` to `out`; an existing directory is removed after that, not before."""
    if not out.exists():
        new.rename(out)
        return
    old = new.with_name(new.name + ".old")
    out.rename(old)
    new.rename(out)
    shutil.rmtree(old)


def _write_shards(
    directory: pathlib.Path,
    shapes: dict[str, tuple[int, ...]],
    dtype: np.dtype,
    tensors: Iterator[tuple[str, np.ndarray]],
    max_shard_bytes: int,
) -> None:
    groups: list[dict[str, tuple[int, ...]]] = [{}]
    total = filled = 0
    for name, shape in shapes.items():
        nbytes = dtype.itemsize * int(np.prod(shape))
        if groups[-1] and filled + nbytes > max_shard_bytes:
            groups.append({})
            filled = 0
        groups[-1][name] = shape
        filled, total = filled + nbytes, total + nbytes
    arrays = (array for _, array in tensors)
    if len(groups) == 1:
        tensorfile.write(directory / tensorfile.SINGLE, shapes, dtype, arrays)
        return
    weight_map: dict[str, str] = {}
    for i, group in enumerate(groups, 1):
        file = f"model-{i:05d}-of-{len(groups):05d}.safetensors"
        # Never takes one tensor too many: the iterator continues in the next shard.
        tensorfile.write(directory / file, group, dtype, (next(arrays) for _ in group))
        weight_map |= dict.fromkeys(group, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / tensorfile.INDEX).write_text(json.dumps(index, indent=2) + "\n")
