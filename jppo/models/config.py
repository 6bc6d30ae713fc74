"""A model's shape and mathematics as one frozen dataclass: what the decoder and the parameter table read.

Layers with the same parameters are a stack: stored stacked and scanned over. A layer's kind is the index of its window,
rotary frequencies and head sizes in `ModelConfig.kinds`.
"""

import dataclasses
import itertools
from typing import Literal, NamedTuple

from jppo.models.rotary import Rotary

Mixer = Literal["attention", "delta"]


Keys = Literal["own", "kept", "shared"]


class Heads(NamedTuple):
    """The sizes of a layer's keys and values."""

    num_kv_heads: int  # K
    head_dim: int  # A


class LayerModules(NamedTuple):
    """The modules of a layer."""

    sparse: bool  # it has experts
    mixer: Mixer = "attention"
    beside: bool = False  # it has an MLP, too
    kind: int | None = None  # index of its kind, where kinds have heads of their own size
    keys: Keys = "own"  # kept: later layers share its keys and values; shared: it takes a kept layer's
    joined: bool = False  # keys and values are one projection

    @property
    def dense(self) -> bool:
        """Whether it has an MLP."""
        return self.beside or not self.sparse

    @property
    def keyed(self) -> bool:
        """Whether it has a projection to keys."""
        return self.keys != "shared"

    @property
    def valued(self) -> bool:
        """Whether it has a projection to values."""
        return self.keyed and not self.joined


@dataclasses.dataclass(frozen=True)
class Stack:
    """Layers `first`, `first + step`, ... with the same parameters."""

    path: tuple[str, ...]  # of its parameters
    first: int
    step: int
    count: int
    modules: LayerModules

    @property
    def layers(self) -> slice:
        return slice(self.first, self.first + self.step * self.count, self.step)


Group = tuple[Stack, ...]  # stacks of one scan, whose layers take turns


def layer_groups(layer_modules: tuple[LayerModules, ...]) -> tuple[Group, ...]:
    """Returns the scans of a model: one over the periods of a repeated pattern, else one for each run of equal layers.

    The parameters are in `layers` if all layers are alike, in `layers/0`, `layers/1`, ... by their place in the period,
    or in `layers0`, `layers1`, ... by run.
    """
    L = len(layer_modules)
    period = next(n for n in range(1, L + 1) if L % n == 0 and layer_modules == layer_modules[:n] * (L // n))
    if period == 1:
        return ((Stack(("layers",), 0, 1, L, layer_modules[0]),),)
    if period < L:
        return (tuple(Stack(("layers", str(i)), i, period, L // period, layer_modules[i]) for i in range(period)),)
    runs = [[i for i, _ in run] for _, run in itertools.groupby(enumerate(layer_modules), key=lambda pair: pair[1])]
    return tuple((Stack((f"layers{n}",), run[0], 1, len(run), layer_modules[run[0]]),) for n, run in enumerate(runs))


Scoring = Literal["softmax", "sigmoid"]
DeltaLayout = Literal["split", "joined"]  # a projection each for q k v, z, b and a; or one for q k v z and one for b a


@dataclasses.dataclass(frozen=True)
class AttentionKind:
    """A kind of attention in one model: window, positions and sizes."""

    window: int | None  # a token sees itself and the window - 1 tokens before it; None: all earlier ones
    rotary: Rotary
    heads: Heads | None = None  # None: the model's


@dataclasses.dataclass(frozen=True)
class Routing:
    """How experts are scored and chosen. By default: the highest of the softmax."""

    scoring: Scoring = "softmax"  # of the logits; the scores are the weights, too
    groups: int = 1  # experts are chosen from the best groups; a softmax's by its highest score, a sigmoid's by two
    best_groups: int = 1
    scale: float = 1.0  # of the weights
    corrected: bool = False  # a buffer of the model is added to the scores for the choice, not for the weights


@dataclasses.dataclass(frozen=True)
class DeepSeekVersion:
    """The differences between DeepSeek's versions."""

    scoring: Scoring
    methods: tuple[str, ...]  # values of `topk_method`, the default first
    # Defaults of fields
    dense_layers: int
    normalized: bool
    scale: float


@dataclasses.dataclass(frozen=True)
class ExpertNames:
    """A family's names, in config.json and of its tensors."""

    count: str = "num_experts"
    width: str = "moe_intermediate_size"
    module: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = ""  # of the expert that every token uses; "": there is none
    shared_gate: bool = False  # that expert has a gate
    normalized: bool | None = None  # None: by the field norm_topk_prob
    normalized_default: bool = False  # of this field
    mixed: bool = True  # config.json may give some layers an MLP in place of experts
    deepseek: DeepSeekVersion | None = None  # whose fields it has
    router: str = "gate"
    fused: tuple[str, str] | None = None  # a layer's experts are one tensor: axes of gates and ups, and of downs
    biased: bool = False  # experts and router have biases, and the gate is clamped
    active: str = "num_experts_per_tok"
    switch: str = ""  # a field that is true if the model has experts; "": it always does
    beside: bool = False  # experts are beside an MLP; the router's input is normed, and its weights have factors


@dataclasses.dataclass(frozen=True)
class Experts:
    """The experts of a model's sparse layers."""

    count: int  # E
    active: int  # of each token
    width: int  # M
    shared_width: int  # S, of the expert that every token uses; 0: there is none
    normalized: bool  # the weights of a token's active experts sum to 1
    sparse: tuple[bool, ...]  # [L], whether a layer has experts
    names: ExpertNames
    routing: Routing
    clamp: tuple[float, float] | None = None  # alpha and limit of a clamped gate; None: the model's activation

    @property
    def widths(self) -> tuple[int, ...]:
        return (self.width, self.shared_width) if self.shared_width else (self.width,)


@dataclasses.dataclass(frozen=True)
class Latent:
    """Attention whose keys and values are computed from one latent of each token."""

    query_rank: int | None  # Q, of the queries' own latent; None: queries are computed from the hidden state
    rank: int  # C, of the latent of keys and values
    plain_dim: int  # of a head's queries and keys: the part without a position
    rotary_dim: int  # P, the rest; all heads share the key's
    value_dim: int  # W
    interleaved: bool  # neighbours are rotated as pairs; otherwise the two halves

    @property
    def head_dim(self) -> int:
        return self.plain_dim + self.rotary_dim

    @property
    def cached_dim(self) -> int:
        """Returns the numbers that the cache holds of a token in a layer, J."""
        return self.rank + self.rotary_dim


@dataclasses.dataclass(frozen=True)
class Delta:
    """The gated delta nets of a model's linear layers."""

    key_heads: int  # N
    value_heads: int  # U; each key head has U/N of them
    key_dim: int
    value_dim: int  # W
    taps: int  # inputs of the convolution over tokens
    joined: bool  # q k v z are one projection by key head, b a another
    linear: tuple[bool, ...]  # [L], whether a layer has one in place of attention

    @property
    def channels(self) -> int:
        """Returns the number of channels C of the convolution, over q, k and v together."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def joined_at(self) -> tuple[int, int, int]:
        """Returns where a key head's q, k, v and z begin in the joined projection, without 0."""
        values = self.value_heads // self.key_heads * self.value_dim
        return self.key_dim, 2 * self.key_dim, 2 * self.key_dim + values

    @property
    def joined_widths(self) -> tuple[int, int]:
        """Returns the outputs of each key head in the joined projections."""
        group = self.value_heads // self.key_heads
        return 2 * self.key_dim + 2 * group * self.value_dim, 2 * group

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the shapes of a row's recurrent state and of the convolution's last inputs."""
        group = self.value_heads // self.key_heads
        return (self.key_heads, group, self.key_dim, self.value_dim), (self.taps - 1, self.channels)


@dataclasses.dataclass(frozen=True)
class Gemma4:
    """Parts of the decoder that only Gemma 4 has, besides norms of values and a fixed factor of each layer's output."""

    per_layer: int  # P, the width of the embeddings in every layer; 0: there are none
    shared_layers: int  # last layers, which take the keys and values of the last one before them with such a window
    double_shared: bool  # their MLPs are twice as wide
    joined: bool  # in layers without a window keys and values are one projection

    def layer_modules(
        self, modules_by_layer: tuple[LayerModules, ...], kinds: tuple[int, ...], windows: tuple[bool, ...]
    ) -> tuple[LayerModules, ...]:
        """Completes the modules of each layer by its kind and whether it has a window, `windows`."""
        first_shared = len(modules_by_layer) - self.shared_layers
        keeping = {max(i for i in range(first_shared) if kinds[i] == kind) for kind in set(kinds[first_shared:])}

        def keys(i: int) -> Keys:
            return "shared" if i >= first_shared else "kept" if i in keeping else "own"

        return tuple(
            modules._replace(beside=modules.sparse, kind=kinds[i], keys=keys(i), joined=self.joined and not windows[i])
            for i, modules in enumerate(modules_by_layer)
        )


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
    kinds: tuple[AttentionKind, ...]  # of layers, without duplicates
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
    multimodal: bool = False  # the checkpoint has other parts, too, which are not trained
    latent: Latent | None = None  # None: keys and values are computed from the hidden state
    further_layers: int = 0  # multi-token prediction layers of the checkpoint, which are not read
    gated: bool = False  # the outputs of attention are multiplied by a gate before their projection
    delta: Delta | None = None  # None: every layer has attention
    gemma4: Gemma4 | None = None  # what only Gemma 4 has
    value_bins: int = 1  # outputs of a value head: one value, or the logits of a histogram
    value_head_std: float = 0.0  # standard deviation of a new value head

    @property
    def layer_modules(self) -> tuple[LayerModules, ...]:
        """Returns the modules of each layer, [L]."""
        sparse = (False,) * self.num_layers if self.experts is None else self.experts.sparse
        linear = (False,) * self.num_layers if self.delta is None else self.delta.linear
        pairs = zip(sparse, linear, strict=True)
        modules = tuple(LayerModules(experts, "delta" if recurrent else "attention") for experts, recurrent in pairs)
        if self.gemma4 is None:
            return modules
        windows = tuple(self.kinds[kind].window is not None for kind in self.layer_kinds)
        return self.gemma4.layer_modules(modules, self.layer_kinds, windows)

    @property
    def groups(self) -> tuple[Group, ...]:
        """Returns the scans over the layers."""
        return layer_groups(self.layer_modules)

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
        if any(not modules.keyed for modules in self.layer_modules):
            return "any keys and values of layers that take an earlier layer's are not read"
        return f"{n} multi-token prediction layer(s) after layer {self.num_layers - 1} are not read" if n else None

    @property
    def unread_names(self) -> tuple[str, ...]:
        """Returns the beginnings of the names of tensors that are not read."""
        further_layers = tuple(f"model.layers.{self.num_layers + i}." for i in range(self.further_layers))
        prefixes = (f"model.layers.{i}.self_attn." for i, modules in enumerate(self.layer_modules) if not modules.keyed)
        unused = tuple(start + name for start in prefixes for name in ("k_proj.", "v_proj.", "k_norm."))
        return (*further_layers, "mtp.") if self.gated else further_layers + unused

    @property
    def delta_kind(self) -> tuple[str, bool] | None:
        """Returns the family of gated delta nets, and whether their projections are one."""
        return None if self.delta is None else (self.family, self.delta.joined)

    @property
    def head_sizes(self) -> tuple[int, ...]:
        """Returns the sizes of attention heads; none if attention is latent."""
        sizes = {self.heads_of(modules).head_dim for modules in self.layer_modules}
        return () if self.latent is not None else tuple(sorted(sizes))

    @property
    def latent_sizes(self) -> tuple[int, int] | None:
        """Returns the sizes of a latent and of a rotary key."""
        return None if self.latent is None else (self.latent.rank, self.latent.rotary_dim)

    @property
    def kernel_dim(self) -> int:
        """Returns the largest size of heads in attention kernels; a head's query, key and value are padded alike."""
        largest = max(self.heads_of(modules).head_dim for modules in self.layer_modules)
        return largest if self.latent is None else max(largest, self.latent.value_dim)

    @property
    def mlp_widths(self) -> tuple[int, ...]:
        """Returns the widths of MLPs and experts."""
        widths = tuple(dict.fromkeys(self.mlp_width(stack.modules) for stack in self.stacks if stack.modules.dense))
        return widths if self.experts is None else (*widths, *self.experts.widths)

    def heads_of(self, modules: LayerModules) -> Heads:
        """Returns the sizes of keys and values in a layer."""
        kind_heads = None if modules.kind is None else self.kinds[modules.kind].heads
        return Heads(self.num_kv_heads, self.head_dim) if kind_heads is None else kind_heads

    def mlp_width(self, modules: LayerModules) -> int:
        double = self.gemma4 is not None and self.gemma4.double_shared and not modules.keyed
        return self.intermediate_size * (1 + double)


def pad_vocab(cfg: ModelConfig, multiple: int) -> ModelConfig:
    """Pads the embedding to a multiple of `multiple` rows; the new ones are no tokens."""
    return dataclasses.replace(cfg, padded_vocab_size=-(-cfg.vocab_size // multiple) * multiple)
