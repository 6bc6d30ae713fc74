"""Passes without gradients: log-probs, values, and the advantages of a batch of micro-batches."""

from collections.abc import Callable
from typing import Any

import chex
import jax.numpy as jnp

from jppo.algorithms import advantage, kl, masked
from jppo.models import decoder, heads
from jppo.models.families import ModelConfig
from jppo.structs import Array, Params, Rows

LogProb = Callable[[Params, Rows], tuple[Array, Array]]  # -> logp, entropy: [R, T] f32
Value = Callable[[Params, Rows], Array]  # -> [R, T] f32


def make_logprob(model: Any, cfg: ModelConfig, *, temperature: float, chunk_tokens: int, with_entropy: bool) -> LogProb:
    """log π(target) and the entropy of π at each entry, at the temperature of sampling. Differentiable."""

    def logprob(params: Params, rows: Rows) -> tuple[Array, Array]:
        hidden = model.apply({"params": params}, rows.inputs, rows.segment, rows.position)
        return heads.logprob_entropy(
            hidden,
            decoder.head_kernel(params, cfg),
            jnp.asarray(rows.targets),
            temperature=temperature,
            chunk_tokens=chunk_tokens,
            with_entropy=with_entropy,
        )

    return logprob


def make_value(model: Any) -> Value:
    """The value of the state that each entry left. Differentiable."""

    def value(params: Params, rows: Rows) -> Array:
        hidden = model.apply({"params": params}, rows.inputs, rows.segment, rows.position)
        return heads.values(hidden, params["score"]["kernel"])

    return value


def make_gae(*, gamma: float, lam: float, kl_penalty: str | None) -> Callable[..., dict[str, Array]]:
    """Token rewards and GAE of one micro-batch, with the moments that whiten the advantage over the whole batch."""
    estimate = None if kl_penalty is None else kl.ESTIMATORS[kl_penalty]

    def compute(rows: Rows, reward: Array, value: Array, logp: Array, ref_logp: Array, kl_coef: Array):
        chex.assert_equal_shape([rows.mask, reward, value, logp, ref_logp])
        penalty = jnp.zeros_like(logp) if estimate is None else estimate(logp, ref_logp)
        token_reward = reward - kl_coef * penalty
        raw, returns = advantage.gae(token_reward, value, rows.mask, rows.segment, gamma=gamma, lam=lam)
        return {
            "advantage": raw,
            "returns": returns,
            "moments": masked.moments(raw, rows.mask),
            "return_moments": masked.moments(returns, rows.mask),
            "error_moments": masked.moments(returns - value, rows.mask),
            "value_moments": masked.moments(value, rows.mask),
            "kl_sum": masked.masked_sum(penalty, rows.mask),
        }

    return compute


def entropy_sum(rows: Rows, entropy: Array) -> Array:  # [] f32
    """The entropy of the policy, summed over the tokens that it chose."""
    return masked.masked_sum(entropy, rows.mask)


def sampler_gap(rows: Rows, logp: Array) -> Array:  # [4] f32
    """Sum and largest |trainer - sampler| log-prob, and the extremes of exp(trainer - sampler)."""
    gap = jnp.where(rows.mask, logp - rows.sampler_logp, 0.0)
    return jnp.stack([jnp.sum(jnp.abs(gap)), jnp.max(jnp.abs(gap)), jnp.exp(jnp.min(gap)), jnp.exp(jnp.max(gap))])
