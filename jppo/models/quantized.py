"""Frozen kernels in 8 or 4 bits under adapters (QLoRA; Dettmers et al., arXiv:2305.14314).

A `Quantized` kernel is a leaf's place in the tree of parameters. `product` decodes it where it multiplies, one layer at
a time in a scan over layers, and again in the backward pass; it has no gradient.

| method | codes | scales |
|---|---|---|
| `int8` | whole numbers from -127 to 127, i8 | of each output: the largest magnitude / 127, f32 |
| `mxfp4` | E2M1, two in a byte, the even input's in its low bits | of 32 inputs: the exponent + 127, u8 |

MXFP4 is that of the OCP Microscaling Formats 1.0.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jppo.models.params import Entry
from jppo.models.tensorfile import BLOCK
from jppo.settings import UserError
from jppo.types import Params


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


def stored(entry: Entry, dtype: Any, method: str) -> Any:
    """Returns the abstract array of a parameter, `Quantized` if the method is for it."""
    whole = jax.ShapeDtypeStruct(entry.shape, entry.dtype(dtype))
    if method == "none" or entry.path[-1] != "kernel" or entry.matrix is None:
        return whole
    axes = tuple(axis - len(entry.shape) for axis in entry.matrix[0])
    if method == "mxfp4" and entry.shape[axes[-1]] % BLOCK:
        raise UserError(
            f"model.base_quantization='mxfp4': {entry.hf_names[0]} has {entry.shape[axes[-1]]} inputs in a row,"
            f" and MXFP4 has blocks of {BLOCK}; take int8"
        )
    found: Quantized = jax.eval_shape(lambda x: encode(x, method, axes), whole)
    return found


def encode(kernel: jax.Array, method: str, axes: tuple[int, ...]) -> Quantized:
    """Quantises a kernel whose inputs are `axes`, counted from the end."""
    x = kernel.astype(jnp.float32)
    codes, scales = _encode_int8(x, axes) if method == "int8" else _encode_mxfp4(x, axes[-1])
    return Quantized(codes, scales, method, axes, jnp.dtype(kernel.dtype))


def like(kept: Any, values: Params) -> Params:
    """Casts or quantises parameters as their counterparts in `kept` are, arrays or abstract ones."""

    def one(kept: Any, x: jax.Array) -> Any:
        if isinstance(kept, Quantized):
            return encode(x.astype(kept.dtype), kept.method, kept.axes)
        return x.astype(kept.dtype)

    found: Params = jax.tree.map(one, kept, values, is_leaf=is_quantized)
    return found


def is_quantized(x: Any) -> bool:
    """Whether x is a quantised kernel, of arrays or of what describes them."""
    return isinstance(x, Quantized)


def decoded(kernel: Any) -> jax.Array:
    """Returns the kernel as an array."""
    out: jax.Array = kernel.astype(kernel.dtype) if isinstance(kernel, Quantized) else kernel
    return out


def _encode_int8(x: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    largest = jnp.max(jnp.abs(x), axis=axes, keepdims=True)
    scales = jnp.where(largest > 0, largest * np.float32(1 / 127), 1.0)  # XLA may divide by a constant either way
    return jnp.round(x / scales).astype(jnp.int8), scales


def _decode_int8(kernel: Quantized) -> jax.Array:
    out: jax.Array = kernel.codes.astype(jnp.float32) * kernel.scales
    return out


def _encode_mxfp4(x: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    """Rounds to nearest even; larger numbers become the largest."""
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
    power, half = (code & 7) >> 1, code & 1
    quarters = jnp.where(power == 0, 2 * half, (2 + half) << power) * (1 - 2 * (code >> 3))
    scale = jax.lax.bitcast_convert_type(kernel.scales.astype(jnp.uint32) << 23, jnp.float32)
    blocks = _split(_merge(quarters, axis), axis, BLOCK).astype(jnp.float32) / 4
    return _merge(blocks * jnp.expand_dims(scale, axis), axis)


def _split(x: jax.Array, axis: int, size: int) -> jax.Array:
    """Splits an axis, counted from the end, into groups of `size`; the number inside a group has its place."""
    at = x.ndim + axis
    return x.reshape(*x.shape[:at], x.shape[at] // size, size, *x.shape[at + 1 :])


def _merge(x: jax.Array, axis: int) -> jax.Array:
    """Inverts `_split`."""
    at = x.ndim + axis
    return x.reshape(*x.shape[: at - 1], math.prod(x.shape[at - 1 : at + 1]), *x.shape[at + 1 :])
