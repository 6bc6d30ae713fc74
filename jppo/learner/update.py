"""Gradient steps: losses of a micro-batch, accumulated in f32 over a mini-batch, then one optimizer step.

Loss and gradient do not depend on how a mini-batch is cut: every token is weighed by 1 / (tokens of the mini-batch),
counted beforehand, and micro-batches are summed.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jppo.algorithms import kl, losses
from jppo.algorithms.masked import masked_sum
from jppo.learner.optim import descend
from jppo.learner.score import LogProb, Value
from jppo.structs import Array, Params, Rows, Scored

# (params, scored, tokens of the mini-batch) -> loss, sums over the mini-batch's tokens
Loss = Callable[[Params, Scored, Array], tuple[Array, dict[str, Array]]]


def make_actor_loss(
    logprob: LogProb,
    *,
    clip_ratio: float,
    entropy_coeff: float,
    kl_loss_coef: float,
    kl_loss_type: str | None,
) -> Loss:
    """mean over tokens of: clipped surrogate - entropy_coeff H + kl_loss_coef KL(π ‖ reference)."""
    estimate = None if kl_loss_type is None else kl.ESTIMATORS[kl_loss_type]

    def loss(params: Params, scored: Scored, tokens: Array) -> tuple[Array, dict[str, Array]]:
        logp, entropy = logprob(params, scored.rows)
        mask = scored.rows.mask

        def mean(x: Array) -> Array:
            return masked_sum(x, mask) / tokens

        # A masked entry must not reach the exponential: its gradient would be 0 * inf.
        delta = jnp.where(mask, logp - scored.logp, 0.0)
        surrogate, held = losses.clipped_policy(delta, jnp.zeros_like(delta), scored.advantage, clip_ratio=clip_ratio)
        total = mean(surrogate) - entropy_coeff * mean(entropy)
        sums = {
            "actor/pg_loss": mean(surrogate),
            "actor/pg_clipfrac": mean(held.astype(jnp.float32)),
            "actor/ppo_kl": mean(-delta),
            "actor/ratio_max": jnp.exp(jnp.max(delta)),
            "actor/ratio_min": jnp.exp(jnp.min(delta)),
        }
        if estimate is not None:
            penalty = mean(estimate(jnp.where(mask, logp, 0.0), jnp.where(mask, scored.ref_logp, 0.0)))
            total += kl_loss_coef * penalty
            sums["actor/kl_loss"] = penalty
        return total, sums

    return loss


def make_critic_loss(value: Value, *, cliprange_value: float) -> Loss:
    """mean over tokens of the clipped value loss."""

    def loss(params: Params, scored: Scored, tokens: Array) -> tuple[Array, dict[str, Array]]:
        mask = scored.rows.mask
        new = value(params, scored.rows)
        each, held = losses.clipped_value(new, scored.value, scored.returns, cliprange_value=cliprange_value)
        total = masked_sum(each, mask) / tokens
        sums = {
            "critic/vf_loss": total,
            "critic/vf_clipfrac": masked_sum(held.astype(jnp.float32), mask) / tokens,
            "critic/vpred_mean": masked_sum(new, mask) / tokens,
        }
        return total, sums

    return loss


def make_imitation_loss(logprob: LogProb) -> Callable[[Params, Rows, Array], tuple[Array, dict[str, Array]]]:
    """mean over tokens of -log π(target): supervised fine-tuning."""

    def loss(params: Params, rows: Rows, tokens: Array) -> tuple[Array, dict[str, Array]]:
        logp, _ = logprob(params, rows)
        total = -masked_sum(logp, rows.mask) / tokens
        return total, {"sft/loss": total}

    return loss


def make_accumulate(
    loss: Callable[..., tuple[Array, dict[str, Array]]],
) -> Callable[..., tuple[Params, dict[str, Array]]]:
    """(params, gradients so far, micro-batch, tokens) -> gradients with its own, and its share of the sums."""

    def accumulate(params: Params, grads: Params, micro: Scored | Rows, tokens: Array):
        new, sums = jax.grad(loss, has_aux=True)(params, micro, tokens)
        return jax.tree.map(lambda a, g: a + g.astype(jnp.float32), grads, new), sums

    return jax.jit(accumulate, donate_argnums=1)


def make_apply(
    tx: optax.GradientTransformation, schedule: Callable[[Array], Array], *, shardings: tuple[Any, Any]
) -> Callable[..., tuple[Params, Any, dict[str, Array]]]:
    """(params, optimizer state, gradients, step) -> the next two, and the gradient's norm before clipping."""

    def apply(params: Params, opt: Any, grads: Params, step: Array):
        lr = schedule(step)
        norm = optax.tree.norm(grads)
        params, opt = descend(tx, params, opt, grads, lr)
        return params, opt, {"grad_norm": norm, "lr": lr}

    # The gradients are not donated: nothing that comes out could take their place.
    return jax.jit(apply, donate_argnums=(0, 1), out_shardings=(*shardings, None))


def make_zeros(shapes: Params, shardings: Params) -> Callable[[], Params]:
    """A fresh f32 accumulator, in the parameters' shards."""
    zeros = lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, jnp.float32), shapes)  # noqa: E731
    return jax.jit(zeros, out_shardings=shardings)
