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
from jppo.models.sequence_parallel import HEADS, POSITIONS, column_axes, row_axes, vary_like

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
        init = nn.initializers.constant(1.0 - self.cfg.norm_offset)
        scale = self.param("scale", init, x.shape[-self.axes :], self.param_dtype)
        gain = scale.astype(jnp.float32) + self.cfg.norm_offset
        return (normed * gain.reshape((1,) * (x.ndim - self.axes) + gain.shape)).astype(x.dtype)


class Project(nn.Module):
    """Multiplies x with a kernel by einsum, with a bias and an adapter where present."""

    equation: str
    shape: tuple[int, ...]  # of the kernel
    bias: bool
    std: float
    param_dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel: Any = self.get_variable("params", "kernel")
        if not isinstance(kernel, Quantized):
            kernel = self.param("kernel", nn.initializers.normal(self.std), self.shape, self.param_dtype)
        y = product(self.equation, x, kernel)
        if self.bias:
            letters, outs = self.equation.partition(",")[2].split("->")
            shape = tuple(n for n, letter in zip(self.shape, letters, strict=True) if letter in outs)
            y += self.param("bias", nn.initializers.zeros, shape, self.param_dtype)[None, None].astype(x.dtype)
        if self.has_variable(lora.COLLECTION, "a"):
            down, up = lora.adapter_equations(self.equation)
            a: jax.Array = self.get_variable(lora.COLLECTION, "a")
            b: jax.Array = self.get_variable(lora.COLLECTION, "b")
            if self.has_variable(lora.COLLECTION, "dropout"):
                x = lora.drop_elements(x, **self.get_variable(lora.COLLECTION, "dropout"))
            y += product(up, product(down, x, a), b)
        return y


class Block(nn.Module):
    """A part of a decoder, with the submodules of all parts: projections and norms of its config and dtype."""

    cfg: ModelConfig
    param_dtype: Any

    def project(self, name: str, equation: str, *shape: int, bias: bool = False) -> Project:
        return Project(equation, shape, bias, self.cfg.initializer_range, self.param_dtype, name=name)

    def norm(self, name: str, *, axes: int = 1, eps: float | None = None) -> RMSNorm:
        return RMSNorm(self.cfg, self.param_dtype, axes, eps, name=name)

    def weight(self, name: str, init: Any, *shape: int) -> jax.Array:
        """Returns a parameter that is no kernel of a projection."""
        out: jax.Array = self.param(name, init, shape, self.param_dtype)
        return out


class MLP(Block):
    """down(activation(gate(x)) * up(x))."""

    width: int  # F

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        D, F, bias = self.cfg.hidden_size, self.width, self.cfg.mlp_bias
        if self.cfg.fused:
            gate_and_up = self.project("gate_up", "rtd,dnf->rtnf", D, 2, F, bias=bias)(x)
            gate, up = gate_and_up[:, :, 0], gate_and_up[:, :, 1]
        else:
            gate = self.project("gate", "rtd,df->rtf", D, F, bias=bias)(x)
            up = self.project("up", "rtd,df->rtf", D, F, bias=bias)(x)
        return self.project("down", "rtf,fd->rtd", F, D, bias=bias)(ACTIVATIONS[self.cfg.activation](gate) * up)


def scale_in_f32(x: jax.Array, factor: float) -> jax.Array:
    """Multiplies in f32: half precision would round the factor."""
    return x if factor == 1.0 else (x.astype(jnp.float32) * factor).astype(x.dtype)


def look_up(table: jax.Array, tokens: jax.Array, dtype: Any) -> jax.Array:
    """Looks up rows [..., D] of the table for tokens [...], cast to this dtype.

    Autodiff sums the cotangents of a token's occurrences in the table's dtype. In bfloat16 a sum stops growing at 2^8
    times the size of its terms, so narrow tables get a backward pass of their own.
    """
    chex.assert_rank(table, 2)
    return (table[tokens] if table.dtype.itemsize >= 4 else _look_up_narrow(table, tokens)).astype(dtype)


def make_lookup(mesh: Mesh | None) -> Lookup:
    """Makes `look_up` for a table whose D and V the mesh shards, and tokens sharded as rows.

    A device reads its columns of the table for the tokens of all devices that share it. It then exchanges them for
    all columns of its own tokens. XLA alone would gather the table or all activations.
    """
    if mesh is None or mesh.size == 1:
        return look_up

    def on_mesh(table: jax.Array, tokens: jax.Array, dtype: Any) -> jax.Array:
        chex.assert_rank([table, tokens], 2)
        V, D = table.shape
        d_axes = column_axes(mesh, D)
        vocab_axis = HEADS if V % mesh.shape[HEADS] == 0 and mesh.shape[HEADS] > 1 else None

        def look_up_on_device(table: jax.Array, tokens: jax.Array) -> jax.Array:
            array_axis = {axis: 1 if axis == POSITIONS else 0 for axis in d_axes}
            for axis, array_dim in array_axis.items():
                tokens = jax.lax.all_gather(tokens, axis, axis=array_dim, tiled=True)
            table = vary_like(table, tokens)
            if vocab_axis is None:
                x = look_up(table, tokens, dtype)
            else:
                local_tokens = tokens - jax.lax.axis_index(vocab_axis) * table.shape[0]
                is_local = (local_tokens >= 0) & (local_tokens < table.shape[0])
                x = look_up(table, jnp.where(is_local, local_tokens, 0), dtype)
                x = jax.lax.psum(jnp.where(is_local[..., None], x, 0), vocab_axis)
            for axis, array_dim in reversed(array_axis.items()):
                x = jax.lax.all_to_all(x, axis, split_axis=array_dim, concat_axis=2, tiled=True)
            return x

        specs = PartitionSpec(vocab_axis, d_axes or None), PartitionSpec(row_axes(), POSITIONS)
        out: jax.Array = jax.shard_map(look_up_on_device, mesh=mesh, in_specs=specs, out_specs=specs[1])(table, tokens)
        return out

    return on_mesh


@jax.custom_vjp
def _look_up_narrow(table: jax.Array, tokens: jax.Array) -> jax.Array:
    return table[tokens]


def _forward(table: jax.Array, tokens: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    # Only shape and dtype of the table are read.
    return table[tokens], (table, tokens)


def _backward(residuals: tuple[jax.Array, jax.Array], cotangent: jax.Array) -> tuple[jax.Array, None]:
    """Sums the cotangents by distinct token in f32, [min(N, V), D], each rounded once: no [V, D] in f32."""
    table, tokens = residuals
    V, D = table.shape
    distinct, row_of_token = jnp.unique(tokens.reshape(-1), size=min(tokens.size, V), fill_value=V, return_inverse=True)
    wide_cotangent = cotangent.reshape(-1, D).astype(jnp.float32)
    sums = jax.ops.segment_sum(wide_cotangent, row_of_token.reshape(-1), num_segments=distinct.size)
    # Each row of the table gathers its sum: XLA's CPU backend would widen a whole table to scatter into it.
    sum_index = jnp.full(V, distinct.size).at[distinct].set(jnp.arange(distinct.size), mode="drop")
    rows = jnp.pad(sums.astype(table.dtype), ((0, 1), (0, 0)))
    return rows[sum_index], None


_look_up_narrow.defvjp(_forward, _backward)


class Embed(Block):
    """The embedding look-up."""

    dtype: Any
    lookup: Lookup
    width: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        init = nn.initializers.normal(self.cfg.initializer_range)
        table = self.weight("embedding", init, self.cfg.padded_vocab_size, self.width)
        return self.lookup(table, tokens, self.dtype)  # [R, T, D]


class PerLayer(Block):
    """Computes the embeddings of all layers [R, T, L, P] from tokens [R, T] and the inputs of the first layer."""

    lookup: Lookup

    @nn.compact
    def __call__(self, tokens: jax.Array, x: jax.Array) -> jax.Array:
        cfg = self.cfg
        assert cfg.gemma4 is not None
        D, L, P = cfg.hidden_size, cfg.num_layers, cfg.gemma4.per_layer
        token_part = Embed(cfg, self.param_dtype, x.dtype, self.lookup, L * P, name="embed")(tokens)
        token_part *= jnp.asarray(P**0.5, x.dtype)
        projected = self.project("project", "rtd,dm->rtm", D, L * P)(x)
        state_part, token_part = (y.reshape(*y.shape[:2], L, P) for y in (projected * D**-0.5, token_part))
        return (self.norm("norm")(state_part) + token_part) * 2**-0.5


def split_by_stack(x: jax.Array | None, group: Group, *, of_sparse: bool = False) -> tuple[jax.Array | None, ...]:
    """Splits an array of all layers [R, T, L, ...] by the stacks of a scan, or by those with experts, layers first."""
    if x is None:
        return (None,) * len(group)
    return tuple(
        None if of_sparse and not stack.modules.sparse else jnp.moveaxis(x[:, :, stack.layers], 2, 0) for stack in group
    )
