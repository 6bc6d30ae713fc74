"""The recipe of configs/sao.py, by numbers worked from the paper's equations (arXiv:2607.07508)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jppo import settings, train
from jppo.learner import estimate, make, score, update
from jppo.learner.views import TokenView, view
from jppo.models import freeze, hf
from jppo.run.make import make_epochs, make_recipe
from jppo.types import Counts, Rows, Scored
from tests.make import changed, typed, untimed, write_weights


@pytest.fixture
def sao():
    return typed(settings.recipe("sao"))


def rows_of(mask):
    shape = mask.shape
    zeros = np.zeros(shape, np.int32)
    return Rows(inputs=zeros, targets=zeros, segment=zeros + 1, position=zeros, mask=mask, sequence=zeros)


def test_a_token_outside_the_band_has_no_gradient(sao):
    """L = -f(ρ) A log π: the gradient by log π is -ρ A / N where 0.2 ≤ ρ ≤ 4, else 0, and N counts all five tokens."""
    recipe = make_recipe(sao)
    ratio, advantage = np.float32([[0.19, 0.21, 1.0, 3.9, 4.1]]), np.float32([[2.0, -1.0, 1.0, 0.5, 3.0]])
    old_logprob = np.float32([[-2.0, -0.5, -1.0, -2.5, -4.0]])
    mask = np.ones_like(ratio, bool)
    scored = Scored(rows_of(mask), {"old_logprob": old_logprob, "advantage": advantage, "weight": np.ones_like(ratio)})

    def score_rows(logprob, *_):
        return score.Scores(logprob=logprob, entropy=jnp.zeros_like(logprob))

    assert recipe.bypass and recipe.correction is not None
    loss = update.make_actor_loss(
        score_rows, recipe.algorithm.without_routers(), mean=recipe.mean,
        bypass_correction=estimate.make_bypass_correction(recipe.correction),
    )  # fmt: skip
    counts = Counts(tokens=np.float32(5), sequences=np.float32(1))
    gradient = jax.grad(lambda x: loss(x, scored, counts, None)[0])(old_logprob + np.log(ratio))
    np.testing.assert_allclose(gradient, np.float32([[0.0, 0.21, -1.0, -1.95, 0.0]]) / 5, rtol=1e-5)


def test_observations_are_skipped_and_lambda_follows_the_length(sao):
    """Three tokens of the policy with two of a tool between: λ = 1 - 1 / (1.5 · 3) = 7/9, and 1 for the returns.

    δ = (0.4 - 0.2, 0.1 - 0.4, 1 - 0.1) = (0.2, -0.3, 0.9): A = (0.2 + 7/9 · 0.4, -0.3 + 7/9 · 0.9, 0.9).
    """
    algorithm = make_recipe(sao).algorithm
    mask = np.array([[True, True, False, False, True]])
    arrays = {"reward": np.float32([[0, 0, 9, 9, 1]]), "value": np.float32([[0.2, 0.4, 50, 60, 0.1]]), "mask": mask}
    advantage, returns = algorithm.advantage(view(TokenView, ("reward", "value", "mask"), arrays))
    np.testing.assert_allclose(advantage, [[0.2 + 7 / 9 * 0.4, 0.4, 0, 0, 0.9]], rtol=1e-5)
    np.testing.assert_allclose(returns, [[1, 1, 0, 0, 1]], rtol=1e-6)


def test_two_updates_of_the_critic_for_one_of_the_policy(sao):
    policy, critic = make_epochs(sao)
    size = sao.data.train_batch_size * sao.rollout.n
    assert size == policy.mini_batch_size == critic.mini_batch_size == 128 and sao.rollout.n == 1
    assert [policy.of_step(step) for step in (9, 10)] == [0, 1]
    assert [critic.of_step(step) for step in (9, 10)] == [2, 2]
    rate = make.rate_schedule(sao.critic, 1010)
    np.testing.assert_allclose([rate(step) for step in (0, 5, 10, 500)], [0, 2.5e-6, 5e-6, 5e-6], rtol=1e-6)


def test_the_critics_attention_is_frozen(sao, tiny_model):
    _, cfg = hf.read_config(tiny_model)
    frozen = freeze.find_frozen(cfg, sao.critic.freeze, "critic.freeze", head="value")
    assert {path[1] for path in frozen} == {"attn"} and len(frozen) == 7  # q, k, v with biases, and o


def test_a_program_takes_the_place_of_the_tool():
    c = settings.recipe("sao", "bash agent.sh")
    settings.check(c)
    assert (c.rollout.agent, c.rollout.agent_branches, c.rollout.multi_turn.enable) == ("bash agent.sh", 8, False)


@pytest.mark.slow
def test_the_recipe_trains_asynchronously(sao, small_run, tmp_path):
    """On a small model, with the trainer's own engine; three steps, of which the first is the critic's alone."""
    write_weights(tmp_path / "model")
    taken = {f"algorithm.{n}": getattr(sao.algorithm, n) for n in ("lam_alpha", "old_logprob", "rollout_is")}
    taken |= {"algorithm.rollout_is_threshold": sao.algorithm.rollout_is_threshold, "actor.loss_mode": "gpg"}
    taken |= {f"critic.{n}": getattr(sao.critic, n) for n in ("freeze", "ppo_epochs", "lam")}
    here = {
        "model.init": "pretrained",
        "rollout.name": "inprocess",
        "rollout.mode": "async",
        "rollout.max_staleness": 1,
    }
    here |= {"rollout.logp_tolerance": 1e-3, "trainer.total_training_steps": 3, "trainer.critic_warmup": 1}
    c = changed(small_run, taken | here)
    train.train(c)
    steps = untimed(c.trainer.run_dir)[1:]
    assert ["actor/loss" in step for step in steps] == [False, True, True]
    assert all("critic/loss" in step or "critic/vf_loss" in step for step in steps)
