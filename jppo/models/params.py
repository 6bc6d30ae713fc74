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
        stacks = [stack for stack in model.stacks if all(getattr(stack.modules, k) == v for k, v in modules.items())]
        return [entry(*row, stack=stack) for stack in stacks]

    def project(path: str, hf: str, hf_letters: str, letters: str, bias: bool = False, **modules: Any) -> list[Entry]:
        """Makes the entries of a projection's kernel, and of its bias if it has one: by HF's first axis."""
        rows, out = layer(f"{path}/kernel", f"{hf}.weight", hf_letters, letters, **modules), hf_letters.split()[0]
        return rows + (layer(f"{path}/bias", f"{hf}.bias", out, f"L{out}", **modules) if bias else [])

    attention, project_attention = (functools.partial(make, mixer="attention") for make in (layer, project))
    alias = "lm_head.weight" if model.tie_word_embeddings else None
    # A norm on attention's output has the usual name of the MLP's own norm.
    before_mlp = "pre_feedforward_layernorm.weight" if model.post_norms else "post_attention_layernorm.weight"
    rows = [
        entry("embed/embedding", "model.embed_tokens.weight", "V D", "VD", alias),
        *(_grouped_entries if model.latent is None else _latent_entries)(model, attention, project_attention),
        *_mlp_entries(model, functools.partial(project, dense=True)),
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
        rows += _delta_entries(model.delta, *(functools.partial(make, mixer="delta") for make in (layer, project)))
    if model.experts is not None:
        rows += _expert_entries(model.experts, *(functools.partial(make, sparse=True) for make in (layer, project)))
    if model.gemma4 is not None:
        rows += _gemma4_entries(model.gemma4, layer, project)
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


def _grouped_entries(model: ModelConfig, layer: Rows, project: Rows) -> list[Entry]:
    """Lists the parameters of attention with a key and value for each group of query heads."""
    q_letters, bias = "HGA" if model.gated else "HA", model.qkv_bias
    rows = project("attn/o", "self_attn.o_proj", "D HA", "LHAD", model.o_bias)
    if model.fused:
        rows += project("attn/qkv", "self_attn.qkv_proj", "QA D", "LDQA")
    else:
        rows += project("attn/q", "self_attn.q_proj", f"{q_letters} D", f"LD{q_letters}", bias)
        rows += project("attn/k", "self_attn.k_proj", "KA D", "LDKA", bias, keyed=True)
        rows += project("attn/v", "self_attn.v_proj", "KA D", "LDKA", bias, valued=True)
    return rows + (layer("attn/sinks", "self_attn.sinks", "H", "LH") if model.sinks else [])


def _latent_entries(model: ModelConfig, layer: Rows, project: Rows) -> list[Entry]:
    assert model.latent is not None
    rows = [
        *project("attn/kv_a", "self_attn.kv_a_proj_with_mqa", "J D", "LDJ", model.qkv_bias),
        *layer("attn/kv_norm/scale", "self_attn.kv_a_layernorm.weight", "C", "LC"),
        *project("attn/kv_b", "self_attn.kv_b_proj", "HU C", "LCHU"),
        *project("attn/o", "self_attn.o_proj", "D HW", "LHWD", model.o_bias),
    ]
    if model.latent.query_rank is None:
        return rows + project("attn/q", "self_attn.q_proj", "HA D", "LDHA")
    rows += project("attn/q_a", "self_attn.q_a_proj", "P D", "LDP", model.qkv_bias)
    rows += layer("attn/q_norm/scale", "self_attn.q_a_layernorm.weight", "I", "LI")
    return rows + project("attn/q_b", "self_attn.q_b_proj", "HA I", "LIHA")


def _delta_entries(spec: Delta, layer: Rows, project: Rows) -> list[Entry]:
    rows = [
        *layer("delta/conv", "linear_attn.conv1d.weight", "Z 1 T", "LZ1T"),
        *layer("delta/a_log", "linear_attn.A_log", "O", "LO"),
        *layer("delta/dt_bias", "linear_attn.dt_bias", "O", "LO"),
        *layer("delta/scale", "linear_attn.norm.weight", "W", "LW"),
        *project("delta/out", "linear_attn.out_proj", "D OW", "LOWD"),
    ]
    if spec.joined:
        return [
            *project("delta/qkvz", "linear_attn.in_proj_qkvz", "RX D", "LDRX"),
            *project("delta/ba", "linear_attn.in_proj_ba", "RY D", "LDRY"),
            *rows,
        ]
    return [
        *project("delta/qkv", "linear_attn.in_proj_qkv", "Z D", "LDZ"),
        *project("delta/z", "linear_attn.in_proj_z", "OW D", "LDOW"),
        *project("delta/b", "linear_attn.in_proj_b", "O D", "LDO"),
        *project("delta/a", "linear_attn.in_proj_a", "O D", "LDO"),
        *rows,
    ]


def _gemma4_entries(spec: Gemma4, layer: Rows, project: Rows) -> list[Entry]:
    rows = layer("scalar", "layer_scalar", "1", "L1")
    if spec.per_layer:
        rows += project("per_layer_gate", "per_layer_input_gate", "p D", "LDp")
        rows += project("per_layer_out", "per_layer_projection", "D p", "LpD")
        rows += layer("per_layer_norm/scale", "post_per_layer_input_norm.weight", "D", "LD")
    return rows


def _expert_entries(spec: Experts, layer: Rows, project: Rows) -> list[Entry]:
    names = spec.names
    module = f"{names.module}." if names.module else ""
    expert_prefix = f"{module}experts.{{expert}}"
    rows = layer("experts/router", f"{module}{names.router}.weight", "E D", "LDE")
    if names.fused is not None:
        gate_up, down = names.fused
        rows += layer("experts/gate_up", f"{module}experts.gate_up_proj", gate_up, "LNEDM")
        rows += layer("experts/down", f"{module}experts.down_proj", down, "LEDM")
        if names.beside:
            rows += layer("experts/router_norm/scale", "router.scale", "D", "LD")
            rows += layer("experts/expert_scale", "router.per_expert_scale", "E", "LE")
            rows += layer("mlp_own_norm/scale", "post_feedforward_layernorm_1.weight", "D", "LD")
            rows += layer("experts_norm/scale", "pre_feedforward_layernorm_2.weight", "D", "LD")
            rows += layer("experts_post_norm/scale", "post_feedforward_layernorm_2.weight", "D", "LD")
        if names.biased:
            rows += layer("experts/router_bias", f"{module}{names.router}.bias", "E", "LE")
            rows += layer("experts/gate_up_bias", f"{module}experts.gate_up_proj_bias", "E MN", "LNEM")
            rows += layer("experts/down_bias", f"{module}experts.down_proj_bias", "E D", "LED")
        return rows
    rows += layer("experts/gate", f"{expert_prefix}.{names.gate}.weight", "M D", "LEDM")
    rows += layer("experts/up", f"{expert_prefix}.{names.up}.weight", "M D", "LEDM")
    rows += layer("experts/down", f"{expert_prefix}.{names.down}.weight", "D M", "LEDM")
    if spec.routing.corrected:
        rows += layer("experts/correction", f"{module}gate.e_score_correction_bias", "E", "LE")
    if spec.shared_width:
        shared = f"{module}{names.shared}"
        rows += project("experts/shared/gate", f"{shared}.gate_proj", "S D", "LDS")
        rows += project("experts/shared/up", f"{shared}.up_proj", "S D", "LDS")
        rows += project("experts/shared/down", f"{shared}.down_proj", "D S", "LSD")
    if names.shared_gate:
        rows += layer("experts/shared_gate", f"{module}shared_expert_gate.weight", "1 D", "LD1")
    return rows


def _mlp_entries(model: ModelConfig, project: Rows) -> list[Entry]:
    rows = project("mlp/down", "mlp.down_proj", "D F", "LFD", model.mlp_bias)
    if model.fused:
        return rows + project("mlp/gate_up", "mlp.gate_up_proj", "NF D", "LDNF")
    rows += project("mlp/gate", "mlp.gate_proj", "F D", "LDF", model.mlp_bias)
    return rows + project("mlp/up", "mlp.up_proj", "F D", "LDF", model.mlp_bias)


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


def merge(first: Params, second: Params) -> Params:
    """Merges two nested dicts that have no leaf in common."""
    merged = dict(first)
    for name, part in second.items():
        merged[name] = merge(first[name], part) if name in first else part
    return merged
