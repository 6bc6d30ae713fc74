"""examples/nano_ppo.py: its mathematics is the package's, on the same batch."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples import nano_ppo
from jppo.algorithms import advantage, kl, losses, masked

B, T = 16, 7


@pytest.fixture(scope="module")
def batch():
    """Log-probs, values, rewards and a mask whose rows end early, some in the first token."""
    rng = np.random.default_rng(0)
    names = ("logp", "old_logp", "ref_logp", "values", "old_values", "rewards")
    made = {name: rng.normal(-1.0, 0.4, (B, T)).astype(np.float32) for name in names}
    mask = np.arange(T) < rng.integers(1, T + 1, B)[:, None]
    score, segment = rng.integers(0, 2, B).astype(np.float32), np.ones((B, T), np.int32)
    return made | {"mask": mask, "score": score, "segment": segment}


@pytest.fixture
def promotion():
    """numpy's rules, which the file takes for its readers' sake; the package has none of it."""
    with jax.numpy_rank_promotion("allow"):
        yield


def close(ours, theirs):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), ours, theirs)


def weighed(loss, batch):
    """The package's mean over all tokens."""
    tokens, sequences = jnp.float32(batch["mask"].sum()), jnp.float32(B)
    how = dict(mode="token-mean", tokens=tokens, sequences=sequences, scale=1.0)
    return jnp.where(batch["mask"], loss * losses.token_weights(batch["mask"], batch["segment"], **how), 0.0).sum()


@pytest.mark.parametrize("gamma, lam", [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.99, 0.0)])
def test_advantages_and_returns(batch, gamma, lam):
    ours = nano_ppo.gae(batch["rewards"], batch["values"], batch["mask"], gamma, lam)
    close(ours, advantage.gae(batch["rewards"], batch["values"], batch["mask"], gamma=gamma, lam=lam))
    close(nano_ppo.whiten(ours[0], batch["mask"]), masked.whiten(ours[0], batch["mask"]))


def test_token_rewards(batch):
    mask, coef = batch["mask"], 0.05
    ours = nano_ppo.token_rewards(batch["score"], batch["logp"], batch["ref_logp"], mask, coef)
    penalty = jnp.where(mask, -coef * kl.k1(batch["logp"], batch["ref_logp"]), 0.0)
    close(ours, penalty + jnp.where(masked.last(mask), batch["score"][:, None], 0.0))


def test_the_policys_loss_and_its_gradient(batch):
    gained = masked.whiten(batch["rewards"], batch["mask"])

    def theirs(logp):
        how = dict(clip_low=0.2, clip_high=0.2, clip_c=1e9)
        given = logp, batch["old_logp"], gained, batch["mask"], batch["segment"]
        return weighed(losses.clipped(*given, **how)[0], batch)

    def ours(logp):
        return nano_ppo.policy_loss(logp, batch["old_logp"], gained, batch["mask"])

    close(jax.value_and_grad(ours)(batch["logp"]), jax.value_and_grad(theirs)(batch["logp"]))


def test_the_critics_loss_and_its_gradient(batch):
    _, returns = advantage.gae(batch["rewards"], batch["old_values"], batch["mask"], gamma=1.0, lam=0.95)

    def theirs(values):
        return weighed(losses.clipped_value(values, batch["old_values"], returns, cliprange_value=0.5)[0], batch)

    def ours(values):
        return nano_ppo.value_loss(values, batch["old_values"], returns, batch["mask"])

    close(jax.value_and_grad(ours)(batch["values"]), jax.value_and_grad(theirs)(batch["values"]))


def test_log_probs_and_samples_are_of_the_same_policy(promotion):
    policy = nano_ppo.init(jax.random.key(0), "tokens")
    prompts = nano_ppo.prompts_of(nano_ppo.problems(0)[:64])
    tokens, mask = nano_ppo.sample(policy, prompts, jax.random.key(1))
    logits = nano_ppo.logits_of(policy, tokens)
    cut = nano_ppo.logits_of(policy, tokens[:, :8])
    close(logits[:, :8], cut)  # a position does not see what comes after it
    assert nano_ppo.log_probs(policy, tokens).shape == mask.shape == (64, 4)
    drawn = np.asarray(tokens)[:, 6:]
    ended = np.cumsum(drawn == nano_ppo.END, 1)
    np.testing.assert_array_equal(np.asarray(mask), (ended == 0) | ((ended == 1) & (drawn == nano_ppo.END)))


def test_it_runs(promotion, capsys, monkeypatch):
    """With a smaller model and smaller batches than the file's own."""
    for name, value in dict(WIDTH=16, LAYERS=1, PROMPTS=64, MINI_BATCH=32).items():
        monkeypatch.setattr(nano_ppo, name, value)
    nano_ppo.main(["--imitation_steps", "3", "--ppo_steps", "1"])
    said = capsys.readouterr().out
    assert "step 1/1  reward" in said and re.search(r"right after PPO: 0\.\d+ of 1000 sums", said)
