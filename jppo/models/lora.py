"""LoRA (Hu et al., arXiv:2106.09685): adapters on frozen kernels, y = W x + (alpha / rank) B A x.

Adapters are a separate collection, so that the model without it is the model before training. The learned weights are
the tree `{'lora': adapters}`, for a critic with its `score`; the rest is the frozen base.
"""

import dataclasses
import itertools
import math
import zlib
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jppo.errors import UserError
from jppo.models import kernels, params, placing
from jppo.models.config import ModelConfig, Stack
from jppo.models.params import Entry, Head
from jppo.types import Array, Params

COLLECTION = "lora"
# The modules that can have an adapter: peft's name, and our path in a layer.
TARGETS = {
    "q_proj": ("attn", "q"),
    "k_proj": ("attn", "k"),
    "v_proj": ("attn", "v"),
    "o_proj": ("attn", "o"),
    "gate_proj": ("mlp", "gate"),  # of every expert, too
    "up_proj": ("mlp", "up"),
    "down_proj": ("mlp", "down"),
    "qkv_proj": ("attn", "qkv"),
    "gate_up_proj": ("mlp", "gate_up"),
    # of latent attention
    "q_a_proj": ("attn", "q_a"),
    "q_b_proj": ("attn", "q_b"),
    "kv_a_proj_with_mqa": ("attn", "kv_a"),
    "kv_b_proj": ("attn", "kv_b"),
}


@dataclasses.dataclass(frozen=True)
class Lora:
    """The adapters of a model."""

    rank: int
    alpha: float
    targets: tuple[str, ...]  # of TARGETS
    dropout: float = 0.0  # probability that an update zeroes an element of an adapter's input
    base: str = "none"  # how the frozen kernels are quantised, as model.base_quantization

    @property
    def scale(self) -> float:
        """Returns the factor of B A."""
        return self.alpha / self.rank


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Base:
    """The frozen weights of a model: all beside its adapters, or those that settings freeze."""

    params: Params
    scale: float = dataclasses.field(default=1.0, metadata=dict(static=True))  # the factor of B A
    dropout: float = dataclasses.field(default=0.0, metadata=dict(static=True))  # of the adapters' inputs


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapted:
    """A model in two parts, of which one learns: with adapters, or with frozen parameters."""

    base: Base
    learned: Params  # the adapters by the key `lora`, if any


Weights = Params | Adapted  # of a model, as the passes' argument


def join(learned: Params, base: Base | None) -> Weights:
    """Joins the learned weights with the frozen base; without a base they are the model."""
    return learned if base is None else Adapted(base, learned)


def variables(model: Weights, seeds: Array | None = None) -> dict[str, Params]:
    """Returns the collections of the flax module: `params`, and any adapters, B times their scale.

    With `seeds` [R, T] of the tokens the adapters have dropout: seeds of every layer, and the rate.
    """
    if not isinstance(model, Adapted):
        return {"params": model}
    learned = dict(model.learned)
    unscaled = learned.pop(COLLECTION, None)
    whole = {"params": params.merge(model.base.params, learned)}
    if unscaled is None:
        return whole
    adapters = jax.tree_util.tree_map_with_path(
        lambda path, x: x * model.base.scale if path[-1].key == "b" else x, unscaled
    )
    if seeds is not None and model.base.dropout:
        adapters = _add_dropout(adapters, jnp.asarray(seeds), model.base.dropout, "")
    return whole | {COLLECTION: adapters}


def _add_dropout(adapters: Params, seeds: jax.Array, rate: float, path: str) -> Params:
    """Adds `dropout` to each adapter of layers: their seeds [L, R, T] and their rate [L]."""
    if "a" not in adapters:
        return {name: _add_dropout(part, seeds, rate, f"{path}/{name}") for name, part in adapters.items()}
    layers = jnp.arange(adapters["a"].shape[0], dtype=jnp.uint32) + np.uint32(zlib.crc32(path.encode()))
    layer_seeds = hash_32_bits(seeds[None] ^ hash_32_bits(layers)[:, None, None])
    return {**adapters, "dropout": {"seeds": layer_seeds, "rate": jnp.full(layers.shape, rate, jnp.float32)}}


def drop_elements(x: jax.Array, seeds: jax.Array, rate: jax.Array) -> jax.Array:
    """Zeroes elements of x [R, T, ...] with probability `rate` and divides the others by 1 - rate.

    The choice follows from a token's seed and the element's number alone, however rows are packed or sharded.
    """
    number = jnp.arange(math.prod(x.shape[2:]), dtype=jnp.uint32).reshape(1, 1, *x.shape[2:])
    bits = hash_32_bits(seeds.reshape(*seeds.shape, *(1,) * (x.ndim - 2)) ^ hash_32_bits(number))
    is_kept = bits >= (rate * 2.0**32).astype(jnp.uint32)
    return jnp.where(is_kept, x / (1 - rate), 0).astype(x.dtype)


def hash_32_bits(x: Any) -> Any:
    """Hashes 32-bit numbers, the last step of MurmurHash3: any bit of x changes half of the result's."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def adapter_equations(equation: str) -> tuple[str, str]:
    """Derives A's and B's einsums from a kernel's: of 'rtd,dha->rtha' they are 'rtd,dz->rtz' and 'rtz,zha->rtha'."""
    ins, outs = equation.split("->")
    x, kernel = ins.split(",")
    inner, outer = [c for c in kernel if c not in outs], [c for c in kernel if c in outs]
    low_rank = "".join(c for c in x if c in outs) + "z"
    return f"{x},{''.join(inner)}z->{low_rank}", f"{low_rank},z{''.join(outer)}->{outs}"


def parse_targets(text: str) -> tuple[str, ...]:
    """Parses the modules of a setting, by peft's names and separated by commas; or all-linear: every one."""
    if text == "all-linear":
        return tuple(TARGETS)
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in TARGETS]
    if unknown or not names:
        raise UserError(
            f"model.target_modules={text!r}: {', '.join(unknown) if unknown else 'nothing'} is no module that can be"
            f" adapted; use all-linear, or some of {', '.join(TARGETS)}"
        )
    return tuple(name for name in TARGETS if name in names)


def adapter_table(model: ModelConfig, lora: Lora, *, head: Head) -> tuple[Entry, ...]:
    """Lists every learned parameter of a model with adapters, under peft's names."""
    kernels = {entry.path: entry for entry in params.table(model, head=head)}
    entries = []
    for name, stack in itertools.product(targets_of(model, lora), model.stacks):
        for kernel in (kernels[path] for path in _kernel_paths(model, stack, *TARGETS[name]) if path in kernels):
            lead, inner, outer = _split_letters(kernel)
            entries += [
                _make_entry(kernel, lora, "a", "lora_A", ("r", inner), f"{lead}{inner}r"),
                _make_entry(kernel, lora, "b", "lora_B", (outer, "r"), f"{lead}r{outer}"),
            ]
    if head == "value":
        score = kernels["score", "kernel"]
        entries.append(dataclasses.replace(score, hf=f"base_model.model.{score.hf}"))
    return tuple(entries)


def targets_of(model: ModelConfig, lora: Lora) -> tuple[str, ...]:
    """Returns the modules of the model that have adapters; UserError for a module that it has not."""
    present = {entry.path for entry in params.table(model, head="trunk")}
    paths = {
        name: [p for stack in model.stacks for p in _kernel_paths(model, stack, *path)]
        for name, path in TARGETS.items()
    }
    possible = tuple(name for name, target_paths in paths.items() if not present.isdisjoint(target_paths))
    routed = [n for n in lora.targets if any("experts" in p and "shared" not in p for p in paths[n] if p in present)]
    if lora.dropout and routed:
        raise UserError(
            f"model.lora_dropout={lora.dropout}: adapters of routed experts ({', '.join(routed)}) have no dropout; set"
            " it to 0, or name other modules by model.target_modules"
        )
    if lora.targets == tuple(TARGETS):  # all-linear
        return possible
    absent = [name for name in lora.targets if name not in possible]
    if absent:
        raise UserError(
            f"model.target_modules: a {model.family} model has no {', '.join(absent)}; use all-linear, or some of"
            f" {', '.join(possible)}"
        )
    return lora.targets


def base_method(model: ModelConfig, lora: Lora | None) -> str:
    """Returns the quantisation of a frozen base; UserError for a model most of which is not quantised."""
    if lora is None or lora.base == "none":
        return "none"
    if model.experts is not None:
        raise UserError(
            f"model.base_quantization={lora.base!r}: routed experts, most of a {model.family} model, are not quantised;"
            " set it to none, and spread the model by mesh.fsdp or mesh.expert"
        )
    return lora.base


def _kernel_paths(model: ModelConfig, stack: Stack, module: str, name: str) -> list[tuple[str, ...]]:
    """Returns the paths of the kernels that a target names in a stack: of every expert, and of one that all use.

    Experts that are one tensor have no adapters.
    """
    paths = [] if module == "mlp" and not stack.modules.dense else [(*stack.path, module, name, "kernel")]
    if module == "mlp" and stack.modules.sparse and model.experts is not None and model.experts.names.fused is None:
        paths += [(*stack.path, "experts", name), (*stack.path, "experts", "shared", name, "kernel")]
    return paths


def _split_letters(kernel: Entry) -> tuple[str, str, str]:
    """Returns a kernel's letters: of layers and experts, of its input (the second axis of HF's), and of its output."""
    lead, inner = kernel.letters[: len(kernel.numbered)], kernel.hf_letters[1]
    return (lead, inner, "".join(letter for letter in kernel.letters if letter not in lead + inner))


def _adapter_path(path: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the place of a parameter's adapter; the kernels of experts have no module of their own."""
    return path[:-1] if path[-1] == "kernel" else path


def _make_entry(kernel: Entry, lora: Lora, name: str, peft: str, hf_letters: tuple[str, ...], letters: str) -> Entry:
    """Makes the entry of a kernel's A or B."""
    sizes = dict(zip(kernel.letters, kernel.shape, strict=True)) | {"r": lora.rank}
    axes = dict(zip(kernel.letters, kernel.axes, strict=True)) | {"r": None}
    return Entry(
        path=(COLLECTION, *_adapter_path(kernel.path), name),
        hf=f"base_model.model.{kernel.hf.removesuffix('.weight')}.{peft}.weight",
        hf_letters=hf_letters,
        letters=letters,
        shape=tuple(sizes[letter] for letter in letters),
        axes=tuple(axes[letter] for letter in letters),
        alias=None,
        first=kernel.first,
        step=kernel.step,
    )


def init(model: ModelConfig, lora: Lora, key: jax.Array) -> Params:
    """Initialises adapters: A uniform within 1 / sqrt(its inputs), as in peft, B zero. Pure, so jit may shard them."""

    def leaf(entry: Entry) -> jax.Array:
        if entry.path[-1] == "b":
            return jnp.zeros(entry.shape, jnp.float32)
        bound = 1 / math.sqrt(math.prod(entry.shape[len(entry.numbered) : -1]))
        stacks, target_number = len(model.stacks), [name for _, name in TARGETS.values()].index(entry.path[-2])
        stack = next(i for i, other in enumerate(model.stacks) if entry.path[1:][: len(other.path)] == other.path)
        target_number += len(TARGETS) * (stack + stacks * ("shared" in entry.path))
        return jax.random.uniform(jax.random.fold_in(key, target_number), entry.shape, jnp.float32, -bound, bound)

    return params.tree(adapter_table(model, lora, head="lm"), leaf)


def kernel_and_adapter(entry: Entry, model: Weights) -> tuple[jax.Array, dict[str, jax.Array] | None]:
    """Returns the parameter of `entry` on its devices, and its adapter with B times its scale, or None."""
    if not isinstance(model, Adapted):
        return kernels.dequantize(placing.to_device(params.leaf_at(model, entry.path))), None
    holder = model.base.params if find_part(model.learned, entry.path) is None else model.learned
    adapter = placing.to_device(find_part(model.learned, (COLLECTION, *_adapter_path(entry.path))))
    scaled = None if adapter is None else {"a": adapter["a"], "b": adapter["b"] * model.base.scale}
    return kernels.dequantize(placing.to_device(params.leaf_at(holder, entry.path))), scaled


def merge(entry: Entry, kernel: jax.Array, adapter: dict[str, jax.Array]) -> jax.Array:
    """Computes W + B A, in W's dtype: both of `entry`, all layers of it or some."""
    chex.assert_rank(kernel, len(entry.letters))
    lead, inner, outer = _split_letters(entry)
    product = jnp.einsum(f"{lead}{inner}r,{lead}r{outer}->{entry.letters}", adapter["a"], adapter["b"])
    return (kernel.astype(jnp.float32) + product).astype(kernel.dtype)


def find_part(tree: Any, path: tuple[str, ...]) -> Any:
    """Returns the part of a nested dict at `path`, such as the adapters of a layer, or None."""
    for key in path:
        tree = tree.get(key) if tree is not None else None
    return tree


def peft_config(model: ModelConfig, lora: Lora, *, head: Head, base: str) -> dict[str, Any]:
    """Returns peft's adapter_config.json."""
    names = [entry.hf.split(".")[-3] for entry in adapter_table(model, lora, head="lm")]  # the family's own
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if head == "lm" else "SEQ_CLS",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "target_modules": list(dict.fromkeys(names)),
        "modules_to_save": ["score"] if head == "value" else None,
    }
