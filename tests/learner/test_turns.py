"""Conversations in the learner: what tools said lies in the rows, and is neither rewarded nor counted."""

import numpy as np
import pytest

from jppo.agent import counts
from jppo.learner import estimate, packing
from jppo.structs import Exchange, Reward, Trajectory
from jppo.train import describe

from .conftest import recipe

GAMMA, LAM, KL_COEF = 0.98, 0.9, 0.2  # of the recipe

# Prompt, then turns of the policy and of others in turn.
CONVERSATIONS = [(3, [4, 5, 2]), (1, [1, 3, 1, 2, 3]), (5, [6]), (2, [2, 4, 1]), (4, [3, 1, 1, 1, 1])]


def conversation(uid, prompt, turns, rng):
    sampled = np.repeat([False, *(i % 2 == 0 for i in range(len(turns)))], [prompt, *turns])
    n = len(sampled)
    return Trajectory(
        uid=uid,
        tokens=rng.integers(0, 32, n).astype(np.int32),
        sampled=sampled,
        logprob=np.where(sampled, rng.normal(-3, 1, n), 0).astype(np.float32),
        version=np.where(sampled, 0, -1).astype(np.int32),
        text="",
        finish="stop",
        turns=-(-len(turns) // 2),
        exchange=Exchange(len(turns) // 2, 0, 0.5, 0.0, None),
    )


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


@pytest.mark.parametrize("kind", ["segments", "buckets", "none"])
def test_rewards_and_advantages_pass_over_what_tools_said(trajectories, kind):
    rng = np.random.default_rng(1)
    B, longest = len(trajectories), max(len(t.tokens) for t in trajectories)
    score = rng.normal(size=B).astype(np.float32)
    value, penalty = rng.normal(size=(2, B, longest)).astype(np.float32)  # by trajectory and token
    plan = packing.make_plan(
        kind, max_length=longest, row_lengths=2, max_tokens_per_row=2 * longest, tokens_per_micro=4 * longest,
        sequences=B, row_multiple=1,
    )  # fmt: skip
    reward, tokens = estimate.make_reward(B), estimate.make_tokens(recipe().estimator)
    seen = 0
    for rows in packing.pack(trajectories, range(B), plan):
        # Entry t is about token t + 1; what is no entry of a sampled token must not matter, so it is huge.
        at = np.maximum(rows.sequence, 0), np.minimum(rows.position + 1, longest - 1)
        v, p = (np.where(rows.mask, x[at], 1e9).astype(np.float32) for x in (value, penalty))
        token_reward, sums = reward(rows, score, p, np.float32(KL_COEF))
        found = tokens(rows, token_reward, v, np.zeros(B, np.float32))
        for b, t in enumerate(trajectories):
            here = rows.sequence == b
            if not here.any():
                continue
            seen += 1
            expected, returns = by_hand(t, score[b], value[b, : len(t.tokens)], penalty[b, : len(t.tokens)])
            np.testing.assert_array_equal(rows.mask[here], t.sampled[1:])
            np.testing.assert_array_equal(rows.inputs[here], t.tokens[:-1])
            np.testing.assert_allclose(np.asarray(found["advantage"])[here], expected[1:], rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(np.asarray(found["returns"])[here], returns[1:], rtol=1e-4, atol=1e-5)
            placed = np.asarray(token_reward)[here] + np.where(rows.mask[here], KL_COEF * p[here], 0.0)
            last = np.flatnonzero(t.sampled)[-1] - 1
            np.testing.assert_allclose(placed, np.where(np.arange(len(placed)) == last, score[b], 0.0), atol=1e-5)
            assert np.asarray(sums["length"])[b] == t.sampled.sum()
    assert seen == B


def test_the_metrics_of_conversations(trajectories):
    rewards = [Reward(1.0, {}, None) for _ in trajectories]
    found = describe(trajectories, rewards)
    assert found["prompt_length/mean"] == np.mean([prompt for prompt, _ in CONVERSATIONS]) == 3
    assert found["response_length/mean"] == np.mean([sum(turns[::2]) for _, turns in CONVERSATIONS])
    assert found["perf/total_num_tokens"] == sum(prompt + sum(turns) for prompt, turns in CONVERSATIONS)
    found = counts.metrics(trajectories)
    assert found == {
        "agent/turns/mean": (2 + 3 + 1 + 2 + 3) / 5,
        "agent/turns/max": 3.0,
        "agent/tool_calls": 6.0,
        "agent/tool_errors": 0.0,
        "agent/tool_s/mean": 5 * 0.5 / 6,
        "agent/given_tokens/mean": (5 + 5 + 0 + 4 + 2) / 5,
        "agent/faults": 0.0,
    }
    assert counts.metrics([]) == {}
