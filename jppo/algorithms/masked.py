"""Sums, means and moments over the entries that a mask keeps. Every function ignores the values behind a False.

Several sequences may share a row: `segment` [R, T] says which entries belong together (0 = empty). What is one number
for a sequence stands at each of its entries, so that everything stays [R, T] and rows may be spread over devices.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jppo.structs import Array

FAR = 20.0  # log-ratios are clipped to ±20 before an exponential, as in verl: large, and finite in every dtype


def masked_sum(x: Array, mask: Array) -> Array:
    """Σ x over the mask; a NaN or infinity behind a False does not leak."""
    chex.assert_equal_shape([x, mask])
    return jnp.sum(jnp.where(mask, x, 0.0))


def moments(x: Array, mask: Array) -> Array:  # [3] f32
    """(n, mean, Σ (x - mean)²) of the kept entries: what `combine` needs to whiten over several arrays."""
    n = jnp.sum(mask, dtype=x.dtype)
    # Measured from one of them, so that equal entries have exactly their own mean: whitening magnifies what is left.
    some = jax.lax.stop_gradient(jnp.where(n > 0, jnp.min(jnp.where(mask, x, jnp.inf)), 0.0))
    mean = some + masked_sum(x - some, mask) / jnp.maximum(n, 1.0)
    deviation = jnp.where(mask, x - mean, 0.0)  # before the square, whose gradient would be 0 * inf
    return jnp.stack([n, mean, jnp.sum(jnp.square(deviation))])


def combine(parts: list[np.ndarray]) -> tuple[float, float, float]:
    """Count, mean, unbiased variance of a union of parts, each given by its `moments` (Chan et al. 1983)."""
    n, mean, m2 = 0.0, 0.0, 0.0
    for part in parts:
        k, part_mean, part_m2 = (float(p) for p in part)
        if k == 0:
            continue
        delta = part_mean - mean
        total = n + k
        mean += delta * k / total
        m2 += part_m2 + delta**2 * n * k / total
        n = total
    return n, mean, m2 / max(n - 1.0, 1.0)


def whiten(x: Array, mask: Array, *, mean: Array, var: Array) -> Array:
    """(x - mean) / √(var + 1e-8) where the mask keeps, 0 elsewhere."""
    chex.assert_equal_shape([x, mask])
    return jnp.where(mask, (x - mean) * (var + 1e-8) ** -0.5, 0.0)


def sequence_sum(x: Array, mask: Array, segment: Array) -> Array:  # [R, T]
    """Σ x over the kept entries of a sequence, at each of its entries."""
    chex.assert_equal_shape([x, mask, segment])
    kept = jnp.where(mask, x, 0)
    return jax.vmap(lambda x, s: jax.ops.segment_sum(x, s, num_segments=s.size + 1)[s])(kept, jnp.asarray(segment))


def sequence_length(mask: Array, segment: Array, dtype: jnp.dtype = jnp.float32) -> Array:  # [R, T]
    """The number of kept entries of a sequence, at each of its entries."""
    return sequence_sum(jnp.ones(mask.shape, dtype), mask, segment)


def sequence_mean(x: Array, mask: Array, segment: Array) -> Array:  # [R, T]
    """The mean of x over the kept entries of a sequence, at each of its entries; 0 where none is kept."""
    return sequence_sum(x, mask, segment) / jnp.maximum(sequence_length(mask, segment, x.dtype), 1.0)


def sequence_max(x: Array, mask: Array, segment: Array) -> Array:  # [R, T]
    """The largest x of the kept entries of a sequence, at each of its entries; 0 where none is kept."""
    chex.assert_equal_shape([x, mask, segment])
    kept = jnp.where(mask, x, -jnp.inf)
    most = jax.vmap(lambda x, s: jax.ops.segment_max(x, s, num_segments=s.size + 1)[s])(kept, jnp.asarray(segment))
    return jnp.where(jnp.isneginf(most), 0.0, most)


def last_of_sequence(mask: Array, segment: Array) -> Array:  # [R, T] bool
    """The last kept entry of each sequence."""
    order = jnp.cumsum(mask, axis=1, dtype=jnp.float32)  # exact: rows are shorter than 2**24
    return jnp.asarray(mask) & (order == sequence_max(order, mask, segment))


def spread(x: Array, sequence: Array, mask: Array) -> Array:  # [B] -> [R, T]
    """x of each entry's sequence where the mask keeps, 0 elsewhere; `sequence` [R, T] counts into x, -1 = empty."""
    chex.assert_rank([x, sequence, mask], [1, 2, 2])
    return jnp.where(mask, jnp.asarray(x)[jnp.maximum(sequence, 0)], 0.0)


def collect(x: Array, sequence: Array, mask: Array, *, sequences: int) -> Array:  # [R, T] -> [B]
    """Σ x over the kept entries of each of the batch's `sequences`."""
    chex.assert_equal_shape([x, sequence, mask])
    kept = jnp.where(mask, x, 0).reshape(-1)
    return jax.ops.segment_sum(kept, jnp.where(mask, sequence, sequences).reshape(-1), num_segments=sequences + 1)[:-1]
