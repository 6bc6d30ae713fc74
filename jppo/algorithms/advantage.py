"""Advantage estimators. They run on packed rows: [R, T] arrays, segments marked, masked gaps allowed."""

import chex
import jax
import jax.numpy as jnp

from jppo.structs import Array


def gae(reward: Array, value: Array, mask: Array, segment: Array, *, gamma: float, lam: float) -> tuple[Array, Array]:
    """Generalised advantage estimation on packed rows (Schulman et al., arXiv:1506.02438).

        δ_t = r_t + γ V_{t'} - V_t,     A_t = δ_t + γ λ A_{t'},     returns_t = A_t + V_t

    where t' is the next masked position of the same segment, and V_{t'} = A_{t'} = 0 behind the last one.
    Positions outside the mask (tool output, prompt, empty) are bridged, not discounted over, and get 0.
    """
    chex.assert_rank(reward, 2)
    chex.assert_equal_shape([reward, value, mask, segment])
    dtype = jnp.result_type(reward, value, jnp.float32)
    reward, value = reward.astype(dtype), value.astype(dtype)

    def row(reward, value, mask, segment):  # [T]
        def step(carry, now):
            next_advantage, next_value, next_segment = carry
            r, v, m, s = now
            same = (s == next_segment).astype(dtype)
            next_advantage, next_value = next_advantage * same, next_value * same
            advantage = r + gamma * next_value - v + gamma * lam * next_advantage
            carry = (jnp.where(m, advantage, next_advantage), jnp.where(m, v, next_value), s)
            return carry, jnp.where(m, advantage, 0.0)

        start = (jnp.zeros((), dtype), jnp.zeros((), dtype), jnp.zeros((), segment.dtype))
        return jax.lax.scan(step, start, (reward, value, mask, segment), reverse=True)[1]

    advantage = jax.vmap(row)(reward, value, mask, segment)  # [R, T] f32
    return advantage, jnp.where(mask, advantage + value, 0.0)
