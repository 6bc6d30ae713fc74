"""Rewards and their metrics on the flat batch, beside the same by loops in numpy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jppo.algorithms import kl
from jppo.learner import estimate
from jppo.learner.algorithm import Algorithm
from jppo.types import Batch

B, L = 6, 5


@pytest.fixture
def batch():
    """Rows of 0 to 5 sampled tokens with gaps between them; the last but one has no score."""
    rng = np.random.default_rng(0)
    mask = rng.random((B, L)) < 0.6
    mask[0], mask[1], mask[2] = True, False, [False, True, False, True, True]
    score = rng.normal(size=B).astype(np.float32)
    score[4] = np.nan
    some = {name: rng.normal(size=(B, L)).astype(np.float32) for name in ("rollout", "old", "ref", "exact", "value")}
    return Batch(
        mask=mask,
        rollout_logprob=some["rollout"],
        first=np.zeros(B, np.int32),
        score=score,
        group=np.arange(B, dtype=np.int32),
        length=mask.sum(1).astype(np.float32),
        arrays=dict(old_logprob=some["old"], ref_logprob=some["ref"], exact_kl=some["exact"], value=some["value"]),
    )


def moments_of(name, values):
    return {
        f"{name}/mean": np.mean(values),
        f"{name}/max": np.max(values),
        f"{name}/min": np.min(values),
        f"{name}/std": np.std(values, ddof=1) if len(values) > 1 else 0.0,
    }


def assert_same(found, expected):
    assert set(found) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=2e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("kind", [None, "full", "kl", "low_var_kl"])
def test_the_penalty_is_the_named_kl_of_sampled_tokens(batch, kind):
    by_token = {None: np.zeros((B, L)), "full": batch["exact_kl"], "kl": batch["old_logprob"] - batch["ref_logprob"]}
    d = batch["ref_logprob"] - batch["old_logprob"]
    by_token["low_var_kl"] = np.clip(np.exp(d) - d - 1, -10, 10)
    expected = np.where(batch.mask, by_token[kind], 0)
    np.testing.assert_allclose(estimate.penalty_of(batch, kind), expected, rtol=1e-5, atol=1e-6)
    assert kind is None or kind in kl.EXACT or kind in kl.ESTIMATORS


def test_the_score_comes_with_the_last_token_and_kl_with_each(batch):
    beta, penalty = 0.3, np.where(batch.mask, batch["exact_kl"], 0).astype(np.float32)
    reward, total, metrics = estimate.rewards(batch, penalty, beta)
    expected, totals, graded, kls, kl_means = np.zeros((B, L)), [], [], [], []
    for b in range(B):
        kept, score = np.flatnonzero(batch.mask[b]), 0.0 if np.isnan(batch.score[b]) else batch.score[b]
        expected[b, kept] = -beta * batch["exact_kl"][b, kept]
        if len(kept):
            expected[b, kept[-1]] += score
            kls.append(batch["exact_kl"][b, kept].sum())
            kl_means.append(batch["exact_kl"][b, kept].mean())
        totals.append(expected[b].sum() if len(kept) else score)
        if not np.isnan(batch.score[b]):
            graded.append(totals[-1])
    np.testing.assert_allclose(reward, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(total, totals, rtol=1e-5, atol=1e-6)
    about = {name: value for name, value in moments_of("critic/rewards", graded).items() if "std" not in name}
    about |= {"actor/reward_kl_penalty": np.mean(kl_means), "actor/reward_kl_penalty_seq": np.mean(kls)}
    assert_same(metrics, about)


def test_what_is_earned_on_the_way_leaves_the_rest_for_the_last_token(batch):
    """Rows 0 and 2 earn at their second token, and row 2 where it sampled nothing."""
    earned = np.zeros((B, L), np.float32)
    earned[0, 1], earned[2, 3], earned[2, 2] = 0.5, -0.25, 2.0
    plain, total, _ = estimate.rewards(batch, np.zeros((B, L), np.float32), 0.0)
    found, same, _ = estimate.rewards(batch.with_arrays(earned=earned), np.zeros((B, L), np.float32), 0.0)
    expected = np.array(plain)  # row 2: tokens 1, 3, 4; what it earned at 2 belongs to the sampled token before
    expected[0, [1, 4]] += [0.5, -0.5]
    expected[2, [1, 3, 4]] += [2.0, -0.25, -1.75]
    np.testing.assert_allclose(found, expected, atol=1e-5)
    np.testing.assert_allclose(same, total, atol=1e-6)


def test_a_distribution_is_that_of_kept_entries(batch):
    assert_same(estimate.distribution("x", batch["value"], batch.mask), moments_of("x", batch["value"][batch.mask]))
    nothing = estimate.distribution("x", jnp.asarray(batch["value"]), jnp.zeros((B, L), bool))
    assert_same(nothing, dict.fromkeys(nothing, 0.0))


def test_explained_variance_is_the_share_that_values_explain(batch):
    returns = 2 * batch["value"] + np.float32(0.1) * batch["exact_kl"]
    found = estimate.value_metrics(batch["value"], returns, batch.mask)
    kept, value = returns[batch.mask], batch["value"][batch.mask]
    expected = {"critic/vf_explained_var": 1 - np.var(kept - value, ddof=1) / np.var(kept, ddof=1)}
    assert_same(found, expected | moments_of("critic/returns", kept) | moments_of("critic/values", value))
    equal = estimate.value_metrics(batch["value"], np.full((B, L), 0.5, np.float32), batch.mask)
    assert np.isnan(equal["critic/vf_explained_var"]), "equal returns have no variance to explain"


def test_the_mismatch_is_measured_over_sampled_tokens(batch):
    found = estimate.mismatch(batch)
    d = (batch["old_logprob"] - batch.rollout_logprob)[batch.mask]
    expected = {
        "rollout/logp_gap_mean": np.abs(d).mean(),
        "rollout/logp_gap_max": np.abs(d).max(),
        "rollout/ratio_min": np.exp(d.min()),
        "rollout/ratio_max": np.exp(d.max()),
        "rollout_corr/kl": -d.mean(),
        "rollout_corr/k3_kl": np.mean(np.exp(d) - d - 1),
        "rollout_corr/chi2_token": np.mean(np.exp(2 * d)) - 1,
    }
    whole = np.where(batch.mask, batch["old_logprob"] - batch.rollout_logprob, 0).sum(1)[batch.mask.any(1)]
    expected["rollout_corr/chi2_seq"] = np.mean(np.exp(2 * whole)) - 1
    assert_same(found, expected)


@pytest.mark.parametrize("normalize", [False, True])
def test_weights_are_capped_and_rejected_tokens_are_counted(batch, normalize):
    rules = (("token_k1", 0.3, 3.0),)
    what = estimate.Correction(level="token", lower=None, upper=1.5, normalize=normalize, rules=rules)
    found, metrics = estimate.correct_mismatch(what, batch)
    d = batch["old_logprob"] - batch.rollout_logprob
    kept = batch.mask & (-d >= np.log(0.3)) & (-d <= np.log(3.0))
    lost, weight = batch.mask & ~kept, np.minimum(np.exp(d), 1.5)
    inside = weight[batch.mask]
    assert 0 < lost.sum() < batch.mask.sum()
    np.testing.assert_array_equal(found.mask, kept)
    scale = inside.mean() if normalize else 1.0
    np.testing.assert_allclose(found["weight"], np.where(batch.mask, weight, 0) / scale, rtol=1e-5, atol=1e-6)
    expected = {
        "rollout_corr/rollout_rs_masked_fraction": lost.sum() / batch.mask.sum(),
        "rollout_corr/rollout_rs_seq_masked_fraction": lost.any(1).sum() / batch.mask.any(1).sum(),
        "rollout_corr/rollout_is_mean": inside.mean(),
        "rollout_corr/rollout_is_max": inside.max(),
        "rollout_corr/rollout_is_min": inside.min(),
        "rollout_corr/rollout_is_eff_sample_size": inside.sum() ** 2 / (len(inside) * (inside**2).sum()),
    }
    assert_same(metrics, expected)


RULES = (("token_k1", 0.5, 2.0), ("seq_mean_k3", 0.0, 1.5))


def without_given(batch):
    """The batch as it is without its given rows."""
    return jax.tree.map(lambda x: x[~batch["given"]], batch.with_arrays(given=None))


@settings(max_examples=20, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**16), level=st.sampled_from(["token", "sequence"]), normalize=st.booleans())
def test_given_rows_change_nothing_of_sampled_ones(seed, level, normalize):
    """Of any rows: mismatch, weights, rejection, and the metrics of rewards are those of the batch without them."""
    rng = np.random.default_rng(seed)
    mask, where = rng.random((B, L)) < 0.7, rng.permutation(np.arange(B) < 2)
    mask[~where] |= np.arange(L) == 0
    some = {name: rng.normal(size=(B, L)).astype(np.float32) for name in ("rollout", "old", "penalty")}
    batch = Batch(
        mask=mask,
        rollout_logprob=np.where(where[:, None], 0, some["rollout"]),
        first=np.zeros(B, np.int32),
        score=rng.normal(size=B).astype(np.float32),
        group=np.zeros(B, np.int32),
        length=mask.sum(1).astype(np.float32),
        arrays=dict(given=where, old_logprob=some["old"]),
    )
    few = without_given(batch)
    assert_same(estimate.mismatch(batch), {name: float(x) for name, x in estimate.mismatch(few).items()})
    what = estimate.Correction(level=level, lower=None, upper=1.5, normalize=normalize, rules=RULES)
    (found, metrics), (expected, of_few) = estimate.correct_mismatch(what, batch), estimate.correct_mismatch(what, few)
    assert_same(metrics, {name: float(x) for name, x in of_few.items()})
    np.testing.assert_array_equal(found.mask[~where], expected.mask)
    np.testing.assert_allclose(found["weight"][~where], expected["weight"], rtol=1e-5)
    np.testing.assert_array_equal(found.mask[where], mask[where])
    np.testing.assert_array_equal(np.asarray(found["weight"])[where][mask[where]], 1.0)
    (_, total, metrics), (_, _, of_few) = (
        estimate.rewards(one, np.where(one.mask, penalty, 0), np.float32(0.3))
        for one, penalty in ((batch, some["penalty"]), (few, some["penalty"][~where]))
    )
    assert_same(metrics, {name: float(x) for name, x in of_few.items()})
    assert (np.asarray(total)[where] != 0).all(), "given responses have rewards"


def test_without_a_sampled_row_metrics_of_samples_are_0(batch):
    _, _, metrics = estimate.rewards(
        batch.with_arrays(given=np.ones(B, bool)), np.ones((B, L), np.float32), np.float32(0.3)
    )
    assert_same(metrics, dict.fromkeys(metrics, 0.0))


def test_an_algorithm_reads_which_responses_are_given(batch):
    """By episode and by token: samples keep their score, given responses get 10 and twice that by token."""
    where = np.arange(B) % 2 == 1
    algorithm = Algorithm(
        outcome=lambda view: jnp.where(view.given, 10.0, view.score),
        advantage=lambda view: jnp.where(view.mask, (view.outcome * (1.0 + view.given))[:, None], 0.0),
        given=lambda prompt: [],
    )
    how = dict(kl_penalty=None, correction=None, bypass=True)
    data = dataclasses.replace(batch, score=np.arange(B, dtype=np.float32)).with_arrays(given=where, value=None)
    found, metrics = estimate.make_advantages(algorithm, **how)(data, np.float32(0))
    expected = np.where(batch.mask, np.array([0, 20, 2, 20, 4, 20])[:, None], 0)
    np.testing.assert_array_equal(found["advantage"], expected)
    assert metrics["critic/advantages/max"] == 20 and metrics["critic/rewards/max"] == 4
