"""The table of parameters: path, HF's name, shape, logical axes, layout and ties of each.

Loading, saving, sharding and the export to the rollout engine all read it; no other module has a list of names.
Parameters of the layers are stored stacked: their first axis is the layer.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jppo.models.config import Delta, Experts, Gemma4, LayerModules, ModelConfig, Stack
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
    "E": "experts",
    "M": "mlp",  # of an expert
    "S": "mlp",  # of a shared expert
    "A": None,
    "Q": None,  # heads of q, k and v: no mesh axis shards all three alike
    "N": None,  # gate and up
    "I": "embed",  # latent attention: of the queries' latent as an input
    "C": "embed",  # of the latent of keys and values as an input
    "P": None,  # of the queries' latent as an output
    "J": None,  # of the other latent and the rotary key as an output
    "U": None,  # of a head's key without the rotary part, and its value
    "W": None,  # of a head's value
    "B": None,  # outputs of a value head
    "1": None,
    "G": None,  # of 2: a query and its gate
    "O": "heads",  # values of a gated delta net
    "R": "heads",  # its keys
    "Z": None,  # channels of its convolution
    "T": None,
    "X": None,  # outputs of its joined projections
    "Y": None,
    "p": None,  # of an embedding in every layer
    "l": "embed",  # of all layers' embeddings
    "m": None,  # the same as outputs of a projection
}


@dataclasses.dataclass(frozen=True)
class Entry:
    """A parameter. `letters` names the axes of our array, `hf_letters` the axes of the HF tensor (of one layer)."""

    path: tuple[str, ...]
    hf: str  # name of the HF tensor, with {layer} if our array is stacked, and {expert} if it has each one's own
    hf_letters: tuple[str, ...]  # a word joins several of our axes in one of HF's: ('HA', 'D')
    letters: str  # of our array; first L if stacked
    shape: tuple[int, ...]  # of our array
    axes: tuple[str | None, ...]  # logical axes of our array
    alias: str | None  # another name under which a checkpoint may store the same matrix
    padding: int = 0  # rows on the first axis that the HF tensor lacks
    first: int = 0  # layer of a stacked array
    step: int = 1  # to its next layer
    buffer: bool = False  # not trained

    @property
    def stacked(self) -> bool:
        """Whether the first axis is the layer."""
        return self.letters[0] == "L"

    @property
    def still(self) -> int:
        """Returns the number of last rows of the first axis that no update changes."""
        return self.shape[0] if self.buffer else self.padding

    def dtype(self, model_dtype: Any) -> Any:
        """Returns the parameter's dtype in a model of this one."""
        return jnp.float32 if self.path[-1] == "correction" else model_dtype

    @property
    def numbered(self) -> tuple[int, ...]:
        """Returns the sizes of our first axes that HF's names number: layers, then experts."""
        return self.shape[: ("{layer}" in self.hf) + ("{expert}" in self.hf)]

    @property
    def matrix(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Returns the input and output axes of a layer's matrix; None for other parameters."""
        words = self.hf_letters
        if words[0] == "E" and len(words) == 3:  # of all experts; a gate and an up are a matrix each
            words = ("D", "M") if self.path[-1] == "down" else ("M", "D")
        if not self.stacked or self.path[-1].endswith("bias") or len(words) != 2:
            return None
        out, into = (tuple(self.letters.index(letter) for letter in word) for word in words)
        return into, out

    @property
    def hf_shape(self) -> tuple[int, ...]:
        """Returns the shape of HF's tensor, of one layer and expert where ours has several."""
        sizes = dict(zip(self.letters, self.shape, strict=True))
        sizes[self.letters[0]] -= self.padding
        return tuple(math.prod(sizes[letter] for letter in word) for word in self.hf_letters)

    @property
    def hf_names(self) -> tuple[str, ...]:
        """Returns HF's names, in the order of `np.ndindex(numbered)`."""
        indices = (dict(zip(("layer", "expert"), at, strict=False)) for at in np.ndindex(self.numbered))
        return tuple(self.hf.format(**at | {"layer": self.first + self.step * at.get("layer", 0)}) for at in indices)


Rows = Callable[..., list[Entry]]  # makes the entries of a row, one of each stack


def _entry_maker(model: ModelConfig) -> Callable[..., Entry]:
    """Makes the function that makes an entry from a row of the table: it fills in shape and axes by the letters."""
    sizes = {
        "V": model.padded_vocab_size,
        "D": model.hidden_size,
        "H": model.num_heads,
        "K": model.num_kv_heads,
        "F": model.intermediate_size,
        "A": model.head_dim,
        "B": model.value_bins,
        "Q": model.num_heads + 2 * model.num_kv_heads,
        "N": 2,
        "1": 1,
        "G": 2,
    }
    if model.experts is not None:
        sizes |= {"E": model.experts.count, "M": model.experts.width, "S": model.experts.shared_width}
    if (latent := model.latent) is not None:
        sizes |= {"C": latent.rank, "J": latent.cached_dim, "U": latent.plain_dim + latent.value_dim}
        sizes |= {"A": latent.head_dim, "W": latent.value_dim} | dict.fromkeys("IP", latent.query_rank or 0)
    if (delta := model.delta) is not None:
        sizes |= {"R": delta.key_heads, "O": delta.value_heads, "W": delta.value_dim, "Z": delta.channels}
        sizes |= dict(zip("XY", delta.joined_widths, strict=True)) | {"T": delta.taps}
    if (gemma4 := model.gemma4) is not None:
        sizes |= {"p": gemma4.per_layer} | dict.fromkeys("lm", gemma4.per_layer * model.num_layers)

    def layer_sizes(modules: LayerModules) -> dict[str, int]:
        return dict(zip("KA", model.heads_of(modules), strict=True)) | {"F": model.mlp_width(modules)}

    def entry(
        path: str, hf: str, hf_letters: str, letters: str, alias: str | None = None, stack: Stack | None = None
    ) -> Entry:
        vector = letters.lstrip("L") in ("D", "A", "I", "C")  # norms, and biases of the residual stream
        letter_sizes = sizes if stack is None or model.gemma4 is None else sizes | layer_sizes(stack.modules)
        return Entry(
            path=tuple(path.split("/")) if stack is None else (*stack.path, *path.split("/")),
            hf=hf if stack is None else f"model.layers.{{layer}}.{hf}",
            hf_letters=tuple(hf_letters.split()),
            letters=letters,
            shape=tuple(stack.count if stack and letter == "L" else letter_sizes[letter] for letter in letters),
            axes=tuple("norm" if vector and letter in "DAIC" else AXES[letter] for letter in letters),
            alias=alias,
            padding=model.padded_vocab_size - model.vocab_size if letters[0] == "V" else 0,
            first=0 if stack is None else stack.first,
            step=1 if stack is None else stack.step,
            buffer=hf.endswith(("e_score_correction_bias", "layer_scalar")),
        )

    return entry


def table(model: ModelConfig, *, head: Head) -> tuple[Entry, ...]:
    """Lists every parameter of the model with this head, in the order of HF's files' layers."""
    entry = _entry_maker(model)

    def layer(*row: str, **modules: Any) -> list[Entry]:
        """Makes the entries of a row: one for each stack whose layers have these modules."""
        stacks = [stack for stack in model.stacks if all(getattr(stack.modules, k) == v for k, v in modules.items())]
        return [entry(*row, stack=stack) for stack in stacks]

    def attention(*row: str, **modules: Any) -> list[Entry]:
        return layer(*row, mixer="attention", **modules)

    alias = "lm_head.weight" if model.tie_word_embeddings else None
    # A norm on attention's output has the usual name of the MLP's own norm.
    before_mlp = "pre_feedforward_layernorm.weight" if model.post_norms else "post_attention_layernorm.weight"
    rows = [
        entry("embed/embedding", "model.embed_tokens.weight", "V D", "VD", alias),
        *_attention_entries(model, attention),
        *_mlp_entries(model, layer),
        entry("norm/scale", "model.norm.weight", "D", "D"),
    ]
    if model.pre_norms:
        rows += layer("attn_norm/scale", "input_layernorm.weight", "D", "LD")
        rows += layer("mlp_norm/scale", before_mlp, "D", "LD")
    if model.post_norms:
        rows += layer("attn_post_norm/scale", "post_attention_layernorm.weight", "D", "LD")
        rows += layer("mlp_post_norm/scale", "post_feedforward_layernorm.weight", "D", "LD")
    if model.qk_norm is not None:
        normed_q, normed_k = ("A", "A") if model.qk_norm == "head" else ("HA", "KA")
        rows += attention("attn/q_norm/scale", "self_attn.q_norm.weight", normed_q, f"L{normed_q}")
        rows += attention("attn/k_norm/scale", "self_attn.k_norm.weight", normed_k, f"L{normed_k}", keyed=True)
    if model.delta is not None:
        rows += _delta_entries(model.delta, functools.partial(layer, mixer="delta"))
    if model.experts is not None:
        rows += _expert_entries(model.experts, layer)
    if model.gemma4 is not None:
        rows += _gemma4_entries(model.gemma4, layer)
        if model.gemma4.per_layer:
            rows += [
                entry("per_layer/embed/embedding", "model.embed_tokens_per_layer.weight", "V l", "Vl"),
                entry("per_layer/project/kernel", "model.per_layer_model_projection.weight", "m D", "Dm"),
                entry("per_layer/norm/scale", "model.per_layer_projection_norm.weight", "p", "p"),
            ]
    if head == "value":
        rows += [entry("score/kernel", "score.weight", "B D", "DB")]
    elif head == "lm" and not model.tie_word_embeddings:
        rows += [entry("lm_head/kernel", "lm_head.weight", "V D", "VD")]
    return tuple(rows)


def _attention_entries(model: ModelConfig, layer: Rows) -> list[Entry]:
    """Lists the parameters of attention, without its norms of queries and keys by head."""
    rows = _grouped_entries(model, layer) if model.latent is None else _latent_entries(model, layer)
    return rows + (layer("attn/o/bias", "self_attn.o_proj.bias", "D", "LD") if model.o_bias else [])


def _grouped_entries(model: ModelConfig, layer: Rows) -> list[Entry]:
    """Lists the parameters of attention with a key and value for each group of query heads."""
    q_letters = "HGA" if model.gated else "HA"
    rows = layer("attn/o/kernel", "self_attn.o_proj.weight", "D HA", "LHAD")
    if model.fused:
        rows += layer("attn/qkv/kernel", "self_attn.qkv_proj.weight", "QA D", "LDQA")
    else:
        rows += layer("attn/q/kernel", "self_attn.q_proj.weight", f"{q_letters} D", f"LD{q_letters}")
        rows += layer("attn/k/kernel", "self_attn.k_proj.weight", "KA D", "LDKA", keyed=True)
        rows += layer("attn/v/kernel", "self_attn.v_proj.weight", "KA D", "LDKA", valued=True)
    if model.qkv_bias:
        rows += layer("attn/q/bias", "self_attn.q_proj.bias", q_letters, f"L{q_letters}")
        rows += layer("attn/k/bias", "self_attn.k_proj.bias", "KA", "LKA", keyed=True)
        rows += layer("attn/v/bias", "self_attn.v_proj.bias", "KA", "LKA", valued=True)
    return rows + (layer("attn/sinks", "self_attn.sinks", "H", "LH") if model.sinks else [])


def _latent_entries(model: ModelConfig, layer: Rows) -> list[Entry]:
    assert model.latent is not None
    rows = [
        *layer("attn/kv_a/kernel", "self_attn.kv_a_proj_with_mqa.weight", "J D", "LDJ"),
        *layer("attn/kv_norm/scale", "self_attn.kv_a_layernorm.weight", "C", "LC"),
        *layer("attn/kv_b/kernel", "self_attn.kv_b_proj.weight", "HU C", "LCHU"),
        *layer("attn/o/kernel", "self_attn.o_proj.weight", "D HW", "LHWD"),
    ]
    if model.qkv_bias:
        rows += layer("attn/kv_a/bias", "self_attn.kv_a_proj_with_mqa.bias", "J", "LJ")
    if model.latent.query_rank is None:
        return rows + layer("attn/q/kernel", "self_attn.q_proj.weight", "HA D", "LDHA")
    if model.qkv_bias:
        rows += layer("attn/q_a/bias", "self_attn.q_a_proj.bias", "P", "LP")
    rows += layer("attn/q_a/kernel", "self_attn.q_a_proj.weight", "P D", "LDP")
    rows += layer("attn/q_norm/scale", "self_attn.q_a_layernorm.weight", "I", "LI")
    return rows + layer("attn/q_b/kernel", "self_attn.q_b_proj.weight", "HA I", "LIHA")


def _delta_entries(spec: Delta, layer: Rows) -> list[Entry]:
    rows = [
        *layer("delta/conv", "linear_attn.conv1d.weight", "Z 1 T", "LZ1T"),
        *layer("delta/a_log", "linear_attn.A_log", "O", "LO"),
        *layer("delta/dt_bias", "linear_attn.dt_bias", "O", "LO"),
        *layer("delta/scale", "linear_attn.norm.weight", "W", "LW"),
        *layer("delta/out/kernel", "linear_attn.out_proj.weight", "D OW", "LOWD"),
    ]
    if spec.joined:
        return [
            *layer("delta/qkvz/kernel", "linear_attn.in_proj_qkvz.weight", "RX D", "LDRX"),
            *layer("delta/ba/kernel", "linear_attn.in_proj_ba.weight", "RY D", "LDRY"),
            *rows,
        ]
    return [
        *layer("delta/qkv/kernel", "linear_attn.in_proj_qkv.weight", "Z D", "LDZ"),
        *layer("delta/z/kernel", "linear_attn.in_proj_z.weight", "OW D", "LDOW"),
        *layer("delta/b/kernel", "linear_attn.in_proj_b.weight", "O D", "LDO"),
        *layer("delta/a/kernel", "linear_attn.in_proj_a.weight", "O D", "LDO"),
        *rows,
    ]


def _gemma4_entries(spec: Gemma4, layer: Rows) -> list[Entry]:
    rows = layer("scalar", "layer_scalar", "1", "L1")
    if spec.per_layer:
        rows += layer("per_layer_gate/kernel", "per_layer_input_gate.weight", "p D", "LDp")
        rows += layer("per_layer_out/kernel", "per_layer_projection.weight", "D p", "LpD")
        rows += layer("per_layer_norm/scale", "post_per_layer_input_norm.weight", "D", "LD")
    return rows


def _expert_entries(spec: Experts, layer: Rows) -> list[Entry]:
    names = spec.names
    module = f"{names.module}." if names.module else ""
    expert_prefix = f"{module}experts.{{expert}}"
    rows = layer("experts/router", f"{module}{names.router}.weight", "E D", "LDE", sparse=True)
    if names.fused is not None:
        gate_up, down = names.fused
        rows += layer("experts/gate_up", f"{module}experts.gate_up_proj", gate_up, "LNEDM", sparse=True)
        rows += layer("experts/down", f"{module}experts.down_proj", down, "LEDM", sparse=True)
        if names.beside:
            rows += layer("experts/router_norm/scale", "router.scale", "D", "LD", sparse=True)
            rows += layer("experts/expert_scale", "router.per_expert_scale", "E", "LE", sparse=True)
            rows += layer("mlp_own_norm/scale", "post_feedforward_layernorm_1.weight", "D", "LD", sparse=True)
            rows += layer("experts_norm/scale", "pre_feedforward_layernorm_2.weight", "D", "LD", sparse=True)
            rows += layer("experts_post_norm/scale", "post_feedforward_layernorm_2.weight", "D", "LD", sparse=True)
        if names.biased:
            rows += layer("experts/router_bias", f"{module}{names.router}.bias", "E", "LE", sparse=True)
            rows += layer("experts/gate_up_bias", f"{module}experts.gate_up_proj_bias", "E MN", "LNEM", sparse=True)
            rows += layer("experts/down_bias", f"{module}experts.down_proj_bias", "E D", "LED", sparse=True)
        return rows
    rows += layer("experts/gate", f"{expert_prefix}.{names.gate}.weight", "M D", "LEDM", sparse=True)
    rows += layer("experts/up", f"{expert_prefix}.{names.up}.weight", "M D", "LEDM", sparse=True)
    rows += layer("experts/down", f"{expert_prefix}.{names.down}.weight", "D M", "LEDM", sparse=True)
    if spec.routing.corrected:
        rows += layer("experts/correction", f"{module}gate.e_score_correction_bias", "E", "LE", sparse=True)
    if spec.shared_width:
        shared = f"{module}{names.shared}"
        rows += layer("experts/shared/gate/kernel", f"{shared}.gate_proj.weight", "S D", "LDS", sparse=True)
        rows += layer("experts/shared/up/kernel", f"{shared}.up_proj.weight", "S D", "LDS", sparse=True)
        rows += layer("experts/shared/down/kernel", f"{shared}.down_proj.weight", "D S", "LSD", sparse=True)
    if names.shared_gate:
        rows += layer("experts/shared_gate", f"{module}shared_expert_gate.weight", "1 D", "LD1", sparse=True)
    return rows


def _mlp_entries(model: ModelConfig, layer: Rows) -> list[Entry]:
    rows = layer("mlp/down/kernel", "mlp.down_proj.weight", "D F", "LFD", dense=True)
    if model.fused:
        rows += layer("mlp/gate_up/kernel", "mlp.gate_up_proj.weight", "NF D", "LDNF", dense=True)
    else:
        rows += layer("mlp/gate/kernel", "mlp.gate_proj.weight", "F D", "LDF", dense=True)
        rows += layer("mlp/up/kernel", "mlp.up_proj.weight", "F D", "LDF", dense=True)
    if model.mlp_bias:
        rows += layer("mlp/gate/bias", "mlp.gate_proj.bias", "F", "LF", dense=True)
        rows += layer("mlp/up/bias", "mlp.up_proj.bias", "F", "LF", dense=True)
        rows += layer("mlp/down/bias", "mlp.down_proj.bias", "D", "LD", dense=True)
    return rows


def from_hf(entry: Entry, tensor: np.ndarray) -> np.ndarray:
    """Converts HF's tensor (of one layer, and expert) to our layout; a view."""
    chex.assert_rank(tensor, len(entry.hf_letters))
    letters = entry.letters[len(entry.numbered) :]
    hf_letters = "".join(entry.hf_letters)
    sizes = dict(zip(entry.letters, entry.shape, strict=True))
    sizes[entry.letters[0]] -= entry.padding
    split = tensor.reshape([sizes[letter] for letter in hf_letters])
    return split.transpose([hf_letters.index(letter) for letter in letters])


def to_hf(entry: Entry, array: jax.Array) -> jax.Array:
    """Converts our array (some or all layers and experts) to HF's layout, still stacked; the inverse of `from_hf`."""
    chex.assert_rank(array, len(entry.letters))
    array = array[: array.shape[0] - entry.padding]  # HF has no padding rows
    lead_letters = entry.letters[: len(entry.numbered)]
    hf_letters = lead_letters + "".join(entry.hf_letters)
    merged = array.shape[: len(lead_letters)] + entry.hf_shape
    return jnp.transpose(array, [entry.letters.index(letter) for letter in hf_letters]).reshape(merged)


def tree(entries: tuple[Entry, ...], leaf: Callable[[Entry], Any]) -> dict[str, Any]:
    """Makes the nested dict of a model's parameters, with `leaf(entry)` in place of each."""
    root: dict[str, Any] = {}
    for entry in entries:
        node = root
        for key in entry.path[:-1]:
            node = node.setdefault(key, {})
        node[entry.path[-1]] = leaf(entry)
    return root


def leaf_at(params: Params, path: tuple[str, ...]) -> Any:
    """Returns the leaf of a nested dict at `path`."""
    for key in path:
        params = params[key]
    return params


def abstract_params(model: ModelConfig, *, head: Head, param_dtype: Any) -> dict[str, Any]:
    """Returns `params` as shapes and dtypes: nothing is allocated."""
    return tree(table(model, head=head), lambda entry: jax.ShapeDtypeStruct(entry.shape, entry.dtype(param_dtype)))
