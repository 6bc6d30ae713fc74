"""AdamW with clipping and a schedule, as pure functions. The learning rate goes by PPO steps, as in verl.

A step is computed in f32, whatever is stored. Everything in it is one product by numbers that hold for all
parameters, so that XLA steps each in its place, with nothing beside it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jppo.models import offload
from jppo.structs import Array, Params

EPS = 1e-8


class AdamState(NamedTuple):
    """The optimizer's state."""

    steps: Array  # [] i32, that are done
    mu: Params  # the mean of the gradients
    nu: Params  # the mean of their squares
    master: Params | None  # f32, what is stepped and the parameters are made of; None: the parameters themselves


def make_optimizer(
    *,
    grad_clip: float,
    betas: tuple[float, float],
    weight_decay: float,
    moments_dtype: str = "float32",
    master: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Clipping by the global norm, Adam's direction, decoupled weight decay; `descend` scales it by the rate.

    With `master` the state keeps an f32 copy of parameters that are narrower, for steps that they could not hold.
    """

    def init(params: Params) -> AdamState:
        def zeros() -> Params:
            return jax.tree.map(lambda p: jnp.zeros_like(p, dtype=moments_dtype), params)

        return AdamState(jnp.zeros((), jnp.int32), zeros(), zeros(), in_f32(params) if master else None)

    def update(grads: Params, state: AdamState, params: Params, *, good: Any = True) -> tuple[Params, AdamState]:
        (b1, b2), steps = betas, state.steps + 1
        norm = optax.tree.norm(grads)
        clip = jnp.where(norm < grad_clip, 1.0, grad_clip / norm)
        # Not to choose between two states, which would be there both: numbers with which a step changes nothing.
        keep1, keep2 = jnp.where(good, b1, 1.0), jnp.where(good, b2, 1.0)
        grads = jax.tree.map(lambda g: jnp.where(good, g * clip, 0.0), grads)
        mu = jax.tree.map(lambda m, g: keep1 * m + (1 - b1) * g, in_f32(state.mu), grads)
        nu = jax.tree.map(lambda v, g: keep2 * v + (1 - b2) * g**2, in_f32(state.nu), grads)
        if moments_dtype == "bfloat16":
            mu, nu = jax.tree.map(lambda m: m.astype(jnp.bfloat16), mu), drawn_bf16(nu, steps)
        of_mu, of_nu = (1 - b ** steps.astype(jnp.float32) for b in betas)
        direction = jax.tree.map(
            lambda p, m, v: (m / of_mu) / (jnp.sqrt(v / of_nu) + EPS) + weight_decay * p,
            params,
            in_f32(mu),
            in_f32(nu),
        )
        return direction, AdamState(jnp.where(good, steps, state.steps), mu, nu, state.master)

    return optax.GradientTransformationExtraArgs(init, update)


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
    """The tree in f32."""
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def drawn_bf16(tree: Params, steps: Array) -> Params:
    """Each f32 of the tree, 0 or more, as one of its two neighbours in bf16, drawn so that the mean is right.

    The nearest would stand still: with beta2=0.999 a mean of squares changes by less than half of bf16's steps. What
    is drawn follows from `steps` and the place in the tree, and takes no memory.
    """
    leaves, form = jax.tree.flatten(tree)

    def draw(number: int, x: jax.Array) -> jax.Array:
        places = jnp.zeros(x.shape, jnp.uint32)
        for axis, size in enumerate(x.shape):
            places = places * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
        low = mixed(places ^ mixed(steps.astype(jnp.uint32) + mixed(jnp.uint32(number)))) >> 16
        bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + low
        return jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)

    return jax.tree.unflatten(form, [draw(number, x) for number, x in enumerate(leaves)])


def mixed(x: Array) -> Array:
    """32 bits that look drawn at random, others for each x: the last step of MurmurHash3, with an odd number first."""
    x = (jnp.asarray(x, jnp.uint32) + jnp.uint32(1)) * jnp.uint32(0x9E3779B9)
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def descend(
    tx: optax.GradientTransformation, params: Params, opt: Any, grads: Params, lr: Array, good: Any = True
) -> tuple[Params, Any]:
    """One optimizer step in f32, whatever the parameters' dtype: p - lr * direction. Nothing changes unless `good`."""
    master = opt.master if isinstance(opt, AdamState) else None
    wide = in_f32(params) if master is None else master
    direction, opt = optax.with_extra_args_support(tx).update(in_f32(grads), opt, wide, good=good)
    wide = jax.tree.map(lambda p, u: p - jnp.where(good, lr, 0.0) * u, wide, direction)
    params = jax.tree.map(lambda p, w: w.astype(p.dtype), params, wide)
    return params, opt if master is None else opt._replace(master=wide)


def begun_anew(opt: Any, params: Params) -> Any:
    """A fresh optimizer's state for other parameters than it was made for: those that a checkpoint has without it."""
    if not isinstance(opt, AdamState) or opt.master is None:
        return opt
    master = jax.tree.map(
        lambda p, old: jax.device_put(offload.to_device(p).astype(old.dtype), old.sharding), params, opt.master
    )
    return opt._replace(master=master)
