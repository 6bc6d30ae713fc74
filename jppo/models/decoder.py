"""The transformer: tokens to hidden states, one module for all families. Its heads are in `heads.py`.

The parameters of the layers are stacked, [L, ...], whether the layers are scanned or unrolled: `params.py`
has the table of them.
"""

from collections.abc import Callable
from typing import Any, Literal

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp

from jppo.models import attention
from jppo.models.families import ModelConfig
from jppo.models.params import Head
from jppo.structs import Params

Remat = Literal["none", "dots", "full"]

_POLICIES = {
    # Keeps the products with weights and computes attention scores again.
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}


def identity(x: jax.Array) -> jax.Array:
    """x."""
    return x


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * scale, in f32."""

    cfg: ModelConfig
    param_dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", nn.initializers.ones, (self.cfg.hidden_size,), self.param_dtype)
        wide = x.astype(jnp.float32)
        variance = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        normed = wide * jax.lax.rsqrt(variance + self.cfg.rms_norm_eps)
        return (normed * scale[None, None].astype(jnp.float32)).astype(x.dtype)


class Project(nn.Module):
    """einsum of x with a kernel, and a bias where the family has one."""

    equation: str
    shape: tuple[int, ...]  # of the kernel
    bias: tuple[int, ...] | None
    std: float
    param_dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.param("kernel", nn.initializers.normal(self.std), self.shape, self.param_dtype)
        y = jnp.einsum(self.equation, x, kernel.astype(x.dtype))
        if self.bias is not None:
            y += self.param("bias", nn.initializers.zeros, self.bias, self.param_dtype)[None, None].astype(x.dtype)
        return y


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    cfg: ModelConfig
    param_dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, segment: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        cfg = self.cfg
        D, H, K, A = cfg.hidden_size, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim

        def project(name: str, equation: str, shape: tuple[int, ...], bias: tuple[int, ...] | None) -> Project:
            return Project(equation, shape, bias, cfg.initializer_range, self.param_dtype, name=name)

        q = project("q", "rtd,dha->rtha", (D, H, A), (H, A) if cfg.qkv_bias else None)(x)
        k = project("k", "rtd,dka->rtka", (D, K, A), (K, A) if cfg.qkv_bias else None)(x)
        v = project("v", "rtd,dka->rtka", (D, K, A), (K, A) if cfg.qkv_bias else None)(x)
        q, k = attention.rotate(q, cos, sin), attention.rotate(k, cos, sin)
        mixed = attention.attend(q, k, v, segment)  # [R, T, H, A]
        return project("o", "rtha,had->rtd", (H, A, D), (D,) if cfg.o_bias else None)(mixed)


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    cfg: ModelConfig
    param_dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        cfg = self.cfg
        D, F = cfg.hidden_size, cfg.intermediate_size

        def project(name: str, equation: str, shape: tuple[int, int]) -> Project:
            bias = shape[1:] if cfg.mlp_bias else None
            return Project(equation, shape, bias, cfg.initializer_range, self.param_dtype, name=name)

        gate = project("gate", "rtd,df->rtf", (D, F))(x)
        up = project("up", "rtd,df->rtf", (D, F))(x)
        return project("down", "rtf,fd->rtd", (F, D))(jax.nn.silu(gate) * up)


class Layer(nn.Module):
    """One block: x + attention(norm(x)), then x + mlp(norm(x)). The body of the scan over layers."""

    cfg: ModelConfig
    param_dtype: Any
    constrain: Callable[[jax.Array], jax.Array]

    @nn.compact
    def __call__(self, x: jax.Array, segment: jax.Array, cos: jax.Array, sin: jax.Array) -> tuple[jax.Array, None]:
        normed = RMSNorm(self.cfg, self.param_dtype, name="attn_norm")(x)
        x = x + Attention(self.cfg, self.param_dtype, name="attn")(normed, segment, cos, sin)
        normed = RMSNorm(self.cfg, self.param_dtype, name="mlp_norm")(x)
        x = x + MLP(self.cfg, self.param_dtype, name="mlp")(normed)
        return self.constrain(x), None


class Embed(nn.Module):
    """Rows of the embedding table."""

    cfg: ModelConfig
    param_dtype: Any

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        shape = (self.cfg.vocab_size, self.cfg.hidden_size)
        init = nn.initializers.normal(self.cfg.initializer_range)
        return self.param("embedding", init, shape, self.param_dtype)[tokens]  # [R, T, D]


class Decoder(nn.Module):
    """`apply({'params': params}, tokens, segment, position)` is the state after the last norm, [R, T, D]."""

    cfg: ModelConfig
    dtype: Any = jnp.float32  # of the activations and of the products
    param_dtype: Any = jnp.float32
    scan_layers: bool = True  # False unrolls: slower to compile, faster on CPU
    remat: Remat = "none"  # what the backward pass keeps of a layer: all, its products with weights, nothing
    constrain: Callable[[jax.Array], jax.Array] = identity  # on activations [R, T, D]: their sharding

    @nn.compact
    def __call__(self, tokens: jax.Array, segment: jax.Array, position: jax.Array) -> jax.Array:
        chex.assert_rank([tokens, segment, position], 2)
        chex.assert_equal_shape([tokens, segment, position])
        cfg = self.cfg
        x = self.constrain(Embed(cfg, self.param_dtype, name="embed")(tokens).astype(self.dtype))
        cos, sin = attention.rotary_angles(position, head_dim=cfg.head_dim, theta=cfg.rope_theta)
        layer: Any = Layer
        if self.remat != "none":
            # In a real loop XLA cannot merge the second computation with the first; unrolled it could.
            layer = nn.remat(layer, policy=_POLICIES[self.remat], prevent_cse=not self.scan_layers)
        layers = nn.scan(
            layer,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,
            length=cfg.num_layers,
            unroll=1 if self.scan_layers else cfg.num_layers,
        )
        x, _ = layers(cfg, self.param_dtype, self.constrain, name="layers")(x, segment, cos, sin)
        return self.constrain(RMSNorm(cfg, self.param_dtype, name="norm")(x))


def init_params(cfg: ModelConfig, key: jax.Array, *, head: Head, param_dtype: Any) -> Params:
    """Random parameters: normal by `initializer_range`, norms 1, biases 0; pure, so jit may shard them."""
    empty = jnp.zeros((1, 1), jnp.int32)
    decoder = Decoder(cfg, param_dtype=param_dtype)
    trunk = decoder.init(jax.random.fold_in(key, 0), empty, empty, empty)["params"]
    return trunk | init_head(cfg, jax.random.fold_in(key, 1), head=head, param_dtype=param_dtype)


def init_head(cfg: ModelConfig, key: jax.Array, *, head: Head, param_dtype: Any) -> Params:
    """The part of the parameters that is the head: `score` or `lm_head`, or nothing where that is tied."""
    if head == "value":
        # Hidden states leave the norm with variance about 1: values start with a variance below 1.
        std = (cfg.hidden_size + 1) ** -0.5
        return {"score": {"kernel": std * jax.random.normal(key, (cfg.hidden_size, 1), param_dtype)}}
    if cfg.tie_word_embeddings:
        return {}
    shape = (cfg.vocab_size, cfg.hidden_size)
    return {"lm_head": {"kernel": cfg.initializer_range * jax.random.normal(key, shape, param_dtype)}}


def head_kernel(params: Params, cfg: ModelConfig) -> jax.Array:
    """The matrix from hidden states to logits, [V, D]: the embedding table itself where the two are tied."""
    return params["embed"]["embedding"] if cfg.tie_word_embeddings else params["lm_head"]["kernel"]
