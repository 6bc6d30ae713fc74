"""The vocabulary axis of logits, whole or sharded over a mesh axis: sums and log-softmax over tokens."""

import dataclasses
import functools

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The tokens along the last axis of logits; a mesh axis may shard them over its devices."""

    axis: str | None = None

    def tokens(self, logits: jax.Array) -> jax.Array:
        """Returns the token of each logit."""
        here = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
        return here if self.axis is None else here + jax.lax.axis_index(self.axis) * logits.shape[-1]

    def total(self, x: jax.Array) -> jax.Array:
        """Sums over tokens."""
        here = jnp.sum(x, axis=-1)
        return here if self.axis is None else _sum_over(self.axis, here)

    def logsumexp(self, logits: jax.Array) -> jax.Array:
        """Computes log Σ exp(logits)."""
        if self.axis is None:
            return jax.nn.logsumexp(logits, axis=-1)
        most: jax.Array = jax.lax.pmax(jnp.max(jax.lax.stop_gradient(logits), axis=-1), self.axis)
        return most + jnp.log(self.total(jnp.exp(logits - most[..., None])))

    def log_softmax(self, logits: jax.Array) -> jax.Array:
        """Converts logits to log-probs."""
        if self.axis is None:
            return jax.nn.log_softmax(logits)
        return logits - _used_over(self.axis, self.logsumexp(logits))[..., None]


WHOLE = Vocabulary()


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum_over(axis: str, x: jax.Array) -> jax.Array:
    """Sums over a mesh axis; the result is the same on all its devices, and so is its cotangent."""
    out: jax.Array = jax.lax.psum(x, axis)
    return out


_sum_over.defvjp(lambda axis, x: (_sum_over(axis, x), None), lambda axis, _, given: (given,))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _used_over(axis: str, x: jax.Array) -> jax.Array:
    """Returns x, equal on all devices of a mesh axis; its different cotangents are summed."""
    return x


_used_over.defvjp(lambda axis, x: (x, None), lambda axis, _, given: (jax.lax.psum(given, axis),))
