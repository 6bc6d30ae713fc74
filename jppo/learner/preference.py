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
from jppo.algorithms.losses import bradley_terry, dpo, ipo
from jppo.learner import sharding
from jppo.learner.score import Value
from jppo.learner.stats import Outputs
from jppo.learner.update import Loss
from jppo.models.lora import Base, Weights, join
from jppo.types import Array, Counts, Params, Rows


def make_scores(value: Value, *, mesh: Mesh) -> Callable[[Params, Base | None, Rows, Array], Array]:
    """Makes (learned, base, rows, scores [B]) -> scores plus the scores of the sequences in these rows.

    A sequence's score is the sum of the values in its mask: a reward model's at its last entry, a policy's log-probs of
    its response.
    """

    def add_scores(learned: Params, base: Base | None, rows: Rows, scores: Array) -> Array:
        chex.assert_rank(scores, 1)
        values = value(join(learned, base), rows)
        return jnp.asarray(scores).at[jnp.where(rows.mask, rows.sequence, scores.shape[0])].add(values, mode="drop")

    return jax.jit(add_scores, out_shardings=sharding.replicated(mesh))


Metrics = dict[str, Array]
Slope = Callable[..., tuple[tuple[Array, Metrics], Array]]


def make_slope(*, center: float) -> Slope:
    """Makes (scores [2N], margin [N]) -> (the mean loss of the pairs, metrics), its slope by each score [2N].

    Scores are in the order of N chosen halves, then the N rejected ones.
    """

    def mean_pair_loss(scores: Array, margin: Array) -> tuple[Array, Metrics]:
        chosen, rejected = _split_halves(scores)
        return _mean_and_metrics(bradley_terry(chosen, rejected, margin, center=center), chosen, rejected)

    return jax.jit(jax.value_and_grad(mean_pair_loss, has_aux=True))


def make_dpo_slope(loss_type: str, *, beta: float) -> Slope:
    """Makes (log-probs [2N], the reference's [2N], tokens [2N]) -> as `make_slope`.

    The metrics are of the implicit reward, β (log π - log π_ref).
    """

    def mean_dpo_loss(logp: Array, reference: Array, tokens: Array) -> tuple[Array, Metrics]:
        ratio = logp - reference
        if loss_type == "ipo":
            losses = ipo(*_split_halves(ratio / jnp.maximum(tokens, 1.0)), beta=beta)
        else:
            losses = dpo(*_split_halves(ratio), beta=beta)
        return _mean_and_metrics(losses, *_split_halves(beta * ratio))

    return jax.jit(jax.value_and_grad(mean_dpo_loss, has_aux=True))


def _split_halves(scores: Array) -> tuple[Array, Array]:
    chex.assert_rank(scores, 1)
    return scores[: len(scores) // 2], scores[len(scores) // 2 :]


def _mean_and_metrics(losses: Array, chosen: Array, rejected: Array) -> tuple[Array, Metrics]:
    """Returns the mean loss of the pairs, and metrics of the scores of their halves."""
    mean = jnp.mean(losses)
    return mean, {
        "loss": mean,
        "accuracy": jnp.mean((chosen > rejected).astype(jnp.float32)),
        "margin": jnp.mean(chosen - rejected),
        "chosen": jnp.mean(chosen),
        "rejected": jnp.mean(rejected),
    }


def make_pullback(value: Value) -> Loss:
    """Makes the loss of the second pass: Σ g r over the rows' sequences for slopes g [B], with the loss's gradient."""

    def loss(params: Weights, rows: Rows, counts: Counts, slope: Array) -> tuple[Array, Outputs]:
        chex.assert_rank(slope, 1)
        return masked.masked_sum(value(params, rows) * slope[jnp.maximum(rows.sequence, 0)], rows.mask), Outputs({})

    return loss
