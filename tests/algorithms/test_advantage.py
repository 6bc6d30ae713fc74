"""Advantages against loops written from the papers, by hand, in special cases, and in any layout."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jppo.algorithms import advantage

FEW = settings(max_examples=5, deadline=None, derandomize=True)
SEEDS = st.integers(0, 2**16)
SETTINGS = [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (0.0, 1.0), (1.0, 0.5)]
ROWS = "reward value mask"


@functools.cache
def gae(gamma, lam):
    return jax.jit(functools.partial(advantage.gae, gamma=gamma, lam=lam))


# By token. The papers speak of one sequence without gaps.


def paper_gae(reward, value, gamma, lam):
    """A_t = Σ_k (γλ)^k δ_{t+k},  δ_t = r_t + γ V_{t+1} - V_t, term by term."""
    n = len(reward)
    following = np.append(value[1:], 0.0)
    delta = [reward[t] + gamma * following[t] - value[t] for t in range(n)]
    return np.array([sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, n)) for t in range(n)])


reinforce_plus_plus = jax.jit(advantage.reinforce_plus_plus, static_argnames="gamma")
remax = jax.jit(advantage.remax)


@functools.partial(jax.jit, static_argnames=("gamma", "lam"))
def by_token(reward, value, mask, baseline, *, gamma=0.9, lam=0.9):
    return (
        *advantage.gae(reward, value, mask, gamma=gamma, lam=lam),
        advantage.reinforce_plus_plus(reward, mask, gamma=gamma),
        advantage.remax(reward, jnp.pad(baseline, (0, len(mask) - len(baseline))), mask),
    )


def to_go(reward, gamma):
    n = len(reward)
    return np.array([sum(gamma ** (k - t) * reward[k] for k in range(t, n)) for t in range(n)])


@pytest.mark.parametrize("gamma,lam", SETTINGS)
@FEW
@given(seed=SEEDS)
def test_gae_is_the_papers(flat, gamma, lam, seed):
    batch = flat.draw(seed)
    laid = flat.lay(batch, gaps=seed)
    found, returns = gae(gamma, lam)(*laid[ROWS])
    papers = [paper_gae(s["reward"], s["value"], gamma, lam) for s in batch]
    laid.assert_same(found, papers, rtol=1e-10, atol=1e-12)
    laid.assert_same(returns, [a + s["value"] for a, s in zip(papers, batch, strict=True)], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("lam", [0.0, 0.7, 1.0])
def test_gae_with_a_discount_at_each_position(lam):
    """A_t = Σ_u λ^(kept between) D(t, u) δ_u; D is the product of the discounts from t to before u, kept or not."""
    rng = np.random.default_rng(3)
    reward, value, gamma = rng.normal(size=(3, 4, 9))
    mask, gamma = rng.random((4, 9)) < 0.6, np.abs(gamma) / 2
    found, returns = jax.jit(advantage.gae, static_argnames="lam")(reward, value, mask, gamma=gamma, lam=lam)
    for b in range(4):
        kept = np.flatnonzero(mask[b])
        ahead = [*kept[1:], None]
        delta = {
            t: reward[b, t] - value[b, t] + (0.0 if u is None else gamma[b, t:u].prod() * value[b, u])
            for t, u in zip(kept, ahead, strict=True)
        }
        want = np.zeros(9)
        for i, t in enumerate(kept):
            want[t] = sum(lam**k * gamma[b, t:u].prod() * delta[u] for k, u in enumerate(kept[i:]))
        np.testing.assert_allclose(found[b], want, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(returns[b], np.where(mask[b], want + value[b], 0.0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("T", [1, 263, 520])
def test_gae_of_long_rows(T):
    rng = np.random.default_rng(T)
    reward, value = rng.normal(size=(2, 2, T))
    mask = rng.random((2, T)) < 0.7
    found, _ = gae(0.99, 0.95)(reward, value, mask)
    want = np.zeros((2, T))
    for r in range(2):
        want[r, mask[r]] = paper_gae(reward[r, mask[r]], value[r, mask[r]], 0.99, 0.95)
    np.testing.assert_allclose(found, want, rtol=1e-10, atol=1e-12)


def test_gae_leaves_rows_on_their_devices(flat):
    """Eight devices, one row on each, nothing sent between them."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    rows = flat.lay(flat.draw(0), shape=(8, 260))[ROWS]
    compiled = gae(0.9, 0.9).lower(*jax.device_put(rows, spread)).compile()
    assert not re.findall(r"all-\w+|collective-\w+|reduce-scatter", compiled.as_text())
    for found, want in zip(compiled(*jax.device_put(rows, spread)), gae(0.9, 0.9)(*rows), strict=True):
        assert found.sharding.is_equivalent_to(spread, 2)
        np.testing.assert_array_equal(found, want)


def test_gae_by_hand():
    """One response of two tokens with a tool's output between them, γ = 0.5, λ = 0.5.

    δ_3 = 4 - 2 = 2;  δ_1 = 0 + 0.5 * 2 - 1 = 0;  A_3 = 2;  A_1 = 0 + 0.25 * 2 = 0.5.
    """
    found, returns = gae(0.5, 0.5)(
        np.float32([[9.0, 0.0, 9.0, 4.0, 9.0]]),
        np.float32([[9.0, 1.0, 9.0, 2.0, 9.0]]),
        np.array([[False, True, False, True, False]]),
    )
    np.testing.assert_array_equal(found, [[0.0, 0.5, 0.0, 2.0, 0.0]])
    np.testing.assert_array_equal(returns, [[0.0, 1.5, 0.0, 4.0, 0.0]])


def test_gae_with_a_lambda_per_row(flat):
    """Each row is that of its own λ."""
    reward, value, mask = flat.lay(flat.draw(5))[ROWS]
    lams = np.linspace(0.0, 1.0, len(mask))
    found, returns = jax.jit(advantage.gae, static_argnames="gamma")(reward, value, mask, gamma=0.9, lam=lams)
    for row, lam in enumerate(lams):
        alone = gae(0.9, lam)(reward[row : row + 1], value[row : row + 1], mask[row : row + 1])
        np.testing.assert_allclose(found[row], alone[0][0], rtol=1e-12)
        np.testing.assert_allclose(returns[row], alone[1][0], rtol=1e-12)


def test_adaptive_lambda_by_hand():
    """α = 0.05, so that 1 / (α l) is 20 / l; below 20 tokens λ is 0, and the mask's gaps are no tokens."""
    mask = np.zeros((5, 450), np.bool_)
    for row, length in enumerate((0, 10, 25, 100, 400)):
        mask[row, 2 : 2 + length] = True
    mask[4, 2:402:2], mask[4, 3:402:2] = True, False  # 200 of them kept
    found = advantage.adaptive_lam(mask, alpha=0.05)
    np.testing.assert_allclose(found, [0.0, 0.0, 0.2, 0.8, 0.9], rtol=1e-6, atol=1e-7)


@FEW
@given(seed=SEEDS)
def test_the_layout_changes_nothing(flat, change, seed):
    batch = flat.draw(seed)
    baseline = np.random.default_rng(seed).normal(size=7)
    out = []
    for laid in (flat.lay(batch), flat.lay(batch, **change)):
        out.append((laid, by_token(*laid[ROWS], baseline)))
    (before, ones), (after, others) = out
    for one, other in zip(ones, others, strict=True):
        after.assert_same(other, before.back(one), rtol=1e-9, atol=1e-12)


@FEW
@given(seed=SEEDS)
def test_returns_of_reinforce_plus_plus_and_remax(flat, seed):
    batch = flat.draw(seed)
    laid = flat.lay(batch, gaps=seed)
    greedy = np.random.default_rng(seed).normal(size=7)
    *_, discounted, less = by_token(*laid[ROWS], greedy)
    laid.assert_same(discounted, [to_go(s["reward"], 0.9) for s in batch], rtol=1e-10, atol=1e-12)
    papers = [to_go(s["reward"], 1.0) - b for s, b in zip(batch, greedy, strict=True)]
    laid.assert_same(less, papers, rtol=1e-10, atol=1e-12)


@FEW
@given(seed=SEEDS)
def test_lambda_0_is_the_td_error_and_lambda_1_the_return_less_the_value(flat, seed):
    batch = flat.draw(seed)
    laid = flat.lay(batch)
    td = [s["reward"] + 0.9 * np.append(s["value"], 0.0)[1:] - s["value"] for s in batch]
    carlo = [to_go(s["reward"], 1.0) - s["value"] for s in batch]
    laid.assert_same(gae(0.9, 0.0)(*laid[ROWS])[0], td, rtol=1e-10, atol=1e-12)
    laid.assert_same(gae(1.0, 1.0)(*laid[ROWS])[0], carlo, rtol=1e-10, atol=1e-12)
    for wrong in (gae(0.9, 0.1), gae(1.0, 0.99), gae(0.99, 1.0)):
        found = np.concatenate(laid.back(wrong(*laid[ROWS])[0]))
        assert not np.allclose(found, np.concatenate(td)) and not np.allclose(found, np.concatenate(carlo))


def test_gae_without_values_is_reinforce_plus_plus(flat):
    reward, value, mask = flat.lay(flat.draw(0))[ROWS]
    plain = reinforce_plus_plus(reward, mask, gamma=0.9)
    found, returns = gae(0.9, 1.0)(reward, np.zeros_like(value), mask)
    np.testing.assert_array_equal(found, plain)
    np.testing.assert_array_equal(returns, plain)
    assert not np.allclose(gae(0.9, 1.0)(reward, value, mask)[0], plain)
    assert not np.allclose(gae(0.9, 0.9)(reward, np.zeros_like(value), mask)[0], plain)


def test_remax_of_a_baseline_of_0_is_reinforce_plus_plus_without_discount(flat):
    laid = flat.lay(flat.draw(1))
    reward, mask = laid["reward mask"]
    found = remax(reward, np.zeros(7), mask)
    np.testing.assert_array_equal(found, reinforce_plus_plus(reward, mask, gamma=1.0))


def test_a_reward_at_the_end_alone_is_every_tokens_score_less_the_greedy_one():
    """Scores 3 and 1, greedy scores 1 and 4: as REINFORCE with a baseline."""
    mask = np.array([[False, True, True], [True, True, False]])
    found = remax(np.float32([[9, 0, 3], [0, 1, 9]]), np.float32([1, 4]), mask)
    np.testing.assert_array_equal(found, [[0, 2, 2], [-3, -3, 0]])


def test_rows_of_nothing_have_no_advantage(flat):
    reward, value, mask = flat.lay(flat.draw(2), dtype=np.float32)[ROWS]
    for part in gae(0.9, 0.9)(reward, value, np.zeros_like(mask)):
        np.testing.assert_array_equal(part, 0.0)


@pytest.mark.parametrize("scale", [1e-6, 1e4])
def test_gae_and_its_gradient_stay_finite(flat, scale):
    with jax.enable_x64(False):
        batch = [s | dict(reward=s["reward"] * scale, value=s["value"] * scale) for s in flat.draw(3)]
        laid = flat.lay(batch, dtype=np.float32)
        reward, value, mask = laid[ROWS]
        grads = jax.jit(jax.grad(lambda r, v: jnp.sum(gae(1.0, 0.95)(r, v, mask)[0] ** 2), argnums=(0, 1)))
        for part in (*gae(1.0, 0.95)(reward, value, mask), *grads(reward, value)):
            assert np.isfinite(part).all() and part.dtype == np.float32
            np.testing.assert_array_equal(laid.rest(part), 0.0)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_dtype_jit_and_vmap_by_token(flat, dtype):
    one, other = ((*flat.lay(flat.draw(s), dtype=dtype)[ROWS], np.ones(7, dtype)) for s in (0, 1))
    both = jax.vmap(by_token)(*(np.stack(x) for x in zip(one, other, strict=True)))
    for two, alone in zip(both, by_token(*other), strict=True):
        assert two.dtype == alone.dtype == dtype
        np.testing.assert_allclose(two[1], alone, rtol=1e-5 if dtype == np.float32 else 1e-12)


def test_whole_numbers_as_rewards_are_not_rounded_on_the_way(flat):
    laid = flat.lay(flat.draw(4), dtype=np.float32)
    _, value, mask = laid[ROWS]
    reward = np.where(mask, np.arange(20) % 3, 0)
    for dtype in (np.int32, np.float16):
        found, _ = gae(0.9, 0.9)(reward.astype(dtype), value, mask)
        assert found.dtype == np.float32
        want = [paper_gae(r, v, 0.9, 0.9) for r, v in zip(laid.back(reward), laid.back(value), strict=True)]
        laid.assert_same(found, want, rtol=1e-5, atol=1e-6)


# By sequence: what the papers say of one group, its scores and lengths.


def paper_grpo(score, length):
    if len(score) == 1:
        return [score[0] / (1 + 1e-6)]
    return [(s - np.mean(score)) / (np.std(score, ddof=1) + 1e-6) for s in score]


def paper_dr_grpo(score, length):
    return [s - (np.mean(score) if len(score) > 1 else 0.0) for s in score]


def paper_passk(score, length):
    """In order of score, only the first may have something, and only if it is better than the second."""
    order = sorted(range(len(score)), key=lambda i: -score[i])
    out = [0.0] * len(score)
    if len(score) > 1:
        out[order[0]] = score[order[0]] - score[order[1]]
    return out


def paper_passk_std(score, length):
    return [a / (np.std(score, ddof=1) + 1e-6) if len(score) > 1 else 0.0 for a in paper_passk(score, length)]


def paper_rloo(score, length):
    return [s - (np.mean(score[:i] + score[i + 1 :]) if len(score) > 1 else 0.0) for i, s in enumerate(score)]


def paper_rloo_vectorized(score, length):
    return paper_rloo(score, length) if len(score) > 1 else [0.0]


def paper_opo(score, length):
    best = sum(n * s for n, s in zip(length, score, strict=True)) / sum(length)
    return [s - (best if len(score) > 1 else 0.0) for s in score]


GROUPED = {
    "grpo": (paper_grpo, lambda s, l, g: advantage.grpo(s, g, norm_adv_by_std=True)),
    "dr_grpo": (paper_dr_grpo, lambda s, l, g: advantage.grpo(s, g, norm_adv_by_std=False)),
    "grpo_passk": (paper_passk_std, lambda s, l, g: advantage.grpo_passk(s, g, norm_adv_by_std=True)),
    "grpo_passk without std": (paper_passk, lambda s, l, g: advantage.grpo_passk(s, g, norm_adv_by_std=False)),
    "rloo": (paper_rloo, lambda s, l, g: advantage.rloo(s, g)),
    "rloo_vectorized": (paper_rloo_vectorized, lambda s, l, g: advantage.rloo_vectorized(s, g)),
    "reinforce_plus_plus_baseline": (paper_dr_grpo, lambda s, l, g: advantage.reinforce_plus_plus_baseline(s, g)),
    "opo": (paper_opo, lambda s, l, g: advantage.opo(s, l, g)),
}


ESTIMATES = {name: jax.jit(f) for name, (_, f) in GROUPED.items()}


def draw_groups(seed):
    """Scores, lengths and groups of 12 samples: 1 to 12 groups with any numbers below 12, ties among the scores."""
    rng = np.random.default_rng(seed)
    names = rng.permutation(12)[: rng.integers(1, 13)]
    score = np.where(rng.random(12) < 0.6, rng.choice([0.0, 0.1, 1.0], 12), rng.normal(size=12))
    return score, rng.integers(1, 30, 12).astype(float), rng.choice(names, 12).astype(np.int32)


def estimate(name, *x):
    return np.asarray(ESTIMATES[name](*x))


@pytest.mark.parametrize("name", GROUPED)
@settings(FEW, max_examples=30)
@given(seed=SEEDS)
def test_group_estimators_are_the_papers(name, seed):
    score, length, group = draw_groups(seed)
    expected = np.zeros(12)
    for g in set(group):
        at = np.flatnonzero(group == g)
        expected[at] = GROUPED[name][0](list(score[at]), list(length[at]))
    # atol: where all scores are equal, the loop's mean is not quite their value, and it divides the rest by 1e-6.
    np.testing.assert_allclose(estimate(name, score, length, group), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", GROUPED)
@FEW
@given(seed=SEEDS)
def test_groups_may_be_permuted_renumbered_and_joined_by_others(name, seed):
    score, length, group = draw_groups(seed)
    before = estimate(name, score, length, group)
    order, names = np.random.default_rng(seed).permuted(np.tile(np.arange(12), (2, 1)), axis=1)
    tight = dict(rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(estimate(name, score[order], length[order], group[order]), before[order], **tight)
    renumbered = names.astype(np.int32)[group]
    np.testing.assert_allclose(estimate(name, score, length, renumbered), before, **tight)
    more = [
        np.append(x, y).astype(x.dtype) for x, y in ((score, [7, -9, 3]), (length, [1, 2, 3]), (group, [13, 13, 14]))
    ]
    np.testing.assert_allclose(estimate(name, *more)[:12], before, **tight)


# A group of scores 1, 3, 5 (mean 3, std 2) and lengths 1, 1, 2; beside it one sample that scored 4.
BY_HAND = {
    "grpo": [-1.0, 0.0, 1.0, 4.0],
    "dr_grpo": [-2.0, 0.0, 2.0, 4.0],
    "grpo_passk": [0.0, 0.0, 1.0, 0.0],
    "grpo_passk without std": [0.0, 0.0, 2.0, 0.0],
    "rloo": [-3.0, 0.0, 3.0, 4.0],
    "rloo_vectorized": [-3.0, 0.0, 3.0, 0.0],
    "reinforce_plus_plus_baseline": [-2.0, 0.0, 2.0, 4.0],
    "opo": [-2.5, -0.5, 1.5, 4.0],  # the baseline is 14 / 4
}


@pytest.mark.parametrize("name", GROUPED)
def test_group_estimators_by_hand(name):
    x = np.array([1.0, 3.0, 5.0, 4.0]), np.array([1.0, 1.0, 2.0, 8.0]), np.int32([2, 2, 2, 0])
    np.testing.assert_allclose(estimate(name, *x), BY_HAND[name], rtol=3e-6)


def test_equal_bests_teach_nothing_in_pass_at_k():
    x = np.array([5.0, 5.0, 1.0]), np.ones(3), np.zeros(3, np.int32)
    np.testing.assert_array_equal(estimate("grpo_passk", *x), 0.0)


def test_gpg_by_hand():
    """One of four graded responses has a score, so the scale is 4. A group of one is not graded, and its mean is 0."""
    group, graded = np.int32([2, 2, 0, 0, 1]), np.array([True, True, True, True, False])
    found = advantage.gpg(np.array([1.0, 0.0, 0.0, 0.0, 4.0]), group, graded)
    np.testing.assert_allclose(found, [2.0, -2.0, 0.0, 0.0, 16.0], rtol=1e-6)
    found = advantage.gpg(np.array([1.0, 0.0, 3.0, 3.0, 0.0]), group, graded)  # scaled by 4 / 3
    np.testing.assert_allclose(found, [2 / 3, -2 / 3, 0.0, 0.0, 0.0], rtol=1e-6)
    np.testing.assert_array_equal(advantage.gpg(np.zeros(5), group, graded), 0.0)  # not a division by 0


def test_estimators_that_are_each_other():
    score, length, _ = draw_groups(0)
    length = length + np.arange(12)
    group = np.repeat(np.arange(3), 4).astype(np.int32)
    by = {name: estimate(name, score, length, group) for name in GROUPED}
    close = functools.partial(np.allclose, rtol=1e-12, atol=1e-14)
    assert close(by["dr_grpo"], by["reinforce_plus_plus_baseline"])
    assert close(by["rloo"], 4 / 3 * by["dr_grpo"]) and not close(by["rloo"], by["dr_grpo"])
    assert close(by["rloo"], by["rloo_vectorized"])
    assert close(estimate("opo", score, np.full(12, 7.0), group), by["dr_grpo"]) and not close(by["opo"], by["dr_grpo"])
    std = np.repeat([score[i : i + 4].std(ddof=1) for i in (0, 4, 8)], 4)
    assert close(by["grpo"] * (std + 1e-6), by["dr_grpo"]) and not close(by["grpo"], by["dr_grpo"])
    assert close(by["grpo_passk"] * (std + 1e-6), by["grpo_passk without std"])


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("value", [0.1, 0.7, 10.1, -3.3])
def test_equal_scores_have_no_advantage(name, value):
    """Not even that of a rounded mean, which grpo would divide by 1e-6: 8 times 10.1 in float32 would make 0.47."""
    for n in (3, 8):
        x = np.full(n, value, np.float32), np.arange(1, n + 1, dtype=np.float32), np.zeros(n, np.int32)
        np.testing.assert_allclose(estimate(name, *x), 0.0, atol=abs(value) * 1e-6 if name == "opo" else 0.0)


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("scale", [1e-9, 1e4])
def test_groups_stay_finite(name, scale):
    with jax.enable_x64(False):
        score, length, group = draw_groups(2)
        for groups in (group, np.arange(12, dtype=np.int32), np.zeros(12, np.int32)):
            for lengths in (length, np.zeros(12)):
                found = estimate(name, (score * scale).astype(np.float32), lengths.astype(np.float32), groups)
                assert np.isfinite(found).all() and found.dtype == np.float32


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_dtype_jit_and_vmap_by_sequence(name, dtype):
    one, other = (
        [x.astype(dtype), n.astype(dtype), np.repeat(np.arange(3), 4).astype(np.int32)]
        for x, n, _ in map(draw_groups, (3, 4))
    )
    both = jax.vmap(ESTIMATES[name])(*(np.stack(x) for x in zip(one, other, strict=True)))
    alone = estimate(name, *other)
    assert both.dtype == alone.dtype == dtype
    np.testing.assert_allclose(both[1], alone, rtol=1e-4 if dtype == np.float32 else 1e-10, atol=1e-6)
