"""FLOP that a model's passes need: for the share of a device's rate that training reaches, and for benchmarks.

What is counted is what whole sequences of real tokens need: every product of a matrix, the pairs of a query and a key
that it sees, the language head where it is read; a multiplication and an addition are two. What the code computes
beyond that (padding, the other half of attention, what the backward pass computes anew) counts nothing, as do norms,
activations, the look-up of embeddings, and the one column of a value head.
"""

import math
from collections.abc import Sequence

from jppo.models import lora
from jppo.models.families import ModelConfig
from jppo.models.lora import Lora

# How much longer a FLOP of attention by XLA takes than one of a product with weights: scores are exponentiated, and
# written and read between their two products. Roughly, from one run on a CPU that was busy.
SLOWER = 2.5


def attention(cfg: ModelConfig, lengths: Sequence[int]) -> int:
    """FLOP of the products of queries, keys and values in a forward pass: of keys in the window that came before."""
    pairs = sum(_pairs(n, cfg.kinds[kind].window) for kind in cfg.layer_kinds for n in lengths)
    return 2 * 2 * pairs * cfg.num_heads * cfg.head_dim  # a pair is a product with k and one with v


def _pairs(length: int, window: int | None) -> int:
    """The keys that the queries of one sequence see, each itself and what lies before it in the window."""
    near = length if window is None else min(length, window)
    return near * (near + 1) // 2 + (length - near) * near


def price(cfg: ModelConfig, keys: float) -> float:
    """How much longer a token takes with attention by XLA over so many keys, padding included, than without."""
    by_token = forward(cfg, [1], head_tokens=1) - attention(cfg, [1])
    by_key = 2 * 2 * cfg.num_layers * cfg.num_heads * cfg.head_dim
    return 1.0 + SLOWER * keys * by_key / by_token


def adapters(cfg: ModelConfig, how: Lora, lengths: Sequence[int]) -> int:
    """FLOP of the adapters in a forward pass."""
    return 2 * sum(lengths) * sum(math.prod(entry.shape) for entry in lora.table(cfg, how, head="lm"))


def forward(cfg: ModelConfig, lengths: Sequence[int], *, head_tokens: int, how: Lora | None = None) -> int:
    """FLOP of a forward pass over sequences of `lengths`, with the language head on `head_tokens` of their tokens."""
    D, H, K, A, F = cfg.hidden_size, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim, cfg.intermediate_size
    matrices = D * H * A + 2 * D * K * A + H * A * D + 3 * D * F  # of a layer
    trunk = 2 * cfg.num_layers * sum(lengths) * matrices + attention(cfg, lengths)
    beside = 0 if how is None else adapters(cfg, how, lengths)
    return trunk + 2 * head_tokens * D * cfg.vocab_size + beside


def update(cfg: ModelConfig, lengths: Sequence[int], *, head_tokens: int, how: Lora | None = None) -> int:
    """FLOP of an update: a forward pass, and a backward one that costs two.

    With adapters alone the kernels that stay have a gradient in their input and none of their own, which spares a
    forward pass of them; attention, whose factors all have gradients, and the adapters are as before.
    """
    whole = forward(cfg, lengths, head_tokens=head_tokens)
    if how is None:
        return 3 * whole
    return 2 * whole + attention(cfg, lengths) + 3 * adapters(cfg, how, lengths)
