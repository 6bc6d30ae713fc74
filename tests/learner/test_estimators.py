"""Estimators as their settings make them."""

import dataclasses

import jax
import numpy as np
import pytest

from jppo.algorithms import advantage
from jppo.learner import batch, estimate, estimators
from jppo.learner.views import EpisodeView, TokenView
from jppo.types import Batch, Reward
from tests.make import trajectory


def tokens(**arrays):
    """The view of an advantage."""
    return TokenView(arrays.__getitem__)


def episodes(**arrays):
    """The view of an outcome."""
    return EpisodeView(arrays.__getitem__)


def test_the_critic_may_have_another_lambda():
    """Two tokens, γ = 1, rewards 0 and 4, values 1 and 2; the advantages with λ = 0.5, the returns with λ = 1.

    δ = (0 + 2 - 1, 4 - 2) = (1, 2).  A = (1 + 0.5 · 2, 2) = (2, 2).  Returns of λ = 1 are the reward to come: (4, 4);
    of λ = 0.5, A + V = (3, 4).
    """
    reward, value, mask = np.float32([[0.0, 4.0]]), np.float32([[1.0, 2.0]]), np.array([[True, True]])

    def found(**how):
        made = estimators.gae(gamma=1.0, **dict(lam=0.5, lam_alpha=None, critic_lam=None) | how)
        return made.advantage(tokens(reward=reward, value=value, mask=mask))

    np.testing.assert_array_equal(found(), [[[2.0, 2.0]], [[3.0, 4.0]]])
    np.testing.assert_array_equal(found(critic_lam=0.5), [[[2.0, 2.0]], [[3.0, 4.0]]])
    np.testing.assert_array_equal(found(critic_lam=1.0), [[[2.0, 2.0]], [[4.0, 4.0]]])
    # α l = 2 makes λ = 0.5
    np.testing.assert_array_equal(found(lam=0.1, lam_alpha=1.0), [[[2.0, 2.0]], [[3.0, 4.0]]])
    np.testing.assert_allclose(found(lam=0.1, lam_alpha=1.0, critic_lam=0.1), [[[2.0, 2.0]], [[2.2, 4.0]]], rtol=1e-6)


@pytest.mark.parametrize("how,scans", [({}, 1), ({"critic_lam": 0.9}, 1), ({"critic_lam": 1.0}, 2)])
def test_a_second_scan_only_for_a_second_lambda(how, scans):
    made = estimators.gae(**dict(gamma=1.0, lam=0.9, lam_alpha=None, critic_lam=None) | how)
    rows, mask = np.ones((2, 3), np.float32), np.ones((2, 3), np.bool_)
    view = tokens(reward=rows, value=rows, mask=mask)
    assert str(jax.make_jaxpr(lambda: made.advantage(view))()).count("= scan[") == scans


@pytest.mark.parametrize("gamma,expected", [(0.0, [-0.2, -0.4, 0.0, 0.6]), (0.5, [-0.25, -0.1, 0.0, 0.6])])
def test_distillation_by_hand(gamma, expected):
    """β = 2 and log-ratios to the teacher of 0.1, 0.2, -0.3, with a tool's token before the last; the score is 5.

    r = -2 d = (-0.2, -0.4, 0.6), and A_t = r_t + γ A_t': with γ = ½ (-0.2 - ½ · 0.1, -0.4 + ½ · 0.6, 0.6).
    """
    mask = np.array([[True, True, False, True]])
    data = Batch(
        mask=mask, rollout_logprob=np.zeros((1, 4), np.float32), first=np.zeros(1, np.int32), score=np.float32([5.0]),
        group=np.zeros(1, np.int32), length=np.float32([3]),
    ).with_arrays(
        old_logprob=np.float32([[-1.0, -1.0, np.nan, -1.0]]), ref_logprob=np.float32([[-1.1, -1.2, np.nan, -0.7]])
    )  # fmt: skip
    how = dict(kl_penalty="kl", correction=None, bypass=True)
    known, metrics = jax.jit(estimate.make_advantages(estimators.distill(gamma=gamma), **how))(data, np.float32(2))
    np.testing.assert_allclose(known["advantage"], [expected], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(metrics["critic/rewards/mean"], 0.0, atol=1e-6)  # -2 (0.1 + 0.2 - 0.3), without the 5
    alone = jax.jit(estimate.make_advantages(estimators.distill(gamma=gamma), **how | {"kl_penalty": None}))
    np.testing.assert_array_equal(alone(data, np.float32(2))[0]["advantage"], 0.0)


def test_reinforce_without_a_baseline_is_verls_grpo_rloo_and_opo_of_one_sample():
    score = np.float32([3.0, -1.0, 0.5])
    view = episodes(score=score, length=np.float32([2.0, 1.0, 4.0]), group=np.arange(3))
    made = estimators.reinforce_no_baseline()
    np.testing.assert_array_equal(made.outcome(view), score)
    grpo, rloo = estimators.by_group(advantage.grpo, norm_adv_by_std=True), estimators.by_group(advantage.rloo)
    for other in (grpo, rloo, estimators.opo()):
        np.testing.assert_allclose(other.outcome(view), score, rtol=2e-6)
    assert not made.compares and other.compares


def test_gpg_counts_the_responses_of_groups_of_two_or_more():
    """One response of four has a score, so the scale is 4; the fifth is alone, which is padding or was not graded."""
    found = estimators.gpg().outcome(
        episodes(score=np.float32([1.0, 0.0, 0.0, 0.0, 4.0]), group=np.int32([2, 2, 0, 0, 1]))
    )
    np.testing.assert_allclose(found, [2.0, -2.0, 0.0, 0.0, 16.0], rtol=1e-6)


def test_normalised_values_by_hand():
    """A response of two tokens with the score 4 and the outputs (1, 2), statistics of weight 0.5, mean 1, variance 4.

    V = 1 + 2 · (1, 2) = (3, 5); with γ = λ = 1 the returns are (4, 4) and A = (1, -1). The statistics have the new
    batch with 2/3: the mean is 1 + 2/3 · 3 = 3, the variance 1/3 · 4 + 2/9 · 9 = 10/3. The targets are on that scale.
    """
    mask = np.array([[True, True, False]])
    data = Batch(
        mask=mask, rollout_logprob=np.zeros((1, 3), np.float32), first=np.zeros(1, np.int32), score=np.float32([4.0]),
        group=np.zeros(1, np.int32), length=np.float32([2]), arrays={"value": np.float32([[1.0, 2.0, 9.0]])},
    )  # fmt: skip
    made = dataclasses.replace(estimators.gae(gamma=1.0, lam=1.0, lam_alpha=None, critic_lam=None), transforms=())
    how = dict(kl_penalty=None, correction=None, bypass=True)
    advantages = jax.jit(estimate.make_advantages(made, **how, value_norm_decay=0.5))
    known, metrics = advantages(data, np.float32(0), np.float32([0.5, 1.0, 4.0]))
    np.testing.assert_allclose(known["advantage"], [[1.0, -1.0, 0.0]], rtol=1e-6)
    np.testing.assert_allclose(known["value_norm"], [0.75, 3.0, 10 / 3], rtol=1e-6)
    np.testing.assert_allclose(known["returns"], np.where(mask, 1 / np.sqrt(10 / 3), 0.0), rtol=1e-6)
    np.testing.assert_allclose(metrics["critic/values/mean"], 4.0, rtol=1e-6)
    np.testing.assert_allclose(metrics["critic/returns/mean"], 4.0, rtol=1e-6)


@pytest.mark.parametrize("left_out", ["filtered", "rejected"])
def test_opo_counts_a_response_of_which_nothing_is_kept(left_out):
    """Scores (1, 0, 0) of two tokens each; of the last two nothing is trained on: A = 1 - 2 · 1 / (2 + 2 + 2) = 2/3."""
    sampled = np.array([False, True, False, True, False])  # a prompt's token; a tool's in the response

    filters = left_out == "filtered"
    responses = [trajectory(range(5), sampled, finish=finish) for finish in ("stop", "length", "length")]
    rewards = [Reward(x, {}, None) for x in (1.0, 0.0, 0.0)]
    data = batch.flatten(responses, rewards, np.zeros(3, np.int32), shape=(4, 4), filter_truncated=filters)
    how = dict(kl_penalty=None, bypass=False)
    # a band around equal log-probs; those of the last two are not equal
    rule = estimate.Correction(None, 0.0, 1.0, normalize=False, rules=(("seq_mean_k1", 0.5, 2.0),))
    old = np.zeros((4, 4), np.float32) if filters else np.float32([[0] * 4, [5] * 4, [5] * 4, [0] * 4])
    data = data.with_arrays(old_logprob=old)
    made = jax.jit(estimate.make_advantages(estimators.opo(), **how, correction=None if filters else rule))
    known, _ = made(data, np.float32(0))
    np.testing.assert_array_equal(known["mask"].sum(1), [2, 0, 0, 0])
    np.testing.assert_allclose(known["advantage"][0], [2 / 3, 0.0, 2 / 3, 0.0], rtol=1e-6)
