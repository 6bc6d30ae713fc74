"""Gradient steps: losses of a micro-batch, accumulated in f32 over a mini-batch, then one optimizer step.

Loss and gradient do not depend on how a mini-batch is cut. Every token's weight follows from the counts of the whole
mini-batch, taken beforehand, and micro-batches are summed.
"""

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jppo.algorithms import losses, values
from jppo.algorithms.masked import FAR, masked_sum
from jppo.learner import sharding
from jppo.learner.optim import Hyperparameters, apply_gradients
from jppo.learner.score import LogProb, LogProbKL, Value
from jppo.learner.stats import Outputs, Stat, join_groups, stats_of
from jppo.models.lora import Base, Weights, join
from jppo.models.router import RouterSums, balance_loss, z_loss
from jppo.models.sequence_parallel import POSITIONS, divided, row_axes
from jppo.types import Array, Counts, Params, Rows, Scored

GROUPS = "data"  # the mesh axis along which groups of devices hold the same parameters

# (params, micro-batch, counts of the mini-batch, further arguments) -> the micro-batch's part of the loss, and more
Loss = Callable[..., tuple[Array, Outputs]]
Weigh = Callable[..., Array]  # (mask, segment, tokens=, sequences=) -> the weight of each token in the loss
# Gradient and loss of the micro-batches so far; gradients have a first axis of `data` if that is above 1.
Carry = tuple[Params, Array]


def make_actor_loss(
    logprob_kl: LogProbKL,
    policy_loss: Callable[..., losses.PolicyLoss],
    weigh: Weigh,
    *,
    entropy_coeff: float,
    entropy_metric: bool = True,
    kl_loss_coef: float,
    kl_loss_max_clamp: float | None = None,
    positive_lm_coef: float = 0.0,
    router_aux_loss_coef: float = 0.0,
    router_z_loss_coef: float = 0.0,
    bypass_correction: Callable[..., tuple[Array, Array | None]] | None = None,
    by_token: bool = False,
) -> Loss:
    """Policy loss - entropy_coeff H + kl_loss_coef KL(π ‖ reference), each summed with the same weights of tokens.

    Plus positive_lm_coef times the mean of -log π over the positive examples' tokens (VAPO, arXiv:2504.05118, eq. 9),
    and the losses of routers. `bypass_correction` weights and rejects tokens of the policy loss. With `by_token`,
    the outputs have the tokens' log-probs.
    """

    def loss(params: Weights, scored: Scored, counts: Counts, reference: Weights | None) -> tuple[Array, Outputs]:
        chex.assert_equal_shape_prefix([*jax.tree.leaves(scored)], 2)
        scores = logprob_kl(params, reference, scored.rows, scored.ref_logprob)
        logprob, entropy, penalty, router, differs, _ = scores
        mask, segment = scored.rows.mask, scored.rows.segment
        share = weigh(mask, segment, tokens=counts.tokens, sequences=counts.sequences)

        def mean(x: Array) -> Array:
            return masked_sum(x.astype(jnp.float32), mask) / counts.tokens

        def total(x: Array) -> Array:
            return masked_sum(share * x, mask)

        surrogate, sums = _surrogate(policy_loss, weigh, bypass_correction, logprob, scored, counts)
        out = surrogate - entropy_coeff * total(entropy)
        of_ratio = _of_ratio(jnp.clip(jnp.where(mask, logprob - scored.old_logprob, 0.0), -FAR, FAR), mean)
        if entropy_metric:
            sums["actor/entropy"] = mean(entropy)
        if differs is not None:
            sums["rollout/routing_differs"] = mean(differs)
        if penalty is not None:
            penalty = penalty if kl_loss_max_clamp is None else jnp.clip(penalty, -kl_loss_max_clamp, kl_loss_max_clamp)
            sums["actor/kl_loss"] = total(penalty)
            out += kl_loss_coef * sums["actor/kl_loss"]
        if scored.positive is not None:
            sums["actor/positive_lm_loss"] = -masked_sum(scored.positive * logprob, mask)
            out += positive_lm_coef * sums["actor/positive_lm_loss"]
        load: tuple[Array, ...] = ()
        if router is not None:
            of_router, routing_metrics = _of_router(router, counts, router_aux_loss_coef, router_z_loss_coef)
            out, sums, load = out + of_router, sums | routing_metrics, (router.load / counts.tokens,)
        stats = stats_of(sums | {"actor/loss": out}) | of_ratio
        return out, Outputs(stats, {"logprob": logprob} if by_token else {}, load)

    return loss


def _surrogate(
    policy_loss: Callable[..., losses.PolicyLoss],
    weigh: Weigh,
    bypass_correction: Callable[..., tuple[Array, Array | None]] | None,
    logprob: Array,
    scored: Scored,
    counts: Counts,
) -> tuple[Array, dict[str, Array]]:
    """Returns the policy loss and its metrics."""
    mask, segment, weight = scored.rows.mask, scored.rows.segment, scored.weight
    kept, sums = mask, dict[str, Array]()
    if bypass_correction is not None:
        kept, weight = bypass_correction(logprob, scored.old_logprob, mask, segment)
        sums["rollout_corr/rollout_rs_masked_fraction"] = masked_sum(jnp.where(kept, 0.0, 1.0), mask) / counts.tokens
        if weight is not None:
            sums["rollout_corr/rollout_is_mean"] = masked_sum(weight, mask) / counts.tokens
    selected = () if scored.selected is None else (scored.selected,)
    each, *clipped = policy_loss(logprob, scored.old_logprob, scored.advantage, kept, segment, *selected)
    share = weigh(kept, segment, tokens=counts.tokens, sequences=counts.sequences)  # lengths count kept tokens
    sums["actor/pg_loss"] = masked_sum(share * (each if weight is None else each * weight), kept)
    held, held_lower = (masked_sum(one.astype(jnp.float32), kept) / counts.tokens for one in clipped)
    sums |= {"actor/pg_clipfrac": held, "actor/pg_clipfrac_lower": held_lower}
    return sums["actor/pg_loss"], sums


def _of_ratio(delta: Array, mean: Callable[[Array], Array]) -> dict[str, Stat]:
    """Returns metrics of the ratio, exp(delta); delta is 0 outside of the mask."""
    return {
        "actor/ppo_kl": Stat(mean(-delta)),
        "actor/ratio_mean": Stat(mean(jnp.exp(delta))),
        "actor/ratio_max": Stat(jnp.exp(jnp.max(delta)), "max"),
        "actor/ratio_min": Stat(jnp.exp(jnp.min(delta)), "min"),
    }


def _of_router(router: RouterSums, counts: Counts, aux_coef: float, z_coef: float) -> tuple[Array, dict[str, Array]]:
    """Returns the losses of routers, times their coefficients, and their metrics."""
    sums: dict[str, Array] = {"actor/router_entropy": jnp.mean(router.entropy) / counts.tokens}
    out: Array = jnp.zeros(())
    if z_coef:
        sums["actor/router_z_loss"] = z_loss(router, counts.tokens)
        out += z_coef * sums["actor/router_z_loss"]
    if aux_coef:
        assert counts.load is not None
        sums["actor/router_aux_loss"] = balance_loss(router, counts.load, counts.tokens)
        out += aux_coef * sums["actor/router_aux_loss"]
    return out, sums


def make_critic_loss(
    value: Value, weigh: Weigh, *, cliprange_value: float, value_range: tuple[float, float] | None = None
) -> Loss:
    """Makes the clipped value loss, or with `value_range` the histogram's, summed with the weights of tokens."""

    def loss(params: Weights, scored: Scored, counts: Counts) -> tuple[Array, Outputs]:
        chex.assert_equal_shape_prefix([*jax.tree.leaves(scored)], 2)
        mask, segment = scored.rows.mask, scored.rows.segment
        assert scored.value is not None and scored.returns is not None
        new = value(params, scored.rows)
        if value_range is None:
            each, held = losses.clipped_value(new, scored.value, scored.returns, cliprange_value=cliprange_value)
        else:
            each, held = values.histogram_loss(new, scored.returns, value_range)
            new = values.histogram_value(new, value_range)
        out = masked_sum(each * weigh(mask, segment, tokens=counts.tokens, sequences=counts.sequences), mask)
        sums = {
            "critic/vf_loss": out,
            "critic/vf_clipfrac": masked_sum(held.astype(jnp.float32), mask) / counts.tokens,
            "critic/vpred_mean": masked_sum(new, mask) / counts.tokens,
        }
        return out, Outputs(stats_of(sums))

    return loss


def make_imitation_loss(logprob: LogProb) -> Loss:
    """Makes the mean over tokens of -log π(target): supervised fine-tuning."""

    def loss(params: Weights, rows: Rows, counts: Counts) -> tuple[Array, Outputs]:
        chex.assert_rank(rows.mask, 2)
        out = -masked_sum(logprob(params, rows).logprob, rows.mask) / counts.tokens
        return out, Outputs({"sft/loss": Stat(out)})

    return loss


def groups_of(mesh: Mesh) -> int:
    """Returns how many groups of devices along `data` sum gradients separately; 1: sums are exchanged at once.

    libtpu 0.0.42 ends the process while it compiles programs for groups (v5e-4, data=4).
    """
    return 1 if sharding.platform(mesh) == "tpu" else mesh.shape[GROUPS]


def make_accumulate(
    loss: Loss, *, mesh: Mesh | None = None, options: dict[str, Any] | None = None
) -> Callable[..., tuple[Carry, Outputs]]:
    """(learned, base, carry, micro-batch, counts, ...) -> the carry with gradient and loss added; the loss's outputs.

    The gradient is by the learned parameters; a frozen `base` has none. Groups of devices along `data` keep their own
    sums of gradients, which take no more memory than one sum. `make_exchange` adds these up, once a mini-batch.
    `options` are the compiler's.
    """
    groups = 1 if mesh is None else groups_of(mesh)

    def by_group(x: Array) -> Array:
        """Reshapes rows [R, ...] to [groups, R / groups, ...]."""
        assert mesh is not None
        place = NamedSharding(mesh, PartitionSpec(GROUPS, row_axes(), POSITIONS))
        out: Array = jax.lax.with_sharding_constraint(x.reshape(groups, -1, *x.shape[1:]), place)
        return out

    def accumulate(
        learned: Params, base: Base | None, carry: Carry, micro: Scored | Rows, counts: Counts, *further: Any
    ) -> tuple[Carry, Outputs]:
        def gradient(micro: Scored | Rows) -> Any:
            def of(learned: Params) -> tuple[Array, Outputs]:
                return loss(join(learned, base), micro, counts, *further)

            return jax.value_and_grad(of, has_aux=True)(learned)

        grads, so_far = carry
        if groups == 1:
            (new_loss, out), new = gradient(micro)
        else:
            with divided(GROUPS):
                (new_loss, each), new = jax.vmap(gradient, spmd_axis_name=GROUPS)(jax.tree.map(by_group, micro))
            new_loss, out = jnp.sum(new_loss), join_groups(each)
        return (jax.tree.map(lambda a, g: a + g.astype(jnp.float32), grads, new), so_far + new_loss), out

    return jax.jit(accumulate, donate_argnums=2, compiler_options=options)


def make_exchange(shardings: Params) -> jax.stages.Wrapped | None:
    """Makes the exchange that replaces each group's gradient in the carry by the sum over all; None with one group.

    A separate program, so that its arguments may be donated: the sums overwrite their summands.
    """
    mesh = jax.tree.leaves(shardings)[0].mesh
    if groups_of(mesh) == 1:
        return None
    specs = jax.tree.map(lambda place: PartitionSpec(GROUPS, *place.spec), shardings), PartitionSpec()

    def exchange(carry: Carry) -> Carry:
        return jax.lax.psum(carry[0], GROUPS), carry[1]

    on_each = jax.shard_map(exchange, mesh=mesh, in_specs=(specs,), out_specs=specs, check_vma=False)
    return jax.jit(on_each, donate_argnums=0)


def without_groups(grads: Params, params: Params, places: Params) -> Params:
    """Removes the axis of groups from gradients that are equal in all groups."""

    def one(grad: Array, param: Array, place: Any) -> Array:
        if grad.ndim == param.ndim:
            return grad
        ins, mesh = PartitionSpec(GROUPS, *place.spec), place.mesh
        local: Any = jax.shard_map(lambda x: x[0], mesh=mesh, in_specs=ins, out_specs=place.spec, check_vma=False)
        ungrouped: Array = local(grad)
        return ungrouped

    return jax.tree.map(one, grads, params, places)


def make_apply(
    tx: optax.GradientTransformation, schedule: Callable[[Any], Any], *, shardings: tuple[Any, Any]
) -> jax.stages.Wrapped:
    """(params, optimizer state, carry, step, learns) -> the next two, the gradient norm before clipping, the rate.

    A non-finite loss or gradient leaves both unchanged and counts as `skipped`. So does a mini-batch without a token to
    learn from (`learns` is False), counted as `empty`. AdamW would decay the weights and move them by momentum.
    `schedule` returns the rate of a step, or all `Hyperparameters`.
    """

    def apply(params: Params, opt: Any, carry: Carry, step: Any, learns: Array) -> tuple[Params, Any, dict[str, Array]]:
        chex.assert_rank(step, 0)
        grads, loss = without_groups(carry[0], params, shardings[0]), carry[1]
        lr = schedule(step)
        norm = optax.tree.norm(grads)
        good = jnp.isfinite(norm) & jnp.isfinite(loss)
        params, opt = apply_gradients(tx, params, opt, grads, lr, good & learns)
        rate = lr.lr if isinstance(lr, Hyperparameters) else lr
        return params, opt, {"grad_norm": norm, "lr": rate, "skipped": 1.0 - good, "empty": 1.0 - learns}

    # The gradients are not donated: the results in their place would be copied, not computed there.
    return jax.jit(apply, donate_argnums=(0, 1), out_shardings=(*shardings, None))


def abstract_carry(shapes: Params, shardings: Params) -> Carry:
    """Returns the f32 accumulator as shapes, in the parameters' shards: one for each group of devices along `data`."""
    mesh = jax.tree.leaves(shardings)[0].mesh
    groups = groups_of(mesh)

    def one(x: Any, place: NamedSharding) -> Any:
        if groups == 1:
            return jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=place)
        place = NamedSharding(mesh, PartitionSpec(GROUPS, *place.spec))
        return jax.ShapeDtypeStruct((groups, *x.shape), jnp.float32, sharding=place)

    loss: Any = jax.ShapeDtypeStruct((), jnp.float32, sharding=sharding.replicated(mesh))
    return jax.tree.map(one, shapes, shardings), loss


def make_zeros(shapes: Params, shardings: Params) -> Callable[[], Carry]:
    """Makes a fresh accumulator."""
    carry = abstract_carry(shapes, shardings)

    def zeros() -> Carry:
        out: Carry = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), carry)
        return out

    return jax.jit(zeros, out_shardings=jax.tree.map(lambda x: x.sharding, carry))
