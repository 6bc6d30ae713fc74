"""What updates report, beside the same in numpy: losses, clipped shares; skipped and empty."""

import dataclasses
import functools
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import special

from jppo import settings as options
from jppo.algorithms import losses
from jppo.learner import catalogue, estimate, optim, ppo, sharding, state, update
from jppo.learner.algorithm import Algorithm
from jppo.learner.score import Scores
from jppo.models.decoder import Decoder
from jppo.types import Counts, Rows, Scored
from tests import make

R, T, CLIP, CLIP_C, COEF = 3, 6, 0.1, 1.5, dict(entropy_coeff=0.02, kl_loss_coef=0.3, positive_lm_coef=0.7)
COEF |= dict(use_kl_loss=True, kl_loss_max_clamp=None, router_z_loss_coef=0.0, router_aux_loss_coef=0.0)


@pytest.fixture
def scored():
    """Three rows; the second holds two sequences, the last position of each is no token of a policy."""
    rng = np.random.default_rng(1)

    def some(scale=1.0):
        return rng.normal(scale=scale, size=(R, T)).astype(np.float32)

    mask = rng.random((R, T)) < 0.7
    mask[:, -1] = False
    segment = np.ones((R, T), np.int32)
    segment[1, 3:] = 2
    zeros = np.zeros((R, T), np.int32)
    rows = Rows(zeros, zeros, segment, zeros, mask, zeros)
    new = types.SimpleNamespace(logprob=some(), entropy=np.abs(some()), penalty=np.abs(some()), value=some())
    old = new.logprob + some(0.3)
    fields = dict(value=some(), weight=np.exp(some(0.2)), advantage=some(), returns=some(), positive=np.abs(some()))
    return Scored(rows, dict(old_logprob=old, **fields)), new


def actor_loss(new):
    clipped = functools.partial(losses.clipped, clip_low=CLIP, clip_high=CLIP, clip_c=CLIP_C)
    terms = catalogue.surrogate(clipped).terms + catalogue.regularisers(types.SimpleNamespace(**COEF))
    scores = Scores(new.logprob, new.entropy, new.penalty)
    return update.make_actor_loss(lambda *_: scores, Algorithm(terms=terms), mean=ppo.token_mean)


def critic_loss(output, **critic):
    terms = catalogue.value_terms(
        types.SimpleNamespace(**dict(value_bins=0, value_range=None, cliprange_value=0.2) | critic)
    )
    limits = critic.get("value_range")
    return update.make_critic_loss(
        lambda *_: output, Algorithm(value_terms=terms), mean=ppo.token_mean, value_range=limits
    )


def counts_of(rows):
    return Counts(np.float32(rows.mask.sum()), np.float32(4))


def test_the_actors_loss_and_metrics_are_those_of_the_papers(scored):
    batch, new = scored
    out, found = actor_loss(new)(None, batch, counts_of(batch.rows), None)
    kept = batch.rows.mask
    ratio = np.exp(new.logprob - batch.arrays["old_logprob"])[kept]
    a = batch.arrays["advantage"][kept]
    plain, held = -a * ratio, -a * np.clip(ratio, 1 - CLIP, 1 + CLIP)
    worse = np.maximum(plain, held)
    bound = np.where(a < 0, np.minimum(worse, -a * CLIP_C), worse)
    policy = np.mean(bound * batch.arrays["weight"][kept])
    expected = {
        "actor/pg_loss": policy,
        "actor/pg_clipfrac": np.mean(held > plain),
        "actor/pg_clipfrac_lower": np.mean((a < 0) & (worse > -a * CLIP_C)),
        "actor/ppo_kl": np.mean((batch.arrays["old_logprob"] - new.logprob)[kept]),
        "actor/ratio_mean": ratio.mean(),
        "actor/ratio_max": max(ratio.max(), 1.0),
        "actor/ratio_min": min(ratio.min(), 1.0),
        "actor/entropy": new.entropy[kept].mean(),
        "actor/kl_loss": new.penalty[kept].mean(),
        "actor/positive_lm_loss": -np.sum((batch.arrays["positive"] * new.logprob)[kept]),
    }
    expected["actor/loss"] = (
        policy
        - COEF["entropy_coeff"] * expected["actor/entropy"]
        + COEF["kl_loss_coef"] * expected["actor/kl_loss"]
        + COEF["positive_lm_coef"] * expected["actor/positive_lm_loss"]
    )
    assert set(found.stats) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(found.stats[name].value, value, rtol=1e-5, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(out, expected["actor/loss"], rtol=1e-5)


def test_the_critics_loss_and_metrics_are_those_of_the_papers(scored):
    batch, new = scored
    loss = critic_loss(new.value, cliprange_value=0.2)
    out, found = loss(None, batch, counts_of(batch.rows))
    kept = batch.rows.mask
    value, old, returns = new.value[kept], batch.arrays["value"][kept], batch.arrays["returns"][kept]
    near = old + np.clip(value - old, -0.2, 0.2)
    plain, held = (value - returns) ** 2, (near - returns) ** 2
    expected = np.mean(np.maximum(plain, held)) / 2
    np.testing.assert_allclose([out, found.stats["critic/vf_loss"].value], expected, rtol=1e-5)
    np.testing.assert_allclose(found.stats["critic/vf_clipfrac"].value, np.mean(held > plain), rtol=1e-6)
    np.testing.assert_allclose(found.stats["critic/vpred_mean"].value, value.mean(), rtol=1e-5)


def test_the_first_update_of_a_new_critic_moves_its_head_and_the_second_all(learner, drawn):
    """Of 1/2 (V - R)^2 at V = w·h = 0 the gradient is -R h in w, and 0 in the layers below, which w multiplies."""
    some, (trajectories, scores) = learner(), drawn(8)
    what = dataclasses.replace(some.what["critic"], cfg=some.cfg)
    new = state.load_sharded(what, "", init="random", key=jax.random.key(2))
    assert not np.any(new["score"]["kernel"])
    plan, policy = some.plan("none", 10**6, 8), some.weights("actor", 0)
    flat, found = some.score(trajectories, scores, plan=plan, policy=policy, reference=policy, value=new)
    assert 0 <= found["critic/vf_explained_var"] < 1e-3 and found["critic/values/std"] == 0

    slopes, kept = np.zeros_like(new["score"]["kernel"][:, 0]), 0
    for i, one in enumerate(trajectories):
        tokens = one.tokens[None]
        place = np.ones_like(tokens), np.arange(tokens.size, dtype=np.int32)[None]
        states = Decoder(what.cfg).apply({"params": new}, tokens, *place)[0]
        hidden = states[np.argmax(one.sampled) - 1 : -1]  # those that predict the response
        returns = np.where(flat.mask[i], flat["returns"][i], 0)[: len(hidden)]
        slopes, kept = slopes - np.asarray(returns @ hidden), kept + flat.mask[i].sum()

    before = jax.device_get(new)
    steps = []
    for rate in (1.0, 1.0):
        how, opt = some.make_trainable("critic", new, lr=rate, tx=optim.at_rate(optax.sgd))
        new, _, _ = how.learn(new, opt, np.int32(0), some.minis(flat, trajectories, plan=plan, mini=8, name="critic"))
        steps.append(jax.device_get(new))
    np.testing.assert_allclose(-steps[0]["score"]["kernel"][:, 0], slopes / kept, rtol=1e-4, atol=1e-6)
    assert np.abs(steps[0]["score"]["kernel"]).max() > 1e-3
    below = [{name: part for name, part in tree.items() if name != "score"} for tree in (before, *steps)]
    jax.tree.map(np.testing.assert_array_equal, below[0], below[1])
    assert all(np.any(x != y) for x, y in zip(*map(jax.tree.leaves, below[1:]), strict=True))


def test_a_histograms_loss_and_metrics_are_those_of_the_paper(scored):
    batch, _ = scored
    logits = np.random.default_rng(2).normal(size=(R, T, 4)).astype(np.float32)
    loss = critic_loss(logits, value_bins=4, value_range=(-1.0, 1.0))
    out, found = loss(None, batch, counts_of(batch.rows))
    kept = batch.rows.mask
    returns, logp = (
        batch.arrays["returns"][kept],
        logits[kept] - np.log(np.sum(np.exp(logits[kept]), -1, keepdims=True)),
    )
    edges, sigma = np.linspace(-1, 1, 5), 0.75 * 0.5
    below = special.ndtr((edges - np.clip(returns, -1, 1)[:, None]) / sigma)
    target = np.diff(below) / (below[:, -1:] - below[:, :1])
    np.testing.assert_allclose(
        [out, found.stats["critic/vf_loss"].value], -np.mean(np.sum(target * logp, -1)), rtol=1e-5
    )
    outside = np.mean(np.abs(returns) > 1)
    assert 0 < outside < 1
    np.testing.assert_allclose(found.stats["critic/vf_clipfrac"].value, outside, rtol=1e-6)
    values = np.exp(logp) @ [-0.75, -0.25, 0.25, 0.75]
    np.testing.assert_allclose(found.stats["critic/vpred_mean"].value, values.mean(), rtol=1e-5)


@pytest.mark.parametrize(
    "gradient, loss, learns, skipped, empty",
    [(0.5, 1.0, True, 0, 0), (np.nan, 1.0, True, 1, 0), (0.5, np.inf, True, 1, 0), (0.5, 1.0, False, 0, 1)],
)
def test_a_step_that_is_skipped_or_empty_says_so_and_changes_nothing(gradient, loss, learns, skipped, empty):
    mesh = sharding.mesh_of_shape((1, 1, 1))
    params = {"w": np.float32([3.0, 4.0])}
    place = jax.tree.map(lambda _: sharding.replicated(mesh), params)
    tx = optim.make_optimizer(lambda rate: optax.sgd(rate), grad_clip=100.0)
    opt = jax.device_put(tx.init(params), sharding.replicated(mesh))
    at = (place, jax.tree.map(lambda _: sharding.replicated(mesh), opt))
    apply = update.make_apply(tx, lambda step: jnp.float32(0.1) * (step + 1), shardings=at)
    carry = jax.device_put(({"w": np.float32([gradient, 1.2])}, np.float32(loss)), sharding.replicated(mesh))
    new, _, stats = apply(jax.device_put(params, place), opt, carry, np.int32(1), np.bool_(learns))
    changed = not (skipped or empty)
    np.testing.assert_allclose(new["w"], params["w"] - changed * 0.2 * np.float32([0.5, 1.2]), rtol=1e-6)
    assert (float(stats["skipped"]), float(stats["empty"])) == (skipped, empty)
    np.testing.assert_allclose(stats["lr"], 0.2, rtol=1e-6)
    np.testing.assert_allclose(stats["grad_norm"], np.hypot(gradient, 1.2), rtol=1e-6)


@pytest.mark.parametrize(
    "changes, expected",
    [
        (dict(entropy_coeff=0.0, bypass=False), (True, False)),  # a metric of the pass before the update
        (dict(entropy_coeff=0.5, bypass=False), (True, True)),
        (dict(entropy_coeff=0.0, bypass=True), (True, True)),
        (dict(entropy_coeff=0.0, bypass=True, entropy_metric=False), (False, False)),
    ],
)
def test_the_update_computes_the_entropy_where_nothing_else_does(make_recipe, monkeypatch, changes, expected):
    wanted = []
    monkeypatch.setattr(ppo.score, "make_logprob", lambda *_, with_entropy, **__: wanted.append(with_entropy))
    models = ppo.Models((None, None), None, None)
    ppo.make_passes(models, make_recipe("grpo", **changes), temperature=1.0, chunk_tokens=8)
    own, in_update = wanted
    assert (own, in_update) == expected


BYPASSES = [
    one for one in json.loads((make.ROOT / "tests/algorithms/golden/verl.json").read_text())
    if one["meta"]["fn"] == "bypass_mode" and not one["meta"].get("rollout_is_batch_normalize")
]  # fmt: skip


@pytest.mark.parametrize("one", BYPASSES, ids=lambda one: one["name"])
def test_bypass_weights_and_rejects_by_the_current_policy_as_verls_function_does(one):
    meta, x = one["meta"], {name: np.float32(value) for name, value in one["inputs"].items()}
    mask, segment = x["mask"] > 0, np.ones(x["mask"].shape, np.int32)
    reinforce, level = meta["loss_type"] == "reinforce", meta.get("rollout_is")
    lower, upper = options.importance_band(meta.get("rollout_is_threshold", "2.0"))
    rules = options.rejection_rules(meta.get("rollout_rs", ""), meta.get("rollout_rs_threshold", ""))
    what = estimate.Correction(level if reinforce else None, lower, upper, normalize=False, rules=rules)
    clips = dict(clip_low=meta["clip_ratio_low"], clip_high=meta["clip_ratio_high"], clip_c=meta["clip_ratio_c"])
    loss = update.make_actor_loss(
        lambda logp, *_: Scores(logp, jnp.zeros_like(logp)),
        catalogue.gpg() if reinforce else catalogue.surrogate(functools.partial(losses.clipped, **clips)),
        mean=functools.partial(update.aggregate, usual=meta["mode"], scale=float(mask.shape[1])),
        bypass_correction=estimate.make_bypass_correction(what),
    )
    zeros = np.zeros(mask.shape, np.int32)
    rows = Rows(zeros, zeros, segment, zeros, mask, zeros)
    batch = Scored(rows, dict(old_logprob=x["old_logprob"], advantage=x["advantages"]))
    kept, _ = estimate.make_bypass_correction(what)(x["logprob"], x["old_logprob"], mask, segment)
    counts = Counts(np.float32(kept.sum()), np.float32(kept.any(axis=1).sum()))  # verl's function counts by itself
    (out, found), grad = jax.value_and_grad(loss, has_aux=True)(x["logprob"], batch, counts, None)
    expected = np.float64(one["expected"]["grad"])
    np.testing.assert_allclose(out, one["expected"]["loss"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(grad, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())
    rejected = np.sum(mask & ~np.asarray(kept)) / counts.tokens
    np.testing.assert_allclose(found.stats["rollout_corr/rollout_rs_masked_fraction"].value, rejected, rtol=1e-6)
