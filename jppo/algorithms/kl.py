"""KL(policy ‖ reference): estimators from the log-probs of sampled tokens, the exact KL both ways, its controller.

Schulman, "Approximating KL divergence". An unbiased value of k1, abs or k3 does not imply an unbiased gradient; k2's
is right. So every name may carry a `+`: its own value with the gradient of k2.
"""

from collections.abc import Callable, Mapping
from typing import Any

import chex
import jax
import jax.numpy as jnp

from jppo.types import Array

Estimate = Callable[[Array, Array], Array]  # (log-probs of sampled tokens, the reference's) -> the KL of each token
Kind = str | Estimate  # a name of `BY_NAME`, or a user's function


def k1(logp: Array, ref_logp: Array) -> Array:
    """log π(a) - log π_ref(a): unbiased, can be negative."""
    chex.assert_equal_shape([logp, ref_logp])
    return logp - ref_logp


def absolute(logp: Array, ref_logp: Array) -> Array:
    """|log π(a) - log π_ref(a)|, with no gradient where the two are equal, as in a first step."""
    chex.assert_equal_shape([logp, ref_logp])
    d = logp - ref_logp
    return d * jnp.sign(d)


def k2(logp: Array, ref_logp: Array) -> Array:
    """½ (log π(a) - log π_ref(a))²: biased, never negative; its expected gradient equals the KL's."""
    chex.assert_equal_shape([logp, ref_logp])
    return 0.5 * jnp.square(logp - ref_logp)


def k3(logp: Array, ref_logp: Array) -> Array:
    """e^d - d - 1 with d = log π_ref(a) - log π(a), in [-10, 10]: unbiased in expectation, never negative.

    d is clipped to [-20, 20] before the exponential, as in verl, so that a far-off reference stays finite.
    """
    chex.assert_equal_shape([logp, ref_logp])
    d = jnp.clip(ref_logp - logp, -20.0, 20.0)
    return jnp.clip(jnp.expm1(d) - d, -10.0, 10.0)


def _total(x: jax.Array) -> jax.Array:
    return jnp.sum(x, axis=-1)


def full(
    logits: jax.Array,  # [..., V] -> [...]
    ref_logits: jax.Array,
    *,
    log_softmax: Callable[[jax.Array], jax.Array] = jax.nn.log_softmax,
    total: Callable[[jax.Array], jax.Array] = _total,
    largest: object = None,
) -> jax.Array:
    """Σ_a π(a) (log π(a) - log π_ref(a)) over the whole vocabulary: exact, and so is its gradient.

    `log_softmax` and `total` replace the functions of the last axis where a mesh shards it, as `largest` does in
    `forward_kl_topk`; here nothing needs it.
    """
    chex.assert_equal_shape([logits, ref_logits])
    logp, ref_logp = log_softmax(logits), log_softmax(ref_logits)
    return total(jnp.exp(logp) * (logp - ref_logp))


def full_forward(logits: jax.Array, ref_logits: jax.Array, **sharded: Any) -> jax.Array:
    """Σ_a π_ref(a) (log π_ref(a) - log π(a)): the exact KL(π_ref ‖ π), with its gradient in π. See `full`."""
    return full(ref_logits, logits, **sharded)


def _largest(x: jax.Array, k: int) -> jax.Array:
    """Returns where the k largest entries of the last axis are; of equal ones the first."""
    index = jax.lax.top_k(x, k)[1]
    return jnp.put_along_axis(jnp.zeros(x.shape, bool), index, True, axis=-1, inplace=False)


def forward_kl_topk(
    logits: jax.Array,  # [..., V] -> [...]
    ref_logits: jax.Array,
    *,
    topk: int = 32,
    min_logp: float | None = None,
    log_softmax: Callable[[jax.Array], jax.Array] = jax.nn.log_softmax,
    total: Callable[[jax.Array], jax.Array] = _total,
    largest: Callable[[jax.Array, int], jax.Array] = _largest,
) -> jax.Array:
    """max(0, Σ_a π_ref(a) (log π_ref(a) - log π(a))) over the reference's `topk` likeliest tokens: `full_forward`, cut.

    Both log-probs are of the whole vocabulary, and at least `min_logp`. As verl's distillation loss of this name.
    """
    chex.assert_equal_shape([logits, ref_logits])
    logp, ref_logp = log_softmax(logits), log_softmax(ref_logits)
    if min_logp is not None:
        logp, ref_logp = jnp.maximum(logp, min_logp), jnp.maximum(ref_logp, min_logp)
    in_topk = largest(jax.lax.stop_gradient(ref_logits), topk)
    return jnp.maximum(total(jnp.where(in_topk, jnp.exp(ref_logp) * (ref_logp - logp), 0.0)), 0.0)


def with_gradient_of_k2(value: Array, logp: Array, ref_logp: Array) -> Array:
    """Returns the value with the gradient of k2: the meaning of a trailing `+`."""
    chex.assert_equal_shape([value, logp, ref_logp])
    k2_value = k2(logp, ref_logp)
    return k2_value - jax.lax.stop_gradient(k2_value) + jax.lax.stop_gradient(value)


def _plus(estimate: Estimate) -> Estimate:
    return lambda logp, ref_logp: with_gradient_of_k2(estimate(logp, ref_logp), logp, ref_logp)


_BY_TOKEN = {"kl": k1, "k1": k1, "abs": absolute, "mse": k2, "k2": k2, "low_var_kl": k3, "k3": k3}
ESTIMATORS: Mapping[str, Estimate] = _BY_TOKEN | {f"{k}+": _plus(f) for k, f in _BY_TOKEN.items()}
EXACT: Mapping[str, Callable[..., jax.Array]] = {
    "full": full, "full+": full, "full_forward": full_forward, "forward_kl_topk": forward_kl_topk,
}  # fmt: skip
BY_NAME: Mapping[str, Callable[..., Array]] = {**ESTIMATORS, **EXACT}  # all names in settings


def estimator(kind: Kind) -> Estimate:
    """Returns the function of a kind that is not of `EXACT`."""
    return ESTIMATORS[kind] if isinstance(kind, str) else kind


def adaptive(coef: Array, current_kl: Array | float, *, steps: int, target: float, horizon: float) -> Array:
    """The next coefficient (Ziegler et al., arXiv:1909.08593): β (1 + clip(KL / target - 1, -0.2, 0.2) n / horizon).

    `steps` is the n: the number of sequences in the KL.
    """
    chex.assert_rank([coef, current_kl], 0)
    error = jnp.clip(current_kl / target - 1.0, -0.2, 0.2)
    return coef * (1.0 + error * steps / horizon)
