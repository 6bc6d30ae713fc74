"""Estimators of KL(policy ‖ reference) from the log-probs of sampled tokens.

Schulman, "Approximating KL divergence".
"""

from collections.abc import Callable

import jax.numpy as jnp

from jppo.structs import Array


def k1(logp: Array, ref_logp: Array) -> Array:
    """log π(a) - log π_ref(a): unbiased, can be negative."""
    return logp - ref_logp


def k3(logp: Array, ref_logp: Array) -> Array:
    """e^d - d - 1 with d = log π_ref(a) - log π(a), in [-10, 10]: unbiased in expectation, never negative.

    d is clipped to [-20, 20] before the exponential, as in verl, so that a far-off reference stays finite.
    """
    d = jnp.clip(ref_logp - logp, -20.0, 20.0)
    return jnp.clip(jnp.exp(d) - d - 1.0, -10.0, 10.0)


ESTIMATORS: dict[str, Callable[[Array, Array], Array]] = {"kl": k1, "k1": k1, "low_var_kl": k3, "k3": k3}
