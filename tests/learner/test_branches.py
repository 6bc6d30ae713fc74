"""Estimators by group compare the episodes of agents, however many branches each has."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jppo.algorithms import advantage
from jppo.learner import batch, estimate, estimators
from jppo.learner.algorithm import Algorithm
from jppo.learner.episodes import make_episodes, with_branches
from jppo.types import Reward
from tests.learner.test_earned import trajectory
from tests.make import sample

SCORES = (1.0, 0.0, 0.25, 1.0)  # of four episodes of one prompt
BRANCHES = (0, 3, 1, 0)  # further ones
KL_COEF = 0.5
MADE = {
    "grpo": lambda: estimators.by_group(advantage.grpo, norm_adv_by_std=True),
    "dr grpo": lambda: estimators.by_group(advantage.grpo, norm_adv_by_std=False),
    "rloo": lambda: estimators.by_group(advantage.rloo),
    "rloo_vectorized": lambda: estimators.by_group(advantage.rloo_vectorized),
    "baseline": lambda: estimators.by_group(advantage.reinforce_plus_plus_baseline),
    "opo": estimators.opo,
}


def outcomes(name, score, length):
    """One number per episode, from the papers' definitions."""
    others = [np.delete(score, i).mean() for i in range(len(score))]
    return {
        "grpo": (score - score.mean()) / (score.std(ddof=1) + 1e-6),
        "dr grpo": score - score.mean(),
        "rloo": score - others,
        "rloo_vectorized": score - others,
        "baseline": score - score.mean(),
        "opo": score - (length * score).sum() / length.sum(),
    }[name]


def test_all_branches_of_an_episode_have_its_columns():
    """Two prompts of two episodes; column 0 is read by episode, column 1 by row."""
    episodes = [
        dataclasses.replace(trajectory(np.ones(6, bool), str(i)), branches=(trajectory(np.ones(6, bool), str(i)),) * i)
        for i in range(4)
    ]
    rewards = [Reward(score, {}, None) for score in SCORES]
    prompts = [dataclasses.replace(sample("").prompt, uid=uid) for uid in "ab"]
    made = with_branches(make_episodes(prompts, episodes, rewards, None, compares=False), lambda _: lambda _: ())
    value, weight = {"a": 0.25, "b": 0.75}, {"a": 2.0, "b": -1.0}
    columns = {"weight": weight, "value": value}
    columns = {name: np.float32([by_uid[p.uid] for p in made.prompts]) for name, by_uid in columns.items()}
    of_rows = made.trajectories, made.rewards, made.group
    data = batch.flatten(*of_rows, shape=(12, 6), episode=made.first, columns=columns)
    one = Algorithm(
        lambda view: jnp.where(view.mask, (view.outcome * view.column("weight"))[:, None], 0.0),
        lambda view: view.score - view.column("value"),
        columns=lambda memory, places: {},
    )
    assert one.column_names == ("weight", "value")
    how = dict(kl_penalty=None, correction=None, bypass=True)
    found, _ = jax.jit(estimate.make_advantages(one, **how))(data, KL_COEF)
    expected = [(score - value[uid]) * weight[uid] for score, uid in zip(SCORES, "aabb", strict=True)]
    for row, of in enumerate([0, 1, 2, 3, 1, 2, 2, 3, 3, 3]):
        np.testing.assert_allclose(found["advantage"][row][data.mask[row]], expected[of], rtol=1e-6)
    assert not found["advantage"][10:].any()


@pytest.mark.parametrize("name", MADE)
def test_a_group_has_each_episode_once_with_all_its_branches(name):
    rng = np.random.default_rng(3)
    episodes = []
    for i, count in enumerate(BRANCHES):
        first, *others = (trajectory(rng.random(6) < 0.7, str(i)) for _ in range(1 + count))
        episodes.append(dataclasses.replace(first, branches=tuple(others)))
    rewards = [Reward(score, {}, None) for score in SCORES]
    made = make_episodes([sample("").prompt], episodes, rewards, None, compares=True)
    all_of_them = with_branches(made, lambda _: lambda _: ())
    of_rows = all_of_them.trajectories, all_of_them.rewards, all_of_them.group
    data = batch.flatten(*of_rows, shape=(12, 6), episode=all_of_them.first)
    penalty = rng.normal(size=data.mask.shape).astype(np.float32)
    how = dict(kl_penalty="full", correction=None, bypass=True)
    made = dataclasses.replace(MADE[name](), transforms=())
    found, _ = jax.jit(estimate.make_advantages(made, **how))(data.with_arrays(exact_kl=penalty), KL_COEF)

    score, length = np.float64(SCORES), np.zeros(4)
    for row, of in enumerate([0, 1, 2, 3, 1, 1, 1, 2]):
        score[of] -= KL_COEF * penalty[row][data.mask[row]].sum()
        length[of] += data.mask[row].sum()
    expected = outcomes(name, score, length)[[0, 1, 2, 3, 1, 1, 1, 2]]
    np.testing.assert_allclose(found["advantage"][:8], expected[:, None] * data.mask[:8], rtol=2e-4, atol=2e-5)
    assert not found["advantage"][8:].any()
