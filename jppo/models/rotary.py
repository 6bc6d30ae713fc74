"""Rotary positions: the frequencies of a model's layers, and the rotation of queries and keys."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np


class Yarn(NamedTuple):
    """YaRN's ramp between kept and interpolated frequencies (Peng et al., arXiv:2309.00071)."""

    fast: float  # beta_fast: frequencies with at least so many turns in the original context are kept
    slow: float  # beta_slow: frequencies with at most so many turns are divided by the factor
    context: int  # original_max_position_embeddings
    truncate: bool  # the ramp begins and ends at whole indices


@dataclasses.dataclass(frozen=True)
class Rotary:
    """The frequencies theta^(-2i/N), i < N/2, and their scaling to longer contexts."""

    theta: float
    factor: float = 1.0  # they are divided by it
    llama3: tuple[float, float, int] | None = None  # only slow ones are divided: low and high factor, first context
    yarn: Yarn | None = None  # only slow ones are divided
    divisors: tuple[float, ...] | None = None  # each frequency has its own
    scale: float = 1.0  # of cos and sin
    part: float = 1.0  # N / A: the first N dimensions of a head are turned
    share: float = 1.0  # of the frequencies that are not 0, the first ones
    longest: int | None = None  # context that the scaling is for; None: by config.json


STILL = Rotary(1.0, math.inf)  # frequencies 0: a layer without positions


def frequencies(rotary: Rotary, head_dim: int) -> np.ndarray:
    """Computes the rotary frequencies [N/2] f32 exactly as transformers and vLLM do, to the last bit."""
    f32, rotated_dims = np.float32, int(head_dim * rotary.part)
    periods = f32(rotary.theta) ** (np.arange(0, rotated_dims, 2, dtype=f32) / f32(rotated_dims))
    if rotary.divisors is not None:
        periods = np.asarray(rotary.divisors, f32) * periods
    unscaled = f32(1.0) / periods
    if rotary.yarn is not None:
        unscaled_share = _yarn_shares(rotary.yarn, rotary.theta, len(unscaled))
        divided = f32(1.0) / (f32(rotary.factor) * periods)
        ramp: np.ndarray = divided * (f32(1.0) - unscaled_share) + unscaled * unscaled_share
        return ramp
    unscaled[int(rotary.share * rotated_dims // 2) :] = 0.0
    scaled = unscaled / f32(rotary.factor)
    if rotary.llama3 is None:
        return scaled
    # Llama 3.1: wavelengths beyond context/low are stretched, those within context/high are not, between them a mix.
    low, high, context = rotary.llama3
    wavelength = f32(2 * np.pi) / unscaled
    blend = (f32(context) / wavelength - f32(low)) / f32(high - low)
    blended = (f32(1.0) - blend) * unscaled / f32(rotary.factor) + blend * unscaled
    frequency = np.where(wavelength > context / low, scaled, unscaled)
    in_ramp = (wavelength >= context / high) & (wavelength <= context / low)
    return np.where(in_ramp, blended, frequency)


def _yarn_shares(yarn: Yarn, theta: float, count: int) -> np.ndarray:
    """Computes the share of each frequency that YaRN does not divide, [N/2] f32."""

    def index_of_turns(turns: float) -> float:
        """Returns the index of the frequency that turns so often within the first context."""
        return count * math.log(yarn.context / (turns * 2 * math.pi)) / math.log(theta)

    first, last = index_of_turns(yarn.fast), index_of_turns(yarn.slow)
    if yarn.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * count - 1)
    width = np.float32((last - first) or 0.001)
    ramp = (np.arange(count, dtype=np.float32) - np.float32(first)) / width
    return np.float32(1.0) - np.clip(ramp, np.float32(0.0), np.float32(1.0))


def compute_angles(position: jax.Array, frequency: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """Computes cos and sin of position times each frequency [N/2]: two of [R, T, N/2] f32."""
    chex.assert_rank([position, frequency], [2, 1])
    angle = position[:, :, None].astype(jnp.float32) * frequency[None, None, :]  # [R, T, N/2]
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the pairs (x_i, x_{i + N/2}), i < N/2, of each head by the position's angles; x [R, T, heads, A]."""
    chex.assert_rank([x, cos, sin], [4, 3, 3])
    half = cos.shape[-1]
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]  # [R, T, 1, N/2]
    first, second, unrotated = jnp.split(x.astype(jnp.float32), (half, 2 * half), axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin, unrotated], axis=-1)
    return rotated.astype(x.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerPositions:
    """The tokens' segments, positions and angles in a forward pass, for one layer."""

    segment: jax.Array | None  # [R, T] i32; None with a slot
    position: jax.Array  # [R, T] i32
    cos: jax.Array  # [R, T, N/2] f32
    sin: jax.Array  # [R, T, N/2] f32
    kind: jax.Array | int  # [] i32, which of the model's kinds of layer
    shared: Any = None  # keys and values of an earlier layer of this kind, if there is one that shares them
    slot: jax.Array | None = None  # [] i32, of the cache, for the rows' newest tokens; None: whole rows or prompts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Positions:
    """The tokens' segments, positions and angles, for all kinds of layer."""

    segment: jax.Array | None  # [R, T] i32
    position: jax.Array  # [R, T] i32
    cos: tuple[jax.Array, ...]  # of each kind, [R, T, N/2] f32
    sin: tuple[jax.Array, ...]
    counted: jax.Array | None = None  # [R, T] bool, tokens that routers' sums are over
    shared: Any = None  # by kind, keys and values that later layers share
    slot: jax.Array | None = None  # as in `LayerPositions`

    def for_layer(self, kind: jax.Array | int, fixed: int | None = None) -> LayerPositions:
        """Returns the positions for a layer of this kind; `fixed`: its number, where head sizes differ by kind."""
        if fixed is not None:
            shared = None if self.shared is None else self.shared.get(fixed)
            cos, sin = self.cos[fixed], self.sin[fixed]
            return LayerPositions(self.segment, self.position, cos, sin, fixed, shared, self.slot)
        if len(self.cos) == 1:
            return LayerPositions(self.segment, self.position, self.cos[0], self.sin[0], 0, slot=self.slot)
        cos, sin = jnp.stack(self.cos)[kind], jnp.stack(self.sin)[kind]
        return LayerPositions(self.segment, self.position, cos, sin, kind, slot=self.slot)

    def sharing(self, kind: int | None, cache: Any) -> "Positions":
        """Returns the positions with a layer's keys and values, a `LayerCache`, for later layers of its kind."""
        keys_and_values = cache.k.swapaxes(1, 2), cache.v.swapaxes(1, 2)
        return dataclasses.replace(self, shared=(self.shared or {}) | {kind: keys_and_values})


def add_angles(rotaries: Sequence[tuple[Rotary, int]], position: jax.Array, segment: jax.Array | None) -> Positions:
    """Returns the positions with the rotary angles of every kind of layer, by its frequencies and rotated size."""
    angles = [(compute_angles(position, frequencies(rotary, size)), rotary.scale) for rotary, size in rotaries]
    cos, sin = (tuple(pair[i] if scale == 1.0 else pair[i] * scale for pair, scale in angles) for i in (0, 1))
    return Positions(segment, position, cos, sin)
