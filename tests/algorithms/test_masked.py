"""Masked sums and moments against numpy on the kept entries; nothing behind a False is seen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jppo.algorithms import masked

FEW = settings(max_examples=5, deadline=None, derandomize=True)
SEEDS = st.integers(0, 2**16)
POISON = [np.nan, np.inf, -np.inf, 3e38]
ask = {name: jax.jit(x) for name, x in vars(masked).items() if callable(x)}
# Of one sequence's kept entries: what stands at each of its entries.
BY_SEQUENCE = {
    "sequence_sum": lambda x: sum(x),
    "sequence_mean": lambda x: sum(x) / max(len(x), 1),
}


@pytest.fixture
def poisoned():
    rng = np.random.default_rng(0)
    x, mask = rng.normal(3.0, 2.0, (4, 9)).astype(np.float32), rng.random((4, 9)) < 0.6
    x[~mask] = np.resize(POISON, (~mask).sum())
    return x, mask


# Over the whole array


def test_masked_sum_is_the_sum_of_what_is_kept(poisoned):
    x, mask = poisoned
    np.testing.assert_allclose(masked.masked_sum(x, mask), x[mask].sum(), rtol=1e-6)
    assert masked.masked_sum(x, np.zeros_like(mask)) == 0.0
    np.testing.assert_array_equal(jax.grad(masked.masked_sum)(x, mask), mask)


def test_masked_sum_does_not_broadcast_a_mask():
    with pytest.raises(AssertionError):
        masked.masked_sum(np.ones((3, 4), np.float32), np.ones((1, 4), bool))


def test_moments_are_count_mean_and_squared_deviations(poisoned):
    x, mask = poisoned
    for most in (1, 2, 3, mask.size):
        some = mask & (np.cumsum(mask).reshape(mask.shape) <= most)
        kept = x[some].astype(np.float64)
        expected = [kept.size, kept.mean(), np.square(kept - kept.mean()).sum()]
        np.testing.assert_allclose(masked.moments(x, some), expected, rtol=1e-5)
    np.testing.assert_array_equal(masked.moments(x, np.zeros_like(mask)), [0.0, 0.0, 0.0])


def test_whitening_has_mean_0_and_variance_1(poisoned):
    x, mask = poisoned
    out = masked.whiten(x, mask)
    kept = x[mask].astype(np.float64)
    expected = (kept - kept.mean()) / np.sqrt(kept.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(np.asarray(out)[mask], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(np.asarray(out)[~mask], 0.0)
    np.testing.assert_array_equal(masked.whiten(x, np.zeros_like(mask)), 0.0)


def test_equal_entries_and_a_single_one_whiten_to_zero():
    x = np.full((2, 3), 0.7, np.float32)
    np.testing.assert_array_equal(masked.whiten(x, np.ones((2, 3), bool)), 0.0)
    np.testing.assert_array_equal(masked.whiten(x, np.eye(2, 3) + [[0], [-1]] > 0.5), 0.0)


@FEW
@given(seed=SEEDS)
def test_the_layout_does_not_change_what_whitens(packed, change, seed):
    batch = packed.draw(seed)
    before, after = packed.lay(batch), packed.lay(batch, **change)
    (x, mask), (moved, moved_mask) = before["reward mask"], after["reward mask"]
    found = ask["moments"](moved, moved_mask)
    np.testing.assert_allclose(found, ask["moments"](x, mask), rtol=1e-12)
    kept = np.concatenate([s["reward"] for s in batch])
    np.testing.assert_allclose(masked.variance(found), kept.var(ddof=1), rtol=1e-10)
    white = masked.whiten(moved, moved_mask)
    after.assert_same(white, [(s["reward"] - kept.mean()) / np.sqrt(kept.var(ddof=1) + 1e-8) for s in batch], rtol=1e-9)


# By row of the flat batch


@FEW
@given(seed=SEEDS)
def test_the_last_of_a_row_is_its_last_kept_entry(flat, change, seed):
    batch = flat.draw(seed)
    laid = flat.lay(batch, **change)
    expected = [np.arange(s["reward"].size) == s["reward"].size - 1 for s in batch]
    laid.assert_same(ask["last"](laid.rows["mask"]), expected)


@FEW
@given(seed=SEEDS)
def test_at_kept_repeats_a_number_at_each_kept_entry(flat, change, seed):
    batch = flat.draw(seed)
    laid = flat.lay(batch, **change)
    mask = laid.rows["mask"]
    score = np.where(mask.any(1), np.arange(1.0, len(mask) + 1), np.nan)  # nothing of the others is kept
    laid.assert_same(
        ask["at_kept"](score, mask), [np.full(s["reward"].size, x) for s, x in zip(batch, score, strict=False)]
    )


# By sequence of packed rows


@pytest.mark.parametrize("name", BY_SEQUENCE)
@FEW
@given(seed=SEEDS)
def test_by_sequence_in_any_layout(packed, change, name, seed):
    batch = packed.draw(seed)
    laid = packed.lay(batch, **change)
    found = np.asarray(ask[name](*laid["reward mask segment"]))
    for i, s in enumerate(batch):  # at the masked entries of the sequence too
        here = found[laid.rows["sequence"] == i]
        np.testing.assert_allclose(here, np.full(here.shape, BY_SEQUENCE[name](s["reward"])), rtol=1e-10, atol=1e-12)
    lengths = np.asarray(ask["sequence_length"](*laid["mask segment"]))
    for i, s in enumerate(batch):
        assert (lengths[laid.rows["sequence"] == i] == s["reward"].size).all()


def test_by_sequence_by_hand():
    """Two sequences share a row, the first with a gap; the second row has one of nothing kept, and emptiness."""
    x = np.float32([[1.0, 9.0, -4.0, 5.0], [9.0, 9.0, 9.0, 9.0]])
    mask = np.array([[True, False, True, True], [False, False, False, False]])
    segment = np.int32([[1, 1, 1, 2], [1, 1, 0, 0]])
    for name, first, second in [("sum", -3.0, 5.0), ("mean", -1.5, 5.0)]:
        found = ask[f"sequence_{name}"](x, mask, segment)
        np.testing.assert_array_equal(found, [[first] * 3 + [second], [0.0] * 4])
    np.testing.assert_array_equal(ask["sequence_length"](mask, segment), [[2, 2, 2, 1], [0] * 4])
    np.testing.assert_array_equal(ask["last"](mask), [[False, False, False, True], [False] * 4])


def test_a_row_may_be_full_of_single_tokens():
    x, every = np.float32([[3.0, -1.0, 4.0]]), np.ones((1, 3), bool)
    for name in BY_SEQUENCE:
        np.testing.assert_array_equal(ask[name](x, every, np.int32([[1, 2, 3]])), x)


# Gradients, shapes, dtypes

OF_ROWS = {
    "masked_sum": lambda x, mask, segment, sequence: masked.masked_sum(x, mask),
    "moments": lambda x, mask, segment, sequence: masked.moments(x, mask),
    "whiten": lambda x, mask, segment, sequence: masked.whiten(x, mask) ** 3,  # their sum is 0, that of cubes is not
    "sequence_sum": lambda x, mask, segment, sequence: masked.sequence_sum(x, mask, segment),
    "sequence_length": lambda x, mask, segment, sequence: masked.sequence_length(mask, segment, x.dtype),
    "sequence_mean": lambda x, mask, segment, sequence: masked.sequence_mean(x, mask, segment),
    "at_kept": lambda x, mask, segment, sequence: masked.at_kept(x[:, 0], mask),
}


of_rows = {name: jax.jit(f) for name, f in OF_ROWS.items()}
slopes = {  # of the sum of what is finite
    name: jax.jit(jax.grad(lambda x, *rest, f=f: jnp.sum(jnp.where(jnp.isfinite(y := f(x, *rest)), y, 0.0))))
    for name, f in OF_ROWS.items()
}


@pytest.mark.parametrize("name", OF_ROWS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_dtype_jit_and_vmap(packed, name, dtype):
    one, other = (packed.lay(packed.draw(seed), dtype=dtype)["reward mask segment sequence"] for seed in (0, 1))
    both = jax.vmap(of_rows[name])(*(np.stack(x) for x in zip(one, other, strict=True)))
    alone = of_rows[name](*other)
    assert both.dtype == alone.dtype == dtype
    np.testing.assert_allclose(both[1], alone, rtol=1e-5 if dtype == np.float32 else 1e-12)


@pytest.mark.parametrize("name", sorted(OF_ROWS.keys() - {"at_kept", "sequence_length"}))
def test_no_gradient_comes_from_behind_the_mask(packed, name):
    with jax.enable_x64(False):
        laid = packed.lay(packed.draw(2), dtype=np.float32)
        x, *rest = laid["reward mask segment sequence"]
        grad = slopes[name](x, *rest)
        np.testing.assert_array_equal(laid.rest(grad), 0.0)
        assert np.isfinite(grad).all() and np.any(grad)


def test_a_long_row_has_one_last_entry():
    found = np.asarray(ask["last"](np.ones((1, 2**17), bool)))
    assert found.sum() == 1 and found[0, -1]


def test_ends_are_the_last_entries_of_runs_by_hand():
    mask = np.bool_([[0, 1, 1, 0, 1, 0], [1, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]])
    np.testing.assert_array_equal(masked.ends(mask), [[0, 0, 1, 0, 1, 0], [1, 0, 0, 0, 0, 1], [0] * 6])


def test_entries_outside_the_mask_move_by_hand():
    mask = np.bool_([[0, 1, 0, 0, 1, 0], [1, 1, 0, 1, 0, 0], [0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 1]])
    x = np.float32([[1, 2, 4, 8, 16, 32], [1, 2, 4, 8, 0, 0], [1, 1, 1, 1, 1, 1], [1, 0, 2, 0, 0, 4]])
    expected = [[0, 15, 0, 0, 48, 0], [1, 6, 0, 8, 0, 0], [0] * 6, [0, 0, 0, 0, 0, 7]]
    np.testing.assert_array_equal(masked.move_into_mask(x, mask), expected)


@FEW
@given(seed=SEEDS)
def test_what_moves_is_neither_lost_nor_made(seed):
    rng = np.random.default_rng(seed)
    x, mask = rng.integers(-9, 9, (5, 12)).astype(np.float32), rng.random((5, 12)) < 0.4
    found = np.asarray(masked.move_into_mask(x, mask))
    np.testing.assert_array_equal(found.sum(axis=1), np.where(mask.any(axis=1), x.sum(axis=1), 0))
    assert not found[~mask].any()
    np.testing.assert_array_equal(masked.move_into_mask(found, mask), found)  # moved already
