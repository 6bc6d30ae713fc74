"""The loss scale of training in float16, whose small gradients would be 0 (Micikevicius et al., arXiv:1710.03740).

`update.make_accumulate` multiplies the loss by the scale and divides the gradient by it in f32. The scale is in the
optimizer's state. A mini-batch whose gradient overflows halves it and changes nothing else; after many in a row that do
not overflow it doubles, as in torch.amp.GradScaler.
"""

from typing import Any, NamedTuple

import chex
import jax.numpy as jnp
import optax
from optax import GradientTransformationExtraArgs as Transformation

from jppo.types import Array, Params

BEGIN, GROWTH, BACKOFF, INTERVAL = 2.0**16, 2.0, 0.5, 2000  # GradScaler's
SMALLEST = 1.0  # an overflow without a scale is the model's


class Scaled(NamedTuple):
    """The state of an optimizer with a loss scale."""

    inner: Any
    scale: Array  # [] f32, a power of two
    good: Array  # [] i32, mini-batches without overflow since the scale changed


def scale_loss(inner: Transformation) -> Transformation:
    """Adds a loss scale to the state of an optimizer, whose updates leave it unchanged."""

    def init(params: Params) -> Scaled:
        return Scaled(inner.init(params), jnp.float32(BEGIN), jnp.int32(0))

    def update(
        updates: Params, state: Scaled, params: Params | None = None, **extra: Any
    ) -> tuple[Params, optax.OptState]:
        updates, new = inner.update(updates, state.inner, params, **extra)
        return updates, state._replace(inner=new)

    return Transformation(init, update)


def unscaled(opt: Any) -> Any:
    """Returns the optimizer's state without the loss scale, if it has one."""
    return opt.inner if isinstance(opt, Scaled) else opt


def scale_of(opt: Any) -> Array | None:
    """Returns the loss scale in an optimizer's state; None: the loss is not scaled."""
    return opt.scale if isinstance(opt, Scaled) else None


def next_scale(opt: Scaled, *, finite: Array, overflowed: Array) -> tuple[Scaled, dict[str, Array]]:
    """Returns the state with the next mini-batch's scale, and metrics.

    A mini-batch that neither is `finite` nor has `overflowed` leaves the scale as it is. Nor can the smallest scale
    overflow.
    """
    chex.assert_rank([opt.scale, opt.good, finite, overflowed], 0)
    overflowed &= opt.scale > SMALLEST
    good = opt.good + finite
    grown = jnp.where(jnp.isfinite(GROWTH * opt.scale), GROWTH * opt.scale, opt.scale)
    grows = good == INTERVAL
    scale = jnp.where(overflowed, jnp.maximum(BACKOFF * opt.scale, SMALLEST), jnp.where(grows, grown, opt.scale))
    stats = {"loss_scale": opt.scale, "overflowed": overflowed.astype(jnp.float32)}
    return opt._replace(scale=scale, good=jnp.where(overflowed | grows, 0, good)), stats
