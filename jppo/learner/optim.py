"""AdamW with clipping and a schedule, as pure functions. The learning rate goes by PPO steps, as in verl."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jppo.structs import Array, Params


def make_optimizer(
    *, grad_clip: float, betas: tuple[float, float], weight_decay: float
) -> optax.GradientTransformation:
    """Clipping by the global norm, Adam's direction, decoupled weight decay; `descend` scales it by the rate."""
    return optax.chain(
        optax.clip_by_global_norm(grad_clip),
        optax.scale_by_adam(b1=betas[0], b2=betas[1], eps=1e-8),
        optax.add_decayed_weights(weight_decay),
    )


def make_schedule(
    kind: str, *, lr: float, warmup_steps: int, total_steps: int, min_lr_ratio: float
) -> Callable[[Array], Array]:
    """The learning rate of a step: linear warm-up from 0, then constant, or a cosine down to lr * min_lr_ratio."""

    def schedule(step: Array) -> Array:
        step = jnp.asarray(step, jnp.float32)
        warm = jnp.minimum(1.0, step / max(warmup_steps, 1)) if warmup_steps else 1.0
        if kind == "constant":
            return jnp.float32(lr) * warm
        progress = jnp.clip((step - warmup_steps) / max(total_steps - warmup_steps, 1), 0.0, 1.0)
        cosine = 0.5 * (1.0 + jnp.cos(jnp.pi * progress))
        return lr * warm * (min_lr_ratio + (1.0 - min_lr_ratio) * cosine)

    return schedule


def in_f32(tree: Params) -> Params:
    """The tree in f32: moments of bf16 would stand still."""
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def descend(tx: optax.GradientTransformation, params: Params, opt: Any, grads: Params, lr: Array) -> tuple[Params, Any]:
    """One optimizer step in f32, whatever the parameters' dtype: p - lr * direction."""
    direction, opt = tx.update(in_f32(grads), opt, in_f32(params))
    params = jax.tree.map(lambda p, u: (p - lr * u).astype(p.dtype), params, direction)
    return params, opt
