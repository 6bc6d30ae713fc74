"""Packing: the alignment rule by hand, every trajectory once, and no shape that the plan does not list."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jppo.learner import packing
from tests import make

KINDS = ("segments", "buckets", "none")


def trajectory(tokens, sampled, uid="a"):
    return make.trajectory(tokens, sampled, uid, logprob=-np.asarray(tokens) / 10, version=3)


def plan(kind, **over):
    sizes = dict(max_length=20, row_lengths=3, max_tokens_per_row=30, tokens_per_micro=90, sequences=12, row_multiple=1)
    return packing.make_plan(kind, **(sizes | over))


def entries(micros):
    """{trajectory: its entries, in order} of packed rows, each checked to stand together in one row."""
    out = {}
    for rows in micros:
        for r in range(rows.inputs.shape[0]):
            for i in set(rows.sequence[r].tolist()) - {-1}:
                at = np.flatnonzero(rows.sequence[r] == i)
                assert i not in out and (np.diff(at) == 1).all()
                assert len(set(rows.segment[r, at])) == 1 and rows.segment[r, at[0]] > 0
                names = ("inputs", "targets", "position", "mask")
                out[i] = {name: getattr(rows, name)[r, at].tolist() for name in names}
    return out


def test_alignment_by_hand():
    """Prompt 5 6, sampled 7 8, tool 9, sampled 10; then prompt 1, sampled 2. Entry t emits targets[t]."""
    two = [
        trajectory([5, 6, 7, 8, 9, 10], [0, 0, 1, 1, 0, 1]),
        trajectory([1, 2], [0, 1]),
    ]
    (rows,) = packing.pack(
        two, [40, 41], plan("segments", max_tokens_per_row=8, max_length=8, tokens_per_micro=8, sequences=2)
    )
    np.testing.assert_array_equal(rows.inputs, [[5, 6, 7, 8, 9, 1, 0, 0]])
    np.testing.assert_array_equal(rows.targets, [[6, 7, 8, 9, 10, 2, 0, 0]])
    np.testing.assert_array_equal(rows.mask, [[0, 1, 1, 0, 1, 1, 0, 0]])
    np.testing.assert_array_equal(rows.segment, [[1, 1, 1, 1, 1, 2, 0, 0]])
    np.testing.assert_array_equal(rows.position, [[0, 1, 2, 3, 4, 0, 0, 0]])
    np.testing.assert_array_equal(rows.sequence, [[40, 40, 40, 40, 40, 41, -1, -1]])
    kinds = {name: str(getattr(rows, name).dtype) for name in ("inputs", "mask", "sequence", "segment")}
    assert kinds == dict(inputs="int32", mask="bool", sequence="int32", segment="int32")


def test_kept_tokens_of_some_trajectories():
    """An entry has the kept tokens of the token that it emits, padded with -1; a trajectory without has -1 only."""
    kept = np.array([[-1, -1], [7, 3], [-1, -1], [9, -1]], np.int32)
    two = [trajectory([5, 7, 8, 9], [0, 1, 0, 1]), trajectory([1, 2], [0, 1])]
    two[0] = dataclasses.replace(two[0], kept=kept)
    sizes = dict(max_tokens_per_row=6, max_length=6, tokens_per_micro=6, sequences=2)
    (rows,) = packing.pack(two, [0, 1], dataclasses.replace(plan("segments", **sizes), kept=3))
    np.testing.assert_array_equal(rows.kept[0, :3], [[7, 3, -1], [-1, -1, -1], [9, -1, -1]])
    assert (rows.kept[0, 3:] == -1).all()


@pytest.mark.parametrize("longest, lengths", [(40, (13, 26, 39)), (65, (24, 48, 64)), (1001, (384, 704, 1024))])
def test_lengths_are_rounded_up_to_whole_blocks(longest, lengths):
    """Of 8 from 64 positions on, of 64 from 512."""
    found = plan("buckets", max_length=longest, tokens_per_micro=2048)
    assert sorted({length for _, length in found.shapes}) == list(lengths)


def ragged(lengths, seed=0):
    """One trajectory of each length; the last token is the tool's in some."""
    rng = np.random.default_rng(seed)
    out = []
    for n in lengths:
        sampled = rng.random(n) < 0.6
        sampled[0] = False
        out.append(trajectory(rng.integers(1, 99, n), sampled))
    return out


@settings(deadline=None, max_examples=150)
@given(
    lengths=st.lists(st.integers(1, 20), max_size=25),
    kind=st.sampled_from(KINDS),
    tokens_per_micro=st.sampled_from([1, 30, 64, 100, 333, 5000]),
    row_multiple=st.sampled_from([1, 2, 3, 8]),
    row_lengths=st.integers(1, 4),
    most=st.sampled_from([None, 1, 2, 3]),
)
def test_every_trajectory_once_in_a_shape_of_the_plan(lengths, kind, tokens_per_micro, row_multiple, row_lengths, most):
    how = dict(tokens_per_micro=tokens_per_micro, row_multiple=row_multiple, row_lengths=row_lengths, most=most)
    p = plan(kind, sequences=max(1, len(lengths)), **how)
    some = ragged(lengths)
    micros = packing.pack(some, range(100, 100 + len(some)), p)
    assert {rows.inputs.shape for rows in micros} <= set(p.shapes)
    assert packing.micro_batch_shapes(some, p) == [rows.inputs.shape for rows in micros]
    assert len(p.shapes) <= 2 * row_lengths
    for r, t in p.shapes:
        assert r % row_multiple == 0
        assert r * t <= max(tokens_per_micro, row_multiple * t)
    assert all(rows.segment.max() <= (most or len(lengths)) for rows in micros)
    found = entries(micros)
    assert found.keys() == {100 + i for i, n in enumerate(lengths) if n > 1}
    for i, t in enumerate(some):
        if len(t.tokens) > 1:
            assert found[100 + i] == dict(
                inputs=t.tokens[:-1].tolist(),
                targets=t.tokens[1:].tolist(),
                position=list(range(len(t.tokens) - 1)),
                mask=t.sampled[1:].tolist(),
            )


def test_all_ways_hold_the_same_and_shared_rows_waste_less():
    some = ragged([2, 20, 7, 7, 13, 19, 3, 4, 11, 20, 5, 2])
    by_kind = [entries(packing.pack(some, range(len(some)), plan(kind))) for kind in KINDS]
    assert by_kind[0] == by_kind[1] == by_kind[2]
    some, plans = ragged([6] * 12), {k: plan(k, tokens_per_micro=60) for k in KINDS}
    area = {k: sum(m.inputs.size for m in packing.pack(some, range(12), p)) for k, p in plans.items()}
    assert area["segments"] < area["buckets"] < area["none"]


def test_too_long_is_said_by_name():
    with pytest.raises(ValueError, match="trajectory long has 39 entries, a row holds 19"):
        packing.pack([trajectory(np.ones(40), np.ones(40), uid="long")], [0], plan("none"))


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    shapes=st.sets(st.tuples(st.integers(1, 3), st.integers(1, 12)), max_size=4),
)
def test_no_other_cut_costs_less(lengths, shapes):
    """Against all there are, written down by recursion."""
    lengths, shapes = sorted(lengths, reverse=True), sorted(shapes | {(2, 12)})

    def every(left):
        if not left:
            yield ()
            return
        for r, t in shapes:
            if t >= left[0]:
                yield from (((r, t), *rest) for rest in every(left[r:]))

    def cost(cut):
        return sum(r * t + packing.MICRO_TOKENS for r, t in cut)

    assert cost(packing.cut(lengths, shapes)) == min(cost(one) for one in every(lengths))


def test_fewer_micro_batches_are_worth_padding_of_64_tokens_each():
    """Three rows of 90: three micro-batches cost 3 * 90 + 3 * 64 = 462 tokens, one of four rows 4 * 90 + 64 = 424."""
    assert packing.cut([90] * 3, [(1, 90), (4, 90)]) == [(4, 90)]
    assert packing.cut([130] * 3, [(1, 130), (4, 130)]) == [(1, 130)] * 3  # 582 and 584


def test_rows_that_are_shared_have_as_much_attention():
    """Twelve rows' worth in a micro-batch of 16: what attention costs is spread over all of them."""
    lengths = np.random.default_rng(1).integers(10, 60, 20)
    p = plan("segments", max_length=64, max_tokens_per_row=64, tokens_per_micro=64 * 16, sequences=20, row_multiple=16)
    (rows,) = packing.pack(ragged(lengths), range(20), p)
    scores = [sum(int((row == i).sum()) ** 2 for i in set(row.tolist()) - {-1}) for row in rows.sequence]
    largest = int(max(lengths) - 1) ** 2
    assert rows.inputs.shape == (16, 64)
    assert max(scores) <= largest + sum(scores) / 16  # the bound of the rule: largest first to the least


def test_of_rows_with_equal_attention_the_emptier_one_is_filled():
    """5² = 4² + 3²: the row with 5 tokens has more room than that with 7."""
    p = packing.Plan((9,), ((2,),), share_rows=True)
    assert packing._balance_rows([[0, 1, 2, 3]], 2, [5, 4, 3, 2], p) == [[0, 3], [1, 2]]


@pytest.mark.parametrize("sizes,counts", [((12, 8), (4,)), ((12, 6), (4, 1)), ((), (4, 1))])
def test_rows_of_one_length_that_fill_every_mini_batch_need_no_smaller_micro_batch(sizes, counts):
    made = plan("buckets", row_lengths=1, tokens_per_micro=80, sizes=sizes)
    assert made.counts == (counts,)
    assert plan("buckets", row_lengths=3, sizes=(12, 8)).counts == plan("buckets", row_lengths=3).counts
