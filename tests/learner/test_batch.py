"""The flat batch: groups of samples, the alignment by hand, and the way to rows and back."""

import dataclasses

import numpy as np
import pytest

from jppo.algorithms import advantage
from jppo.learner import batch, estimate, estimators, packing, sharding
from jppo.learner.episodes import comparison_groups, make_episodes
from jppo.types import Reward, Trajectory
from tests.make import sample

GRADED, FAILED = Reward(0.5, {}, None), Reward(float("nan"), {}, "boom", unusable="boom")
WHOLE, REFUSED = Reward(1.0, {}, None), Reward(0.0, {}, None, unusable="not graded: boom")


def trajectory(tokens, sampled, uid="a"):
    tokens, sampled = np.asarray(tokens, np.int32), np.asarray(sampled, bool)
    logprob = np.where(sampled, -tokens / 10, 7.0).astype(np.float32)
    return Trajectory(uid, tokens, sampled, logprob, np.where(sampled, 3, -1), "", "stop", 1)


@pytest.mark.parametrize(
    "unusable, n, expected",
    [
        ("......", 3, [0, 0, 0, 3, 3, 3]),
        ("x.....", 3, [0, 1, 1, 3, 3, 3]),
        (".x..xx", 3, [0, 1, 0, 3, 4, 5]),
        ("xxx.x.", 3, [0, 1, 2, 3, 4, 3]),
        ("..x.", 1, [0, 1, 2, 3]),
        ("xx..x.", 2, [0, 1, 2, 2, 4, 5]),
    ],
)
def test_a_group_has_the_usable_samples_of_a_prompt(unusable, n, expected):
    found = comparison_groups(np.array([x == "x" for x in unusable]), n)
    assert found.tolist() == expected and found.dtype == np.int32


@pytest.mark.parametrize(
    "rewards, baseline, compared, expected",
    [
        ([WHOLE, REFUSED, WHOLE, WHOLE], None, False, [None, "not graded: boom", None, None]),
        ([WHOLE, REFUSED, WHOLE, WHOLE], None, True, ["no other response", "not graded: boom", None, None]),
        ([WHOLE] * 4, [REFUSED, WHOLE], False, ["greedy response is not graded: boom"] * 2 + [None] * 2),
    ],
)
def test_what_a_sample_cannot_be_learned_from_is_said_once(rewards, baseline, compared, expected):
    prompts, some = [sample("").prompt] * 2, [trajectory([1, 2], [0, 1])] * 4
    found = make_episodes(prompts, some, rewards, baseline, compares=compared)
    for reward, why in zip(found.rewards, expected, strict=True):
        assert reward.unusable is None if why is None else why in reward.unusable
    assert found.group.tolist() == ([0, 1, 2, 2] if REFUSED in rewards else [0, 0, 2, 2])
    assert found.greedy is None if baseline is None else found.greedy.tolist() == [0, 0, 1, 1]


def test_alignment_by_hand():
    """Prompt 5 6, sampled 7 8, tool 9, sampled 10; an unusable one; one of which nothing was sampled; padding."""
    some = [
        trajectory([5, 6, 7, 8, 9, 10], [0, 0, 1, 1, 0, 1]),
        trajectory([1, 2], [0, 1]),
        trajectory([3, 4, 5], [0, 0, 0]),
    ]
    group, greedy = np.int32([0, 1, 0]), np.float32([1, 2, 3])
    data = batch.flatten(some, [GRADED, FAILED, GRADED], group, greedy, shape=(4, 5))
    np.testing.assert_array_equal(data.mask, [[1, 1, 0, 1, 0], [0] * 5, [0] * 5, [0] * 5])
    logprob = [[-0.7, -0.8, 0, -1.0, 0], [-0.2, 0, 0, 0, 0], [0] * 5, [0] * 5]
    np.testing.assert_allclose(data.rollout_logprob, logprob, rtol=1e-6)
    np.testing.assert_array_equal(data.first, [1, 0, 0, 0])
    np.testing.assert_array_equal(data.score, np.float32([0.5, np.nan, 0.5, np.nan]))
    np.testing.assert_array_equal(data.group, [0, 1, 0, 3])
    np.testing.assert_array_equal(data["greedy"], [1, 2, 3, 0])
    assert some[1].sampled.any(), "what was sampled stays as it was"
    np.testing.assert_array_equal(batch.arrays(data, some)["tokens"][:2], [[7, 8, 9, 10, 0], [2, 0, 0, 0, 0]])


def test_a_truncated_response_is_not_learned_but_compared():
    """GRPO of the scores 1, 0 and 0, whose second is of a truncated response: 1 - 1/3 and -1/3, and no token of it."""
    some = [trajectory([1, 2, 3], [0, 1, 1]) for _ in range(3)]
    some[1] = dataclasses.replace(some[1], finish="length")
    rewards = [Reward(score, {}, None) for score in (1.0, 0.0, 0.0)]
    data = batch.flatten(some, rewards, np.zeros(3, np.int32), shape=(3, 2), filter_truncated=True)
    np.testing.assert_array_equal(data.mask, [[1, 1], [0, 0], [1, 1]])
    how = dict(kl_penalty=None, correction=None, bypass=True)
    dr_grpo = estimators.by_group(advantage.grpo, norm_adv_by_std=False)
    found, _ = estimate.make_advantages(dr_grpo, **how)(data, np.float32(0))
    np.testing.assert_allclose(found["advantage"], np.float32([[2, 2], [0, 0], [-1, -1]]) / 3, rtol=1e-5)
    assert batch.flatten(some, rewards, np.zeros(3, np.int32), shape=(3, 2)).mask.all(), "without the filter"


def test_a_given_response_is_marked_and_learned_however_it_was_cut():
    """A sampled response, a given one that was cut, padding."""
    sampled = trajectory([1, 2, 3], [0, 1, 1])
    shown = dataclasses.replace(sampled, version=np.int32([-1, -1, -1]), logprob=np.zeros(3, np.float32))
    some, rewards = [dataclasses.replace(t, finish="length") for t in (sampled, shown)], [GRADED, GRADED]
    how = dict(shape=(3, 2), filter_truncated=True)
    data = batch.flatten(some, rewards, np.zeros(2, np.int32), has_given=True, **how)
    assert data["given"].tolist() == [False, True, False] and data["given"].dtype == np.bool_
    np.testing.assert_array_equal(data.mask, [[0, 0], [1, 1], [0, 0]])
    np.testing.assert_array_equal(data.sampled, np.zeros((3, 2)))
    assert not data.rollout_logprob[1].any() and data.length.tolist() == [2, 2, 0]
    assert batch.flatten(some, rewards, np.zeros(2, np.int32), **how).get("given") is None


def test_a_response_that_does_not_fit_is_named():
    with pytest.raises(ValueError, match="trajectory long has a response of 4 tokens, the batch holds 3"):
        batch.flatten([trajectory(np.ones(6), [0, 0, 1, 1, 1, 1], "long")], [GRADED], np.int32([0]), shape=(1, 3))


def drawn(rng, uids):
    """Trajectories with tool output, those of a prompt in any places of the batch."""
    prompts = {uid: rng.integers(1, 99, rng.integers(1, 7)) for uid in uids}
    out = []
    for uid in uids:
        rest = int(rng.integers(1, 14))
        sampled = np.concatenate([np.zeros(len(prompts[uid]), bool), rng.random(rest) < 0.7])
        out.append(trajectory(np.concatenate([prompts[uid], rng.integers(1, 99, rest)]), sampled, uid))
    return out


@pytest.mark.parametrize("kind", ["none", "buckets", "segments", "prefix"])
def test_the_way_to_rows_and_back(kind):
    """Of mini-batches in any order, rejected tokens left out; shared prompts have no place in the batch."""
    rng, mesh = np.random.default_rng(0), sharding.mesh_of_shape((1, 1, 1))
    plan = packing.make_plan(
        kind, max_length=20, row_lengths=2, max_tokens_per_row=40, tokens_per_micro=90, sequences=9, row_multiple=1,
        shared=(6, 13),
    )  # fmt: skip
    for _ in range(20):
        some = drawn(rng, rng.permutation(list("aaaabbbcc")).tolist())
        data = batch.flatten(some, [GRADED, FAILED] * 4 + [GRADED], np.zeros(9, np.int32), shape=(12, 13))
        x = np.where(data.mask, rng.normal(size=data.mask.shape), 0.0).astype(np.float32)
        micros = batch.pack_micros(data, some, plan=plan, mesh=mesh)
        packed = [(m.host, batch.pack_like(data, x, m.host)) for m in micros]
        np.testing.assert_array_equal(batch.unpack_rows(data, packed), x)
        data.mask[:] &= rng.random(data.mask.shape) < 0.8
        tokens = batch.arrays(data, some)["tokens"]
        seen = np.zeros(data.mask.shape, int)
        order = rng.permutation(9)
        for mini in batch.mini_batches(
            data.with_arrays(old_logprob=x),
            some,
            reads=("old_logprob", "advantage"),
            order=order,
            mini_batch_size=5,
            plan=plan,
            mesh=mesh,
        ):
            kept = 0
            for micro in mini.micros:
                rows = micro.rows
                np.testing.assert_array_equal(rows.mask, batch.pack_like(data, data.mask, rows))
                assert [*micro.arrays] == ["old_logprob"]  # the batch has no advantage
                np.testing.assert_array_equal(micro.arrays["old_logprob"], batch.pack_like(data, x, rows))
                np.testing.assert_array_equal(rows.targets[rows.mask], batch.pack_like(data, tokens, rows)[rows.mask])
                assert not rows.mask[rows.sequence < 0].any()
                seen += batch.unpack_rows(data, [(rows, rows.mask.astype(int))])
                kept += rows.mask.sum()
            assert mini.counts.tokens == max(kept, 1) and mini.learns == bool(kept)
        np.testing.assert_array_equal(seen, data.mask)


@pytest.mark.parametrize(
    "count,size,expected",
    [
        (12, 4, [4, 4, 4]),  # as ever where the size divides
        (13, 4, [5, 4, 4]),  # one branch more is no optimizer step of its own
        (14, 4, [4, 4, 3, 3]),  # a half is rounded up
        (3, 4, [3]),  # a short step
        (1, 4, [1]),
        (5, 4, [5]),
        (6, 4, [3, 3]),
        (23, 16, [23]),
        (257, 64, [65, 64, 64, 64]),
    ],
)
def test_a_remainder_is_spread_over_the_mini_batches(count, size, expected):
    """Every trajectory is in one of them, in the given order, and the weights of tokens are alike."""
    rng, mesh = np.random.default_rng(0), sharding.mesh_of_shape((1, 1, 1))
    some = [trajectory([1, 2, 3, 4], [0, 1, 1, 1]) for _ in range(count)]
    how = dict(max_length=8, row_lengths=1, max_tokens_per_row=8, tokens_per_micro=32, sequences=size, row_multiple=1)
    plan = packing.make_plan("buckets", **how)
    data = batch.flatten(some, [GRADED] * count, np.zeros(count, np.int32), shape=(count, 4))
    order = rng.permutation(count)
    found = list(batch.mini_batches(data, some, reads=(), order=order, mini_batch_size=size, plan=plan, mesh=mesh))
    members = [sorted({int(i) for m in mini.micros for i in np.unique(m.rows.sequence) if i >= 0}) for mini in found]
    assert [len(one) for one in members] == expected == [int(mini.counts.sequences) for mini in found]
    ends = np.cumsum(expected)
    assert members == [sorted(part.tolist()) for part in np.split(order, ends[:-1])]
    assert {m.rows.mask.shape for mini in found for m in mini.micros} <= set(plan.shapes), "a new program"
