"""Rewards earned inside a response, from the graders' result to advantages: by hand, beside tools and padding."""

import dataclasses

import jax
import numpy as np
import pytest

from jppo import settings
from jppo.algorithms import masked
from jppo.learner import batch, catalogue, estimate, estimators
from jppo.learner.views import TokenView
from jppo.types import Reward
from tests import make

GAMMA, LAM, KL_COEF = 0.9, 0.8, 0.5
# Per trajectory: which tokens are sampled, from the first sampled one on; (token, amount) pairs; the score.
CASES = {
    "within": ([1, 1, 1, 1], ((0, 0.5), (2, -1.0)), 2.0),
    "everything": ([1, 1, 1], ((0, 0.25), (1, 0.5)), 0.75),
    "twice at a token": ([1, 1, 1], ((1, 0.5), (1, 0.75), (2, 1.0)), 3.0),
    "at a tool's token": ([1, 1, 0, 0, 1], ((3, 2.0),), 2.5),
    "at both ends": ([1, 0, 1, 0], ((0, 1.0), (3, -2.0)), 0.0),
    "nowhere": ([1, 1], (), 1.0),
}


def trajectory(sampled, uid):
    return make.trajectory(range(2 + len(sampled)), [0, 0, *sampled], uid, logprob=-0.5)


def flat(rewards, *, earns=True, n=1):
    some = [trajectory(sampled, uid) for uid, (sampled, _, _) in CASES.items() for _ in range(n)]
    group = np.repeat(np.arange(len(CASES)) * n, n).astype(np.int32)
    return batch.flatten(some, rewards, group, shape=(len(some) + 1, 6), has_earned=earns)


def made(estimator, data, *, rng=None):
    """Advantages, returns and metrics, without whitening; values and KL are random."""
    rng = rng or np.random.default_rng(0)
    value, penalty = rng.normal(size=(2, *data.mask.shape)).astype(np.float32)
    data = data.with_arrays(value=value if estimator.critic else None, exact_kl=penalty)
    how = dict(kl_penalty="full", correction=None, bypass=True)
    run = jax.jit(estimate.make_advantages(dataclasses.replace(estimator, transforms=()), **how))
    return *run(data, KL_COEF), value, penalty


def rewards_by_hand(penalty, sampled, amounts, score):
    """The reward of each sampled token: amounts at other tokens belong to the last sampled one before."""
    chosen = np.flatnonzero(sampled)
    reward = -KL_COEF * penalty[chosen].astype(np.float64)
    for k, amount in amounts:
        reward[np.flatnonzero(chosen <= k)[-1]] += amount
    reward[-1] += score - sum(amount for _, amount in amounts)
    return chosen, reward


@pytest.mark.parametrize("gamma, lam", [(1.0, 1.0), (GAMMA, LAM), (GAMMA, 0.0)])
def test_gae_of_rewards_inside_a_response_is_that_of_the_definition(gamma, lam):
    data = flat([Reward(score, {}, None, earned=amounts) for _, amounts, score in CASES.values()])
    gae = estimators.gae(gamma=gamma, lam=lam, lam_alpha=None, critic_lam=None)
    known, metrics, value, penalty = made(gae, data)
    totals = []
    for b, (sampled, amounts, score) in enumerate(CASES.values()):
        chosen, reward = rewards_by_hand(penalty[b], sampled, amounts, score)
        values = np.append(value[b, chosen], 0.0)
        delta = reward + gamma * values[1:] - values[:-1]
        expected = [sum((gamma * lam) ** j * d for j, d in enumerate(delta[t:])) for t in range(len(delta))]
        np.testing.assert_allclose(known["advantage"][b, chosen], expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(known["returns"][b, chosen], expected + values[:-1], rtol=1e-5, atol=1e-5)
        assert not np.delete(known["advantage"][b], chosen).any()
        totals.append(reward.sum())
    np.testing.assert_allclose(metrics["critic/rewards/mean"], np.mean(totals), rtol=1e-5)


def test_returns_to_go_count_only_what_is_still_to_be_earned():
    data = flat([Reward(score, {}, None, earned=amounts) for _, amounts, score in CASES.values()])
    known, _, _, penalty = made(estimators.reinforce_plus_plus(gamma=GAMMA), data)
    for b, (sampled, amounts, score) in enumerate(CASES.values()):
        chosen, reward = rewards_by_hand(penalty[b], sampled, amounts, score)
        expected = [sum(GAMMA**j * r for j, r in enumerate(reward[t:])) for t in range(len(reward))]
        np.testing.assert_allclose(known["advantage"][b, chosen], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo", "reinforce_plus_plus_baseline"])
def test_group_estimators_see_the_sums_alone(name):
    config = settings.default()
    config.algorithm.adv_estimator = name
    estimator = catalogue.ESTIMATORS[name](make.typed(config))
    rng = np.random.default_rng(1)
    scores = rng.normal(size=2 * len(CASES))
    amounts = [one for _, one, _ in CASES.values() for _ in range(2)]
    inside = [Reward(score, {}, None, earned=one) for score, one in zip(scores, amounts, strict=True)]
    total = [dataclasses.replace(one, earned=()) for one in inside]
    (one, metrics, *_), (other, expected, *_) = (
        made(estimator, flat(some, earns=some is inside, n=2)) for some in (inside, total)
    )
    np.testing.assert_array_equal(one["advantage"], other["advantage"])
    assert metrics == expected and np.asarray(one["advantage"]).any()


def test_a_run_without_such_rewards_has_the_same_numbers_to_the_bit():
    some = [Reward(score, {}, None) for _, _, score in CASES.values()]
    gae = estimators.gae(gamma=GAMMA, lam=LAM, lam_alpha=None, critic_lam=None)
    (one, *_), (other, *_) = (made(gae, flat(some, earns=earns)) for earns in (True, False))
    for name in ("advantage", "returns"):
        np.testing.assert_array_equal(one[name], other[name])


@pytest.mark.parametrize("rejected", [None, "some", "a turn"])
def test_discounting_by_turn_is_by_the_definition(rejected):
    """γ to the number of turn ends between two tokens; turns count even if none of their tokens is kept."""
    sampled = np.bool_([1, 1, 0, 0, 1, 1, 1, 0, 1])
    turn = np.array([0, 0, 0, 0, 1, 1, 1, 1, 2])
    kept = sampled.copy()
    if rejected is not None:
        kept[[1, 5] if rejected == "some" else [4, 5, 6]] = False
    rng = np.random.default_rng(3)
    reward, value = np.where(kept, rng.normal(size=(2, 9)), 0.0)
    chosen = np.flatnonzero(kept)
    expected = dict.fromkeys(chosen, 0.0)
    for i, t in enumerate(chosen):
        for j, u in enumerate(chosen[i:], i):  # Σ_u (discount from t to u) λ^(tokens between) δ_u
            after = chosen[j + 1] if j + 1 < len(chosen) else None
            delta = reward[u] - value[u]
            delta += 0.0 if after is None else GAMMA ** (turn[after] - turn[u]) * value[after]
            expected[t] += GAMMA ** (turn[u] - turn[t]) * LAM ** (j - i) * delta
    made = estimators.gae(gamma=GAMMA, gamma_by="turn", lam=LAM, lam_alpha=None, critic_lam=None)
    ends = masked.ends(sampled[None])
    assert np.flatnonzero(ends[0]).tolist() == [1, 6, 8]
    view = dict(reward=np.float32(reward[None]), value=np.float32(value[None]), mask=kept[None], turn_ends=ends)
    advantage, returns = made.advantage(TokenView(view.__getitem__))
    np.testing.assert_allclose(advantage[0, chosen], list(expected.values()), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(returns[0, chosen], value[chosen] + list(expected.values()), rtol=1e-5, atol=1e-6)
    other = estimators.reinforce_plus_plus(gamma=GAMMA, gamma_by="turn").advantage(TokenView(view.__getitem__))
    to_go = [sum(GAMMA ** (turn[u] - turn[t]) * reward[u] for u in chosen if u >= t) for t in chosen]
    np.testing.assert_allclose(other[0, chosen], to_go, rtol=1e-5, atol=1e-6)


def test_turns_are_those_before_tokens_are_rejected():
    """A rejected token inside a turn ends no turn, with a correction as in a run; one turn is not discounted at all."""
    some = [Reward(1.0, {}, None, earned=((0, 0.5),)) for _ in CASES]
    data = flat(some)
    old = data.rollout_logprob.copy()
    old[2, 1] += 9.0  # rejected by its ratio
    old = data.with_arrays(old_logprob=old)
    reject = estimate.Correction(level=None, lower=0.5, upper=2.0, normalize=False, rules=(("token_k1", 0.5, 2.0),))
    made = estimators.reinforce_plus_plus(gamma=GAMMA, gamma_by="turn")
    how = dict(kl_penalty=None, correction=reject, bypass=False)
    run = jax.jit(estimate.make_advantages(dataclasses.replace(made, transforms=()), **how))
    known, _ = run(old, np.float32(0))
    assert np.asarray(known["mask"])[2].tolist() == [True, False, True, False, False, False]
    np.testing.assert_allclose(known["advantage"][2, [0, 2]], [1.0, 0.5], rtol=1e-6)
    np.testing.assert_allclose(known["advantage"][3, [0, 1, 4]], [0.5 + 0.5 * GAMMA, 0.5 * GAMMA, 0.5], rtol=1e-6)


def test_an_unusable_sample_and_padding_earn_nothing():
    some = [Reward(9.0, {}, None, unusable="said so", earned=((0, 4.0),)) for _ in CASES]
    gae = estimators.gae(gamma=1.0, lam=1.0, lam_alpha=None, critic_lam=None)
    known, *_ = made(gae, flat(some))
    assert not np.asarray(known["advantage"]).any() and not np.asarray(known["returns"]).any()
