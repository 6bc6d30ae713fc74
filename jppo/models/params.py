"""The table of parameters: path, HF's name, shape, logical axes, layout and ties of each.

Loading, saving, sharding and the export to the rollout engine all read it; no other module knows a weight's name.
Parameters of the layers are stored stacked: their first axis is the layer.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jppo.models.families import ModelConfig
from jppo.types import Params

Head = Literal["lm", "value", "trunk"]  # trunk: none

# The legend's letters as the logical axes of the sharding rules.
AXES = {
    "L": "layers",
    "V": "vocab",
    "D": "embed",
    "H": "heads",
    "K": "kv_heads",
    "F": "mlp",
    "A": None,
    "1": None,
}


@dataclasses.dataclass(frozen=True)
class Entry:
    """A parameter. `letters` names the axes of our array, `hf_letters` the axes of the HF tensor (of one layer)."""

    path: tuple[str, ...]
    hf: str  # name of the HF tensor, with {layer} if our array is stacked
    hf_letters: tuple[str, ...]  # a word joins several of our axes in one of HF's: ('HA', 'D')
    letters: str  # of our array; first L if stacked
    shape: tuple[int, ...]  # of our array
    axes: tuple[str | None, ...]  # logical axes of our array
    alias: str | None  # another name under which a checkpoint may store the same matrix
    padding: int = 0  # rows on the first axis that the HF tensor lacks

    @property
    def stacked(self) -> bool:
        """Whether the first axis is the layer."""
        return self.letters[0] == "L"

    @property
    def matrix(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Returns the input and output axes of a layer's matrix; None for other parameters."""
        if not self.stacked or len(self.hf_letters) != 2:
            return None
        out, into = (tuple(self.letters.index(letter) for letter in word) for word in self.hf_letters)
        return into, out

    @property
    def hf_shape(self) -> tuple[int, ...]:
        """Returns the shape of HF's tensor, of one layer where ours is stacked."""
        sizes = dict(zip(self.letters, self.shape, strict=True))
        sizes[self.letters[0]] -= self.padding
        return tuple(math.prod(sizes[letter] for letter in word) for word in self.hf_letters)

    @property
    def hf_names(self) -> tuple[str, ...]:
        """Returns HF's names: one a layer where ours is stacked, else one."""
        return tuple(self.hf.format(layer=i) for i in range(self.shape[0])) if self.stacked else (self.hf,)


def _make_entry(model: ModelConfig) -> Callable[..., Entry]:
    sizes = {
        "L": model.num_layers,
        "V": model.padded_vocab_size,
        "D": model.hidden_size,
        "H": model.num_heads,
        "K": model.num_kv_heads,
        "F": model.intermediate_size,
        "A": model.head_dim,
        "1": 1,
    }

    def entry(path: str, hf: str, hf_letters: str, letters: str, alias: str | None = None) -> Entry:
        vector = letters.lstrip("L") in ("D", "A")  # norms, and biases of the residual stream
        return Entry(
            path=tuple(path.split("/")),
            hf=f"model.layers.{{layer}}.{hf}" if letters[0] == "L" else hf,
            hf_letters=tuple(hf_letters.split()),
            letters=letters,
            shape=tuple(sizes[letter] for letter in letters),
            axes=tuple("norm" if vector and letter in "DA" else AXES[letter] for letter in letters),
            alias=alias,
            padding=model.padded_vocab_size - model.vocab_size if letters[0] == "V" else 0,
        )

    return entry


def table(model: ModelConfig, *, head: Head) -> tuple[Entry, ...]:
    """Lists every parameter of the model with this head, in the order of HF's files' layers."""
    entry = _make_entry(model)
    tied = "lm_head.weight" if model.tie_word_embeddings else None
    # With a norm on attention's output, it has the usual name of the MLP's own norm.
    before_mlp = "pre_feedforward_layernorm.weight" if model.post_norms else "post_attention_layernorm.weight"
    rows = [
        entry("embed/embedding", "model.embed_tokens.weight", "V D", "VD", tied),
        entry("layers/attn_norm/scale", "input_layernorm.weight", "D", "LD"),
        entry("layers/attn/q/kernel", "self_attn.q_proj.weight", "HA D", "LDHA"),
        entry("layers/attn/k/kernel", "self_attn.k_proj.weight", "KA D", "LDKA"),
        entry("layers/attn/v/kernel", "self_attn.v_proj.weight", "KA D", "LDKA"),
        entry("layers/attn/o/kernel", "self_attn.o_proj.weight", "D HA", "LHAD"),
        entry("layers/mlp_norm/scale", before_mlp, "D", "LD"),
        entry("layers/mlp/gate/kernel", "mlp.gate_proj.weight", "F D", "LDF"),
        entry("layers/mlp/up/kernel", "mlp.up_proj.weight", "F D", "LDF"),
        entry("layers/mlp/down/kernel", "mlp.down_proj.weight", "D F", "LFD"),
        entry("norm/scale", "model.norm.weight", "D", "D"),
    ]
    if model.post_norms:
        rows += [
            entry("layers/attn_post_norm/scale", "post_attention_layernorm.weight", "D", "LD"),
            entry("layers/mlp_post_norm/scale", "post_feedforward_layernorm.weight", "D", "LD"),
        ]
    if model.qk_norm:
        rows += [
            entry("layers/attn/q_norm/scale", "self_attn.q_norm.weight", "A", "LA"),
            entry("layers/attn/k_norm/scale", "self_attn.k_norm.weight", "A", "LA"),
        ]
    if model.qkv_bias:
        rows += [
            entry("layers/attn/q/bias", "self_attn.q_proj.bias", "HA", "LHA"),
            entry("layers/attn/k/bias", "self_attn.k_proj.bias", "KA", "LKA"),
            entry("layers/attn/v/bias", "self_attn.v_proj.bias", "KA", "LKA"),
        ]
    if model.o_bias:
        rows += [entry("layers/attn/o/bias", "self_attn.o_proj.bias", "D", "LD")]
    if model.mlp_bias:
        rows += [
            entry("layers/mlp/gate/bias", "mlp.gate_proj.bias", "F", "LF"),
            entry("layers/mlp/up/bias", "mlp.up_proj.bias", "F", "LF"),
            entry("layers/mlp/down/bias", "mlp.down_proj.bias", "D", "LD"),
        ]
    if head == "value":
        rows += [entry("score/kernel", "score.weight", "1 D", "D1")]
    elif head == "lm" and not model.tie_word_embeddings:
        rows += [entry("lm_head/kernel", "lm_head.weight", "V D", "VD")]
    return tuple(rows)


def from_hf(entry: Entry, tensor: np.ndarray) -> np.ndarray:
    """Converts HF's tensor (of one layer) to our layout; a view."""
    chex.assert_rank(tensor, len(entry.hf_letters))
    ours = entry.letters.lstrip("L")
    theirs = "".join(entry.hf_letters)
    sizes = dict(zip(entry.letters, entry.shape, strict=True))
    sizes[entry.letters[0]] -= entry.padding
    split = tensor.reshape([sizes[letter] for letter in theirs])
    return split.transpose([theirs.index(letter) for letter in ours])


def to_hf(entry: Entry, array: jax.Array) -> jax.Array:
    """Converts our array (some or all layers) to HF's layout, still stacked; pure, the inverse of `from_hf`."""
    chex.assert_rank(array, len(entry.letters))
    array = array[: array.shape[0] - entry.padding]  # HF has no padding rows
    lead = "L" if entry.stacked else ""
    theirs = lead + "".join(entry.hf_letters)
    merged = array.shape[: len(lead)] + entry.hf_shape
    return jnp.transpose(array, [entry.letters.index(letter) for letter in theirs]).reshape(merged)


def tree(entries: tuple[Entry, ...], leaf: Callable[[Entry], Any]) -> dict[str, Any]:
    """Makes the nested dict of `params` with `leaf(entry)` in each place."""
    root: dict[str, Any] = {}
    for entry in entries:
        node = root
        for key in entry.path[:-1]:
            node = node.setdefault(key, {})
        node[entry.path[-1]] = leaf(entry)
    return root


def get(params: Params, path: tuple[str, ...]) -> Any:
    """Returns the leaf of a nested dict at `path`."""
    for key in path:
        params = params[key]
    return params


def abstract(model: ModelConfig, *, head: Head, param_dtype: Any) -> dict[str, Any]:
    """Returns `params` as shapes and dtypes: nothing is allocated."""
    return tree(table(model, head=head), lambda entry: jax.ShapeDtypeStruct(entry.shape, param_dtype))


def logical_axes(model: ModelConfig, *, head: Head) -> dict[str, Any]:
    """Returns `params` with a tuple of logical axis names in place of each array."""
    return tree(table(model, head=head), lambda entry: entry.axes)
