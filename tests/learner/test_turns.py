"""Conversations in the learner: what tools said lies in the rows, and is neither rewarded nor counted."""

import dataclasses

import jax
import numpy as np
import pytest

from jppo.learner import batch, estimate
from jppo.run.sample_log import conversation_metrics, sample_metrics
from jppo.types import Exchange, Reward
from tests.make import trajectory

from .conftest import recipe

GAMMA, LAM, KL_COEF = 0.98, 0.9, 0.2  # of the recipe

# Prompt, then turns of the policy and of others in turn.
CONVERSATIONS = [(3, [4, 5, 2]), (1, [1, 3, 1, 2, 3]), (5, [6]), (2, [2, 4, 1]), (4, [3, 1, 1, 1, 1])]


def conversation(uid, prompt, turns, rng):
    sampled = np.repeat([False, *(i % 2 == 0 for i in range(len(turns)))], [prompt, *turns])
    n = len(sampled)
    how = dict(turns=-(-len(turns) // 2), exchange=Exchange(len(turns) // 2, 0, 0.5, 0.0, None))
    return trajectory(rng.integers(0, 32, n), sampled, uid, logprob=rng.normal(-3, 1, n), **how)


@pytest.fixture
def trajectories():
    rng = np.random.default_rng(0)
    return [conversation(str(i), *shape, rng) for i, shape in enumerate(CONVERSATIONS)]


def by_hand(t, score, value, penalty):
    """Advantages and returns of one conversation by the definition, over the tokens that the policy chose alone."""
    chosen = np.flatnonzero(t.sampled)
    reward = [-KL_COEF * penalty[i] for i in chosen]
    reward[-1] += score
    values = [value[i] for i in chosen] + [0.0]
    advantage = np.zeros(len(t.tokens))
    ahead = 0.0
    for k in reversed(range(len(chosen))):
        ahead = reward[k] + GAMMA * values[k + 1] - values[k] + GAMMA * LAM * ahead
        advantage[chosen[k]] = ahead
    return advantage, np.where(t.sampled, advantage + value, 0.0)


def test_rewards_and_advantages_pass_over_what_tools_said(trajectories):
    rng = np.random.default_rng(1)
    B, longest = len(trajectories), max(len(t.tokens) for t in trajectories)
    score = rng.normal(size=B).astype(np.float32)
    value, penalty = rng.normal(size=(2, B, longest)).astype(np.float32)  # by trajectory and token
    data = batch.flatten(
        trajectories, [Reward(x, {}, None) for x in score], np.arange(B, dtype=np.int32), shape=(B + 3, longest)
    )

    def flat(x):
        """By token of the response; what is of no sampled token must not matter, so it is huge."""
        at = data.first[:B, None] + 1 + np.arange(longest)
        found = np.take_along_axis(x, np.minimum(at, longest - 1), axis=1)
        return np.where(data.mask, np.pad(found, ((0, 3), (0, 0))), np.float32(1e9))

    estimator = dataclasses.replace(recipe().algorithm, transforms=())
    how = dict(kl_penalty="full", correction=None, bypass=True)
    advantages = jax.jit(estimate.make_advantages(estimator, **how))
    known, metrics = advantages(data.with_arrays(value=flat(value), exact_kl=flat(penalty)), KL_COEF)
    total = []
    for b, t in enumerate(trajectories):
        n = len(t.tokens)
        expected = by_hand(t, score[b], value[b, :n], penalty[b, :n])
        for name, x in zip(("advantage", "returns"), expected, strict=True):
            response = x[data.first[b] + 1 :]
            np.testing.assert_allclose(known[name][b, : len(response)], response, rtol=1e-4, atol=1e-5)
            assert not np.asarray(known[name])[b, len(response) :].any()
        total.append(score[b] - KL_COEF * penalty[b, :n][t.sampled].sum())
    for name, reduce in (("mean", np.mean), ("max", np.max), ("min", np.min)):
        np.testing.assert_allclose(metrics[f"critic/rewards/{name}"], reduce(total), rtol=1e-4)


def test_the_metrics_of_conversations(trajectories):
    rewards = [Reward(1.0, {}, None) for _ in trajectories]
    found = sample_metrics(trajectories, rewards)
    assert found["prompt_length/mean"] == np.mean([prompt for prompt, _ in CONVERSATIONS]) == 3
    assert found["response_length/mean"] == np.mean([sum(turns[::2]) for _, turns in CONVERSATIONS])
    assert found["perf/total_num_tokens"] == sum(prompt + sum(turns) for prompt, turns in CONVERSATIONS)
    found = conversation_metrics(trajectories)
    assert found == {
        "agent/branches/mean": 1.0,
        "agent/branches_left_out": 0.0,
        "agent/turns/mean": (2 + 3 + 1 + 2 + 3) / 5,
        "agent/turns/max": 3.0,
        "agent/tool_calls": 6.0,
        "agent/tool_errors": 0.0,
        "agent/tool_s/mean": 5 * 0.5 / 6,
        "agent/given_tokens/mean": (5 + 5 + 0 + 4 + 2) / 5,
        "agent/faults": 0.0,
    }
    assert conversation_metrics([]) == {}
