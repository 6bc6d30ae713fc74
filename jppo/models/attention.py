"""Causal attention inside segments, and the rotary embedding. Used by `decoder.py`."""

import chex
import jax
import jax.numpy as jnp
import numpy as np


def rotary_angles(position: jax.Array, *, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """cos and sin of position * theta^(-2i/A), i < A/2: two of [R, T, A/2] f32."""
    chex.assert_rank(position, 2)
    # f32 as transformers and vLLM compute it, so that the angles are theirs to the last bit.
    frequency = 1.0 / theta ** (np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim))  # [A/2]
    angle = position[:, :, None].astype(jnp.float32) * frequency[None, None, :]  # [R, T, A/2]
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turns the pairs (x_i, x_{i + A/2}) of each head by the position's angles; x [R, T, heads, A]."""
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]  # [R, T, 1, A/2]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def attend(q: jax.Array, k: jax.Array, v: jax.Array, segment: jax.Array) -> jax.Array:
    """softmax(q k^T / sqrt(A)) v over the earlier positions of the same segment: [R, T, H, A].

    q is [R, T, H, A], k and v are [R, T, K, A], each kv head shared by H/K query heads; segment is [R, T].
    Empty positions (segment 0) see each other, so that every position sees at least itself and all is finite.
    """
    chex.assert_rank([q, k, v, segment], [4, 4, 4, 2])
    R, T, H, A = q.shape
    K = k.shape[2]
    # g: the query heads that share one kv head; t: queries, s: keys.
    grouped = q.reshape(R, T, K, H // K, A)
    scores = jnp.einsum("rtkga,rska->rkgts", grouped, k, preferred_element_type=jnp.float32) / np.sqrt(A)
    causal = jnp.tril(jnp.ones((T, T), bool))
    seen = causal[None] & (segment[:, :, None] == segment[:, None, :])  # [R, T, T]
    scores = jnp.where(seen[:, None, None], scores, jnp.finfo(jnp.float32).min)
    weight = jax.nn.softmax(scores, axis=-1).astype(v.dtype)  # [R, K, H/K, T, T]
    return jnp.einsum("rkgts,rska->rtkga", weight, v).reshape(R, T, H, A)
