"""Gradient steps: losses of a micro-batch, accumulated in f32 over a mini-batch, then one optimizer step.

Loss and gradient do not depend on how a mini-batch is cut. Every token's weight follows from the counts of the whole
mini-batch, taken beforehand, and micro-batches are summed.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jppo.algorithms import losses, values
from jppo.algorithms.masked import FAR, masked_sum
from jppo.errors import UserError
from jppo.learner import sharding
from jppo.learner.algorithm import Algorithm, Term
from jppo.learner.loss_scale import Scaled, next_scale
from jppo.learner.optim import Hyperparameters, apply_gradients
from jppo.learner.score import LogProb, LogProbKL, Value
from jppo.learner.stats import Outputs, Stat, join_groups, stats_of
from jppo.learner.views import STATISTIC, LossView, ValueView, View, view
from jppo.models.lora import Base, Weights, join
from jppo.models.sequence_parallel import POSITIONS, divide_rows, row_axes
from jppo.types import Array, Counts, Params, Rows, Scored

GROUPS = "data"  # the mesh axis along which groups of devices hold the same parameters

# (params, micro-batch, counts of the mini-batch, further arguments) -> the micro-batch's part of the loss, and more
Loss = Callable[..., tuple[Array, Outputs]]
# Gradient and loss of the micro-batches so far; gradients have a first axis of `data` if that is above 1.
Carry = tuple[Params, Array]
# (mask, segment, aggregation or None, tokens=, sequences=) -> the weight of each token
Mean = Callable[..., Array]
Correct = Callable[..., tuple[Array, Array | None]]  # `estimate.make_bypass_correction`


def aggregate(
    mask: Array, segment: Array, mode: str | None, *, usual: str, scale: float, tokens: Array, sequences: Array
) -> Array:
    """Returns the weights of the tokens by an aggregation, the `usual` one if that is None (`losses.token_weights`)."""
    return losses.token_weights(mask, segment, mode=mode or usual, tokens=tokens, sequences=sequences, scale=scale)


def make_actor_loss(
    score_rows: LogProbKL,
    algorithm: Algorithm,
    *,
    mean: Mean,
    entropy_metric: bool = True,
    bypass_correction: Correct | None = None,
    by_token: bool = False,
) -> Loss:
    """Makes the policy's loss, the sum of the algorithm's terms. `bypass_correction` corrects the `corrected` ones.

    With `by_token`, the outputs have the tokens' log-probs.
    """

    def actor_loss(params: Weights, scored: Scored, counts: Counts, reference: Weights | None) -> tuple[Array, Outputs]:
        """Scores a micro-batch with the current policy, and returns its part of the loss, and metrics."""
        chex.assert_equal_shape_prefix([*jax.tree.leaves(scored)], 2)
        arrays, mask = scored.arrays, scored.rows.mask
        scores = score_rows(params, reference, scored.rows, arrays.get("ref_logprob"))
        inputs = {"logprob": scores.logprob, "entropy": scores.entropy, "kl": scores.penalty, "router": scores.router}
        inputs |= {f"{STATISTIC}{name}": x for name, x in (scores.statistics or {}).items()}
        inputs |= {"load": counts.load, "tokens": counts.tokens, "segment": scored.rows.segment}
        inputs |= {name: x for name, x in arrays.items() if name != "weight"}
        kept_mask, weight, sums = mask, arrays.get("weight"), dict[str, Array]()
        if bypass_correction is not None:
            kept_mask, weight = bypass_correction(scores.logprob, arrays["old_logprob"], mask, scored.rows.segment)
            sums["rollout_corr/rollout_rs_masked_fraction"] = (
                masked_sum(jnp.where(kept_mask, 0.0, 1.0), mask) / counts.tokens
            )
            if weight is not None:
                sums["rollout_corr/rollout_is_mean"] = masked_sum(weight, mask) / counts.tokens
        views = inputs | {"mask": mask}, inputs | {"mask": kept_mask, "weight": weight}
        total, term_metrics = add_terms(algorithm.terms, LossView, algorithm.loss_reads, *views, counts, mean)
        stats = _ratio_metrics(
            jnp.clip(jnp.where(mask, scores.logprob - arrays["old_logprob"], 0.0), -FAR, FAR), mask, counts
        )
        if entropy_metric:
            sums["actor/entropy"] = masked_sum(scores.entropy, mask) / counts.tokens
        if scores.routing_differs is not None:
            sums["rollout/routing_differs"] = masked_sum(scores.routing_differs, mask) / counts.tokens
        load: tuple[Array, ...] = ()
        if scores.router is not None:
            sums["actor/router_entropy"] = jnp.mean(scores.router.entropy) / counts.tokens
            load = (scores.router.load / counts.tokens,)
        stats |= stats_of(sums | {"actor/loss": total})
        if common := stats.keys() & term_metrics:
            raise UserError(f"a term of the loss writes the metric {min(common)!r}, which the update has; rename it")
        stats |= stats_of(term_metrics)
        return total, Outputs(stats, {"logprob": scores.logprob} if by_token else {}, load)

    return actor_loss


def add_terms(
    terms: Sequence[Term],
    kind: type[View],
    reads: tuple[str, ...],
    plain: Mapping[str, Any],
    corrected: Mapping[str, Any],
    counts: Counts,
    mean: Mean,
) -> tuple[Array, dict[str, Array]]:
    """Adds the terms times their coefficients; returns the sum and the metrics.

    `plain` and `corrected` are the arrays that views have by name, of which a corrected term sees the second; their
    `mask` is the tokens that count, and `weight` multiplies the term.
    """
    total: Array = jnp.zeros(())
    sums = dict[str, Array]()
    for term in terms:
        arrays = corrected if term.corrected else plain
        mask, weight = arrays["mask"], arrays.get("weight")
        result = term.loss(view(kind, reads, arrays))
        numbers, metrics = result if isinstance(result, tuple) else (result, {})
        sums |= {name: masked_sum(x.astype(jnp.float32), mask) / counts.tokens for name, x in metrics.items()}
        if jnp.ndim(numbers):  # lengths count the tokens of the term
            share = mean(mask, arrays["segment"], term.aggregation, tokens=counts.tokens, sequences=counts.sequences)
            numbers = masked_sum(share * (numbers if weight is None else numbers * weight), mask)
        if term.metric:
            sums[term.metric] = numbers
        total = total + (numbers if term.coefficient == 1.0 else term.coefficient * numbers)
    return total, sums


def _ratio_metrics(delta: Array, mask: Array, counts: Counts) -> dict[str, Stat]:
    """Returns metrics of the ratio, exp(delta); delta is 0 outside of the mask."""
    return {
        "actor/ppo_kl": Stat(masked_sum(-delta, mask) / counts.tokens),
        "actor/ratio_mean": Stat(masked_sum(jnp.exp(delta), mask) / counts.tokens),
        "actor/ratio_max": Stat(jnp.exp(jnp.max(delta)), "max"),
        "actor/ratio_min": Stat(jnp.exp(jnp.min(delta)), "min"),
    }


def make_critic_loss(
    value: Value, algorithm: Algorithm, *, mean: Mean, value_range: tuple[float, float] | None = None
) -> Loss:
    """Makes the sum of the algorithm's terms of values; with `value_range`, `value` returns a histogram's logits."""

    def critic_loss(params: Weights, scored: Scored, counts: Counts) -> tuple[Array, Outputs]:
        chex.assert_equal_shape_prefix([*jax.tree.leaves(scored)], 2)
        rows, output = scored.rows, value(params, scored.rows)
        prediction = output if value_range is None else values.histogram_value(output, value_range)
        arrays = {"value": prediction, "logits": output, "old_value": scored.arrays["value"]}
        arrays["returns"] = scored.arrays["returns"]
        arrays |= {"mask": rows.mask, "segment": rows.segment}
        total, sums = add_terms(algorithm.value_terms, ValueView, algorithm.value_reads, arrays, arrays, counts, mean)
        sums["critic/vpred_mean"] = masked_sum(prediction, rows.mask) / counts.tokens
        return total, Outputs(stats_of(sums))

    return critic_loss


def make_imitation_loss(logprob: LogProb) -> Loss:
    """Makes the mean over tokens of -log π(target): supervised fine-tuning."""

    def imitation_loss(params: Weights, rows: Rows, counts: Counts) -> tuple[Array, Outputs]:
        chex.assert_rank(rows.mask, 2)
        mean = -masked_sum(logprob(params, rows).logprob, rows.mask) / counts.tokens
        return mean, Outputs({"sft/loss": Stat(mean)})

    return imitation_loss


def groups_of(mesh: Mesh) -> int:
    """Returns how many groups of devices along `data` sum gradients separately; 1: sums are exchanged at once.

    libtpu 0.0.42 ends the process while it compiles programs for groups (v5e-4, data=4).
    """
    return 1 if sharding.platform(mesh) == "tpu" else mesh.shape[GROUPS]


def make_accumulate(
    loss: Loss, *, mesh: Mesh | None = None, options: dict[str, Any] | None = None
) -> Callable[..., tuple[Carry, Outputs]]:
    """Compiles (learned, base, carry, micro-batch, counts, scale, ...) -> carry plus gradient and loss; the outputs.

    The gradient is by the learned parameters; a frozen `base` has none. `scale` is the loss scale; None: 1. Groups of
    devices along `data` keep their own sums of gradients, which take no more memory than one sum. `make_exchange` adds
    these up, once a mini-batch. `options` are the compiler's.
    """
    groups = 1 if mesh is None else groups_of(mesh)

    def by_group(x: Array) -> Array:
        """Reshapes rows [R, ...] to [groups, R / groups, ...]."""
        assert mesh is not None
        place = NamedSharding(mesh, PartitionSpec(GROUPS, row_axes(), POSITIONS))
        outputs: Array = jax.lax.with_sharding_constraint(x.reshape(groups, -1, *x.shape[1:]), place)
        return outputs

    def accumulate(
        learned: Params,
        base: Base | None,
        carry: Carry,
        micro: Scored | Rows,
        counts: Counts,
        scale: Array | None,
        *further: Any,
    ) -> tuple[Carry, Outputs]:
        """Adds a micro-batch's gradient and loss to the sums in `carry`."""

        def gradient(micro: Scored | Rows) -> Any:
            def loss_of(learned: Params) -> tuple[Array, tuple[Array, Outputs]]:
                value, outputs = loss(join(learned, base), micro, counts, *further)
                return value if scale is None else scale * value, (value, outputs)

            grads, results = jax.grad(loss_of, has_aux=True)(learned)
            return results, grads

        grads, loss_sum = carry
        if groups == 1:
            (new_loss, outputs), new_grads = gradient(micro)
        else:
            with divide_rows(GROUPS):
                (new_loss, parts), new_grads = jax.vmap(gradient, spmd_axis_name=GROUPS)(jax.tree.map(by_group, micro))
            new_loss, outputs = jnp.sum(new_loss), join_groups(parts)

        def add(total: Array, new: Array) -> Array:
            wide = new.astype(jnp.float32)
            return total + (wide if scale is None else wide / scale)

        return (jax.tree.map(add, grads, new_grads), loss_sum + new_loss), outputs

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

    on_each = jax.shard_map(exchange, mesh=mesh, in_specs=(specs,), out_specs=specs)
    return jax.jit(on_each, donate_argnums=0)


def without_groups(grads: Params, params: Params, shardings: Params) -> Params:
    """Removes the first axis, of groups of devices, from gradients that are equal in all groups."""

    def drop_axis(grad: Array, param: Array, place: Any) -> Array:
        if grad.ndim == param.ndim:
            return grad
        spec, mesh = PartitionSpec(GROUPS, *place.spec), place.mesh
        # That the groups are equal cannot be checked: only another exchange would prove it.
        first: Any = jax.shard_map(lambda x: x[0], mesh=mesh, in_specs=spec, out_specs=place.spec, check_vma=False)
        ungrouped: Array = first(grad)
        return ungrouped

    return jax.tree.map(drop_axis, grads, params, shardings)


def make_apply(
    tx: optax.GradientTransformation, schedule: Callable[[Any], Any], *, shardings: tuple[Any, Any]
) -> jax.stages.Wrapped:
    """Compiles the optimizer step: (params, optimizer state, carry, step, learns) -> the next two, and metrics.

    A non-finite loss or gradient leaves both unchanged and counts as `skipped`; if the loss scale may be the reason, it
    is lowered, and the mini-batch counts as `overflowed`. Unchanged are both also after a mini-batch without a token to
    learn from (`learns` is False), counted as `empty`. AdamW would decay the weights and move them by momentum.
    `schedule` returns the rate of a step, or all `Hyperparameters`.
    """

    def apply(params: Params, opt: Any, carry: Carry, step: Any, learns: Array) -> tuple[Params, Any, dict[str, Array]]:
        """Takes an optimizer step with the summed gradient in `carry`, unless it is non-finite or empty."""
        chex.assert_rank(step, 0)
        grads, loss = without_groups(carry[0], params, shardings[0]), carry[1]
        lr = schedule(step)
        norm = optax.tree.norm(grads)
        is_finite = jnp.isfinite(norm) & jnp.isfinite(loss)
        params, opt = apply_gradients(tx, params, opt, grads, lr, is_finite & learns)
        rate = lr.lr if isinstance(lr, Hyperparameters) else lr
        stats = {"grad_norm": norm, "lr": rate, "skipped": 1.0 - is_finite, "empty": 1.0 - learns}
        if isinstance(opt, Scaled):
            overflowed = learns & jnp.isfinite(loss) & ~is_finite
            opt, of_scale = next_scale(opt, finite=is_finite & learns, overflowed=overflowed)
            stats |= of_scale | {"skipped": stats["skipped"] - of_scale["overflowed"]}
        return params, opt, stats

    # The gradients are not donated: the results in their place would be copied, not computed there.
    return jax.jit(apply, donate_argnums=(0, 1), out_shardings=(*shardings, None))


def abstract_carry(shapes: Params, shardings: Params) -> Carry:
    """Returns the f32 accumulator as shapes, in the parameters' shards.

    Each group of devices along `data` has its own, so that only a whole mini-batch is summed over them.
    """
    mesh = jax.tree.leaves(shardings)[0].mesh
    groups = groups_of(mesh)

    def sum_shape(x: Any, place: NamedSharding) -> Any:
        if groups == 1:
            return jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=place)
        place = NamedSharding(mesh, PartitionSpec(GROUPS, *place.spec))
        return jax.ShapeDtypeStruct((groups, *x.shape), jnp.float32, sharding=place)

    loss: Any = jax.ShapeDtypeStruct((), jnp.float32, sharding=sharding.replicated(mesh))
    return jax.tree.map(sum_shape, shapes, shardings), loss


def make_zeros(shapes: Params, shardings: Params) -> Callable[[], Carry]:
    """Makes the function that returns an accumulator of zeros, in the parameters' shards."""
    carry = abstract_carry(shapes, shardings)
    places = jax.tree.map(lambda x: x.sharding, carry)
    return jax.jit(lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), carry), out_shardings=places)
