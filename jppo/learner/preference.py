"""The gradient of a pairwise loss whose halves are anywhere in a batch, in two passes over its rows.

A pair's loss needs both of its scores, and the packer puts each half where it fits. So the first pass computes all
scores without a gradient. Then come the loss and its slope by every score, g = dL/dr. The second pass computes,
micro-batch by micro-batch, the gradient of Σ g r with g held fixed: by the chain rule, the gradient of L. Loss
and gradient do not depend on how the batch is cut. The price is one more forward pass.
"""

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jppo.algorithms import masked
from jppo.algorithms.preference import bradley_terry
from jppo.learner import sharding
from jppo.learner.score import Value
from jppo.learner.update import Loss
from jppo.models.lora import Base, Weights, join
from jppo.types import Array, Counts, Params, Rows


def make_scores(value: Value, *, mesh: Mesh) -> Callable[[Params, Base | None, Rows, Array], Array]:
    """Makes (learned, base, rows, scores [B]) -> scores plus the scores of the sequences in these rows.

    A sequence's score is the value at its only entry in the mask, its last.
    """

    def scores(learned: Params, base: Base | None, rows: Rows, so_far: Array) -> Array:
        chex.assert_rank(so_far, 1)
        found = value(join(learned, base), rows)
        return jnp.asarray(so_far).at[jnp.where(rows.mask, rows.sequence, so_far.shape[0])].add(found, mode="drop")

    return jax.jit(scores, out_shardings=sharding.replicated(mesh))


def make_slope(*, center: float) -> Callable[[Array, Array], tuple[tuple[Array, dict[str, Array]], Array]]:
    """Makes (scores [2N], margin [N]) -> (the mean loss of the pairs, metrics), its slope by each score [2N].

    Scores are in the order of N chosen halves, then the N rejected ones.
    """

    def loss(scores: Array, margin: Array) -> tuple[Array, dict[str, Array]]:
        chex.assert_shape(scores, (2 * margin.shape[0],))
        chosen, rejected = scores[: margin.shape[0]], scores[margin.shape[0] :]
        out = jnp.mean(bradley_terry(chosen, rejected, margin, center=center))
        return out, {
            "rm/loss": out,
            "rm/accuracy": jnp.mean((chosen > rejected).astype(jnp.float32)),
            "rm/margin": jnp.mean(chosen - rejected),
            "rm/chosen": jnp.mean(chosen),
            "rm/rejected": jnp.mean(rejected),
        }

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def make_pulled(value: Value) -> Loss:
    """Makes Σ g r over the rows' sequences for slopes g [B]; its gradient is their part of the loss gradient."""

    def loss(params: Weights, rows: Rows, counts: Counts, slope: Array) -> tuple[Array, dict[str, Array]]:
        chex.assert_rank(slope, 1)
        return masked.masked_sum(value(params, rows) * slope[jnp.maximum(rows.sequence, 0)], rows.mask), {}

    return loss
