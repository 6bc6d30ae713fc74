"""MXFP4, decoded to bfloat16: blocks of 32 four-bit floats with a power of two (OCP Microscaling Formats 1.0)."""

import functools

import jax.numpy as jnp
import numpy as np

BLOCK = 32  # numbers, two in a byte


@functools.cache
def _tables() -> tuple[np.ndarray, np.ndarray]:
    """Computes the bfloat16 number in the low and in the high four bits of a byte, by 256 * its scale + byte."""
    positive = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    values = np.array([*positive, *(-x for x in positive)], np.float32)
    byte, exponent = np.arange(256), np.arange(256, dtype=np.int32)[:, None] - 127
    with np.errstate(over="ignore"):
        low, high = (np.ldexp(values[four], exponent).astype(jnp.bfloat16) for four in (byte & 15, byte >> 4))
    return low.reshape(-1), high.reshape(-1)


def decode(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Decodes experts' matrices: blocks [E, O, I/32, 16] and exponents plus 127 [E, O, I/32], u8, to [E, I, O]."""
    E, O, G, _ = blocks.shape
    out = np.empty((E, G, BLOCK // 2, 2, O), jnp.bfloat16)
    low, high = _tables()
    for e in range(E):
        byte = np.ascontiguousarray(blocks[e].transpose(1, 2, 0))  # transposed first: it is the smallest
        index = scales[e].T.astype(np.uint16)[:, None] << 8 | byte
        out[e, :, :, 0], out[e, :, :, 1] = low[index], high[index]
    return out.reshape(E, G * BLOCK, O)
