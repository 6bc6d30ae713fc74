"""Hugging Face model directories: reading, by the table of `params.py`; `hf_write.py` writes them."""

import functools
import json
import math
import os
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jppo.errors import UserError, expanded
from jppo.models import config_reader, kernels, lora, params, placing, tensorfile
from jppo.models.config import ModelConfig
from jppo.models.decoder import init_head
from jppo.models.params import Entry, Head
from jppo.types import Params

# Other files of a model directory besides weights and config.json: copied unchanged.
COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spm.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
_BUFFERS = re.compile(r".*\.(rotary_emb\.inv_freq|masked_bias)$")  # stored by old versions of transformers
_PREFIX = re.compile(r"^(model\.language_model|language_model\.model)\.")  # of a text model that is part of another


def resolve_directory(
    path: str | os.PathLike[str], *, weights: bool, further: Sequence[str] = (), setting: str = "model"
) -> pathlib.Path:
    """Returns a model's local directory: `path` itself, or the hub's copy under that name, with `further` files."""
    directory = expanded(path)
    if directory.is_dir():
        return directory
    remedy = "give the path of a directory with config.json, the tokenizer and *.safetensors"
    name = os.fspath(path)
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name):
        raise UserError(f"{setting} {name!r} is not a directory; {remedy}")
    import huggingface_hub  # only for a hub name

    patterns = ["config.json", *COMPANIONS, *(["*.safetensors", tensorfile.INDEX] if weights else []), *further]
    try:
        return pathlib.Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns))
    except (OSError, ValueError) as e:  # no network, no such model, no access, no valid name
        reason = str(e).split("\n")[0]
        raise UserError(
            f"{setting} {name!r} is no directory here, and {patterns[0]} of a hub model of that name could not be "
            f"fetched ({type(e).__name__}: {reason}); {remedy}"
        ) from e


def final_model(path: str) -> str:
    """Returns the path of the final model where `path` is the folder of a run, else `path`."""
    run = expanded(path)
    if (run / "hf/config.json").is_file():
        return f"{path}/hf"
    if (run / "checkpoints").is_dir():
        raise UserError(f"{path} is a run without a final model; python -m jppo.export {path} --out MODEL writes one")
    return path


def read_config(
    path: str | os.PathLike[str], *, longest: int | None = None, setting: str = "model"
) -> tuple[dict[str, Any], ModelConfig]:
    """Reads a model's config.json, parsed, and as ModelConfig for rows of up to `longest` tokens."""
    file = resolve_directory(path, weights=False, setting=setting) / "config.json"
    if not file.is_file():
        raise UserError(f"{setting}: {file} is missing; a model directory must hold it")
    try:
        config = json.loads(file.read_text())
    except (ValueError, RecursionError) as e:
        raise UserError(f"{file} is no JSON: {e}") from e
    if not isinstance(config, dict):
        raise UserError(f"{file} must hold a JSON object, not {type(config).__name__}")
    return config, config_reader.parse_config(config, path=file, longest=longest)


def load_params(
    path: str | os.PathLike[str],
    cfg: ModelConfig,
    *,
    head: Head,
    param_dtype: Any,
    shardings: Params | None = None,
    key: jax.Array | None = None,
) -> Params:
    """Loads the parameters of a checkpoint, each tensor from a memory map straight into its shards.

    The host holds one tensor at a time besides the shards. Without shardings they go to the default device. A value
    model takes `score.weight` if the checkpoint has it (a sequence classifier), else a new one from `key`. A head
    of several bins is always new. Its unused language head is not read.
    """
    entries, slots = _find_parameters(path, cfg, head)
    loaded = params.tree(
        entries, lambda entry: _load(entry, slots, entry.dtype(param_dtype), _sharding(shardings, entry.path))
    )
    if head == "value" and "score.weight" not in slots:
        if key is None:
            raise ValueError(f"{path} has no score.weight: a value model needs a key for a new one")
        score_sharding = _sharding(shardings, ("score", "kernel"))
        loaded |= placing.put(init_head(cfg, key, head=head, param_dtype=param_dtype), score_sharding)
    return loaded


def adapter_slots(path: str | os.PathLike[str], spec: lora.Lora) -> dict[str, tensorfile.Slot]:
    """Finds the tensors of peft's adapter at `path`; UserError unless it is LoRA of this rank and scale."""
    folder, setting = expanded(path), f"model.lora_adapter_path={os.fspath(path)!r}"
    file, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    if not file.is_file() or not config.is_file():
        raise UserError(f"{setting}: it needs {file.name} and {config.name}; give a folder that peft or jppo wrote")
    try:
        stored = json.loads(config.read_text())
        rank, alpha = int(stored["r"]), float(stored["lora_alpha"])
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise UserError(f"{setting}: {config.name} has no r and lora_alpha ({e}); write it again") from e
    if other := [name for name in ("use_dora", "use_rslora", "alpha_pattern", "rank_pattern") if stored.get(name)]:
        raise UserError(f"{setting}: {config.name} has {other[0]}; only plain LoRA can be trained: merge it")
    for name, want, have in (("lora_rank", spec.rank, rank), ("lora_alpha", spec.alpha, alpha)):
        if want != have:
            raise UserError(f"{setting}: its {name.removeprefix('lora_')} is {have:g}; set model.{name}={have:g}")
    return tensorfile.file_slots(file)


def load_adapters(
    path: str | os.PathLike[str], cfg: ModelConfig, spec: lora.Lora, *, shardings: Params | None
) -> Params:
    """Loads the adapters of a policy from peft's folder into their shards, in f32."""
    slots, entries = adapter_slots(path, spec), lora.adapter_table(cfg, spec, head="lm")
    shapes = {name: entry.hf_shape for entry in entries for name in entry.hf_names}
    names = sorted(set(shapes) ^ set(slots)) or [name for name in shapes if slots[name].shape != shapes[name]]
    if names:
        fault = "lacks" if names[0] not in slots else "has another shape of" if names[0] in shapes else "also has"
        raise UserError(
            f"model.lora_adapter_path={os.fspath(path)!r} {fault} {_name_some(names)}; set model.target_modules to"
            " its modules, and model.path to its base"
        )
    return params.tree(entries, lambda entry: _load(entry, slots, jnp.float32, _sharding(shardings, entry.path)))


def _sharding(shardings: Params | None, path: tuple[str, ...]) -> Any:
    return None if shardings is None else params.leaf_at(shardings, path)


def check_weights(path: str | os.PathLike[str], cfg: ModelConfig, *, head: Head) -> None:
    """Raises UserError for a missing, extra, misshapen or truncated tensor; reads headers only."""
    _find_parameters(path, cfg, head)


def _find_parameters(
    path: str | os.PathLike[str], cfg: ModelConfig, head: Head
) -> tuple[tuple[Entry, ...], dict[str, tensorfile.Slot]]:
    """Finds the parameters that the checkpoint holds (not a new score), and their places."""
    directory = resolve_directory(path, weights=True)
    stored = _rename_tensors(cfg, tensorfile.pair_mxfp4(tensorfile.slots(directory)))
    unread = {name for name in stored if _BUFFERS.match(name) or name.startswith(cfg.unread_names)}
    slots = {name: slot for name, slot in stored.items() if name not in unread}
    entries = params.table(cfg, head=head)
    if cfg.value_bins > 1:  # scores of a classifier, not logits of a histogram
        slots.pop("score.weight", None)
    if head == "value" and "score.weight" not in slots:
        entries = tuple(entry for entry in entries if entry.hf != "score.weight")
    if head != "lm" and not cfg.tie_word_embeddings:
        slots.pop("lm_head.weight", None)
    if head == "trunk":
        slots = {name: slot for name, slot in slots.items() if name not in ("score.weight", "score.bias")}
    slots = _resolve_aliases(entries, slots)
    _check_names(directory, entries, slots)
    return entries, slots


def _rename_tensors(cfg: ModelConfig, stored: dict[str, tensorfile.Slot]) -> dict[str, tensorfile.Slot]:
    """Returns the tensors by the names of the table: text models may be saved with a prefix, experts in two tensors."""
    if cfg.multimodal:
        stored = {name.removeprefix("language_model.") if name.endswith("lm_head.weight") else name: slot
                  for name, slot in stored.items() if is_text_tensor(name)}  # fmt: skip
    if cfg.gated or cfg.multimodal:
        stored = {_PREFIX.sub("model.", name): slot for name, slot in stored.items()}
    fused = cfg.experts is not None and cfg.experts.names.fused
    return stored if fused else tensorfile.split_experts(stored)


def is_text_tensor(name: str) -> bool:
    """Whether a tensor of a multimodal model is its text model's."""
    return _PREFIX.match(name) is not None or name in ("lm_head.weight", "language_model.lm_head.weight")


def _resolve_aliases(entries: tuple[Entry, ...], slots: dict[str, tensorfile.Slot]) -> dict[str, tensorfile.Slot]:
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
        if same:
            pair = tensorfile.read_tensor(first, entry.hf), tensorfile.read_tensor(second, entry.alias)
            a, b = (tensor.view(np.uint8) for tensor in pair)
            same = np.array_equal(a, b)
        if not same:
            raise UserError(
                f"{second.file}: {entry.alias} differs from {entry.hf}, but config.json ties them; "
                "set tie_word_embeddings to false there"
            )
    return slots


def _check_names(directory: pathlib.Path, entries: tuple[Entry, ...], slots: dict[str, tensorfile.Slot]) -> None:
    """Raises UserError unless the checkpoint has exactly the parameters' tensors, in their shapes."""
    shapes = {name: entry.hf_shape for entry in entries for name in entry.hf_names}
    missing, extra = sorted(set(shapes) - set(slots)), sorted(set(slots) - set(shapes))
    if missing:
        raise UserError(f"{directory} lacks {_name_some(missing)}, which its config.json asks for")
    if extra:
        raise UserError(f"{slots[extra[0]].file} holds {_name_some(extra)}, which its config.json has no place for")
    for name, shape in shapes.items():
        if slots[name].shape != shape:
            stored = list(slots[name].shape)
            raise UserError(f"{slots[name].file}: {name} has shape {stored}, config.json asks for {list(shape)}")


def _name_some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more tensors" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _load(entry: Entry, slots: dict[str, tensorfile.Slot], dtype: Any, sharding: Any) -> Any:
    """Reads one parameter, filled tensor by tensor in its shards; quantised if its sharding is of codes and scales."""
    shards, method = sharding, "none"
    if isinstance(sharding, kernels.Quantized):
        sharding, method = sharding.codes, sharding.method
    form = kernels.stored_form(entry, dtype, method)
    array: Any = jax.jit(lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), form), out_shardings=shards)()
    for index, name in zip(np.ndindex(entry.numbered), entry.hf_names, strict=True):
        tensor = params.from_hf(entry, tensorfile.read_tensor(slots[name], name))
        if entry.padding and sharding is not None:  # else no mesh divides it, and each device would get all of it
            tensor = np.pad(tensor, [(0, entry.padding)] + [(0, 0)] * (tensor.ndim - 1))
        piece = tensor[(None,) * len(index)]
        array = _fill(array, placing.put(piece, _piece_sharding(sharding, piece.shape)), index)
        jax.block_until_ready(array)  # one tensor on the host at a time
    return array


def _piece_sharding(sharding: Any, shape: tuple[int, ...]) -> Any:
    """Returns the sharding of a tensor that becomes part of a parameter: the parameter's, where its shape allows."""
    if sharding is None:
        return None

    def num_shards(axes: str | tuple[str, ...] | None) -> int:
        return math.prod(sharding.mesh.shape[axis] for axis in ((axes,) if isinstance(axes, str) else axes or ()))

    spec = [None if n % num_shards(axes) else axes for n, axes in zip(shape, sharding.spec, strict=False)]
    return jax.NamedSharding(sharding.mesh, jax.P(*spec))


@functools.partial(jax.jit, donate_argnums=0)
def _fill(parameter: Any, piece: jax.Array, index: tuple[int, ...]) -> Any:
    """Writes the piece into `parameter` from the indices `index` of its first axes on."""

    def write(parameter: jax.Array, piece: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(parameter, piece, index + (0,) * (parameter.ndim - len(index)))

    return jax.tree.map(write, parameter, kernels.stored_like(parameter, piece))


def stored_tensors(path: str | os.PathLike[str], cfg: ModelConfig) -> Iterator[tuple[str, np.ndarray]]:
    """Yields a checkpoint's tensors as `hf_tensors` would, straight from its files, without a device."""
    entries, slots = _find_parameters(path, cfg, "lm")
    for entry in entries:
        for name in entry.hf_names:
            tensor = tensorfile.read_tensor(slots[name], name)
            yield name, tensor.astype(np.float32) if tensor.dtype == np.float64 else tensor
