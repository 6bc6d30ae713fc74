"""Hugging Face model directories: the export of tensors, and writing models and adapters; `hf.py` reads them."""

import contextlib
import functools
import itertools
import json
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

from jppo.models import config_reader, half, hf, lora, params, placing, tensorfile
from jppo.models.config import ModelConfig
from jppo.models.params import Entry, Head
from jppo.types import Params

T = TypeVar("T")
AHEAD = 1 << 26  # bytes of tensors in flight from the device while earlier ones are used


@functools.partial(jax.jit, static_argnames=("entry", "dtype"))
def _export_tensor(
    array: jax.Array, adapter: dict[str, jax.Array] | None, index: tuple[int, ...], *, entry: Entry, dtype: np.dtype
) -> jax.Array:
    """Converts one layer and expert (of an unstacked parameter: all of it) to HF's tensor, its adapter merged."""
    for axis, i in enumerate(index):
        array, adapter = jax.tree.map(
            lambda x, i=i, axis=axis: jax.lax.dynamic_slice_in_dim(x, i, 1, axis), (array, adapter)
        )
    if adapter is not None:
        array = lora.merge(entry, array, adapter)
    tensor = params.to_hf(entry, array).astype(dtype)
    return tensor[(0,) * len(index)]


def hf_tensors(
    model: lora.Weights, cfg: ModelConfig, *, head: Head = "lm", dtype: Any = None
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields a model's tensors under HF's names, in the order of `hf_shapes`; a tied matrix once, as the embedding.

    Adapters are merged. Each tensor is made on the device, in `dtype` (None: unchanged), and fetched while earlier ones
    are used. `AHEAD` bytes, or the largest tensor and one more, are in flight.
    """
    in_flight: deque[tuple[str, jax.Array]] = deque()

    def to_numpy(name: str, tensor: jax.Array) -> tuple[str, np.ndarray]:
        return name, np.asarray(tensor)

    for name, tensor in device_tensors(model, cfg, head=head, dtype=dtype):
        tensor.copy_to_host_async()
        in_flight.append((name, tensor))
        del tensor  # else it would be kept until the next one is made
        while len(in_flight) > 2 and sum(array.nbytes for _, array in in_flight) > AHEAD:
            yield to_numpy(*in_flight.popleft())
    while in_flight:
        yield to_numpy(*in_flight.popleft())


def device_tensors(
    model: lora.Weights, cfg: ModelConfig, *, head: Head = "lm", dtype: Any = None
) -> Iterator[tuple[str, jax.Array]]:
    """Yields the tensors of `hf_tensors`, still on the devices; arrays already in HF's layout are not copied.

    Raises UserError for a weight beyond float16, if that is the dtype.
    """
    for entry in params.table(cfg, head=head):
        array, adapter = lora.kernel_and_adapter(entry, model)
        dtype_out = np.dtype(entry.dtype(array.dtype if dtype is None else dtype))
        same_layout = entry.letters == "".join(entry.hf_letters) and array.shape == entry.hf_shape
        if same_layout and adapter is None and array.dtype == dtype_out:
            yield entry.hf, placing.whole_array(_new_array(array))
            continue
        for index, name in zip(np.ndindex(entry.numbered), entry.hf_names, strict=True):
            tensor = placing.whole_array(_export_tensor(array, adapter, index, entry=entry, dtype=dtype_out))
            if dtype_out == np.float16 and not jnp.isfinite(tensor).all():
                wide = _export_tensor(array, adapter, index, entry=entry, dtype=np.dtype(np.float32))
                half.require_range_of_all({name: wide}, "rollout.dtype, or an export's --dtype,")
            yield name, tensor
            del tensor


def _new_array(array: jax.Array) -> jax.Array:
    """Returns the array as a new object: an array caches its host copy, and this one is short-lived."""
    shards = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


def hf_shapes(cfg: ModelConfig, *, head: Head = "lm") -> dict[str, tuple[int, ...]]:
    """Returns the names and shapes that `hf_tensors` yields, in its order."""
    return {name: entry.hf_shape for entry in params.table(cfg, head=head) for name in entry.hf_names}


def _describe_tensors(entries: tuple[Entry, ...], dtype: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shape and dtype of every tensor of a checkpoint in this dtype."""
    return {name: jax.ShapeDtypeStruct(e.hf_shape, e.dtype(dtype)) for e in entries for name in e.hf_names}


def save_model(
    out_dir: str | os.PathLike[str],
    model: lora.Weights,
    cfg: ModelConfig,
    *,
    source: str | os.PathLike[str],
    dtype: Any,
    head: Head = "lm",
    changes: Mapping[str, Any] | None = None,
    max_shard_bytes: int = 5 * 10**9,
    write: bool = True,
) -> pathlib.Path:
    """Writes a model directory atomically; config, with `changes`, and tokenizer are `source`'s.

    A host with `write` False writes nothing, but takes part in fetching the tensors.
    """
    folder, numpy_dtype = pathlib.Path(out_dir), np.dtype(dtype)
    with exhaust_on_exit(hf_tensors(model, cfg, head=head, dtype=numpy_dtype)) as tensors:
        if not write:
            return folder
        origin = hf.resolve_directory(source, weights=False)
        config, _ = hf.read_config(origin)
        shapes = _describe_tensors(params.table(cfg, head=head), numpy_dtype)
        if cfg.multimodal and head == "lm":
            shapes, tensors = _add_other_tensors(hf.resolve_directory(source, weights=True), shapes, tensors)
        else:
            config = dict(config_reader.text_config(config))
        stale = {"torch_dtype", "tie_word_embeddings", "quantization_config"}  # rewritten, or no longer true
        config = {k: v for k, v in config.items() if k not in stale}
        config |= {"dtype": numpy_dtype.name, "tie_word_embeddings": cfg.tie_word_embeddings, **(changes or {})}
        if cfg.further_layers:
            config["num_nextn_predict_layers"] = 0
        with in_place_of(folder) as tmp:
            (tmp / "config.json").write_text(json.dumps(config, indent=2) + "\n")
            for name in hf.COMPANIONS:
                if (origin / name).is_file():
                    shutil.copyfile(origin / name, tmp / name)
            _write_shards(tmp, shapes, tensors, max_shard_bytes)
    return folder


def classifier_changes(path: str | os.PathLike[str], *, pad_token_id: int | None) -> dict[str, Any]:
    """Returns config.json's changes for a one-label sequence classifier made from the model at `path`.

    transformers scores several texts at once only if it knows their padding token.
    """
    config = config_reader.text_config(hf.read_config(path)[0])
    # whose classifiers have longer names
    classifier_names = {"gemma3_text": "Gemma3TextForCausalLM", "qwen3_5_text": "Qwen3_5TextForCausalLM"}
    longer_name = classifier_names.get(config["model_type"])
    names = [longer_name] if longer_name else config.get("architectures") or []
    changes: dict[str, Any] = {
        "architectures": [
            re.sub("ForCausalLM$", "ForSequenceClassification", name) for name in names if isinstance(name, str)
        ],
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
    }
    if config.get("pad_token_id") is None and pad_token_id is not None:
        changes["pad_token_id"] = pad_token_id
    return changes


@contextlib.contextmanager
def exhaust_on_exit(tensors: Iterator[T]) -> Iterator[Iterator[T]]:
    """Exhausts the iterator after the block, even on errors, if there are other hosts, which would wait."""
    try:
        yield tensors
    finally:
        if jax.process_count() > 1:
            deque(tensors, maxlen=0)


def _add_other_tensors(
    origin: pathlib.Path, shapes: dict[str, jax.ShapeDtypeStruct], tensors: Iterator[tuple[str, np.ndarray]]
) -> tuple[dict[str, jax.ShapeDtypeStruct], Iterator[tuple[str, np.ndarray]]]:
    """Gives a text model's tensors their names in the multimodal checkpoint at `origin`, and adds its other tensors."""
    slots = tensorfile.slots(origin)
    prefix = next(p for p in config_reader.PREFIXES if any(name.startswith(p) for name in slots))
    head = "language_model.lm_head.weight" if prefix == "language_model.model." else "lm_head.weight"

    def stored_name(name: str) -> str:
        return head if name == "lm_head.weight" else prefix + name.removeprefix("model.")

    other = {name: slot for name, slot in slots.items() if not hf.is_text_tensor(name)}
    merged = {stored_name(name): x for name, x in shapes.items()}
    merged |= {name: jax.ShapeDtypeStruct(s.shape, tensorfile.read_tensor(s, name).dtype) for name, s in other.items()}
    other_tensors = ((name, tensorfile.read_tensor(slot, name)) for name, slot in other.items())
    return merged, itertools.chain(((stored_name(name), array) for name, array in tensors), other_tensors)


def adapter_tensors(
    learned: Params, cfg: ModelConfig, spec: lora.Lora, *, head: Head = "lm"
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the learned weights of a model with adapters, under peft's names."""
    for entry in lora.adapter_table(cfg, spec, head=head):
        array = placing.to_device(params.leaf_at(learned, entry.path))
        for index, name in zip(np.ndindex(entry.numbered), entry.hf_names, strict=True):
            yield name, placing.fetch(_export_tensor(array, None, index, entry=entry, dtype=np.dtype(array.dtype)))


def save_adapter(
    out_dir: str | os.PathLike[str],
    learned: Params,
    cfg: ModelConfig,
    spec: lora.Lora,
    *,
    head: Head = "lm",
    base: str,
    write: bool = True,
) -> pathlib.Path:
    """Writes adapters as a directory for peft and vLLM with the base model `base`, atomically.

    `write` as in `save_model`.
    """
    arrays = (array for _, array in adapter_tensors(learned, cfg, spec, head=head))
    with exhaust_on_exit(arrays):
        if write:
            with in_place_of(pathlib.Path(out_dir)) as tmp:
                settings = lora.peft_config(cfg, spec, head=head, base=base)
                (tmp / "adapter_config.json").write_text(json.dumps(settings, indent=2) + "\n")
                shapes = _describe_tensors(lora.adapter_table(cfg, spec, head=head), np.float32)
                tensorfile.write_tensors(tmp / "adapter_model.safetensors", shapes, arrays)
    return pathlib.Path(out_dir)


@contextlib.contextmanager
def in_place_of(out: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a folder to write to, which replaces `out` once it is complete."""
    out.parent.mkdir(parents=True, exist_ok=True)
    tmp = out.parent / f".{out.name}.{uuid.uuid4().hex[:8]}"
    tmp.mkdir()
    try:
        yield tmp
        old = tmp.with_name(f"{tmp.name}.old")  # removed after the new one is in its place, not before
        if replaces := out.exists():
            out.rename(old)
        tmp.rename(out)
        if replaces:
            shutil.rmtree(old)
    finally:
        shutil.rmtree(tmp, ignore_errors=True)


def _write_shards(
    directory: pathlib.Path,
    announced: dict[str, jax.ShapeDtypeStruct],
    tensors: Iterator[tuple[str, np.ndarray]],
    max_shard_bytes: int,
) -> None:
    groups: list[dict[str, jax.ShapeDtypeStruct]] = [{}]
    total = filled = 0
    for name, x in announced.items():
        nbytes = tensorfile.nbytes(x)
        if groups[-1] and filled + nbytes > max_shard_bytes:
            groups.append({})
            filled = 0
        groups[-1][name] = x
        filled, total = filled + nbytes, total + nbytes
    arrays = (array for _, array in tensors)
    if len(groups) == 1:
        tensorfile.write_tensors(directory / tensorfile.SINGLE, announced, arrays)
        return
    weight_map: dict[str, str] = {}
    for i, group in enumerate(groups, 1):
        file = f"model-{i:05d}-of-{len(groups):05d}.safetensors"
        # Never takes one tensor too many: the iterator continues in the next shard.
        tensorfile.write_tensors(directory / file, group, (next(arrays) for _ in group))
        weight_map |= dict.fromkeys(group, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / tensorfile.INDEX).write_text(json.dumps(index, indent=2) + "\n")
