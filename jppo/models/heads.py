"""From hidden states to log-probs, entropy and values; logits exist for one chunk of tokens at a time.

The kernel of the logits is [V, D], as an embedding table is, so that a tied one is not copied to turn it. It may have
more rows than there are tokens, so that a mesh divides them: those have no probability.
"""

from collections.abc import Callable, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp

from jppo.models.families import ModelConfig
from jppo.models.product import product

# The logit of what is no token: its probability is 0, and its share of the entropy too.
NO_TOKEN = -1e30

# Hidden states [R, T, D], the kernel [V, D] that makes logits of them, and the model that both are of.
State = tuple[jax.Array, jax.Array, ModelConfig]


def logprob_entropy(
    state: State,
    targets: jax.Array,
    *,
    temperature: float,
    chunk_tokens: int,
    with_entropy: bool,
) -> tuple[jax.Array, jax.Array]:
    """log p(target) and H(p) where p = softmax(logits / temperature): two of [R, T] f32.

    targets is [R, T]. Without entropy the second is 0.
    """

    def body(targets: jax.Array, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        logp = logprob_of(logits, targets)
        return logp, entropy_of(logits) if with_entropy else jnp.zeros_like(logp)

    return by_logits(body, [state], targets, temperature=temperature, chunk_tokens=chunk_tokens)


def by_logits(
    body: Callable[..., Any],
    states: Sequence[State],
    targets: jax.Array,
    *,
    temperature: float,
    chunk_tokens: int,
) -> Any:
    """`body(targets, *logits)`, a tree of [R, T], for the logits of each state at the temperature.

    The body sees [R, C] targets and [R, C, V] f32 logits: about `chunk_tokens` tokens at a time have logits in memory,
    backwards too. Chunks run along T, so that rows may be sharded, and hold the whole vocabulary, which may be too.
    """
    hidden, kernels, models = zip(*states, strict=True)
    chex.assert_rank([targets, *hidden], [2] + [3] * len(states))
    chex.assert_equal_shape_prefix([targets, *hidden], 2)
    if temperature <= 0 or chunk_tokens < 1:
        raise ValueError(f"{temperature=} must be above 0 and {chunk_tokens=} at least 1")
    R, T = targets.shape
    chunks = -(-T // max(1, chunk_tokens // R))
    width = -(-T // chunks)  # even chunks: less padding at the end
    pad = chunks * width - T

    def run(kernels: Sequence[jax.Array], targets: jax.Array, hidden: Sequence[jax.Array]) -> Any:
        # The kernel is cast inside the chunk, so that its gradient adds up over chunks in its own dtype.
        return body(targets, *(logits_of(state) / temperature for state in zip(hidden, kernels, models, strict=True)))

    def split(x: jax.Array) -> jax.Array:  # [R, T, ...] -> [chunks, R, width, ...]
        x = jnp.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(R, chunks, width, *x.shape[2:]), 1, 0)

    def join(x: jax.Array) -> jax.Array:  # [chunks, R, width] -> [R, T]
        return jnp.moveaxis(x, 0, 1).reshape(R, chunks * width)[:, :T]

    if chunks == 1:
        return run(kernels, targets, hidden)
    remat = jax.checkpoint(run, prevent_cse=False)
    parts = split(targets), [split(h) for h in hidden]
    return jax.tree.map(join, jax.lax.map(lambda part: remat(kernels, *part), parts))


def logprob_of(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """log p(target) [...] of logits [..., V]."""
    # A comparison and not a gather: it fuses, its gradient is no scatter, and the vocabulary may be sharded.
    chosen = jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1) == targets[..., None]
    return jnp.sum(jnp.where(chosen, logits, 0.0), axis=-1) - jax.nn.logsumexp(logits, axis=-1)


def entropy_of(logits: jax.Array) -> jax.Array:
    """H(p) = -Σ p log p [...] of logits [..., V]."""
    every = jax.nn.log_softmax(logits)  # of every token: large logits would cancel otherwise
    return -jnp.sum(jnp.exp(every) * every, axis=-1)


def logits_of(state: State) -> jax.Array:
    """[R, T, V] logits, f32 at least: for a few positions only."""
    hidden, kernel, cfg = state
    dtype = jnp.promote_types(hidden.dtype, jnp.float32)
    logits = product("rtd,vd->rtv", hidden, kernel, dtype)
    if cfg.logit_softcap is not None:
        logits = cfg.logit_softcap * jnp.tanh(logits / cfg.logit_softcap)
    if cfg.padded_vocab_size == cfg.vocab_size:
        return logits
    token = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2)
    return jnp.where(token < cfg.vocab_size, logits, NO_TOKEN)


def values(hidden: jax.Array, kernel: jax.Array) -> jax.Array:
    """[R, T] f32 values of the states, from hidden [R, T, D] and the score kernel [D, 1]."""
    chex.assert_rank([hidden, kernel], [3, 2])
    return jnp.einsum("rtd,d->rt", hidden.astype(jnp.float32), kernel[:, 0].astype(jnp.float32))
