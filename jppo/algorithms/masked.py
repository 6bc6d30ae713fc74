"""Sums, means and moments over the kept entries, where a mask is True. Every function ignores the others' values.

On the flat batch [B, L] a row is a sequence. In packed rows [R, T] several sequences share a row: `segment` says which
entries belong together (0 = empty). The `sequence_` functions repeat a sequence's number at each of its entries.
"""

from typing import Any

import chex
import jax
import jax.numpy as jnp

from jppo.types import Array

FAR = 20.0  # log-ratios are clipped to ±20 before an exponential, as in verl: large, and finite in every dtype


def masked_sum(x: Array, mask: Array) -> Array:
    """Σ x over the mask; a NaN or infinity behind a False does not leak."""
    chex.assert_equal_shape([x, mask])
    return jnp.sum(jnp.where(mask, x, 0.0))


def moments(x: Array, mask: Array) -> Array:  # [3] f32
    """(n, mean, Σ (x - mean)²) of the kept entries."""
    n = jnp.sum(mask, dtype=x.dtype)
    # Relative to one of them, so that equal entries have exactly their own mean: whitening magnifies the remainder.
    origin = jax.lax.stop_gradient(jnp.where(n > 0, jnp.min(jnp.where(mask, x, jnp.inf)), 0.0))
    mean = origin + masked_sum(x - origin, mask) / jnp.maximum(n, 1.0)
    deviation = jnp.where(mask, x - mean, 0.0)  # before the square, whose gradient would be 0 * inf
    return jnp.stack([n, mean, jnp.sum(jnp.square(deviation))])


def variance(moments: Array) -> Array:
    """The unbiased variance by `moments`; 0 of a single entry."""
    return moments[2] / jnp.maximum(moments[0] - 1.0, 1.0)


def whiten(x: Array, mask: Array) -> Array:
    """(x - mean) / √(var + 1e-8) where the mask keeps, 0 elsewhere; mean and variance are over all kept entries."""
    chex.assert_equal_shape([x, mask])
    _, mean, _ = statistics = moments(x, mask)
    return jnp.where(mask, x - mean, 0.0) * (variance(statistics) + 1e-8) ** -0.5


def at_kept(x: Array, mask: Array) -> Array:  # [B] -> [B, L]
    """Puts the number x of each row at all its kept entries, 0 elsewhere."""
    chex.assert_equal_shape_prefix([x, mask], 1)
    return jnp.where(mask, jnp.asarray(x)[:, None], 0.0)


def last(mask: Array) -> Array:  # [B, L] bool
    """Marks the last kept entry of each row."""
    chex.assert_rank(mask, 2)
    remaining = jnp.cumsum(mask[:, ::-1], axis=1, dtype=jnp.int32)[:, ::-1]
    return jnp.asarray(mask) & (remaining == 1)


def ends(mask: Array) -> Array:  # [B, L] bool
    """Marks the last entry of each run of kept entries."""
    chex.assert_rank(mask, 2)
    return jnp.asarray(mask) & ~jnp.pad(jnp.asarray(mask)[:, 1:], ((0, 0), (0, 1)))


def move_into_mask(x: Array, mask: Array) -> Array:  # [B, L]
    """Moves each entry outside the mask to the last kept entry before it, or else to the row's first kept entry."""
    chex.assert_equal_shape([x, mask])
    mask = jnp.asarray(mask)

    def step(carried: jax.Array, inputs: Any) -> tuple[jax.Array, jax.Array]:  # all rows at one position
        entry, in_mask = inputs
        total = entry + carried
        return jnp.where(in_mask, 0.0, total), jnp.where(in_mask, total, 0.0)

    carried, kept_entries = jax.lax.scan(step, jnp.zeros_like(x[:, 0]), (jnp.asarray(x).T, mask.T), reverse=True)
    first = mask & (jnp.cumsum(mask, axis=1, dtype=jnp.int32) == 1)
    return kept_entries.T + at_kept(carried, first)


def sequence_sum(x: Array, mask: Array, segment: Array) -> Array:  # [R, T]
    """Σ x over the kept entries of a sequence, at each of its entries."""
    chex.assert_equal_shape([x, mask, segment])
    masked_x = jnp.where(mask, x, 0)
    return jax.vmap(lambda x, s: jax.ops.segment_sum(x, s, num_segments=s.size + 1)[s])(masked_x, jnp.asarray(segment))


def sequence_max(x: Array, segment: Array) -> Array:  # [R, T]
    """The largest x of a sequence, at each of its entries."""
    chex.assert_equal_shape([x, segment])
    return jax.vmap(lambda x, s: jax.ops.segment_max(x, s, num_segments=s.size + 1)[s])(x, jnp.asarray(segment))


def sequence_length(mask: Array, segment: Array, dtype: jnp.dtype = jnp.float32) -> Array:  # [R, T]
    """The number of kept entries of a sequence, at each of its entries."""
    return sequence_sum(jnp.ones(mask.shape, dtype), mask, segment)


def sequence_mean(x: Array, mask: Array, segment: Array) -> Array:  # [R, T]
    """The mean of x over the kept entries of a sequence, at each of its entries; 0 where none is kept."""
    return sequence_sum(x, mask, segment) / jnp.maximum(sequence_length(mask, segment, x.dtype), 1.0)
