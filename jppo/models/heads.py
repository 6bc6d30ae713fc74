"""Heads: hidden states to log-probs, entropy and values; logits exist for one chunk of tokens at a time.

The kernel of the logits is [V, D], as an embedding table, so that a tied one needs no transposed copy. It may have
padding rows, so that a mesh divides them; these have probability 0.
"""

import functools
from collections.abc import Callable, Sequence

import chex
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jppo.models import chunked_logits
from jppo.models.config import ModelConfig
from jppo.models.product import product
from jppo.models.vocabulary import WHOLE, Vocabulary

# The logit of padding: its probability is 0, and its share of the entropy too.
NO_TOKEN = -1e30

# Hidden states [R, T, D], the kernel [V, D] of the logits, and their model's config.
State = tuple[jax.Array, jax.Array, ModelConfig]


def logprob_entropy(
    state: State,
    targets: jax.Array,
    *,
    temperature: float,
    chunk_tokens: int,
    with_entropy: bool,
    mask: jax.Array | None = None,
    mesh: Mesh | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Computes log p(target) and H(p) with p = softmax(logits / temperature): two of [R, T] f32, 0 outside the mask.

    targets is [R, T]. Without entropy the second is 0.
    """

    def body(vocabulary: Vocabulary, targets: jax.Array, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        logp = logprob_of(logits, targets, vocabulary)
        return logp, entropy_of(logits, vocabulary) if with_entropy else jnp.zeros_like(logp)

    logp, entropy = by_logits(
        body, [state], targets, temperature=temperature, chunk_tokens=chunk_tokens, mask=mask, mesh=mesh
    )
    return logp, entropy


def by_logits(
    body: Callable[..., tuple[jax.Array, ...]],
    states: Sequence[State],
    targets: jax.Array,
    *,
    temperature: float,
    chunk_tokens: int,
    mask: jax.Array | None = None,
    mesh: Mesh | None = None,
) -> tuple[jax.Array, ...]:
    """Runs `body(vocabulary, targets, *logits)` on the logits of each state at the temperature; arrays [R, T] f32.

    The body sees [C] targets and [C, V] f32 logits, C at most `chunk_tokens`, also in the backward pass. Outside the
    mask its outputs are 0. Each device of the mesh processes its own tokens of the mask. It gathers the kernel's
    columns, in the states' dtype, once for each direction. It sums the kernel's gradient over its chunks in f32 before
    devices exchange it. A sharded vocabulary stays sharded, and sums over it are exchanged.
    """
    hidden, kernels = (tuple(jnp.asarray(state[i]) for state in states) for i in (0, 1))
    models, targets = tuple(state[2] for state in states), jnp.asarray(targets)
    chex.assert_rank([targets, *hidden], [2] + [3] * len(states))
    chex.assert_equal_shape_prefix([targets, *hidden], 2)
    if temperature <= 0 or chunk_tokens < 1:
        raise ValueError(f"{temperature=} must be above 0 and {chunk_tokens=} at least 1")
    mask = jnp.ones(targets.shape, bool) if mask is None else mask
    plan = chunked_logits.Chunking(functools.partial(_finished, body, models, temperature), chunk_tokens, mesh)
    found: tuple[jax.Array, ...] = chunked_logits.outputs(plan, kernels, hidden, targets, mask)
    return found


def _finished(
    body: Callable[..., tuple[jax.Array, ...]],
    models: Sequence[ModelConfig],
    temperature: float,
    vocabulary: Vocabulary,
    targets: jax.Array,
    *raw: jax.Array,
) -> tuple[jax.Array, ...]:
    """Runs the body on raw logits [C, V]."""
    logits = (_logits(x, cfg, vocabulary) / temperature for x, cfg in zip(raw, models, strict=True))
    return body(vocabulary, targets, *logits)


def logprob_of(logits: jax.Array, targets: jax.Array, vocabulary: Vocabulary = WHOLE) -> jax.Array:
    """Computes log p(target) [...] of logits [..., V]."""
    chex.assert_rank(logits, targets.ndim + 1)
    # A comparison and not a gather: it fuses, its gradient is no scatter, and the vocabulary may be sharded.
    chosen = vocabulary.tokens(logits) == targets[..., None]
    return vocabulary.total(jnp.where(chosen, logits, 0.0)) - vocabulary.logsumexp(logits)


def entropy_of(logits: jax.Array, vocabulary: Vocabulary = WHOLE) -> jax.Array:
    """Computes H(p) = -Σ p log p [...] of logits [..., V]."""
    every = vocabulary.log_softmax(logits)  # of every token: large logits would cancel otherwise
    return -vocabulary.total(jnp.exp(every) * every)


def logits_of(state: State) -> jax.Array:
    """Computes [R, T, V] logits, f32 at least: for a few positions only."""
    hidden, kernel, cfg = state
    dtype = jnp.promote_types(hidden.dtype, jnp.float32)
    return _logits(product("rtd,vd->rtv", hidden, kernel, dtype), cfg)


def _logits(raw: jax.Array, cfg: ModelConfig, vocabulary: Vocabulary = WHOLE) -> jax.Array:
    """Finishes logits [..., V] of products with the kernel: divided, soft-capped, and with padding rows masked."""
    if cfg.logit_divisor != 1.0:
        raw = raw / cfg.logit_divisor
    if cfg.logit_softcap is not None:
        raw = cfg.logit_softcap * jnp.tanh(raw / cfg.logit_softcap)
    if cfg.padded_vocab_size == cfg.vocab_size:
        return raw
    return jnp.where(vocabulary.tokens(raw) < cfg.vocab_size, raw, NO_TOKEN)


def values(hidden: jax.Array, kernel: jax.Array) -> jax.Array:
    """Computes [R, T] f32 values of the states, from hidden [R, T, D] and the score kernel [D, 1].

    A kernel [D, B] of a histogram makes its logits, [R, T, B] f32.
    """
    chex.assert_rank([hidden, kernel], [3, 2])
    hidden, kernel = hidden.astype(jnp.float32), kernel.astype(jnp.float32)
    one = kernel.shape[1] == 1
    return jnp.einsum("rtd,d->rt", hidden, kernel[:, 0]) if one else jnp.einsum("rtd,db->rtb", hidden, kernel)
