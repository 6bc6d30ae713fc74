"""Embeddings: of tokens, with an f32 sum of gradients for narrow tables; and in every layer, as of Gemma 4.

On a mesh, devices exchange rows of activations, never the table.
"""

from collections.abc import Callable
from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jppo.models.config import Group, ModelConfig
from jppo.models.modules import Project, RMSNorm
from jppo.models.sequence_parallel import HEADS, POSITIONS, columns, row_axes

# (table [V, D], tokens [R, T], dtype) -> [R, T, D]
Lookup = Callable[[jax.Array, jax.Array, Any], jax.Array]


def lookup(table: jax.Array, tokens: jax.Array, dtype: Any) -> jax.Array:
    """Looks up rows [..., D] of the table for tokens [...], cast to this dtype.

    Autodiff sums the cotangents of a token's occurrences in the table's dtype. In bfloat16 a sum stops growing at 2^8
    times the size of its terms, so narrow tables get a backward pass of their own.
    """
    chex.assert_rank(table, 2)
    return (table[tokens] if table.dtype.itemsize >= 4 else _narrow(table, tokens)).astype(dtype)


def make_lookup(mesh: Mesh | None) -> Lookup:
    """Makes the same for a table whose D and V the mesh shards, and tokens sharded as rows.

    A device reads its columns of the table for the tokens of all devices that share it. It then exchanges them for
    all columns of its own tokens. XLA alone would gather the table or all activations.
    """
    if mesh is None or mesh.size == 1:
        return lookup

    def on_mesh(table: jax.Array, tokens: jax.Array, dtype: Any) -> jax.Array:
        chex.assert_rank([table, tokens], 2)
        V, D = table.shape
        of_columns = columns(mesh, D)
        of_rows = HEADS if V % mesh.shape[HEADS] == 0 and mesh.shape[HEADS] > 1 else None

        def local(table: jax.Array, tokens: jax.Array) -> jax.Array:
            axis_of = {axis: 1 if axis == POSITIONS else 0 for axis in of_columns}
            for axis, place in axis_of.items():
                tokens = jax.lax.all_gather(tokens, axis, axis=place, tiled=True)
            if of_rows is None:
                x = lookup(table, tokens, dtype)
            else:
                here = tokens - jax.lax.axis_index(of_rows) * table.shape[0]
                mine = (here >= 0) & (here < table.shape[0])
                x = lookup(table, jnp.where(mine, here, 0), dtype)
                x = jax.lax.psum(jnp.where(mine[..., None], x, 0), of_rows)
            for axis, place in reversed(axis_of.items()):
                x = jax.lax.all_to_all(x, axis, split_axis=place, concat_axis=2, tiled=True)
            return x

        specs = PartitionSpec(of_rows, of_columns or None), PartitionSpec(row_axes(), POSITIONS)
        over_mesh = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs[1], check_vma=False)
        out: jax.Array = over_mesh(table, tokens)
        return out

    return on_mesh


@jax.custom_vjp
def _narrow(table: jax.Array, tokens: jax.Array) -> jax.Array:
    return table[tokens]


def _forward(table: jax.Array, tokens: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    # Only shape and dtype of the table are read.
    return table[tokens], (table, tokens)


def _backward(held: tuple[jax.Array, jax.Array], given: jax.Array) -> tuple[jax.Array, None]:
    """Sums the cotangents by distinct token in f32, [min(N, V), D], each rounded once: no [V, D] in f32."""
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


class Embed(nn.Module):
    """The embedding look-up."""

    cfg: ModelConfig
    param_dtype: Any
    dtype: Any
    lookup: Lookup
    width: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        shape = (self.cfg.padded_vocab_size, self.width)
        init = nn.initializers.normal(self.cfg.initializer_range)
        table = self.param("embedding", init, shape, self.param_dtype)
        return self.lookup(table, tokens, self.dtype)  # [R, T, D]


class PerLayer(nn.Module):
    """Computes the embeddings of all layers [R, T, L, P] from tokens [R, T] and the inputs of the first layer."""

    cfg: ModelConfig
    param_dtype: Any
    lookup: Lookup

    @nn.compact
    def __call__(self, tokens: jax.Array, x: jax.Array) -> jax.Array:
        cfg = self.cfg
        assert cfg.gemma4 is not None
        D, L, P = cfg.hidden_size, cfg.num_layers, cfg.gemma4.per_layer
        of_token = Embed(cfg, self.param_dtype, x.dtype, self.lookup, L * P, name="embed")(tokens)
        of_token *= jnp.asarray(P**0.5, x.dtype)
        project = Project("rtd,dm->rtm", (D, L * P), None, cfg.initializer_range, self.param_dtype, name="project")
        of_state, of_token = (y.reshape(*y.shape[:2], L, P) for y in (project(x) * D**-0.5, of_token))
        return (RMSNorm(cfg, self.param_dtype, name="norm")(of_state) + of_token) * 2**-0.5


def by_stack(embeddings: jax.Array | None, group: Group) -> tuple[jax.Array | None, ...]:
    """Splits embeddings [R, T, L, P] by the stacks of a scan: [layers, R, T, P]."""
    if embeddings is None:
        return (None,) * len(group)
    return tuple(jnp.moveaxis(embeddings[:, :, stack.layers], 2, 0) for stack in group)
