"""Kernels: their products with activations, for any dtype of either; and frozen ones in 8 or 4 bits under adapters.

Autodiff alone would multiply a bfloat16 operand with an f32 cotangent, which XLA does in f32 at a fraction of the
speed. It would also round a parameter's gradient to the activations' dtype before it is summed. `product` does neither.

A `Quantized` kernel (QLoRA; Dettmers et al., arXiv:2305.14314) is a leaf's place in the tree of parameters. `product`
decodes it where it multiplies, one layer at a time in a scan over layers, and again in the backward pass; it has no
gradient.

| method | codes | scales |
|---|---|---|
| `int8` | whole numbers from -127 to 127, i8 | of each output: the largest magnitude / 127, f32 |
| `mxfp4` | E2M1, two in a byte, the even input's in its low bits | of 32 inputs: the exponent + 127, u8 |

MXFP4 is that of the OCP Microscaling Formats 1.0.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jppo.errors import UserError
from jppo.models.params import Entry
from jppo.models.tensorfile import BLOCK
from jppo.types import Params

T = TypeVar("T")
NAME = "product"  # under which remat policies save outputs


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized:
    """A kernel as codes and scales, all layers of it or one; also their shapes, shardings or memory kinds."""

    codes: Any
    scales: Any
    method: str = dataclasses.field(metadata=dict(static=True))
    axes: tuple[int, ...] = dataclasses.field(metadata=dict(static=True))  # of the inputs, from the end
    dtype: Any = dataclasses.field(metadata=dict(static=True))  # of the decoded kernel

    def astype(self, dtype: Any) -> jax.Array:
        """Decodes the kernel, rounded to its own dtype first, and casts it."""
        decode = _decode_int8 if self.method == "int8" else _decode_mxfp4
        return decode(self).astype(self.dtype).astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def _product(equation: str, x: jax.Array, kernel: jax.Array | Quantized, dtype: Any) -> jax.Array:
    return einsum(equation, x, kernel.astype(x.dtype), dtype)


def product(equation: str, x: jax.Array, kernel: jax.Array | Quantized, dtype: Any = None) -> jax.Array:
    """Multiplies x and the kernel, cast to x's dtype, by einsum; the result is in `dtype`, or x's if None.

    In the backward pass the cotangent is cast to x's dtype too; the kernel's gradient is summed in f32.
    It has the kernel's dtype. A quantised kernel has none.
    """
    out: jax.Array = checkpoint_name(_product(equation, x, kernel, x.dtype if dtype is None else dtype), NAME)
    return out


def _forward(equation: str, x: jax.Array, kernel: jax.Array | Quantized, dtype: Any) -> tuple[jax.Array, Any]:
    return _product(equation, x, kernel, dtype), (x, kernel)


def _backward(equation: str, dtype: Any, residuals: Any, cotangent: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    x, kernel = residuals
    inputs, out = equation.split("->")
    left, right = inputs.split(",")
    cotangent = cotangent.astype(x.dtype)
    grad_x = einsum(f"{out},{right}->{left}", cotangent, kernel.astype(x.dtype), x.dtype)
    if isinstance(kernel, Quantized):
        return grad_x, None
    return grad_x, einsum(f"{left},{out}->{right}", x, cotangent, kernel.dtype)


_product.defvjp(_forward, _backward)


def recomputed_by(backward: Callable[..., tuple[Any, ...]]) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Decorates a function of (constants, *arrays) with `backward(constants, arrays, cotangent)`, its gradients.

    The arrays alone are kept for it.
    """

    def decorate(fn: Callable[..., T]) -> Callable[..., T]:
        function = jax.custom_vjp(fn, nondiff_argnums=(0,))
        function.defvjp(lambda constants, *arrays: (function(constants, *arrays), arrays), backward)
        return function

    return decorate


def einsum(equation: str, a: jax.Array, b: jax.Array, dtype: Any) -> jax.Array:
    """Multiplies two operands of one dtype, summed in f32 and returned in `dtype`."""
    sum_dtype = jnp.promote_types(a.dtype, jnp.float32)

    def multiply(a: jax.Array, b: jax.Array) -> jax.Array:  # an accelerator sums in f32 for any result dtype
        return jnp.einsum(equation, a, b, preferred_element_type=dtype)

    def multiply_wide(a: jax.Array, b: jax.Array) -> jax.Array:
        # XLA's CPU backend has products of bfloat16 for f32 results only.
        return jnp.einsum(*_transpose_for_amx(equation, a, b), preferred_element_type=sum_dtype).astype(dtype)

    if a.dtype == sum_dtype == dtype:
        return multiply(a, b)
    out: jax.Array = jax.lax.platform_dependent(a, b, cpu=multiply_wide, default=multiply)
    return out


def _transpose_for_amx(equation: str, a: jax.Array, b: jax.Array) -> tuple[str, jax.Array, jax.Array]:
    """Returns the product with `a` transposed if the sum is not over its last axis: AMX on a CPU needs that.

    A sum over two axes is always transposed, so the axis is split into two: up to five times as fast as without.
    """
    inputs, out = equation.split("->")
    left, right = inputs.split(",")
    axes = [axis for axis in left if axis in right and axis not in out and a.shape[left.index(axis)] > 1]
    if len(axes) != 1 or left.endswith(axes[0]) or a.shape[left.index(axes[0])] % 2:
        return equation, a, b

    def split_axis(x: jax.Array, letters: str) -> jax.Array:
        i = letters.index(axes[0])
        return x.reshape(*x.shape[:i], 2, x.shape[i] // 2, *x.shape[i + 1 :])

    return equation.replace(axes[0], "Z" + axes[0]), split_axis(a, left), split_axis(b, right)


def stored_form(entry: Entry, dtype: Any, method: str) -> Any:
    """Returns the abstract array of a parameter, `Quantized` if the method is for it."""
    unquantized = jax.ShapeDtypeStruct(entry.shape, entry.dtype(dtype))
    if method == "none" or entry.path[-1] != "kernel" or entry.matrix is None:
        return unquantized
    axes = tuple(axis - len(entry.shape) for axis in entry.matrix[0])
    if method == "mxfp4" and entry.shape[axes[-1]] % BLOCK:
        raise UserError(
            f"model.base_quantization='mxfp4': {entry.hf_names[0]} has {entry.shape[axes[-1]]} inputs in a row,"
            f" and MXFP4 has blocks of {BLOCK}; take int8"
        )
    quantized: Quantized = jax.eval_shape(lambda x: quantize(x, method, axes), unquantized)
    return quantized


def quantize(kernel: jax.Array, method: str, axes: tuple[int, ...]) -> Quantized:
    """Quantises a kernel whose inputs are `axes`, counted from the end."""
    x = kernel.astype(jnp.float32)
    codes, scales = _encode_int8(x, axes) if method == "int8" else _encode_mxfp4(x, axes[-1])
    return Quantized(codes, scales, method, axes, jnp.dtype(kernel.dtype))


def stored_like(like: Any, values: Params) -> Params:
    """Casts or quantises parameters as their counterparts in `like` are, arrays or abstract ones."""

    def store(like: Any, x: jax.Array) -> Any:
        if isinstance(like, Quantized):
            return quantize(x.astype(like.dtype), like.method, like.axes)
        return x.astype(like.dtype)

    stored: Params = jax.tree.map(store, like, values, is_leaf=is_quantized)
    return stored


def is_quantized(x: Any) -> bool:
    return isinstance(x, Quantized)


def dequantize(kernel: Any) -> jax.Array:
    out: jax.Array = kernel.astype(kernel.dtype) if isinstance(kernel, Quantized) else kernel
    return out


def _encode_int8(x: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Returns codes and scales, one scale for each output."""
    largest = jnp.max(jnp.abs(x), axis=axes, keepdims=True)
    scales = jnp.where(largest > 0, largest * np.float32(1 / 127), 1.0)  # XLA may divide by a constant either way
    return jnp.round(x / scales).astype(jnp.int8), scales


def _decode_int8(kernel: Quantized) -> jax.Array:
    out: jax.Array = kernel.codes.astype(jnp.float32) * kernel.scales
    return out


def _encode_mxfp4(x: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    """Returns MXFP4 codes and scales, rounded to nearest even; larger numbers become the largest."""
    blocks = _split(x, axis, BLOCK)
    exponent = jnp.frexp(jnp.max(jnp.abs(blocks), axis=axis, keepdims=True))[1] - 3  # the largest is 4 or 6, or less
    exponent = jnp.clip(exponent, -126, 127)
    y = jnp.abs(jnp.ldexp(blocks, -exponent))
    step = jnp.where(y < 2, 0.5, jnp.where(y < 4, 1.0, 2.0))
    rounded = jnp.minimum(jnp.round(y / step) * step, 6.0)
    code = jnp.where(rounded < 2, 2 * rounded, jnp.where(rounded < 4, rounded + 2, rounded / 2 + 4)).astype(jnp.uint8)
    code = _merge(code | (jnp.signbit(blocks).astype(jnp.uint8) << 3), axis)
    pairs = _split(code, axis, 2)
    low, high = (jax.lax.index_in_dim(pairs, i, pairs.ndim + axis, keepdims=False) for i in (0, 1))
    return low | high << 4, jnp.squeeze(exponent + 127, axis).astype(jnp.uint8)


def _decode_mxfp4(kernel: Quantized) -> jax.Array:
    axis = kernel.axes[-1]
    code = jnp.stack([kernel.codes & 15, kernel.codes >> 4], kernel.codes.ndim + axis + 1).astype(jnp.int32)
    power, low_bit = (code & 7) >> 1, code & 1
    quarters = jnp.where(power == 0, 2 * low_bit, (2 + low_bit) << power) * (1 - 2 * (code >> 3))
    scale = jax.lax.bitcast_convert_type(kernel.scales.astype(jnp.uint32) << 23, jnp.float32)
    blocks = _split(_merge(quarters, axis), axis, BLOCK).astype(jnp.float32) / 4
    return _merge(blocks * jnp.expand_dims(scale, axis), axis)


def _split(x: jax.Array, axis: int, size: int) -> jax.Array:
    """Reshapes an axis, counted from the end, from n to n / size, size."""
    i = x.ndim + axis
    return x.reshape(*x.shape[:i], x.shape[i] // size, size, *x.shape[i + 1 :])


def _merge(x: jax.Array, axis: int) -> jax.Array:
    """Inverts `_split`: reshapes two axes to one."""
    i = x.ndim + axis
    return x.reshape(*x.shape[: i - 1], math.prod(x.shape[i - 1 : i + 1]), *x.shape[i + 1 :])
