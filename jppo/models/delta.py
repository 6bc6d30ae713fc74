"""Layers in place of plain attention: gated delta nets and multi-head latent attention.

Gated delta nets (Yang et al., arXiv:2412.06464) have a recurrent state. A head's state S maps keys to values. A token
with key k, value v, decay a and rate b changes and reads it:

    S <- a S + k (b (v - (a S)^T k))^T,    output S^T q

State and convolution start anew with each segment of a row. Letters: N key heads, G value heads of each, C channels.

Latent attention (DeepSeek-V2, arXiv:2405.04434) has keys and values from one small latent of each token. Over whole
rows, they are expanded from the latents, and any attention kernel mixes them. With a cache, only the latents and the
rotary keys are kept. Queries are taken to the latents instead, and attend to these as one head.
"""

from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp

from jppo.models import lora
from jppo.models.attention import Attend
from jppo.models.cache import DeltaCache, LayerCache, ToCache, make_layer_cache, write_token
from jppo.models.kernels import product
from jppo.models.modules import ACTIVATIONS, Block, Project
from jppo.models.rotary import LayerPositions, rotate

CHUNK = 64  # tokens whose changes of the state are computed together
_EPS = 1e-6  # of the norms of queries and keys


class DeltaNet(Block):
    """A gated delta net; from a recurrent state if there is one."""

    @nn.compact
    def __call__(
        self, x: jax.Array, positions: LayerPositions, cache: DeltaCache | None
    ) -> tuple[jax.Array, DeltaCache | None]:
        """Computes the net's output for x [R, T, D]; returns it with the next recurrent state, if there was one."""
        cfg, spec = self.cfg, self.cfg.delta
        assert spec is not None
        D, N, U, W = cfg.hidden_size, spec.key_heads, spec.value_heads, spec.value_dim
        G, C = U // N, spec.channels
        R, T, _ = x.shape

        def project(name: str, *shape: int) -> Project:
            out = "hga"[: len(shape)]
            return self.project(name, f"rtd,d{out}->rt{out}", D, *shape)

        if spec.joined:
            qkvz, ba = project("qkvz", N, spec.joined_widths[0])(x), project("ba", N, spec.joined_widths[1])(x)
            *qkv, z = jnp.split(qkvz, spec.joined_at, axis=-1)
            mixed = jnp.concatenate([part.reshape(R, T, -1) for part in qkv], axis=-1)
            b, a = jnp.split(ba, 2, axis=-1)
        else:
            mixed, z, b, a = project("qkv", C)(x), project("z", U, W)(x), project("b", U)(x), project("a", U)(x)
        kernel = self.weight("conv", nn.initializers.normal(cfg.initializer_range), C, 1, spec.taps)[:, 0]
        log_rate, bias = self.weight("a_log", _log_rates, U), self.weight("dt_bias", nn.initializers.ones, U)
        decay = _decays(a.reshape(R, T, U), log_rate, bias)
        rate = jax.nn.sigmoid(b.reshape(R, T, U).astype(jnp.float32))
        if cache is None:
            assert positions.segment is not None
            run = number_runs(positions.segment)
            earlier, state = jnp.zeros((R, spec.taps - 1, C), mixed.dtype), None
        else:
            run, (earlier, state) = jnp.zeros((R, T), jnp.int32), (cache.inputs.astype(mixed.dtype), cache.state)
            if positions.segment is not None:  # padding leaves the state unchanged
                real = (positions.segment > 0)[:, :, None]
                decay, rate = jnp.where(real, decay, 0.0), jnp.where(real, rate, 0.0)
        inputs = jnp.concatenate([earlier, mixed], axis=1)
        mixed = ACTIVATIONS[cfg.activation](convolve(inputs, kernel, run)).astype(x.dtype)
        q, k, v = jnp.split(mixed, [N * spec.key_dim, 2 * N * spec.key_dim], axis=-1)
        q, k = (_l2_normalize(y.reshape(R, T, N, spec.key_dim)) for y in (q, k))
        decay, rate, v = decay.reshape(R, T, N, G), rate.reshape(R, T, N, G), v.reshape(R, T, N, G, W)
        out, state = run_delta_rule(q * spec.key_dim**-0.5, k, v, decay, rate, run, state)
        if cache is not None:
            cache = DeltaCache(state, _last_inputs(inputs, positions.segment, spec.taps - 1).astype(cache.inputs.dtype))
        gain = self.weight("scale", nn.initializers.ones, W)
        y = _gated_norm(out.reshape(R, T, U, W), z.reshape(R, T, U, W), gain, cfg.rms_norm_eps)
        return self.project("out", "rtha,had->rtd", U, W, D)(y.astype(x.dtype)), cache


def _log_rates(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Initialises the logarithms of decay rates, which are uniform."""
    return jnp.log(jax.random.uniform(key, shape, jnp.float32, 0.01, 16.0)).astype(dtype)


def _decays(a: jax.Array, log_rate: jax.Array, bias: jax.Array) -> jax.Array:
    """Computes the log decays of a [R, T, U]: -exp(log_rate) softplus(a + bias), in f32."""
    a, log_rate, bias = (x.astype(jnp.float32) for x in (a, log_rate, bias))
    return -jnp.exp(log_rate)[None, None] * jax.nn.softplus(a + bias[None, None])


def _gated_norm(x: jax.Array, z: jax.Array, gain: jax.Array, eps: float) -> jax.Array:
    """Computes x / sqrt(mean(x^2) + eps) * gain * silu(z) over the last axis, in f32."""
    wide = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)
    return wide * gain.astype(jnp.float32)[None, None, None] * jax.nn.silu(z.astype(jnp.float32))


def _l2_normalize(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return wide * jax.lax.rsqrt(jnp.sum(jnp.square(wide), axis=-1, keepdims=True) + _EPS)


def number_runs(segment: jax.Array) -> jax.Array:
    """Numbers the runs of equal segments in each row [R, T], from 1; run 0 continues a cache."""
    chex.assert_rank(segment, 2)
    starts = jnp.concatenate([jnp.ones_like(segment[:, :1]), jnp.diff(segment, axis=1) != 0], axis=1)
    return jnp.cumsum(starts.astype(jnp.int32), axis=1)


def convolve(x: jax.Array, kernel: jax.Array, run: jax.Array) -> jax.Array:
    """Convolves each channel of x [R, taps - 1 + T, C] with its kernel [C, taps] within runs [R, T]; in f32."""
    chex.assert_rank([x, kernel, run], [3, 2, 2])
    T, taps = run.shape[1], kernel.shape[1]
    total = jnp.zeros((x.shape[0], T, x.shape[2]), jnp.float32)
    input_run = jnp.pad(run, [(0, 0), (taps - 1, 0)])
    for i in range(taps):
        same_run = input_run[:, i : i + T] == run
        weighted = x[:, i : i + T].astype(jnp.float32) * kernel[None, None, :, i].astype(jnp.float32)
        total += jnp.where(same_run[:, :, None], weighted, 0.0)
    return total


def _last_inputs(inputs: jax.Array, segment: jax.Array | None, count: int) -> jax.Array:
    """Returns the last inputs [R, count, C] before a row's padding."""
    if segment is None:
        return inputs[:, inputs.shape[1] - count :]
    index = jnp.sum(segment > 0, axis=1)[:, None] + jnp.arange(count, dtype=jnp.int32)[None]
    return jnp.take_along_axis(inputs, index[:, :, None], axis=1)


def run_delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    decay: jax.Array,
    rate: jax.Array,
    run: jax.Array,
    state: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Runs the gated delta rule over rows; returns the outputs [R, T, N, G, W] and the states after them, in f32.

    q and k are [R, T, N, A], v [R, T, N, G, W], log decay and rate [R, T, N, G], `run` [R, T]. `state` [R, N, G, A, W]
    is the state after earlier tokens, which run 0 continues. A scan runs over chunks of tokens; the backward pass keeps
    only the states between chunks.
    """
    chex.assert_rank([q, k, v, decay, rate, run], [4, 4, 5, 4, 4, 2])
    R, T, N, A = q.shape
    if state is None:
        state = jnp.zeros((R, N, v.shape[3], A, v.shape[4]), jnp.float32)
    chunk_tokens = min(CHUNK, T)
    count = -(-T // chunk_tokens)

    def chunks(x: jax.Array, axis: int, mode: Any = "constant") -> jax.Array:
        """Cuts [R, T, ...] into [chunks, R, ..., tokens, ...], padded by tokens that change nothing."""
        x = jnp.pad(x, [(0, 0), (0, count * chunk_tokens - T)] + [(0, 0)] * (x.ndim - 2), mode=mode)
        return jnp.moveaxis(x.reshape(R, count, chunk_tokens, *x.shape[2:]), (1, 2), (0, axis))

    vectors = (chunks(x.astype(jnp.float32), -2) for x in (q, k, v))
    numbers = (chunks(x.astype(jnp.float32), -1) for x in (decay, rate))
    initial = state, jnp.zeros((R,), jnp.int32)
    step = jax.checkpoint(_run_chunk, prevent_cse=False)
    (final, _), out = jax.lax.scan(step, initial, (*vectors, *numbers, chunks(run, -1, "edge")))
    out = jnp.moveaxis(out, (0, -2), (1, 2))  # [R, chunks, tokens, N, G, W]
    return out.reshape(R, count * chunk_tokens, *out.shape[3:])[:, :T], final


def _run_chunk(carry: tuple[jax.Array, jax.Array], inputs: tuple[jax.Array, ...]) -> tuple[Any, jax.Array]:
    """Computes a chunk's outputs [R, N, G, t, W] and the state after it. Its changes solve a triangular system."""
    state, last_run = carry
    q, k, v, decay, rate, run = inputs
    is_earlier = jnp.tril(jnp.ones((run.shape[1],) * 2, bool), -1)[None, None, None]
    # Log decays from token s to t, [R, N, G, t, s]. Differences of sums since the chunk's start would lose digits.
    log_fade = jnp.cumsum(jnp.where(is_earlier, decay[..., :, None], 0.0), axis=-2)
    same_run = (run[:, :, None] == run[:, None, :])[:, None, None]
    fade = jnp.exp(jnp.where(same_run & ~is_earlier.mT, log_fade, -jnp.inf))
    continues = (run == last_run[:, None])[:, None, None]
    state_decay = jnp.where(continues, jnp.exp(jnp.cumsum(decay, axis=-1)), 0.0)[..., None]  # [R, N, G, t, 1]
    rate = rate[..., None]
    targets = rate * (v - state_decay * jnp.einsum("rnta,rngaw->rngtw", k, state))
    triangle = rate * fade * jnp.einsum("rnta,rnsa->rnts", k, k)[:, :, None]
    changes = targets
    if run.shape[1] > 1:
        changes = jax.lax.linalg.triangular_solve(triangle, targets, left_side=True, lower=True, unit_diagonal=True)
    scores = fade * jnp.einsum("rnta,rnsa->rnts", q, k)[:, :, None]
    out = state_decay * jnp.einsum("rnta,rngaw->rngtw", q, state)
    out += jnp.einsum("rngts,rngsw->rngtw", scores, changes)
    state_change = jnp.einsum("rnsa,rngsw->rngaw", k, fade[..., -1, :, None] * changes)
    return (state_decay[..., -1:, :] * state + state_change, run[:, -1]), out


NORM_EPS = 1e-6  # of the latents' norms, whatever rms_norm_eps is: as in transformers


class LatentAttention(Block):
    """Attention by latents with rotary positions in a part of each head; as `decoder.Attention`."""

    attend: Attend
    to_cache: ToCache | None

    @nn.compact
    def __call__(
        self, x: jax.Array, positions: LayerPositions, cache: LayerCache | None
    ) -> tuple[jax.Array, LayerCache | None]:
        """Computes attention of x [R, T, D]; returns it with the next cache, if there is one.

        In rows, keys and values are expanded from the latents. A newest token's queries are taken to the latents,
        which are cached and attended to as one head. Both scale by cfg.query_scale, not by q's size.
        """
        cfg, spec = self.cfg, self.cfg.latent
        assert spec is not None
        D, H, C, N, W = cfg.hidden_size, cfg.num_heads, spec.rank, spec.plain_dim, spec.value_dim

        if spec.query_rank is None:
            q = self.project("q", "rtd,dha->rtha", D, H, spec.head_dim)(x)
        else:
            query_latent = self.project("q_a", "rtd,dq->rtq", D, spec.query_rank, bias=cfg.qkv_bias)(x)
            query_latent = self.norm("q_norm", eps=NORM_EPS)(query_latent)
            q = self.project("q_b", "rtq,qha->rtha", spec.query_rank, H, spec.head_dim)(query_latent)
        q_plain, q_rotary = q[..., :N], self._rotate(q[..., N:], positions)
        latent_and_key = self.project("kv_a", "rtd,dj->rtj", D, spec.cached_dim, bias=cfg.qkv_bias)(x)
        latent = self.norm("kv_norm", eps=NORM_EPS)(latent_and_key[..., :C])
        key = self._rotate(latent_and_key[:, :, None, C:], positions)
        if positions.slot is None:
            assert positions.segment is not None
            if cache is not None:
                cache = make_layer_cache(jnp.concatenate([latent[:, :, None], key], axis=-1), None)
            keys_and_values = self.project("kv_b", "rtc,chu->rthu", C, H, N + W)(latent)
            key = jnp.broadcast_to(key, (*keys_and_values.shape[:3], key.shape[-1]))
            q, k = (jnp.concatenate(parts, axis=-1) for parts in ((q_plain, q_rotary), (keys_and_values[..., :N], key)))
            output = self.attend(q, k, keys_and_values[..., N:], positions.segment, positions.kind)  # [R, T, H, W]
        else:
            assert cache is not None and self.to_cache is not None
            cache = write_token(cache, jnp.concatenate([latent[:, :, None], key], axis=-1), None, positions.slot)
            kernel = self._expansion_kernel(x.dtype)
            q = jnp.concatenate([product("rthn,chn->rthc", q_plain, kernel[..., :N]), q_rotary], axis=-1)
            mixed_latents = self.to_cache(q, cache.k, cache.k[..., :C], positions)
            output = product("rthc,chw->rthw", mixed_latents, kernel[..., N:])
        return self.project("o", "rthw,hwd->rtd", H, W, D, bias=cfg.o_bias)(output), cache

    def _rotate(self, x: jax.Array, positions: LayerPositions) -> jax.Array:
        """Rotates a part of each head [R, T, heads, P]; interleaved pairs are put in halves, as the keys' are."""
        assert self.cfg.latent is not None
        if self.cfg.latent.interleaved:
            x = jnp.concatenate([x[..., ::2], x[..., 1::2]], axis=-1)
        return rotate(x, positions.cos, positions.sin)

    def _expansion_kernel(self, dtype: Any) -> jax.Array:
        """Returns the kernel from latents to keys and values [C, H, N + W], its adapter merged."""
        variables = self.variables
        kernel: jax.Array = variables["params"]["kv_b"]["kernel"].astype(dtype)
        adapter = variables.get(lora.COLLECTION, {}).get("kv_b")  # whose B has its scale already (`lora.variables`)
        return kernel if adapter is None else kernel + product("cz,zhu->chu", adapter["a"].astype(dtype), adapter["b"])
