"""Flax modules that the layers of the decoder are made of: norm, projection, MLP."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jppo.models import lora, product, quantized
from jppo.models.config import ModelConfig

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


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
        if not isinstance(kernel, quantized.Quantized):
            kernel = self.param("kernel", nn.initializers.normal(self.std), self.shape, self.param_dtype)
        y = product.product(self.equation, x, kernel)
        if self.bias is not None:
            y += self.param("bias", nn.initializers.zeros, self.bias, self.param_dtype)[None, None].astype(x.dtype)
        if self.has_variable(lora.COLLECTION, "a"):
            down, up = lora.equations(self.equation)
            a: jax.Array = self.get_variable(lora.COLLECTION, "a")
            b: jax.Array = self.get_variable(lora.COLLECTION, "b")
            if self.has_variable(lora.COLLECTION, "dropout"):
                x = lora.dropped(x, **self.get_variable(lora.COLLECTION, "dropout"))
            y += product.product(up, product.product(down, x, a), b)
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
