"""Flax modules that the decoder is made of: norm, projection, MLP, embeddings of tokens and, as of Gemma 4, of layers.

Token embeddings have an f32 sum of gradients for narrow tables. On a mesh, devices exchange rows of activations, never
the table.
"""

import functools
from collections.abc import Callable
from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jppo.models import lora
from jppo.models.config import Group, ModelConfig
from jppo.models.kernels import Quantized, product
from jppo.models.sequence_parallel import HEADS, POSITIONS, columns, row_axes

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
}

# (table [V, D], tokens [R, T], dtype) -> [R, T, D]
Lookup = Callable[[jax.Array, jax.Array, Any], jax.Array]


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * (scale + offset) over the last axes, in f32."""

    cfg: ModelConfig
    param_dtype: Any
    axes: int = 1
    eps: float | None = None  # None: the model's
    scaled: bool = True  # False: there is no scale

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        variance = jnp.mean(jnp.square(wide), axis=tuple(range(-self.axes, 0)), keepdims=True)
        normed = wide * jax.lax.rsqrt(variance + (self.cfg.rms_norm_eps if self.eps is None else self.eps))
        if not self.scaled:
            return normed.astype(x.dtype)
        start = nn.initializers.constant(1.0 - self.cfg.norm_offset)
        scale = self.param("scale", start, x.shape[-self.axes :], self.param_dtype)
        gain = scale.astype(jnp.float32) + self.cfg.norm_offset
        return (normed * gain.reshape((1,) * (x.ndim - self.axes) + gain.shape)).astype(x.dtype)


class Project(nn.Module):
    """Multiplies x with a kernel by einsum, with a bias and an adapter where present."""

    equation: str
    shape: tuple[int, ...]  # of the kernel
    bias: tuple[int, ...] | None
    std: float
    param_dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel: Any = self.get_variable("params", "kernel")
        if not isinstance(kernel, Quantized):
            kernel = self.param("kernel", nn.initializers.normal(self.std), self.shape, self.param_dtype)
        y = product(self.equation, x, kernel)
        if self.bias is not None:
            y += self.param("bias", nn.initializers.zeros, self.bias, self.param_dtype)[None, None].astype(x.dtype)
        if self.has_variable(lora.COLLECTION, "a"):
            down, up = lora.equations(self.equation)
            a: jax.Array = self.get_variable(lora.COLLECTION, "a")
            b: jax.Array = self.get_variable(lora.COLLECTION, "b")
            if self.has_variable(lora.COLLECTION, "dropout"):
                x = lora.dropped(x, **self.get_variable(lora.COLLECTION, "dropout"))
            y += product(up, product(down, x, a), b)
        return y


class MLP(nn.Module):
    """down(activation(gate(x)) * up(x))."""

    cfg: ModelConfig
    param_dtype: Any
    width: int  # F

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        cfg = self.cfg
        D, F = cfg.hidden_size, self.width

        def project(name: str, equation: str, shape: tuple[int, ...]) -> Project:
            bias = shape[1:] if cfg.mlp_bias else None
            return Project(equation, shape, bias, cfg.initializer_range, self.param_dtype, name=name)

        if cfg.fused:
            both = project("gate_up", "rtd,dnf->rtnf", (D, 2, F))(x)
            gate, up = both[:, :, 0], both[:, :, 1]
        else:
            gate = project("gate", "rtd,df->rtf", (D, F))(x)
            up = project("up", "rtd,df->rtf", (D, F))(x)
        return project("down", "rtf,fd->rtd", (F, D))(ACTIVATIONS[cfg.activation](gate) * up)


def scaled(x: jax.Array, factor: float) -> jax.Array:
    """Multiplies in f32: half precision would round the factor."""
    return x if factor == 1.0 else (x.astype(jnp.float32) * factor).astype(x.dtype)


def look_up(table: jax.Array, tokens: jax.Array, dtype: Any) -> jax.Array:
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
        return look_up

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
                x = look_up(table, tokens, dtype)
            else:
                here = tokens - jax.lax.axis_index(of_rows) * table.shape[0]
                mine = (here >= 0) & (here < table.shape[0])
                x = look_up(table, jnp.where(mine, here, 0), dtype)
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


def embeddings_by_stack(embeddings: jax.Array | None, group: Group) -> tuple[jax.Array | None, ...]:
    """Splits embeddings [R, T, L, P] by the stacks of a scan: [layers, R, T, P]."""
    if embeddings is None:
        return (None,) * len(group)
    return tuple(jnp.moveaxis(embeddings[:, :, stack.layers], 2, 0) for stack in group)
