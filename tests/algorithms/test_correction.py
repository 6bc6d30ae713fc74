"""Importance weights and rejection against loops over sequences, by hand, in any layout and far out."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jppo.algorithms import correction

FEW = settings(max_examples=5, deadline=None, derandomize=True)
SEEDS = st.integers(0, 2**16)
LEVELS = ("token", "sequence")
# Rules of which some tokens of a drawn batch pass and some do not.
RULES = [
    ("token_k1", 0.8, 1.3),
    ("token_k2", 0.0, 0.05),
    ("token_k3", 0.0, 0.05),
    ("seq_sum_k1", 0.6, 1.5),
    ("seq_sum_k2", 0.0, 0.3),
    ("seq_sum_k3", 0.0, 0.3),
    ("seq_mean_k1", 0.9, 1.15),
    ("seq_mean_k2", 0.0, 0.08),
    ("seq_mean_k3", 0.0, 0.08),
    ("seq_max_k2", 0.0, 0.2),
    ("seq_max_k3", 0.0, 0.2),
]


raw_weights = jax.jit(correction.raw_weights, static_argnames="level")
mean_weight = jax.jit(correction.mean_weight, static_argnames="level")
keep = jax.jit(correction.keep, static_argnames="rules")
divergences = jax.jit(correction.divergences)


def draw(flat, seed):
    """A batch with `d`, the log-ratio of trainer to sampler."""
    return [s | dict(d=s["logp"] - s["old_logp"]) for s in flat.draw(seed)]


def paper_weights(d, level):
    """Π of the ratios for a sequence, each ratio for itself for a token."""
    ratios = [np.exp(x) for x in d]
    return ratios if level == "token" else [np.prod(ratios)] * len(d)


def paper_keeps(d, rule):
    """Of each token: whether its statistic, or its sequence's, lies within the bounds."""
    name, lower, upper = rule
    over, kind = name.rsplit("_", 1)
    each = [{"k1": -x, "k2": x**2 / 2, "k3": np.exp(x) - 1 - x}[kind] for x in d]
    if over != "token" and d.size:
        each = [{"seq_sum": sum(each), "seq_mean": sum(each) / len(each), "seq_max": max(each)}[over]] * len(each)
    return [np.log(lower) <= x <= np.log(upper) if kind == "k1" else x <= upper for x in each]


@pytest.mark.parametrize("level", LEVELS)
@FEW
@given(seed=SEEDS)
def test_weights_and_their_sums_by_a_loop_in_any_layout(flat, change, level, seed):
    batch = draw(flat, seed)
    laid = flat.lay(batch, **change)
    d, mask = laid["d mask"]
    weight = raw_weights(d, mask, level=level)
    papers = [paper_weights(s["d"], level) for s in batch]
    laid.assert_same(weight, papers, rtol=1e-10)
    truncated = correction.bound_weights(weight, lower=None, upper=1.2)
    laid.assert_same(truncated, [[min(w, 1.2) for w in p] for p in papers], rtol=1e-10)
    banded = correction.bound_weights(weight, lower=0.7, upper=1.2)
    laid.assert_same(banded, [[w if 0.7 <= w <= 1.2 else 0.0 for w in p] for p in papers], rtol=1e-10)

    whole = [p for p in papers if p]
    one_each = [w for p in whole for w in p] if level == "token" else [np.mean(p) for p in whole]
    np.testing.assert_allclose(mean_weight(weight, mask, level=level), np.mean(one_each), rtol=1e-10)
    mean = correction.normalized_weights(weight, mean=np.mean(one_each))
    np.testing.assert_allclose(mean_weight(mean, mask, level=level), 1.0, rtol=1e-10)
    laid.assert_same(mean, [[w / np.mean(one_each) for w in p] for p in papers], rtol=1e-10)

    found, every = correction.importance(weight, mask), np.concatenate(whole)
    want = dict(mean=every.mean(), max=every.max(), min=every.min())
    want["eff_sample_size"] = every.sum() ** 2 / (every.size * np.square(every).sum())
    assert found.keys() == want.keys()
    for name, x in want.items():
        np.testing.assert_allclose(found[name], x, rtol=1e-10)


def test_weights_by_hand():
    """Ratios 2 and 3 in one sequence, 1/4 alone in another: 6, 6 and 1/4 by sequence, of mean 25/8."""
    d, mask = np.log([[2.0, 9.0, 3.0], [0.25, 9.0, 9.0]]), np.array([[True, False, True], [True, False, False]])
    by_token = raw_weights(d, mask, level="token")
    by_sequence = raw_weights(d, mask, level="sequence")
    np.testing.assert_allclose(by_token, [[2, 0, 3], [0.25, 0, 0]], rtol=1e-12)
    np.testing.assert_allclose(by_sequence, [[6, 0, 6], [0.25, 0, 0]], rtol=1e-12)
    truncated = correction.bound_weights(by_token, lower=None, upper=2.5)
    np.testing.assert_allclose(truncated, [[2, 0, 2.5], [0.25, 0, 0]], rtol=1e-12)
    banded = correction.bound_weights(by_token, lower=0.5, upper=2.5)
    np.testing.assert_allclose(banded, [[2, 0, 0], [0, 0, 0]], rtol=1e-12)
    np.testing.assert_allclose(mean_weight(by_token, mask, level="token"), 5.25 / 3, rtol=1e-12)
    mean = mean_weight(by_sequence, mask, level="sequence")
    np.testing.assert_allclose(mean, 6.25 / 2, rtol=1e-12)
    normalized = correction.normalized_weights(by_sequence, mean=mean)
    np.testing.assert_allclose(normalized, [[1.92, 0, 1.92], [0.08, 0, 0]], rtol=1e-12)


def test_geometric_by_hand():
    """Two sequences, √(4 · 1) and √(9 · 1e-10) with a masked 7 between; one of which nothing is kept."""
    weight = np.float64([[4.0, 1.0, 9.0], [9.0, 7.0, 0.0], [5.0, 5.0, 5.0]])
    mask = np.array([[True, True, False], [True, False, True], [False] * 3])
    expected = [[2.0, 2.0, 0.0], [3e-5, 0.0, 3e-5], [0.0] * 3]
    np.testing.assert_allclose(correction.geometric(weight, mask), expected, rtol=1e-6)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule[0])
@FEW
@given(seed=SEEDS)
def test_rejection_by_a_loop_in_any_layout(flat, change, rule, seed):
    batch = draw(flat, seed)
    laid = flat.lay(batch, **change)
    found = keep(*laid["d mask"], rules=(rule,))
    assert found.dtype == bool
    laid.assert_same(found, [paper_keeps(s["d"], rule) for s in batch])


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule[0])
def test_every_rule_keeps_some_and_rejects_some(flat, rule):
    verdicts = [kept for seed in range(5) for s in draw(flat, seed) for kept in paper_keeps(s["d"], rule)]
    assert 0.1 < np.mean(verdicts) < 0.9


def test_rules_in_a_chain_must_all_be_passed(flat):
    laid = flat.lay(draw(flat, 0))
    x = laid["d mask"]
    chain = (("token_k1", 0.6, 1.6), ("seq_max_k2", 0.0, 0.6), ("seq_mean_k3", 0.0, 0.09))
    alone = [np.asarray(keep(*x, rules=(rule,))) for rule in chain]
    np.testing.assert_array_equal(keep(*x, rules=chain), np.logical_and.reduce(alone))
    assert all(one.sum() > np.logical_and.reduce(alone).sum() for one in alone)


def test_rejection_by_hand():
    """Ratios 2, 1/2 and 4 in a sequence: their logs sum up to log 4; the largest k2 is ½ (log 4)² = 0.96."""
    d, mask = np.log([[2.0, 0.5, 4.0]]), np.ones((1, 3), bool)

    def kept(*rule):
        return np.asarray(keep(d, mask, rules=(rule,)))[0].tolist()

    # k1 is the log of sampler over trainer: 1/2, 2, 1/4
    assert kept("token_k1", 0.4, 3.0) == [True, True, False]
    assert kept("token_k1", 0.2, 1.0) == [True, False, True]
    assert kept("seq_sum_k1", 0.2, 0.3) == [True] * 3
    assert kept("seq_sum_k1", 0.3, 9.0) == [False] * 3
    assert kept("seq_mean_k1", 0.6, 0.7) == [True] * 3  # 4 to the -1/3 is 0.63
    assert kept("seq_max_k2", 0.0, 0.97) == [True] * 3
    assert kept("seq_max_k2", 0.0, 0.95) == [False] * 3
    assert kept("token_k3", 0.0, 1.0) == [True, True, False]  # 1 - log 2, log 2 - 1/2, 3 - log 4


def test_what_changes_nothing(flat):
    """Equal policies; a band of everything; a bound of nothing; a mean of 1; no rules, and rules of no bounds."""
    laid = flat.lay(draw(flat, 1))
    d, mask = laid["d mask"]
    same = [("token_k1", 0.99, 1.01), ("seq_sum_k2", 0.0, 0.0), ("seq_max_k3", 0.0, 0.0)]
    for level in LEVELS:
        ones = raw_weights(np.where(mask, 0.0, d), mask, level=level)
        np.testing.assert_array_equal(ones, mask.astype(float))
        weight = raw_weights(d, mask, level=level)
        assert not np.allclose(weight, ones)
        for lower in (None, 0.0):
            np.testing.assert_array_equal(correction.bound_weights(weight, lower=lower, upper=np.inf), weight)
        assert not np.allclose(correction.bound_weights(weight, lower=0.9, upper=np.inf), weight)
        np.testing.assert_array_equal(correction.normalized_weights(weight, mean=jnp.float64(1.0)), weight)
        nothing = correction.normalized_weights(weight, mean=jnp.float64(0.0))
        np.testing.assert_array_equal(nothing, weight)
    np.testing.assert_array_equal(keep(np.where(mask, 0.0, d), mask, rules=tuple(same)), mask)
    assert not np.array_equal(keep(d, mask, rules=tuple(same)), mask)
    free = tuple((name, 0.0, np.inf) for name, *_ in RULES)
    for rules in ((), free):
        np.testing.assert_array_equal(keep(d, mask, rules=rules), mask)


def test_token_and_sequence_weights_are_the_same_for_single_tokens(flat):
    d, mask = flat.lay(draw(flat, 2))["d mask"]
    one, other = (raw_weights(d.reshape(-1, 1), mask.reshape(-1, 1), level=level) for level in LEVELS)
    np.testing.assert_array_equal(one, other)
    assert not np.allclose(one.reshape(mask.shape), raw_weights(d, mask, level="sequence"))


@FEW
@given(seed=SEEDS)
def test_divergences_by_a_loop_in_any_layout(flat, change, seed):
    batch = draw(flat, seed)
    found = divergences(*flat.lay(batch, **change)["d mask"])
    each, whole = np.concatenate([s["d"] for s in batch]), [s["d"] for s in batch if s["d"].size]
    want = {
        "kl": np.mean([-x for x in each]),
        "k3_kl": np.mean([np.exp(x) - x - 1 for x in each]),
        "chi2_token": np.mean([np.exp(x) ** 2 for x in each]) - 1,
        "chi2_seq": np.mean([np.prod(np.exp(x)) ** 2 for x in whole]) - 1,
    }
    assert found.keys() == want.keys()
    for name, x in want.items():
        np.testing.assert_allclose(found[name], x, rtol=1e-11)


# Far out, shapes and dtypes


@jax.jit
def everything(d, mask):
    """All that takes log-ratios, and is a number to differentiate."""
    out = dict(correction.divergences(d, mask))
    for level in LEVELS:
        weight = correction.raw_weights(d, mask, level=level)
        banded = correction.bound_weights(weight, lower=0.5, upper=2.0)
        mean = correction.mean_weight(weight, mask, level=level)
        out |= {f"{level} {name}": x for name, x in correction.importance(banded, mask).items()}
        out |= {
            f"{level} raw": weight,
            f"{level} banded": banded,
            f"{level} truncated": correction.bound_weights(weight, lower=None, upper=2.0),
            f"{level} mean weight": mean,
            f"{level} normalized": correction.normalized_weights(weight, mean=mean),
        }
    return out


slopes = jax.jit(jax.jacrev(everything))


@pytest.mark.parametrize("gap", [0.0, 100.0, -100.0, 1e4, -1e4])
def test_outputs_and_gradients_stay_finite_far_apart(flat, gap):
    with jax.enable_x64(False):
        batch = draw(flat, 3)
        for way in (lambda s: np.sign(s["reward"]), lambda s: 1.0):
            far = [s | dict(d=s["d"] + gap * way(s)) for s in batch]
            laid = flat.lay(far, dtype=np.float32)
            d, mask = laid["d mask"]
            found, grads = everything(d, mask), slopes(d, mask)
            for name, part in found.items():
                assert np.isfinite(part).all() and part.dtype == np.float32, name
                if part.shape == mask.shape:
                    np.testing.assert_array_equal(laid.rest(part), 0.0)
                assert np.isfinite(grads[name]).all(), name
                np.testing.assert_array_equal(np.asarray(grads[name])[..., ~mask], 0.0)
            kept = keep(d, mask, rules=tuple(RULES))
            assert not laid.rest(kept).any() and (gap == 0.0 or not kept.any())


def test_rows_without_a_kept_token(flat):
    with jax.enable_x64(False):
        d, mask = flat.lay(draw(flat, 4), dtype=np.float32)["d mask"]
        found = everything(d, np.zeros_like(mask))
        for name, part in found.items():
            neutral = {"max": -np.inf, "min": np.inf, "chi2_token": -1.0, "chi2_seq": -1.0}.get(
                name.split(" ")[-1], 0.0
            )
            np.testing.assert_array_equal(part, np.full(part.shape, neutral))
        assert not correction.keep(d, np.zeros_like(mask), rules=(("seq_max_k2", 0.0, 9.0),)).any()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_dtype_jit_and_vmap(flat, dtype):
    one, other = (flat.lay(draw(flat, seed), dtype=dtype)["d mask"] for seed in (5, 6))
    both = jax.vmap(everything)(*(np.stack(x) for x in zip(one, other, strict=True)))
    for name, alone in everything(*other).items():
        assert both[name].dtype == alone.dtype == dtype, name
        np.testing.assert_allclose(both[name][1], alone, rtol=1e-4 if dtype == np.float32 else 1e-12)
    judge = functools.partial(keep, rules=tuple(RULES[:1]))
    np.testing.assert_array_equal(
        jax.vmap(judge)(*(np.stack(x) for x in zip(one, other, strict=True)))[1], judge(*other)
    )
