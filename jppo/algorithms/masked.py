"""Means and moments over the entries that a mask keeps. Every function ignores the values behind a False."""

import chex
import jax.numpy as jnp
import numpy as np

from jppo.structs import Array


def masked_sum(x: Array, mask: Array) -> Array:
    """Σ x over the mask; a NaN or infinity behind a False does not leak."""
    chex.assert_equal_shape([x, mask])
    return jnp.sum(jnp.where(mask, x, 0.0))


def moments(x: Array, mask: Array) -> Array:  # [3] f32
    """(n, mean, Σ (x - mean)²) of the kept entries: what `combine` needs to whiten over several arrays."""
    n = jnp.sum(mask, dtype=x.dtype)
    mean = masked_sum(x, mask) / jnp.maximum(n, 1.0)
    return jnp.stack([n, mean, masked_sum(jnp.square(x - mean), mask)])


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
    return jnp.where(mask, (x - mean) * (var + 1e-8) ** -0.5, 0.0)
