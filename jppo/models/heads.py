"""From hidden states to log-probs, entropy and values; logits exist for one chunk of tokens at a time.

The kernel of the logits is [V, D], as an embedding table is, so that a tied one is not copied to turn it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp


def logprob_entropy(
    hidden: jax.Array,
    kernel: jax.Array,
    targets: jax.Array,
    *,
    temperature: float,
    chunk_tokens: int,
    with_entropy: bool,
) -> tuple[jax.Array, jax.Array]:
    """log p(target) and H(p) where p = softmax(kernel hidden / temperature): two of [R, T] f32.

    hidden is [R, T, D], kernel [V, D], targets [R, T]. Without entropy the second is 0.
    """

    def body(targets: jax.Array, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        logp = logprob_of(logits, targets)
        return logp, entropy_of(logits) if with_entropy else jnp.zeros_like(logp)

    return by_logits(body, [(hidden, kernel)], targets, temperature=temperature, chunk_tokens=chunk_tokens)


def by_logits(
    body: Callable[..., Any],
    states: Sequence[tuple[jax.Array, jax.Array]],
    targets: jax.Array,
    *,
    temperature: float,
    chunk_tokens: int,
) -> Any:
    """`body(targets, *logits)`, a tree of [R, T], for the logits of each (hidden, kernel) at the temperature.

    The body sees [R, C] targets and [R, C, V] f32 logits: about `chunk_tokens` tokens at a time have logits in memory,
    backwards too. Chunks run along T, so that rows may be sharded, and hold the whole vocabulary, which may be too.
    """
    chex.assert_rank([targets, *(hidden for hidden, _ in states)], [2] + [3] * len(states))
    chex.assert_equal_shape_prefix([targets, *(hidden for hidden, _ in states)], 2)
    if temperature <= 0 or chunk_tokens < 1:
        raise ValueError(f"{temperature=} must be above 0 and {chunk_tokens=} at least 1")
    R, T = targets.shape
    chunks = -(-T // max(1, chunk_tokens // R))
    width = -(-T // chunks)  # even chunks: less padding at the end
    pad = chunks * width - T
    kernels = [kernel for _, kernel in states]

    def run(kernels: list[jax.Array], targets: jax.Array, hidden: list[jax.Array]) -> Any:
        # The kernel is cast inside the chunk, so that its gradient adds up over chunks in its own dtype.
        return body(targets, *(logits_of(h, k) / temperature for h, k in zip(hidden, kernels, strict=True)))

    def split(x: jax.Array) -> jax.Array:  # [R, T, ...] -> [chunks, R, width, ...]
        x = jnp.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(R, chunks, width, *x.shape[2:]), 1, 0)

    def join(x: jax.Array) -> jax.Array:  # [chunks, R, width] -> [R, T]
        return jnp.moveaxis(x, 0, 1).reshape(R, chunks * width)[:, :T]

    if chunks == 1:
        return run(kernels, targets, [hidden for hidden, _ in states])
    remat = jax.checkpoint(run, prevent_cse=False)
    parts = split(targets), [split(hidden) for hidden, _ in states]
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


def logits_of(hidden: jax.Array, kernel: jax.Array) -> jax.Array:
    """[R, T, V] logits, f32 at least, of hidden [R, T, D] by kernel [V, D]: for a few positions only."""
    dtype = jnp.promote_types(hidden.dtype, jnp.float32)
    return jnp.einsum("rtd,vd->rtv", hidden, kernel.astype(hidden.dtype), preferred_element_type=dtype)


def values(hidden: jax.Array, kernel: jax.Array) -> jax.Array:
    """[R, T] f32 values of the states, from hidden [R, T, D] and the score kernel [D, 1]."""
    chex.assert_rank([hidden, kernel], [3, 2])
    return jnp.einsum("rtd,d->rt", hidden.astype(jnp.float32), kernel[:, 0].astype(jnp.float32))
