"""Advantages, losses and gradients by token do not depend on the cut, whatever is estimated, weighed or averaged.

The policy is a table: its log-prob of a sampled token stands at [trajectory, how many were sampled before it]. So its
gradient names every token, and what a cut does to any of them is seen.
"""

import dataclasses
import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from jppo import settings as options
from jppo.learner import batch, estimate, packing, ppo, score, sharding, update
from jppo.learner.trainable import CompiledLoss, make_before
from jppo.run.make import make_recipe
from jppo.settings.table import TABLE
from jppo.types import Reward
from tests import make

N, G, LONGEST = 6, 3, 24  # prompts, samples of each, tokens
B = N * G
RNG = np.random.default_rng(0)
TABLES = {name: RNG.normal(-2, 0.4, (B, LONGEST)).astype(np.float32) for name in ("new", "old", "reference", "sampler")}
TABLES["value"] = RNG.normal(0, 1, (B, LONGEST)).astype(np.float32)
SCORES = RNG.normal(0, 1, B).astype(np.float32)
STYLE = np.float32(np.arange(B) % 2)
LENGTHS = RNG.integers(1, 12, B)  # sampled tokens; the rest are of the prompt
LENGTHS[:2] = 1
KL_COEF = 0.3
FEW = 100  # tokens of a micro-batch; the same wherever rows are cut by length, so that the shapes are few


def trajectory(i, tools=()):
    """Trajectory i with a prompt of two tokens, and one token of a tool before each sampled token in `tools`."""
    tokens, sampled, logp = [0, 0], [False, False], [0.0, 0.0]
    for rank in range(LENGTHS[i]):
        for _ in range(tools.count(rank)):
            tokens, sampled, logp = [*tokens, 0], [*sampled, False], [*logp, 0.0]
        tokens, sampled = [*tokens, rank], [*sampled, True]
        logp = [*logp, TABLES["sampler"][i, rank]]
    return make.trajectory(tokens, sampled, str(i // G), logprob=logp)


def look_up(table, rows):
    """What the table says of each entry, and no entropy."""
    found = table[jnp.maximum(rows.sequence, 0), rows.targets]
    return score.Scores(found, jnp.zeros_like(found))


def look_up_squared(table, rows):
    """The same with a sum of squared probabilities."""
    found = look_up(table, rows)
    return found._replace(statistics={"sum_pi_squared": jnp.exp(2 * found.logprob) + 0.1})


def recipe(**changes):
    """What the settings ask for."""
    c = options.default()
    c.algorithm.gamma, c.algorithm.lam, c.actor.clip_ratio, c.rollout.n = 0.97, 0.9, 0.1, G
    c.model.path, c.data.train_files, c.data.val_files = "m", "t", "v"
    c.data.train_batch_size, c.actor.ppo_mini_batch_size = N, B
    c.algorithm.use_kl_in_reward = c.actor.use_kl_loss = True
    c.actor.entropy_coeff, c.actor.kl_loss_coef = 0.1, 0.2
    for name, value in changes.items():
        section, leaf = name.split("__")
        c[section][leaf] = value
    return make_recipe(options.typed(c))


@functools.cache
def passes_of(made):
    """The passes of a recipe, tables for models."""
    passes = ppo.make_passes(ppo.Models((None, None), (None, None), None), made, temperature=1.0, chunk_tokens=1)
    with_kl = score.make_logprob_kl(made.kl_loss_type, look_up, None)
    current = estimate.make_bypass_correction(made.correction) if made.bypass and made.correction is not None else None
    loss = update.make_actor_loss(with_kl, made.algorithm, mean=made.mean, bypass_correction=current)
    logprob = jax.jit(look_up_squared if made.algorithm.old_logits else look_up)
    value = lambda table, rows: look_up(table, rows)[0]  # noqa: E731
    reference = score.make_reference(made.kl_penalty, made.kl_loss_type, look_up, None)
    return dataclasses.replace(
        passes,
        logprob=logprob,
        reference=None if reference is None else jax.jit(reference),
        value=jax.jit(value) if made.algorithm.critic else None,
        actor=CompiledLoss(
            update.make_accumulate(loss),
            ppo.actor_reads(made),
            before=make_before(made.algorithm, logprob),
        ),
        critic=CompiledLoss(
            update.make_accumulate(update.make_critic_loss(value, made.algorithm, mean=made.value_mean)),
            ppo.VALUE_READS,
        ),
    )


def learn(made, *, kind="none", tokens_per_micro=10**6, order=None, tools=None):
    """By [trajectory, sampled token]: advantages, and the gradients of both losses; and the losses themselves."""
    order = np.arange(B) if order is None else order
    passes = passes_of(made)
    tables = {name: table[order] for name, table in TABLES.items()}
    trajectories = [trajectory(i, () if tools is None else tools[i]) for i in order]
    plan = packing.make_plan(
        kind, max_length=LONGEST, row_lengths=2, max_tokens_per_row=2 * LONGEST, tokens_per_micro=tokens_per_micro,
        sequences=B, row_multiple=1,
    )  # fmt: skip
    mesh = sharding.mesh_of_shape((1, 1, 1))
    group = np.array([np.flatnonzero(order // G == i // G)[0] for i in order], np.int32)
    parts = [{"rule_score": SCORES[i], "format_score": STYLE[i]} for i in order]
    rewards = [Reward(SCORES[i], part, None) for i, part in zip(order, parts, strict=True)]
    how = dict(shape=(B, LONGEST), parts=made.algorithm.parts)
    flat = batch.flatten(trajectories, rewards, group, SCORES[order] / 2, **how)
    micros = batch.pack_micros(flat, trajectories, plan=plan, mesh=mesh)
    flat = ppo.with_old_logprob(passes, made, flat, micros, tables["old"])
    flat = ppo.with_reference(passes, made, flat, micros, tables["old"], tables["reference"])
    flat = ppo.with_values(passes, flat, micros, tables["value"])
    flat, _ = ppo.with_advantages(passes, flat, np.float32(KL_COEF), mesh)
    out = {"advantage": np.zeros((B, LONGEST), np.float32)}
    row, column = np.nonzero(flat.mask)
    where = order[row], batch.arrays(flat, trajectories)["tokens"][row, column]
    out["advantage"][where] = flat["advantage"][row, column]
    cut = dict(order=np.random.default_rng(1).permutation(B), mini_batch_size=B, plan=plan, mesh=mesh)
    models = [("actor", (None,))] + ([("critic", ())] if made.algorithm.critic else [])
    for name, further in models:
        for mini in batch.mini_batches(flat, trajectories, reads=getattr(passes, name).reads, **cut):
            table = jnp.asarray(tables["new" if name == "actor" else "value"] * 1.1)
            carry, taken = (jnp.zeros_like(table), jnp.float32(0)), mini
            if name == "actor" and passes.actor.before is not None:
                taken = passes.actor.before(table, mini, jax.random.key(0), np.int32(0), 0)
            for micro in taken.micros:
                carry, _ = getattr(passes, name).accumulate(table, None, carry, micro, mini.counts, None, *further)
            gradient = np.zeros((B, LONGEST), np.float32)
            gradient[order] = carry[0]
            out |= {f"{name} gradient": gradient, f"{name} loss": np.asarray(carry[1])}
    return out


CORRECTED = dict(
    algorithm__old_logprob="correction",
    algorithm__rollout_is="sequence",
    algorithm__rollout_is_batch_normalize=True,
    algorithm__rollout_rs="token_k1,seq_max_k3",
    algorithm__rollout_rs_threshold="0.4_2.5,0.5",
)
BANDED = CORRECTED | dict(algorithm__rollout_is="token", algorithm__rollout_is_threshold="0.7_1.5")
# Every estimator, loss, aggregation and kind of KL stands in one of them.
RECIPES = {
    "gae": dict(),
    "gae sums": dict(actor__loss_agg_mode="seq-mean-token-sum", algorithm__kl_penalty="k2"),
    "gae banded": BANDED | dict(actor__loss_agg_mode="seq-mean-token-mean", algorithm__kl_penalty="abs"),
    "gae decoupled": dict(algorithm__lam_alpha=0.4, critic__lam=1.0),
    "gae positive": dict(actor__positive_lm_coef=0.5),
    "distill": dict(algorithm__adv_estimator="distill", ref__path="teacher"),
    "reinforce": dict(algorithm__adv_estimator="reinforce_no_baseline"),
    "grpo": dict(algorithm__adv_estimator="grpo", actor__loss_agg_mode="seq-mean-token-sum-norm"),
    "passk": dict(algorithm__adv_estimator="grpo_passk", actor__loss_mode="cispo", actor__kl_loss_type="k3+"),
    "rloo": CORRECTED | dict(algorithm__adv_estimator="rloo", actor__kl_loss_type="abs+"),
    "rloo_vectorized": dict(algorithm__adv_estimator="rloo_vectorized", actor__loss_mode="geo_mean"),
    "rf++": dict(algorithm__adv_estimator="reinforce_plus_plus", actor__loss_mode="sapo"),
    "baseline": dict(algorithm__adv_estimator="reinforce_plus_plus_baseline", actor__loss_mode="gspo"),
    "geo corrected": CORRECTED | dict(algorithm__adv_estimator="grpo", actor__loss_mode="geo_mean"),
    "remax": BANDED | dict(algorithm__adv_estimator="remax", actor__loss_mode="gpg", algorithm__kl_penalty="mse"),
    "opo": dict(algorithm__adv_estimator="opo", actor__kl_loss_type="k1+", algorithm__old_logprob="bypass"),
    "gpg": dict(algorithm__adv_estimator="gpg", actor__loss_mode="dro", actor__dro_beta=0.3),
    "gdpo": dict(
        algorithm__adv_estimator="gdpo", algorithm__gdpo_reward_keys="rule_score,format_score",
        algorithm__gdpo_reward_weights="1,0.5", algorithm__use_kl_in_reward=False, actor__loss_mode="kl_cov",
        actor__kl_cov_ratio=0.3,
    ),
    "vectorized": dict(
        algorithm__adv_estimator="grpo_vectorized", actor__loss_mode="clip_cov", actor__clip_cov_ratio=1.0,
        actor__clip_cov_lb=0.0, actor__loss_agg_mode="token-sum",
    ),
    "baseline by column": CORRECTED | dict(
        algorithm__adv_estimator="optimal_token_baseline", actor__loss_mode="dppo_tv", actor__clip_ratio_c=1.2
    ),
    "baseline by token": dict(algorithm__adv_estimator="tir_optimal_token_baseline", actor__loss_mode="dppo_kl"),
    "bypass clipped": dict(algorithm__rollout_correction="bypass_ppo_clip_k3_rs"),
    "bypass reinforce": dict(
        algorithm__adv_estimator="grpo", algorithm__rollout_correction="bypass_pg_geo_rs_seq_tis",
        algorithm__rollout_rs_threshold="0.8_1.25", actor__loss_agg_mode="seq-mean-token-mean",
    ),
    "bypass reinforce by token": dict(
        algorithm__adv_estimator="rloo", algorithm__rollout_correction="bypass_pg_token_icepop"
    ),
}  # fmt: skip


def test_every_choice_stands_in_a_recipe():
    for name in ("algorithm.adv_estimator", "actor.loss_mode", "actor.loss_agg_mode", "algorithm.old_logprob"):
        default = options.default()[name.split(".")[0]][name.split(".")[1]]
        used = {changes.get(name.replace(".", "__"), default) for changes in RECIPES.values()}
        assert used == set(TABLE[name].choices)


@pytest.fixture(scope="module", params=RECIPES)
def base(request):
    made = named(request.param)
    return made, learn(made)


@functools.cache
def named(name):
    return recipe(**RECIPES[name])


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-6 * max(1, np.abs(value).max()), err_msg=name)


def test_something_is_learned_from_nearly_every_token(base):
    """Else the tests below would compare nothing with nothing."""
    _, found = base
    tokens = LENGTHS.sum()
    for name in ("advantage", "actor gradient"):
        assert np.isfinite(found[name]).all()
        assert np.count_nonzero(found[name]) > tokens / 8, name


@pytest.mark.parametrize("kind,tokens_per_micro", [("none", 30), ("buckets", FEW), ("segments", 10**6)])
def test_cut_packed_and_permuted(base, kind, tokens_per_micro):
    made, expected = base
    rng = np.random.default_rng(tokens_per_micro)
    order = (G * rng.permutation(N)[:, None] + rng.permutation(G)).reshape(-1)
    assert_same(learn(made, kind=kind, tokens_per_micro=tokens_per_micro, order=order), expected)


@settings(deadline=None, max_examples=3, derandomize=True)
@given(tools=st.lists(st.lists(st.integers(0, 8), max_size=4), min_size=B, max_size=B))
def test_tokens_that_the_policy_did_not_choose_change_nothing(base, tools):
    made, expected = base
    if made is named("baseline by column"):
        return  # verl's compares columns, and tool output moves these
    assert_same(learn(made, kind="buckets", tokens_per_micro=FEW, tools=tools), expected)


def test_the_loss_of_positive_examples_by_hand():
    """μ times the mean of -log π over the tokens of all responses with a score above 0, whatever their lengths."""
    without, with_term = learn(recipe()), learn(recipe(actor__positive_lm_coef=0.5))
    tokens = (SCORES > 0)[:, None] & (np.arange(LONGEST) < LENGTHS[:, None])
    assert 0 < tokens.sum() < LENGTHS.sum()
    gradient = with_term["actor gradient"] - without["actor gradient"]
    np.testing.assert_allclose(gradient, -0.5 / tokens.sum() * tokens, atol=1e-7)
    likelihood = -(TABLES["new"] * 1.1)[tokens].mean()  # the policy of `learn`
    np.testing.assert_allclose(with_term["actor loss"] - without["actor loss"], 0.5 * likelihood, rtol=1e-4)
    np.testing.assert_array_equal(with_term["critic gradient"], without["critic gradient"])


def test_a_mini_batch_without_a_positive_example_has_no_such_loss():
    trajectories = [trajectory(i) for i in range(2)]
    mesh, shape = sharding.mesh_of_shape((1, 1, 1)), (2, LONGEST)
    flat = batch.flatten(trajectories, [Reward(0.0, {}, None)] * 2, np.arange(2), shape=shape)
    zeros = np.zeros(shape, np.float32)
    flat = flat.with_arrays(old_logprob=zeros, advantage=zeros, positive=zeros)
    plan = packing.make_plan(
        "none", max_length=LONGEST, row_lengths=1, max_tokens_per_row=LONGEST, tokens_per_micro=FEW, sequences=2,
        row_multiple=1,
    )  # fmt: skip
    how = dict(order=np.arange(2), mini_batch_size=2, plan=plan, mesh=mesh)
    [mini] = batch.mini_batches(flat, trajectories, reads=("positive",), **how)
    assert [micro.arrays["positive"].sum() for micro in mini.micros] == [0.0] * len(mini.micros)
