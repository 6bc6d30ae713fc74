"""Advantage estimators.

Two kinds. By token, on the flat batch [B, L]: `gae`, `reinforce_plus_plus`, `remax`. By sequence, on the batch's scores
[B] and their groups: `grpo`, `grpo_passk`, `rloo`, `rloo_vectorized`, `reinforce_plus_plus_baseline`, `opo`, `gpg`,
`gdpo`; every token of a sequence then has its advantage. A score is the sum of a sequence's token rewards. `group`
[B] i32 has equal numbers, below B, for the samples of one prompt. Both: `optimal_token_baseline`.

The advantages of gae, reinforce_plus_plus, reinforce_plus_plus_baseline and gdpo are whitened afterwards, over all
tokens of the batch: `masked.whiten`.
"""

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp

from jppo.algorithms.masked import at_kept
from jppo.types import Array


def gae(reward: Array, value: Array, mask: Array, *, gamma: float | Array, lam: float | Array) -> tuple[Array, Array]:
    """Generalised advantage estimation (Schulman et al., arXiv:1506.02438), all arrays [B, L].

        δ_t = r_t + γ V_{t'} - V_t,     A_t = δ_t + γ λ A_{t'},     returns_t = A_t + V_t

    where t' is the next masked position of the row, and V_{t'} = A_{t'} = 0 behind the last one.
    λ may be one number per row, [B]. γ may be [B, L]: the discount of all that follows a position, masked or not.
    With a single γ, positions outside the mask (tool output, padding) are bridged, not discounted over, and get 0.
    """
    chex.assert_rank(reward, 2)
    chex.assert_equal_shape([reward, value, mask])
    dtype = jnp.result_type(reward, value, jnp.float32)
    reward, value = reward.astype(dtype), value.astype(dtype)

    # One number carries all of the future: A_t = r_t - V_t + γ C_{t'}, where C_t = V_t + λ A_t.
    def step(next_c: jax.Array, inputs: Any) -> tuple[jax.Array, jax.Array]:  # all rows at one position
        r, v, m, *discounts = inputs
        discount: Any = gamma
        if discounts:
            next_c, discount = discounts[0] * next_c, 1.0
        c = jnp.where(m, lam * r + (1.0 - lam) * v + discount * lam * next_c, next_c)
        return c, jnp.where(m, r - v + discount * next_c, 0.0)

    by_time = (reward.T, value.T, jnp.asarray(mask).T, *([] if jnp.ndim(gamma) == 0 else [jnp.asarray(gamma).T]))
    _, advantage = jax.lax.scan(step, jnp.zeros_like(reward[:, 0]), by_time, reverse=True)
    return advantage.T, jnp.where(mask, advantage.T + value, 0.0)


def adaptive_lam(mask: Array, *, alpha: float) -> Array:  # [B]
    """Length-adaptive λ = 1 - 1 / (α l), at least 0, for l trained tokens (VAPO, Yue et al., arXiv:2504.05118)."""
    length = jnp.sum(mask, axis=1, dtype=jnp.float32)
    return 1.0 - 1.0 / jnp.maximum(alpha * length, 1.0)


def reinforce_plus_plus(reward: Array, mask: Array, *, gamma: float | Array) -> Array:
    """The discounted return (REINFORCE++, Hu, arXiv:2501.03262): A_t = r_t + γ A_{t'}. GAE with V = 0 and λ = 1."""
    return gae(reward, jnp.zeros_like(reward), mask, gamma=gamma, lam=1.0)[0]


def remax(reward: Array, baseline: Array, mask: Array) -> Array:
    """The return minus the score of the greedy response (ReMax, Li et al., arXiv:2310.10505): A_t = Σ_{u ≥ t} r_u - b.

    baseline is [B].
    """
    chex.assert_rank([reward, baseline], [2, 1])
    return reinforce_plus_plus(reward, mask, gamma=1.0) - at_kept(baseline, mask)


def grpo(score: Array, group: Array, *, norm_adv_by_std: bool) -> Array:  # [B]
    """A = (s - mean) / (std + 1e-6) within the group (GRPO, Shao et al., arXiv:2402.03300).

    Without the division it is Dr. GRPO (Liu et al., arXiv:2503.20783). A group of one has mean 0 and std 1, as in verl.
    """
    count, mean, std = _group_moments(score, group)
    centred = score - jnp.where(count > 1, mean, 0.0)
    return centred / (jnp.where(count > 1, std, 1.0) + 1e-6) if norm_adv_by_std else centred


def grpo_passk(score: Array, group: Array, *, norm_adv_by_std: bool) -> Array:  # [B]
    """Trains only the best of a group, by its lead over the second (pass@k, Tang et al., arXiv:2503.19595).

    A = (s_1 - s_2) / (std + 1e-6) for the best. All others have 0, as do ties for the best and groups of one.
    """
    count, _, std = _group_moments(score, group)
    best = _group(jax.ops.segment_max, score, group)
    second = _group(jax.ops.segment_max, jnp.where(score == best, -jnp.inf, score), group)
    single_best = (score == best) & (_group(jax.ops.segment_sum, (score == best).astype(score.dtype), group) == 1)
    lead = jnp.where(single_best & (count > 1), best - second, 0.0)
    return lead / (std + 1e-6) if norm_adv_by_std else lead


def rloo(score: Array, group: Array) -> Array:  # [B]
    """A = s - the mean of the group's others (RLOO, Ahmadian et al., arXiv:2402.14740); s itself in a group of one."""
    return jnp.where(_group_moments(score, group)[0] > 1, rloo_vectorized(score, group), score)


def rloo_vectorized(score: Array, group: Array) -> Array:  # [B]
    """A = (n s - Σ s) / (n - 1), the same as rloo; 0 in a group of one."""
    count, mean, _ = _group_moments(score, group)
    return (score - mean) * count / jnp.maximum(count - 1.0, 1.0)


def reinforce_plus_plus_baseline(score: Array, group: Array) -> Array:  # [B]
    """A = s - the group's mean (REINFORCE++-baseline, Hu, arXiv:2501.03262); a group of one has mean 0."""
    return grpo(score, group, norm_adv_by_std=False)


def opo(score: Array, length: Array, group: Array) -> Array:  # [B]
    """A = s - Σ l s / Σ l over the group, l the lengths (OPO, Hao et al., arXiv:2505.23585); s in a group of one."""
    chex.assert_equal_shape([score, length, group])
    total = _group(jax.ops.segment_sum, length, group)
    baseline = _group(jax.ops.segment_sum, length * score, group) / jnp.maximum(total, 1.0)
    return score - jnp.where(_group_moments(score, group)[0] > 1, baseline, 0.0)


def gpg(score: Array, group: Array, graded: Array) -> Array:  # [B]
    """A = α (s - mean) (GPG, Chu et al., arXiv:2504.02546), with 0 for the mean of a group of one.

    α is the batch's graded responses over those with a score other than 0, after the paper's scaling for groups whose
    scores are all equal.
    """
    chex.assert_equal_shape([score, group, graded])
    nonzero = jnp.sum(graded & (score != 0), dtype=score.dtype)
    scale = jnp.sum(graded, dtype=score.dtype) / jnp.maximum(nonzero, 1.0)
    return scale * grpo(score, group, norm_adv_by_std=False)


def gdpo(parts: Array, group: Array, *, weights: tuple[float, ...], norm_adv_by_std: bool) -> Array:  # [B]
    """A = Σ w_k grpo(s_k), each part of the reward normalised in its group (GDPO, Liu et al., arXiv:2601.05242).

    parts is [B, K].
    """
    chex.assert_shape(parts, (group.shape[0], len(weights)))
    advantages = jax.vmap(lambda part: grpo(part, group, norm_adv_by_std=norm_adv_by_std), in_axes=1)(parts)
    return jnp.asarray(weights, parts.dtype) @ advantages


def energy(logp: Array, sum_pi_squared: Array, weight: Array | None) -> Array:  # [B, L]
    """w_t = (1 - 2 π_t + Σ_a π(a)²) ρ_t²: the squared norm of the gradient of log π_t by the logits, weighted."""
    chex.assert_equal_shape([logp, sum_pi_squared])
    norms = 1.0 - 2.0 * jnp.exp(logp) + sum_pi_squared
    return norms if weight is None else norms * jnp.square(weight)


def optimal_token_baseline(
    reward: Array, energy: Array, mask: Array, group: Array, *, by_kept: bool
) -> tuple[Array, Array]:
    """The return minus the baseline of least variance at each place of a response; returns also the return.

        A_t = G_t - Σ G_t W_t / (Σ W_t + 1e-8),     W_t = Σ_{u ≤ t} w_u,     sums over the group

    From verl's optimal token baseline. A group of one has no baseline, and neither has the single longest response of a
    group behind the end of the second longest. `by_kept`: a place is the number of kept tokens before it, not of all.
    """
    chex.assert_equal_shape([reward, energy, mask])
    mask, (B, L) = jnp.asarray(mask), mask.shape
    returns = reinforce_plus_plus(reward, mask, gamma=1.0)
    length = jnp.sum(mask, axis=1, dtype=jnp.int32)
    column = jnp.cumsum(mask, axis=1, dtype=jnp.int32) - 1 if by_kept else jnp.broadcast_to(jnp.arange(L), mask.shape)
    cumulative = jnp.where(mask, jnp.cumsum(jnp.where(mask, energy, 0.0), axis=1), 0.0)
    cells = group[:, None] * L + jnp.maximum(column, 0)

    def sum_by_group(x: Array) -> Array:  # over the group, at each place
        return jax.ops.segment_sum(x.reshape(-1), cells.reshape(-1), num_segments=B * L)[cells]

    baseline = sum_by_group(returns * cumulative) / (sum_by_group(cumulative) + 1e-8)
    longest = _group(jax.ops.segment_max, length, group)
    single = _group(jax.ops.segment_sum, (length == longest).astype(jnp.int32), group) == 1
    second_length = _group(jax.ops.segment_max, jnp.where(length == longest, -1, length), group)  # -1 in a group of one
    uncovered = ((length == longest) & single)[:, None] & (column >= second_length[:, None])
    return jnp.where(mask, returns - jnp.where(uncovered, 0.0, baseline), 0.0), returns


def _group(reduce: Callable[..., Array], x: Array, group: Array) -> Array:  # [B]
    """Reduces x over each group, for each of its members."""
    reduced: Array = reduce(x, group, num_segments=x.shape[0])[group]
    return reduced


def _group_moments(score: Array, group: Array) -> tuple[Array, Array, Array]:  # three of [B]
    """Returns count, mean and unbiased standard deviation of each group, for each member; the last is 0 for one."""
    chex.assert_rank([score, group], 1)
    chex.assert_equal_shape([score, group])
    count = _group(jax.ops.segment_sum, jnp.ones_like(score), group)
    # Relative to the best, so that equal scores have exactly their own mean: grpo divides the remainder by 1e-6.
    best = _group(jax.ops.segment_max, score, group)
    mean = best + _group(jax.ops.segment_sum, score - best, group) / count
    squares = _group(jax.ops.segment_sum, jnp.square(score - mean), group)
    return count, mean, jnp.sqrt(squares / jnp.maximum(count - 1.0, 1.0))
