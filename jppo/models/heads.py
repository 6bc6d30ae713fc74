"""From hidden states to log-probs, entropy and values; logits exist for one chunk of tokens at a time.

The kernel of the logits is [V, D], as an embedding table is, so that a tied one is not copied to turn it.
"""

import functools

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

    hidden is [R, T, D], kernel [V, D], targets [R, T]. About `chunk_tokens` tokens at a time have logits in
    memory, backwards too. Chunks run along T, so that rows may be sharded. Without entropy the second is 0.
    """
    chex.assert_rank([hidden, kernel, targets], [3, 2, 2])
    chex.assert_equal_shape_prefix([hidden, targets], 2)
    if temperature <= 0 or chunk_tokens < 1:
        raise ValueError(f"{temperature=} must be above 0 and {chunk_tokens=} at least 1")
    R, T, _ = hidden.shape
    chunks = -(-T // max(1, chunk_tokens // R))
    width = -(-T // chunks)  # even chunks: less padding at the end
    pad = chunks * width - T
    body = functools.partial(_chunk, temperature=temperature, with_entropy=with_entropy)

    def split(x: jax.Array) -> jax.Array:  # [R, T, ...] -> [chunks, R, width, ...]
        x = jnp.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(R, chunks, width, *x.shape[2:]), 1, 0)

    def join(x: jax.Array) -> jax.Array:  # [chunks, R, width] -> [R, T]
        return jnp.moveaxis(x, 0, 1).reshape(R, chunks * width)[:, :T]

    if chunks == 1:
        return body(kernel, hidden, targets)
    # The kernel is cast inside the chunk, so that its gradient adds up over chunks in its own dtype.
    remat = jax.checkpoint(body, prevent_cse=False)
    logp, entropy = jax.lax.map(lambda x: remat(kernel, *x), (split(hidden), split(targets)))
    return join(logp), join(entropy)


def _chunk(
    kernel: jax.Array, hidden: jax.Array, targets: jax.Array, *, temperature: float, with_entropy: bool
) -> tuple[jax.Array, jax.Array]:
    logits = logits_of(hidden, kernel) / temperature  # [R, C, V] f32
    total = jax.nn.logsumexp(logits, axis=-1)
    # A comparison and not a gather: it fuses, its gradient is no scatter, and the vocabulary may be sharded.
    chosen = jax.lax.broadcasted_iota(targets.dtype, logits.shape, 2) == targets[:, :, None]
    logp = jnp.sum(jnp.where(chosen, logits, 0.0), axis=-1) - total
    if not with_entropy:
        return logp, jnp.zeros_like(logp)
    every = logits - total[:, :, None]  # of every token; large logits would cancel worse
    return logp, -jnp.sum(jnp.exp(every) * every, axis=-1)


def logits_of(hidden: jax.Array, kernel: jax.Array) -> jax.Array:
    """[R, T, V] f32 logits of hidden [R, T, D] by kernel [V, D]: for a few positions only."""
    return jnp.einsum("rtd,vd->rtv", hidden, kernel.astype(hidden.dtype), preferred_element_type=jnp.float32)


def values(hidden: jax.Array, kernel: jax.Array) -> jax.Array:
    """[R, T] f32 values of the states, from hidden [R, T, D] and the score kernel [D, 1]."""
    chex.assert_rank([hidden, kernel], [3, 2])
    return jnp.einsum("rtd,d->rt", hidden.astype(jnp.float32), kernel[:, 0].astype(jnp.float32))
