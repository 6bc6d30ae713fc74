"""GAE against a loop written from the paper, and its special cases."""

import jax
import numpy as np
import pytest

from jppo.algorithms import advantage


def paper(reward, value, gamma, lam):
    """A_t = Σ_k (γλ)^k δ_{t+k},  δ_t = r_t + γ V_{t+1} - V_t, of a trajectory without gaps, term by term."""
    n = len(reward)
    following = np.append(value[1:], 0.0)
    delta = reward + gamma * following - value
    return np.array([sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, n)) for t in range(n)])


def expected(reward, value, mask, segment, gamma, lam):
    """Segment by segment, the masked positions closed up."""
    out = np.zeros(reward.shape)
    for r in range(reward.shape[0]):
        for s in set(segment[r]):
            at = np.flatnonzero((segment[r] == s) & mask[r])
            out[r, at] = paper(reward[r, at], value[r, at], gamma, lam)
    return out


@pytest.fixture
def rows():
    """Rows of two or three segments with gaps inside, prompts before and empty space behind."""
    rng = np.random.default_rng(3)
    segment = np.zeros((5, 24), np.int32)
    for r in range(5):
        cuts = np.sort(rng.choice(np.arange(3, 23), 3, replace=False))
        segment[r, : cuts[0]], segment[r, cuts[0] : cuts[1]] = 1, 2
        if r % 2:
            segment[r, cuts[1] : cuts[2]] = 3
    mask = (rng.random((5, 24)) < 0.6) & (segment > 0)
    reward, value = rng.normal(size=(2, 5, 24)).astype(np.float32)
    return reward, value, mask, segment


@pytest.mark.parametrize("gamma,lam", [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (0.0, 1.0), (1.0, 0.5)])
def test_equals_the_paper_by_segment_and_over_gaps(rows, gamma, lam):
    reward, value, mask, segment = rows
    found, returns = advantage.gae(*rows, gamma=gamma, lam=lam)
    want = expected(reward, value, mask, segment, gamma, lam)
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(returns, np.where(mask, want + value, 0.0), rtol=1e-5, atol=1e-5)
    assert found.dtype == returns.dtype == np.float32


def test_by_hand():
    """One response of two tokens with a tool's output between them, γ = 0.5, λ = 0.5.

    δ_3 = 4 - 2 = 2;  δ_1 = 0 + 0.5 * 2 - 1 = 0;  A_3 = 2;  A_1 = 0 + 0.25 * 2 = 0.5.
    """
    found, returns = advantage.gae(
        np.array([[9.0, 0.0, 9.0, 4.0, 9.0]], np.float32),
        np.array([[9.0, 1.0, 9.0, 2.0, 9.0]], np.float32),
        np.array([[False, True, False, True, False]]),
        np.array([[1, 1, 1, 1, 0]], np.int32),
        gamma=0.5,
        lam=0.5,
    )
    np.testing.assert_array_equal(found, [[0.0, 0.5, 0.0, 2.0, 0.0]])
    np.testing.assert_array_equal(returns, [[0.0, 1.5, 0.0, 4.0, 0.0]])


def test_lambda_0_is_the_td_error():
    reward, value = np.random.default_rng(0).normal(size=(2, 1, 6)).astype(np.float32)
    everywhere, one = np.ones((1, 6), bool), np.ones((1, 6), np.int32)
    found, _ = advantage.gae(reward, value, everywhere, one, gamma=0.9, lam=0.0)
    td = reward + 0.9 * np.append(value[:, 1:], [[0.0]], axis=1) - value
    np.testing.assert_allclose(found, td, rtol=1e-6)


def test_lambda_1_is_the_monte_carlo_return_less_the_value():
    reward, value = np.random.default_rng(1).normal(size=(2, 1, 6)).astype(np.float32)
    everywhere, one = np.ones((1, 6), bool), np.ones((1, 6), np.int32)
    found, returns = advantage.gae(reward, value, everywhere, one, gamma=0.9, lam=1.0)
    to_go = [sum(0.9 ** (k - t) * reward[0, k] for k in range(t, 6)) for t in range(6)]
    np.testing.assert_allclose(returns[0], to_go, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found[0], to_go - value[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e30])
def test_tokens_behind_the_mask_change_nothing_wherever_they_are_inserted(rows, poison):
    reward, value, mask, segment = (np.array(x) for x in rows)
    before, _ = advantage.gae(reward, value, mask, segment, gamma=0.97, lam=0.9)
    rng = np.random.default_rng(7)
    for _ in range(5):
        at = np.sort(rng.integers(0, 25, 8))
        neighbour = np.minimum(at, 23)  # an inserted token belongs to the segment that it is put in front of

        def wide(x, fill, at=at):
            return np.insert(x, at, fill, axis=1)

        found, returns = advantage.gae(
            wide(reward, poison),
            wide(value, poison),
            wide(mask, False),
            wide(segment, segment[:, neighbour]),
            gamma=0.97,
            lam=0.9,
        )
        real = wide(np.ones_like(mask), False)[0]
        np.testing.assert_array_equal(np.asarray(found)[:, real], before)
        np.testing.assert_array_equal(np.asarray(found)[:, ~real], 0.0)
        np.testing.assert_array_equal(np.asarray(returns)[:, ~real], 0.0)


def test_rows_do_not_see_each_other(rows):
    order = np.array([3, 0, 4, 2, 1])
    found = advantage.gae(*rows, gamma=0.9, lam=0.9)
    moved = advantage.gae(*(x[order] for x in rows), gamma=0.9, lam=0.9)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a)[order], b), found, moved)


def test_a_reward_of_low_precision_is_not_rounded_on_the_way(rows):
    reward, value, mask, segment = rows
    whole = np.round(reward).astype(np.int32)
    found, _ = advantage.gae(whole, value, mask, segment, gamma=0.9, lam=0.9)
    np.testing.assert_allclose(found, expected(whole, value, mask, segment, 0.9, 0.9), rtol=1e-5, atol=1e-5)
