"""A model's shape and mathematics as one frozen dataclass: what the decoder and the parameter table read."""

import dataclasses
from typing import Literal

from jppo.models import stacks
from jppo.models.config_delta import Delta
from jppo.models.config_experts import Experts
from jppo.models.config_gemma4 import Gemma4
from jppo.models.config_latent import Latent
from jppo.models.rotary import Rotary
from jppo.models.stacks import Group, Heads, Sort, Stack


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of layer in one model."""

    window: int | None  # a token sees itself and the window - 1 tokens before it; None: all earlier ones
    rotary: Rotary
    heads: Heads | None = None  # None: the model's


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder's shape and mathematics, of any family; hashable, so that it may be static in jit."""

    family: str  # HF's model_type
    vocab_size: int  # V
    hidden_size: int  # D
    intermediate_size: int  # F
    num_layers: int  # L
    num_heads: int  # H
    num_kv_heads: int  # K
    head_dim: int  # A
    kinds: tuple[Kind, ...]  # of layers, without duplicates
    layer_kinds: tuple[int, ...]  # [L], index into kinds
    rms_norm_eps: float
    norm_offset: float  # a norm multiplies by its scale plus this
    qk_norm: Literal["head", "all"] | None  # queries and keys are normed before rotation, by head or over all heads
    pre_norms: bool  # a block's input is normed
    post_norms: bool  # a block's output is normed, before it is added to the residual
    fused: bool  # q, k and v are one projection, and so are gate and up
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    activation: str  # of the MLP's gate
    embed_scale: float  # on input embeddings
    residual_scale: float  # on a block's output, before it is added to the residual
    query_scale: float  # on the products of queries and keys
    sinks: bool  # attention sinks: each head's softmax has a learned score without a key
    attn_softcap: float | None  # c: scores become c tanh(x / c)
    logit_divisor: float  # logits are divided by it, before their soft cap
    logit_softcap: float | None  # c: logits become c tanh(x / c)
    tie_word_embeddings: bool
    max_position_embeddings: int
    initializer_range: float  # standard deviation of random weights
    padded_vocab_size: int  # rows of the embedding: V, or more so that a mesh divides them; the rest is padding
    experts: Experts | None  # None: every layer has an MLP
    quantization: str | None  # quant_method of the checkpoint, whose tensors are read as bfloat16
    latent: Latent | None = None  # None: keys and values are computed from the hidden state
    further_layers: int = 0  # multi-token prediction layers of the checkpoint, which are not read
    gated: bool = False  # the outputs of attention are multiplied by a gate before their projection
    delta: Delta | None = None  # None: every layer has attention
    gemma4: Gemma4 | None = None  # what only Gemma 4 has
    value_bins: int = 1  # outputs of a value head: one value, or the logits of a histogram
    value_head_std: float = 0.0  # standard deviation of a new value head

    @property
    def sorts(self) -> tuple[Sort, ...]:
        """Returns the modules of each layer, [L]."""
        sparse = (False,) * self.num_layers if self.experts is None else self.experts.sparse
        linear = (False,) * self.num_layers if self.delta is None else self.delta.linear
        found = tuple(Sort(one, "delta" if two else "attention") for one, two in zip(sparse, linear, strict=True))
        if self.gemma4 is None:
            return found
        windows = tuple(self.kinds[kind].window is not None for kind in self.layer_kinds)
        return self.gemma4.sorts(found, self.layer_kinds, windows)

    @property
    def groups(self) -> tuple[Group, ...]:
        """Returns the scans over the layers."""
        return stacks.groups(self.sorts)

    @property
    def stacks(self) -> tuple[Stack, ...]:
        """Returns the layers whose parameters are stacked."""
        return sum(self.groups, ())

    @property
    def unread(self) -> str | None:
        """Names the parts of a checkpoint that are not read."""
        n = self.further_layers
        if self.gated:
            return "any multi-token prediction layers (mtp.*) are not read"
        if any(not sort.keyed for sort in self.sorts):
            return "any keys and values of layers that take an earlier layer's are not read"
        return f"{n} multi-token prediction layer(s) after layer {self.num_layers - 1} are not read" if n else None

    @property
    def unread_names(self) -> tuple[str, ...]:
        """Returns the first parts of their names."""
        further = tuple(f"model.layers.{self.num_layers + i}." for i in range(self.further_layers))
        shared = (f"model.layers.{i}.self_attn." for i, sort in enumerate(self.sorts) if not sort.keyed)
        own = tuple(start + name for start in shared for name in ("k_proj.", "v_proj.", "k_norm."))
        return (*further, "mtp.") if self.gated else further + own

    @property
    def delta_kind(self) -> tuple[str, bool] | None:
        """Returns the family of gated delta nets, and whether their projections are one."""
        return None if self.delta is None else (self.family, self.delta.joined)

    @property
    def latent_sizes(self) -> tuple[int, int] | None:
        """Returns the sizes of a latent and of a rotary key."""
        return None if self.latent is None else (self.latent.rank, self.latent.rotary_dim)

    @property
    def kernel_dim(self) -> int:
        """Returns the largest size of heads in attention kernels; a head's query, key and value are padded alike."""
        own = max(self.heads_of(sort).head_dim for sort in self.sorts)
        return own if self.latent is None else max(own, self.latent.value_dim)

    @property
    def mlp_widths(self) -> tuple[int, ...]:
        """Returns the widths of MLPs and experts."""
        own = tuple(dict.fromkeys(self.mlp_width(stack.sort) for stack in self.stacks if stack.sort.dense))
        return own if self.experts is None else (*own, *self.experts.widths)

    def heads_of(self, sort: Sort) -> Heads:
        """Returns the sizes of keys and values in a layer."""
        own = None if sort.kind is None else self.kinds[sort.kind].heads
        return Heads(self.num_kv_heads, self.head_dim) if own is None else own

    def mlp_width(self, sort: Sort) -> int:
        """Returns the width of a layer's MLP."""
        double = self.gemma4 is not None and self.gemma4.double_shared and not sort.keyed
        return self.intermediate_size * (1 + double)


def pad_vocab(cfg: ModelConfig, multiple: int) -> ModelConfig:
    """Pads the embedding to a multiple of `multiple` rows; the new ones are no tokens."""
    return dataclasses.replace(cfg, padded_vocab_size=-(-cfg.vocab_size // multiple) * multiple)
