"""The optimizer as an optax chain: clipping, a named or user-defined optimizer, and jppo's own transformations.

Learning rates follow PPO steps, as in verl, not optimizer updates. A chain is therefore a function of the learning rate
that returns an `optax.GradientTransformation`, and each step traces it with its own rate.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax
from optax import GradientTransformationExtraArgs as Transformation
from optax import contrib

from jppo.learner.loss_scale import Scaled, unscaled
from jppo.models import placing
from jppo.models.lora import hash_32_bits
from jppo.types import Array, Params

Chain = Callable[[Any], optax.GradientTransformation]  # learning rate, or Hyperparameters -> optimizer
ADAM_EPS = 1e-8  # of `optax.adamw`
MUON_RMS = 0.2  # RMS of the update over the learning rate, about AdamW's


class Hyperparameters(NamedTuple):
    """Hyperparameters of one optimizer step, as traced scalars; they replace the settings."""

    lr: Any
    beta1: Any
    beta2: Any
    eps: Any
    weight_decay: Any
    grad_clip: Any  # global norm; inf: none


class Rounded(NamedTuple):
    """The state of `stochastic_rounding`."""

    steps: Array  # [] i32, updates so far
    inner: Any  # leaves of parameters in bfloat16


class Master(NamedTuple):
    """The state of `master_copy`."""

    inner: Any
    master: Params  # f32


def muon(learning_rate: Any, betas: tuple[float, float], weight_decay: float, matrices: Params | None) -> Any:
    """Orthogonalized Nesterov momentum for the matrices of the layers, AdamW with Nesterov momentum for the others.

    An orthogonalized update has the same size for any momentum: a matrix without a gradient, such as a kernel of an
    expert without tokens, moves on in its last direction until rounding ends it.

    `matrices` has `contrib.MuonDimensionNumbers` for each matrix and None for other parameters. A single None makes all
    parameters with two axes matrices.
    """
    options = dict(adam_b1=betas[0], adam_b2=betas[1], weight_decay=weight_decay, adam_weight_decay=weight_decay)
    return contrib.muon(learning_rate, muon_weight_dimension_numbers=matrices, consistent_rms=MUON_RMS, **options)


def adafactor(learning_rate: Any, *, weight_decay: float) -> Any:
    """Second moments without momentum; the learning rate is absolute, as in AdamW.

    They are a row and a column where both of a parameter's largest axes have 128 or more entries, else one per weight.
    """
    decay = weight_decay * learning_rate
    return optax.adafactor(learning_rate, multiply_by_parameter_scale=False, weight_decay_rate=decay)


def sgd(learning_rate: Any, momentum_decay: float, weight_decay: float) -> Any:
    """Gradient descent with momentum and decoupled weight decay."""
    momentum = optax.trace(momentum_decay) if momentum_decay else optax.identity()
    return optax.chain(momentum, optax.add_decayed_weights(weight_decay), optax.scale_by_learning_rate(learning_rate))


def make_optimizer(
    chain: Chain, *, grad_clip: float, moments_dtype: str = "float32", master: bool = False, still: Params | None = None
) -> Transformation:
    """Makes the optimizer for `apply_gradients`: clipping by the global norm, then `chain`.

    With `master` the state keeps an f32 copy of narrower parameters. `still` is the number of rows at the end of each
    parameter that no update changes.
    """

    def clipped_chain(learning_rate: Any) -> optax.GradientTransformation:
        limit = learning_rate.grad_clip if isinstance(learning_rate, Hyperparameters) else grad_clip
        steps = [clip_by_global_norm(limit), chain(learning_rate)]
        return optax.chain(*steps, *([zero_last(still)] if any(jax.tree.leaves(still)) else []))

    tx = at_rate(clipped_chain)
    if moments_dtype == "bfloat16":
        tx = stochastic_rounding(tx)
    return master_copy(tx) if master else tx


def apply_gradients(
    tx: Transformation, params: Params, opt: Any, grads: Params, learning_rate: Array, good: Any = True
) -> tuple[Params, Any]:
    """Takes one optimizer step in f32 for any parameter dtype; unless `good`, parameters and state stay unchanged."""
    chex.assert_trees_all_equal_shapes(params, grads)

    def step_in_f32(params: Params, opt: Any) -> tuple[Params, Any]:
        params_f32 = in_f32(params)
        updates, opt = tx.update(in_f32(grads), opt, params_f32, learning_rate=learning_rate)
        inner = unscaled(opt)
        params_f32 = inner.master if isinstance(inner, Master) else optax.apply_updates(params_f32, updates)
        return jax.tree.map(lambda p, w: w.astype(p.dtype), params, params_f32), opt

    by_platform = {
        "cpu": functools.partial(step_by_branch, good, step_in_f32),
        "default": functools.partial(step_by_selection, good, step_in_f32),
    }
    new: tuple[Params, Any] = jax.lax.platform_dependent(params, opt, **by_platform)
    return new


def step_by_branch(is_finite: Any, step: Callable[..., Any], *state: Any) -> Any:
    """Returns `step(*state)` if `is_finite`, else `state`, by a branch: in place on CPUs; GPUs copy its operands.

    `optax.apply_if_finite` branches too, but returns zero updates, which take memory, and gives up after a number of
    steps.
    """
    return jax.lax.cond(is_finite, step, lambda *state: state, *state)


def step_by_selection(is_finite: Any, step: Callable[..., Any], *state: Any) -> Any:
    """Returns the same as `step_by_branch`, by selecting each element: in place on GPUs and TPUs, not on CPUs."""
    return jax.tree.map(lambda new_leaf, state: jnp.where(is_finite, new_leaf, state), step(*state), state)


def clip_by_global_norm(limit: Any) -> optax.GradientTransformation:
    """Clips as `optax.clip_by_global_norm`, by one factor for all elements: optax's division copies the gradient."""

    def clip(updates: Params, _: Params | None) -> Params:
        factor = jnp.minimum(1.0, limit / optax.tree.norm(updates))
        return jax.tree.map(lambda u: factor * u, updates)

    return optax.stateless(clip)


def at_rate(chain: Chain) -> Transformation:
    """Makes an optimizer whose `update` takes its learning rate: `optax.inject_hyperparams` without a state."""

    def update(
        updates: Params, state: Any, params: Params | None = None, *, learning_rate: Any, **extra: Any
    ) -> tuple[Params, Any]:
        tx = optax.with_extra_args_support(chain(learning_rate))
        out: tuple[Params, Any] = tx.update(updates, state, params, **extra)
        return out

    return Transformation(lambda params: chain(0.0).init(params), update)


def master_copy(inner: Transformation) -> Transformation:
    """Updates an f32 copy of the parameters, which keeps steps that narrower parameters round away."""

    def init(params: Params) -> Master:
        return Master(inner.init(in_f32(params)), in_f32(params))

    def update(updates: Params, state: Master, params: Params | None = None, **extra: Any) -> tuple[Params, Master]:
        updates, new = inner.update(updates, state.inner, state.master, **extra)
        return updates, Master(new, optax.apply_updates(state.master, updates))

    return Transformation(init, update)


def stochastic_rounding(inner: Transformation) -> Transformation:
    """Stores the f32 leaves of the state that belong to parameters in bfloat16, stochastically rounded.

    Rounding to nearest freezes them: with beta2=0.999 a second moment changes by less than half of bfloat16's step.
    """

    def to_bf16(state: Any, params: Params, steps: Array) -> Any:
        """Rounds a state's moments stochastically, by bits that follow from the step and the leaf's number."""
        numbers = iter(range(len(jax.tree.leaves(state))))

        def round_leaf(x: Any, _: Any) -> Any:
            leaf_number = next(numbers)
            return rounded_bf16(x, steps, leaf_number) if x.dtype == jnp.float32 else x

        return map_state(round_leaf, state, params, other=lambda x: x)

    def to_f32(x: Any, _: Any) -> Any:
        return x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x

    def init(params: Params) -> Rounded:
        steps = jnp.zeros((), jnp.int32)
        return Rounded(steps, to_bf16(inner.init(params), params, steps))

    def update(updates: Params, state: Rounded, params: Params, **extra: Any) -> tuple[Params, Rounded]:
        wide_state, steps = map_state(to_f32, state.inner, params, other=lambda x: x), state.steps + 1
        updates, new = inner.update(updates, wide_state, params, **extra)
        return updates, Rounded(steps, to_bf16(new, params, steps))

    return Transformation(init, update)


def zero_last(still: Params) -> optax.GradientTransformation:
    """Zeroes the updates of the last `still` rows of each parameter: those that pad the vocabulary stay as they are."""

    def zero_rows(u: Any, rows: int) -> Any:
        return jnp.where(jax.lax.broadcasted_iota(jnp.int32, u.shape, 0) < len(u) - rows, u, 0) if rows else u

    return optax.stateless(lambda updates, _: jax.tree.map(zero_rows, updates, still))


def map_state(f: Callable[..., Any], state: Any, *trees: Params, other: Callable[[Any], Any]) -> Any:
    """Applies `f(leaf, *leaves of its parameter)` to an optimizer's state, and `other(leaf)` to leaves of no parameter.

    A leaf's path ends in its parameter's path, in any optimizer's state.
    """
    leaves_by_path: dict[Any, tuple[Any, ...]] = {}
    jax.tree.map_with_path(lambda path, *leaves: leaves_by_path.update({path: leaves}), *trees)

    def map_leaf(path: tuple[Any, ...], leaf: Any) -> Any:
        leaves = next((leaves_by_path[path[i:]] for i in range(len(path)) if path[i:] in leaves_by_path), None)
        return other(leaf) if leaves is None else f(leaf, *leaves)

    return jax.tree.map_with_path(map_leaf, state)


def make_schedule(
    kind: str, *, lr: float, warmup_steps: int, total_steps: int, min_lr_ratio: float, init_lr_ratio: float = 0.0
) -> Callable[[Array], Array]:
    """Computes a step's learning rate: warm-up from lr * init_lr_ratio, then constant, or to lr * min_lr_ratio."""
    rate: optax.Schedule = optax.constant_schedule(lr)
    if kind == "cosine":
        rate = optax.cosine_decay_schedule(lr, max(total_steps - warmup_steps, 1), min_lr_ratio)
    elif kind == "linear":
        rate = optax.linear_schedule(lr, lr * min_lr_ratio, max(total_steps - warmup_steps, 1))
    if warmup_steps:
        rate = optax.join_schedules([optax.linear_schedule(lr * init_lr_ratio, lr, warmup_steps), rate], [warmup_steps])
    return lambda step: jnp.asarray(rate(step), jnp.float32)


def in_f32(tree: Params) -> Params:
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def rounded_bf16(x: Array, steps: Array, number: int) -> Array:
    """Rounds each f32 to one of its two bfloat16 neighbours at random, with the right mean.

    The random bits follow from `steps`, the leaf's `number` and the position in it, and take no memory.
    """
    indices, odd = jnp.zeros(x.shape, jnp.uint32), jnp.uint32(0x9E3779B9)
    for axis, size in enumerate(x.shape):
        indices = indices * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
    leaf_seed = hash_32_bits((jnp.uint32(number) + 1) * odd)
    hashes = (indices + hash_32_bits((steps.astype(jnp.uint32) + leaf_seed + 1) * odd)) * odd
    random_bits = (hashes ^ (hashes >> 16)) * jnp.uint32(0x85EBCA6B) >> 16  # two products an element, which CPUs feel
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + random_bits
    return jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)


def reset_optimizer(opt: Any, params: Params) -> Any:
    """Returns a fresh optimizer state for loaded parameters whose checkpoint has none: a master copy is theirs."""
    if isinstance(opt, Scaled):
        return opt._replace(inner=reset_optimizer(opt.inner, params))
    if not isinstance(opt, Master):
        return opt
    master = jax.tree.map(
        lambda p, old: jax.device_put(placing.to_device(p).astype(old.dtype), old.sharding), params, opt.master
    )
    return opt._replace(master=master)
