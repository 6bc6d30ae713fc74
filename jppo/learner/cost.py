"""FLOP of a model's passes.

Counted for whole sequences of real tokens: matrix products, pairs of a query and a key that it sees, and the
language head where it is read. A multiplication and an addition are two. Not counted: padding, the masked half of
attention, and recomputation in the backward pass. Nor are convolutions, norms, activations, embedding look-ups, and
the one column of a value head.
"""

import math
from collections.abc import Sequence

from jppo.models import lora, params
from jppo.models.config import LayerModules, ModelConfig
from jppo.models.freeze import ALL_LEARN, Frozen
from jppo.models.lora import Lora

# Time of a FLOP of attention relative to one of a product with weights, by platform and kernel: scores are
# exponentiated, and by XLA also written and read between their two products. On a CPU roughly, from one run on a busy
# one. On a GPU from gradients on an H200: 50 and 105 TFLOP/s in 16 rows of 1,024 tokens and 14 heads of 64, against 523
# of products. On a TPU assumed.
SLOWER = {("cpu", "xla"): 2.5, ("gpu", "xla"): 10.4, ("gpu", "cudnn"): 5.0, ("tpu", "xla"): 10.4}


def attention(cfg: ModelConfig, lengths: Sequence[int]) -> int:
    """Returns FLOP of the attention products in a forward pass, with earlier keys in the window."""
    total = 0
    for kind, modules in zip(cfg.layer_kinds, cfg.layer_modules, strict=True):
        if modules.mixer == "attention":
            total += _kv_size(cfg, modules) * sum(_count_pairs(n, cfg.kinds[kind].window) for n in lengths)
    return 2 * total * cfg.num_heads


def _kv_size(cfg: ModelConfig, modules: LayerModules) -> int:
    """Returns the sizes of a head's k and v, which each pair of a query and a key multiplies."""
    A = cfg.heads_of(modules).head_dim
    return A + (A if cfg.latent is None else cfg.latent.value_dim)


def _count_pairs(length: int, window: int | None) -> int:
    """Counts the keys that the queries of one sequence see: each its own and earlier ones in the window."""
    window_keys = length if window is None else min(length, window)
    return window_keys * (window_keys + 1) // 2 + (length - window_keys) * window_keys


def price(cfg: ModelConfig, keys: float, slower: float) -> float:
    """Returns a token's time with attention over so many keys, padding included, relative to none.

    `slower` is of `SLOWER`.
    """
    by_token = forward(cfg, [1], head_tokens=1) - attention(cfg, [1])
    by_key = 2 * cfg.num_heads * sum(_kv_size(cfg, layer) for layer in cfg.layer_modules if layer.mixer == "attention")
    return 1.0 + slower * keys * by_key / by_token


def adapter_flop(cfg: ModelConfig, adapters: Lora, lengths: Sequence[int]) -> int:
    """Returns FLOP of the adapters in a forward pass. Those of experts are merged, which is not counted."""
    entries = lora.adapter_table(cfg, adapters, head="lm")
    return 2 * sum(lengths) * sum(math.prod(entry.shape) for entry in entries if "{expert}" not in entry.hf)


def forward(cfg: ModelConfig, lengths: Sequence[int], *, head_tokens: int, adapters: Lora | None = None) -> int:
    """Returns FLOP of a forward pass over sequences of `lengths`, with the language head on `head_tokens` tokens."""
    D = cfg.hidden_size
    matrices = sum(_projection_elements(cfg, layer) for layer in cfg.layer_modules if layer.mixer == "attention")
    if (d := cfg.delta) is not None:  # with a token's three products with each state, one by one
        values, layers = d.value_heads * d.value_dim, sum(layer.mixer == "delta" for layer in cfg.layer_modules)
        matrices += (D * (d.channels + 2 * values + 2 * d.value_heads) + 3 * values * d.key_dim) * layers
    moe = 0
    if (e := cfg.experts) is not None:
        moe = 3 * D * (e.active * e.width + e.shared_width) + D * (e.count + e.names.shared_gate)
    mlp = sum(moe * layer.sparse + 3 * D * cfg.mlp_width(layer) * layer.dense for layer in cfg.layer_modules)
    if cfg.gemma4 is not None:  # in each layer a part of one projection, a gate, and its output
        mlp += 3 * D * cfg.gemma4.per_layer * cfg.num_layers
    trunk = 2 * sum(lengths) * (matrices + mlp) + attention(cfg, lengths)
    adapter_part = 0 if adapters is None else adapter_flop(cfg, adapters, lengths)
    return trunk + 2 * head_tokens * D * cfg.vocab_size + adapter_part


def _projection_elements(cfg: ModelConfig, modules: LayerModules) -> int:
    """Returns the elements of the kernels of a layer's attention."""
    D, H, (K, A) = cfg.hidden_size, cfg.num_heads, cfg.heads_of(modules)
    if (latent := cfg.latent) is None:
        return D * H * A * (1 + cfg.gated) + (modules.keyed + modules.valued) * D * K * A + H * A * D
    queries = D * H * A if latent.query_rank is None else latent.query_rank * (D + H * A)
    return (
        queries
        + D * latent.cached_dim
        + H * (latent.rank * (latent.plain_dim + latent.value_dim) + latent.value_dim * D)
    )


def frozen_flop(cfg: ModelConfig, frozen: Frozen, lengths: Sequence[int], head_tokens: int) -> int:
    """Returns FLOP of the products with frozen matrices of layers and head in a forward pass."""
    total = 0
    for entry in params.table(cfg, head="lm"):
        if entry.path in frozen and entry.matrix is not None:
            routed = cfg.experts if "M" in entry.letters else None
            share = 1.0 if routed is None else routed.active / routed.count  # of the experts, by a token
            total += 2 * sum(lengths) * round(share * math.prod(entry.shape))
        elif entry.path in frozen and "lm_head.weight" in (entry.hf, entry.alias):
            total += 2 * head_tokens * cfg.hidden_size * cfg.vocab_size
    return total


def update(
    cfg: ModelConfig, lengths: Sequence[int], *, head_tokens: int, adapters: Lora | None = None,
    frozen: Frozen = ALL_LEARN,
) -> int:  # fmt: skip
    """Returns FLOP of an update: a forward pass, and a backward one that costs two.

    Frozen matrices have a gradient of their input but none of their own, which saves one forward pass of them. With
    adapters these are all kernels: attention, whose factors all have gradients, experts into which adapters are merged,
    and the adapters cost the same.
    """
    forward_flop = forward(cfg, lengths, head_tokens=head_tokens)
    if adapters is None:
        return 3 * forward_flop - frozen_flop(cfg, frozen, lengths, head_tokens)
    adapter_part = 3 * adapter_flop(cfg, adapters, lengths)
    return 2 * forward_flop + attention(cfg, lengths) + _merged_expert_flop(cfg, adapters, lengths) + adapter_part


def _merged_expert_flop(cfg: ModelConfig, adapters: Lora, lengths: Sequence[int]) -> int:
    """Returns FLOP of the experts' kernels with adapters in a forward pass."""
    if (e := cfg.experts) is None:
        return 0
    expert_entries = (entry for entry in lora.adapter_table(cfg, adapters, head="lm") if "{expert}" in entry.hf)
    layers = sum(entry.shape[0] for entry in expert_entries) // 2  # an adapter has two matrices
    return 2 * sum(lengths) * layers * cfg.hidden_size * e.active * e.width
