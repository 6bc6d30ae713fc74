"""The look-up of token embeddings, with a gradient that frequent tokens keep in narrow parameters: `lookup`."""

import jax
import jax.numpy as jnp


def lookup(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """The rows [..., D] of the table [V, D] for tokens [...].

    Autodiff adds the cotangents of a token's occurrences up in the table's dtype. In bfloat16 a sum stands still once
    it is 2^8 times as large as its terms, so narrow tables get a backward pass of their own.
    """
    return table[tokens] if table.dtype.itemsize >= 4 else _narrow(table, tokens)


@jax.custom_vjp
def _narrow(table: jax.Array, tokens: jax.Array) -> jax.Array:
    return table[tokens]


def _forward(table: jax.Array, tokens: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    # Of the table only shape and dtype are read.
    return table[tokens], (table, tokens)


def _backward(held: tuple[jax.Array, jax.Array], given: jax.Array) -> tuple[jax.Array, None]:
    """Sums by distinct token in f32, [min(N, V), D], each rounded once: no [V, D] in f32."""
    table, tokens = held
    V, D = table.shape
    distinct, which = jnp.unique(tokens.reshape(-1), size=min(tokens.size, V), fill_value=V, return_inverse=True)
    wide = given.reshape(-1, D).astype(jnp.float32)
    sums = jax.ops.segment_sum(wide, which.reshape(-1), num_segments=distinct.size)
    # Each row of the table gathers its sum: XLA's CPU backend would widen a whole table to scatter into it.
    place = jnp.full(V, distinct.size).at[distinct].set(jnp.arange(distinct.size), mode="drop")
    rows = jnp.pad(sums.astype(table.dtype), ((0, 1), (0, 0)))
    return rows[place], None


_narrow.defvjp(_forward, _backward)
