"""Products of activations with parameters, for any dtype of either: `product`.

Autodiff alone would multiply a bfloat16 operand with an f32 cotangent, which XLA does in f32 at a fraction of the
speed. It would also round a parameter's gradient to the activations' dtype before it is summed.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jppo.models.quantized import Quantized

NAME = "product"  # under which remat policies save outputs


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


def _backward(equation: str, dtype: Any, held: Any, given: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    x, kernel = held
    inputs, out = equation.split("->")
    left, right = inputs.split(",")
    given = given.astype(x.dtype)
    by_x = einsum(f"{out},{right}->{left}", given, kernel.astype(x.dtype), x.dtype)
    if isinstance(kernel, Quantized):
        return by_x, None
    return by_x, einsum(f"{left},{out}->{right}", x, given, kernel.dtype)


_product.defvjp(_forward, _backward)


def einsum(equation: str, a: jax.Array, b: jax.Array, dtype: Any) -> jax.Array:
    """Multiplies two operands of one dtype, summed in f32 and returned in `dtype`."""
    summed = jnp.promote_types(a.dtype, jnp.float32)

    def direct(a: jax.Array, b: jax.Array) -> jax.Array:  # an accelerator sums in f32 for any result dtype
        return jnp.einsum(equation, a, b, preferred_element_type=dtype)

    def wide(a: jax.Array, b: jax.Array) -> jax.Array:
        # XLA's CPU backend has products of bfloat16 for f32 results only.
        return jnp.einsum(*_transposed(equation, a, b), preferred_element_type=summed).astype(dtype)

    if a.dtype == summed == dtype:
        return direct(a, b)
    out: jax.Array = jax.lax.platform_dependent(a, b, cpu=wide, default=direct)
    return out


def _transposed(equation: str, a: jax.Array, b: jax.Array) -> tuple[str, jax.Array, jax.Array]:
    """Makes XLA's CPU backend transpose `a` where the sum is not over its last axis: its kernel needs that for AMX.

    A sum over two axes is always transposed, so the axis is split into two: up to five times as fast as without.
    """
    inputs, out = equation.split("->")
    left, right = inputs.split(",")
    axes = [axis for axis in left if axis in right and axis not in out and a.shape[left.index(axis)] > 1]
    if len(axes) != 1 or left.endswith(axes[0]) or a.shape[left.index(axes[0])] % 2:
        return equation, a, b

    def halved(x: jax.Array, letters: str) -> jax.Array:
        i = letters.index(axes[0])
        return x.reshape(*x.shape[:i], 2, x.shape[i] // 2, *x.shape[i + 1 :])

    return equation.replace(axes[0], "Z" + axes[0]), halved(a, left), halved(b, right)
