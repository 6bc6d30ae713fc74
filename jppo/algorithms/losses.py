"""Losses: of a policy and of values per token, with the weights of tokens; of preference pairs.

A policy loss takes current and old log-probs, advantages and the mask, all [R, T]. It returns the loss of each token
with two masks of clipped tokens: in the usual direction and in the other one. Inputs outside the mask are arbitrary;
outputs there mean nothing and have no gradient.

`clip_cov` and `kl_cov` also take tokens of high covariance between log-prob and advantage (Cui et al.,
arXiv:2505.22617). The covariance of a token is (log π - mean)(A - mean), with means over the mask. Such tokens lower
the policy's entropy most. They are selected in a whole mini-batch, [B, L], whatever its cut into micro-batches; `count`
is [] i32.

The losses of pairs are a reward model's by Bradley and Terry, and a policy's by DPO and IPO.
"""

import chex
import jax
import jax.numpy as jnp

from jppo.algorithms.masked import FAR, masked_sum, sequence_length, sequence_mean
from jppo.types import Array

PolicyLoss = tuple[Array, Array, Array]  # loss, clipped, clipped the other way: [R, T] f32, bool, bool
FARTHEST = 80.0  # of a log-ratio that verl does not clip: its exponential is finite in float32
AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "token-sum")


def clipped(
    logp: Array, old_logp: Array, advantage: Array, mask: Array, segment: Array,
    *, clip_low: float, clip_high: float, clip_c: float,
) -> PolicyLoss:  # fmt: skip
    """PPO's clipped surrogate (Schulman et al., arXiv:1707.06347) with a second bound (Ye et al., arXiv:1912.09729).

        L = max(-A ρ, -A clip(ρ, 1 - ε_low, 1 + ε_high)),     ρ = π / π_old,     and L ≤ -A c where A < 0

    The two bounds of the clip may differ (DAPO, Yu et al., arXiv:2503.14476).
    """
    chex.assert_equal_shape([logp, old_logp, advantage, mask, segment])
    ratio = jnp.exp(_log_ratio(logp, old_logp, mask))
    unclipped = -advantage * ratio
    pessimistic = jnp.maximum(unclipped, -advantage * jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high))
    bound = jnp.where(advantage < 0, -advantage * clip_c, jnp.inf)
    return jnp.minimum(pessimistic, bound), pessimistic > unclipped, pessimistic > bound


def gspo(
    logp: Array, old_logp: Array, advantage: Array, mask: Array, segment: Array, *, clip_low: float, clip_high: float
) -> PolicyLoss:
    """The clipped surrogate with the ratio of the whole sequence (GSPO, Zheng et al., arXiv:2507.18071).

    log s = mean over the sequence of log ρ; each token has s in value and its own log π in the gradient.
    """
    chex.assert_equal_shape([logp, old_logp, advantage, mask, segment])
    log_ratio = jnp.where(mask, logp - old_logp, 0.0)
    sequence_log_ratio = sequence_mean(jax.lax.stop_gradient(log_ratio), mask, segment)
    zero = log_ratio - jax.lax.stop_gradient(log_ratio)  # 0 with a gradient; first, so that it rounds nothing away
    ratio = jnp.exp(jnp.minimum(sequence_log_ratio + zero, 10.0))
    unclipped = -advantage * ratio
    clipped_loss = -advantage * jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    return jnp.maximum(unclipped, clipped_loss), clipped_loss > unclipped, jnp.zeros_like(mask)


def geo_mean(
    logp: Array, old_logp: Array, advantage: Array, mask: Array, segment: Array, *, clip_low: float, clip_high: float
) -> PolicyLoss:
    """The geometric mean of the sequence's ratios, each clipped in log space (GMPO, Zhao et al., arXiv:2507.20673).

        L = -mean(A) exp(mean of sgn(A) min(sgn(A) log ρ, sgn(A) clip(log ρ, -ε_low, ε_high)))

    It is one number per sequence, at each of its entries, to be averaged by seq-mean-token-mean.
    """
    chex.assert_equal_shape([logp, old_logp, advantage, mask, segment])
    log_ratio = jnp.where(mask, logp - old_logp, 0.0)
    clipped_log_ratio = jnp.clip(log_ratio, -clip_low, clip_high)
    sign = jnp.sign(advantage)
    mean = sequence_mean(sign * jnp.minimum(sign * log_ratio, sign * clipped_log_ratio), mask, segment)
    loss = -sequence_mean(advantage, mask, segment) * jnp.exp(jnp.minimum(mean, FAR))
    return loss, (log_ratio != clipped_log_ratio) & (advantage > 0), (log_ratio != clipped_log_ratio) & (advantage < 0)


def cispo(
    logp: Array, old_logp: Array, advantage: Array, mask: Array, segment: Array, *, clip_low: float, clip_high: float
) -> PolicyLoss:
    """REINFORCE weighted by the clipped ratio, which has no gradient (CISPO, MiniMax, arXiv:2506.13585).

    L = -A sg[clip(ρ, 1 - ε_low, 1 + ε_high)] log π
    """
    chex.assert_equal_shape([logp, old_logp, advantage, mask, segment])
    ratio = jax.lax.stop_gradient(jnp.exp(_log_ratio(logp, old_logp, mask)))
    weight = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    return -advantage * weight * jnp.where(mask, logp, 0.0), ratio != weight, jnp.zeros_like(mask)


def sapo(
    logp: Array, old_logp: Array, advantage: Array, mask: Array, segment: Array, *, tau_pos: float, tau_neg: float
) -> PolicyLoss:
    """A soft gate in place of the clip (SAPO, Gao et al., arXiv:2511.20347); averaged by seq-mean-token-mean.

    L = -A σ(τ (ρ - 1)) 4 / τ, with τ_pos where A > 0 and τ_neg elsewhere
    """
    chex.assert_equal_shape([logp, old_logp, advantage, mask, segment])
    ratio = jnp.exp(_log_ratio(logp, old_logp, mask))
    tau = jnp.where(advantage > 0, tau_pos, tau_neg)
    gate = jax.nn.sigmoid(tau * (ratio - 1.0)) * 4.0 / tau
    return -advantage * gate, jnp.zeros_like(mask), jnp.zeros_like(mask)


def gpg(logp: Array, old_logp: Array, advantage: Array, mask: Array, segment: Array) -> PolicyLoss:
    """REINFORCE without the old policy (GPG, Chu et al., arXiv:2504.02546): L = -A log π."""
    chex.assert_equal_shape([logp, old_logp, advantage, mask, segment])
    return -advantage * jnp.where(mask, logp, 0.0), jnp.zeros_like(mask), jnp.zeros_like(mask)


def dro(logp: Array, old_logp: Array, advantage: Array, mask: Array, segment: Array, *, dro_beta: float) -> PolicyLoss:
    """REINFORCE with a quadratic penalty of the log-ratio (after DRO, Richemond et al., arXiv:2405.19107).

    L = -(A log π - ½ β (log ρ)²)
    """
    chex.assert_equal_shape([logp, old_logp, advantage, mask, segment])
    here, log_ratio = jnp.where(mask, logp, 0.0), jnp.where(mask, logp - old_logp, 0.0)
    return -(here * advantage - 0.5 * dro_beta * jnp.square(log_ratio)), jnp.zeros_like(mask), jnp.zeros_like(mask)


def dppo_tv(
    logp: Array, old_logp: Array, advantage: Array, mask: Array, segment: Array,
    *, clip_low: float, clip_high: float, clip_c: float,
) -> PolicyLoss:  # fmt: skip
    """REINFORCE with truncated ratios inside a trust region of total variation (DPPO, Qi et al., arXiv:2602.04879).

        L = -A sg[min(ρ, c)] log π     if π - π_old ≤ ε_high, or where A ≤ 0, if π_old - π ≤ ε_low; else 0

    The divergence is of Bernoulli variables: the token is sampled, or another one.
    """
    chex.assert_equal_shape([logp, old_logp, advantage, mask, segment])
    change = jnp.exp(jnp.where(mask, logp, 0.0)) - jnp.exp(jnp.where(mask, old_logp, 0.0))
    inside = jnp.where(advantage > 0, change <= clip_high, change >= -clip_low)
    return _truncated_reinforce(logp, old_logp, advantage, mask, inside, clip_c)


def dppo_kl(
    logp: Array, old_logp: Array, advantage: Array, mask: Array, segment: Array,
    *, clip_low: float, clip_high: float, clip_c: float,
) -> PolicyLoss:  # fmt: skip
    """REINFORCE with truncated ratios inside a trust region of KL (DPPO, Qi et al., arXiv:2602.04879).

        L = -A sg[min(ρ, clip_c)] log π     if KL(π_old ‖ π) ≤ clip_high, or clip_low where A ≤ 0; else 0

    The KL is of Bernoulli variables, as in `dppo_tv`. A token outside it still counts if its gradient leads back: where
    A > 0 if π ≤ π_old, elsewhere if π ≥ π_old.
    """
    chex.assert_equal_shape([logp, old_logp, advantage, mask, segment])
    now, before = jnp.where(mask, logp, 0.0), jnp.where(mask, old_logp, 0.0)
    prob, old = jnp.exp(now), jnp.exp(before)
    divergence = old * (before - now) + (1.0 - old) * jnp.log((1.0 - old + 1e-8) / (1.0 - prob + 1e-8))
    up, down = (divergence <= clip_high) | (prob <= old), (divergence <= clip_low) | (prob >= old)
    return _truncated_reinforce(logp, old_logp, advantage, mask, jnp.where(advantage > 0, up, down), clip_c)


def _truncated_reinforce(
    logp: Array, old_logp: Array, advantage: Array, mask: Array, inside: Array, clip_c: float
) -> PolicyLoss:
    """Returns -A sg[min(ρ, c)] log π for the tokens `inside` a trust region, 0 for the others."""
    ratio = jax.lax.stop_gradient(jnp.exp(_log_ratio(logp, old_logp, mask)))
    loss = -advantage * jnp.minimum(ratio, clip_c) * jnp.where(mask, logp, 0.0)
    return jnp.where(inside, loss, 0.0), ~inside, (ratio > clip_c) & inside


def clip_cov(
    logp: Array, old_logp: Array, advantage: Array, mask: Array, segment: Array, selected: Array,
    *, clip_low: float, clip_high: float,
) -> PolicyLoss:  # fmt: skip
    """PPO's clipped surrogate without the selected tokens (Clip-Cov, Cui et al., arXiv:2505.22617).

    L = max(-A ρ, -A clip(ρ, 1 - ε_low, 1 + ε_high)), and 0 without a gradient for tokens of `drawn_by_covariance`
    """
    chex.assert_equal_shape([logp, old_logp, advantage, mask, segment, selected])
    ratio = jnp.exp(_log_ratio(logp, old_logp, mask, far=FARTHEST))
    pessimistic = jnp.maximum(-advantage * ratio, -advantage * jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high))
    return jnp.where(selected, 0.0, pessimistic), jnp.asarray(selected), jnp.zeros_like(mask)


def kl_cov(
    logp: Array, old_logp: Array, advantage: Array, mask: Array, segment: Array, selected: Array,
    *, ppo_kl_coef: float,
) -> PolicyLoss:  # fmt: skip
    """The surrogate with a penalty of the selected tokens' log-ratio (KL-Cov, Cui et al., arXiv:2505.22617).

    L = -A ρ, plus β |log ρ| for tokens of `highest_covariance`
    """
    chex.assert_equal_shape([logp, old_logp, advantage, mask, segment, selected])
    log_ratio = _log_ratio(logp, old_logp, mask, far=FARTHEST)
    penalty = jnp.where(selected, ppo_kl_coef * log_ratio * jnp.sign(log_ratio), 0.0)
    return -advantage * jnp.exp(log_ratio) + penalty, jnp.asarray(selected), jnp.zeros_like(mask)


def _log_ratio(logp: Array, old_logp: Array, mask: Array, *, far: float = FAR) -> Array:
    # A masked entry must not reach the exponential: its gradient would be 0 * inf.
    return jnp.clip(jnp.where(mask, logp - old_logp, 0.0), -far, far)


def covariance(logp: Array, advantage: Array, mask: Array) -> Array:  # [B, L]
    """Returns each token's summand of the covariance; -∞ outside the mask."""
    chex.assert_equal_shape([logp, advantage, mask])
    tokens = jnp.maximum(jnp.sum(mask, dtype=logp.dtype), 1.0)
    logp_deviation, advantage_deviation = (x - masked_sum(x, mask) / tokens for x in (logp, advantage))
    return jnp.where(mask, logp_deviation * advantage_deviation, -jnp.inf)


def highest_covariance(logp: Array, advantage: Array, mask: Array, *, count: Array) -> Array:  # [B, L] bool
    """Marks the `count` tokens of the highest covariance."""
    chex.assert_rank(count, 0)
    covariances = covariance(logp, advantage, mask)
    return (_rank(-covariances) < count) & jnp.asarray(mask)


def drawn_by_covariance(
    key: Array, logp: Array, old_logp: Array, advantage: Array, mask: Array,
    *, count: Array, low: float, high: float, clip_low: float, clip_high: float,
) -> Array:  # [B, L] bool  # fmt: skip
    """Draws at most `count` of the tokens whose covariance is above `low` and below `high`.

    Tokens that the surrogate's own clip holds are not drawn.
    """
    chex.assert_rank(count, 0)
    covariances = covariance(logp, advantage, mask)
    ratio = jnp.exp(jnp.where(mask, logp - old_logp, 0.0))
    is_clipped = -advantage * jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high) > -advantage * ratio
    candidates = (covariances > low) & (covariances < high) & ~is_clipped
    return (_rank(jnp.where(candidates, jax.random.uniform(key, mask.shape), jnp.inf)) < count) & candidates


def _rank(x: Array) -> Array:  # of [B, L], i32
    """Returns the rank of each entry among all, from 0, in ascending order."""
    flat = x.reshape(-1)
    ranks = (
        jnp.zeros(flat.size, jnp.int32).at[jnp.argsort(flat, stable=True)].set(jnp.arange(flat.size, dtype=jnp.int32))
    )
    return ranks.reshape(x.shape)


def clipped_value(value: Array, old_value: Array, returns: Array, *, cliprange_value: float) -> tuple[Array, Array]:
    """Half the larger squared error: of the value, or of the value clipped around the old one.

    L = ½ max((V - R)², (clip(V, V_old - c, V_old + c) - R)²), and where the clip is active.
    """
    chex.assert_equal_shape([value, old_value, returns])
    clipped_prediction = jnp.clip(value, old_value - cliprange_value, old_value + cliprange_value)
    error, clipped_error = jnp.square(value - returns), jnp.square(clipped_prediction - returns)
    return 0.5 * jnp.maximum(error, clipped_error), clipped_error > error


def token_weights(
    mask: Array, segment: Array, *, mode: str, tokens: Array, sequences: Array, scale: float
) -> Array:  # [R, T]
    """Returns each token's weight in the mean over a mini-batch: Σ weight · loss is the aggregation `mode`.

    token-mean                1 / tokens
    seq-mean-token-sum        1 / sequences
    seq-mean-token-mean       1 / (sequences · the sequence's length)
    seq-mean-token-sum-norm   1 / (sequences · scale)      (Dr. GRPO, Liu et al., arXiv:2503.20783)
    token-sum                 1

    `tokens` and `sequences` count the whole mini-batch, however it is cut into rows, without sequences that have no
    kept token. Lengths count kept tokens.
    """
    chex.assert_rank([tokens, sequences], 0)
    chex.assert_equal_shape([mask, segment])
    dtype = jnp.result_type(tokens)
    if mode == "token-mean":
        weight = 1.0 / tokens
    elif mode == "seq-mean-token-sum":
        weight = 1.0 / sequences
    elif mode == "seq-mean-token-mean":
        weight = 1.0 / (sequences * jnp.maximum(sequence_length(mask, segment, dtype), 1.0))
    elif mode == "seq-mean-token-sum-norm":
        weight = 1.0 / (sequences * scale)
    elif mode == "token-sum":
        weight = jnp.ones((), dtype)
    else:
        raise ValueError(f"{mode=} is not known; it is one of {', '.join(AGGREGATIONS)}")
    return jnp.where(mask, weight, 0.0)


def bradley_terry(chosen: Array, rejected: Array, margin: Array, *, center: float) -> Array:
    """-log σ(r_chosen - r_rejected - margin) + center (r_chosen + r_rejected)², of each pair [N] f32.

    By Bradley and Terry's model a response wins with probability σ of the scores' difference. The margin is from
    Llama 2 (arXiv 2307.09288), the centring term from Eisenstein et al. (arXiv 2312.09244).
    """
    chex.assert_equal_shape([chosen, rejected, margin])
    chex.assert_rank(chosen, 1)
    return -jax.nn.log_sigmoid(chosen - rejected - margin) + center * jnp.square(chosen + rejected)


def dpo(chosen: Array, rejected: Array, *, beta: float) -> Array:
    """-log σ(β (chosen - rejected)), of each pair [N] f32 (arXiv 2305.18290).

    `chosen` and `rejected` are log π(y|x) - log π_ref(y|x) of whole responses.
    """
    chex.assert_equal_shape([chosen, rejected])
    chex.assert_rank(chosen, 1)
    return -jax.nn.log_sigmoid(beta * (chosen - rejected))


def ipo(chosen: Array, rejected: Array, *, beta: float) -> Array:
    """(chosen - rejected - 1 / (2 β))², of each pair [N] f32 (arXiv 2310.12036, equation 17).

    `chosen` and `rejected` are as for `dpo`, but means over the response's tokens, as in the paper's experiments.
    """
    chex.assert_equal_shape([chosen, rejected])
    chex.assert_rank(chosen, 1)
    return jnp.square(chosen - rejected - 1.0 / (2.0 * beta))
