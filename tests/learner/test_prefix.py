"""Rows that have a prompt once for its samples: what is in them, what they cost, and that nothing else changes."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jppo.learner import batch, packing, ppo
from jppo.types import Reward
from tests.learner.test_invariance import START, assert_same
from tests.learner.test_packing import trajectory


def plan(**over):
    sizes = dict(max_length=20, row_lengths=3, max_tokens_per_row=40, tokens_per_micro=90, sequences=12)
    sizes |= dict(row_multiple=1, shared=(20, 20))
    return packing.make_plan("prefix", **(sizes | over))


def test_alignment_by_hand():
    """Prompt 5 6 7 with samples 8 9 and 8 (tool's 3) 4, in each of which 7 is read; prompt 1 with one sample."""
    some = [
        trajectory([5, 6, 7, 8, 9], [0, 0, 0, 1, 1], "a"),
        trajectory([1, 2], [0, 1], "b"),
        trajectory([5, 6, 7, 8, 3, 4], [0, 0, 0, 1, 0, 1], "a"),
    ]
    (rows,) = packing.pack(
        some, [40, 41, 42], plan(max_length=8, max_tokens_per_row=8, row_lengths=1, tokens_per_micro=16, sequences=2)
    )
    np.testing.assert_array_equal(rows.inputs, [[5, 6, 7, 8, 3, 7, 8, 0], [1, 0, 0, 0, 0, 0, 0, 0]])
    np.testing.assert_array_equal(rows.targets, [[6, 7, 8, 3, 4, 8, 9, 0], [2, 0, 0, 0, 0, 0, 0, 0]])
    np.testing.assert_array_equal(rows.mask, [[0, 0, 1, 0, 1, 1, 1, 0], [1, 0, 0, 0, 0, 0, 0, 0]])
    np.testing.assert_array_equal(rows.segment, [[-1, -1, 1, 1, 1, 2, 2, 0], [1, 0, 0, 0, 0, 0, 0, 0]])
    np.testing.assert_array_equal(rows.position, [[0, 1, 2, 3, 4, 2, 3, 0], [0, 0, 0, 0, 0, 0, 0, 0]])
    np.testing.assert_array_equal(rows.sequence, [[-1, -1, 42, 42, 42, 40, 40, -1], [41, -1, -1, -1, -1, -1, -1, -1]])


@pytest.mark.parametrize(
    "samples, shared",
    [
        ([([1, 2, 3, 4], 3), ([1, 2, 3, 5], 3)], 2),
        ([([1, 2, 3, 4], 3), ([1, 2, 9, 4], 3)], 1),  # of prompts that were cut in two ways: 1 2, and 2 is read twice
        ([([1, 2, 3, 4], 2), ([1, 2, 3, 5], 3)], 1),  # 3 was sampled in one of them
        ([([1, 2], 1), ([1, 3], 1)], 0),  # a prompt of one token
        ([([1, 2], 1), ([9, 3], 1)], 0),
        ([([1, 2, 3, 4], 4), ([1, 2, 3, 4], 3)], 2),  # nothing of the one is learned from
        ([([1, 2, 3], 3), ([1, 2, 3, 4], 3)], 1),  # nor has it anything else: one entry of it stays its own
    ],
)
def test_what_samples_share(samples, shared):
    some = [trajectory(tokens, np.arange(len(tokens)) >= prompt) for tokens, prompt in samples]
    assert packing.shared_entries(some) == shared


def grouped(sizes, rng, longest=20):
    """Samples of as many prompts as there are sizes, in any order, with tool output; and one that nothing teaches."""
    out = []
    for g, size in enumerate(sizes):
        prompt = rng.integers(1, 99, rng.integers(1, longest - 2))
        for j in range(size):
            rest = int(rng.integers(1, longest - len(prompt) + 1))
            sampled = np.concatenate([np.zeros(len(prompt), bool), rng.random(rest) < 0.7])
            if j % 4 != 3:
                sampled[len(prompt)] = True
            out.append(trajectory(np.concatenate([prompt, rng.integers(1, 99, rest)]), sampled, str(g)))
    return [out[i] for i in rng.permutation(len(out))]


def read_back(micros):
    """{trajectory: its entries, those of its prompt first}, each found once, its own entries side by side."""
    names, out = ("inputs", "targets", "position", "mask"), {}
    for rows in micros:
        for r, numbers in enumerate(rows.sequence):
            (prompt,) = np.nonzero(rows.segment[r] == -1)
            assert prompt.tolist() == list(range(len(prompt)))
            for i in set(numbers.tolist()) - {-1}:
                at = np.flatnonzero(numbers == i)
                assert i not in out and (np.diff(at) == 1).all()
                assert len(set(rows.segment[r, at])) == 1 and rows.segment[r, at[0]] > 0
                assert rows.position[r, at[0]] == len(prompt)
                at = np.concatenate([prompt, at])
                out[i] = {name: getattr(rows, name)[r, at].tolist() for name in names}
    return out


@settings(deadline=None, max_examples=100)
@given(
    sizes=st.lists(st.sampled_from([1, 1, 2, 3, 5]), max_size=6),
    seed=st.integers(0, 10**6),
    row=st.integers(19, 70),
    tokens_per_micro=st.sampled_from([1, 64, 333, 5000]),
    row_multiple=st.sampled_from([1, 2, 8]),
    row_lengths=st.integers(1, 4),
    dear=st.sampled_from([0.0, 0.02, 1.0]),
    most=st.sampled_from([(20, 6), (20, 20), (4, 20), (7, 15)]),
)
def test_every_trajectory_once_in_a_shape_of_the_plan(
    sizes, seed, row, tokens_per_micro, row_multiple, row_lengths, dear, most
):
    some = grouped(sizes, np.random.default_rng(seed))
    how = dict(tokens_per_micro=tokens_per_micro, row_multiple=row_multiple, row_lengths=row_lengths)
    how |= dict(shared=most, price=lambda length: 1 + dear * length)
    p = plan(max_tokens_per_row=row, sequences=max(1, len(some)), **how)
    micros = packing.pack(some, range(100, 100 + len(some)), p)
    assert {rows.inputs.shape for rows in micros} <= set(p.shapes)
    assert all(r % row_multiple == 0 for r, _ in p.shapes)
    found = read_back(micros)
    for rows in micros:
        own = [np.sum((rows.sequence == i) & (rows.segment[:, :1] == -1)) for i in range(100, 100 + len(some))]
        assert max(own, default=0) <= most[1]
        assert (rows.segment == -1).sum(1).max() <= most[0]
    assert found.keys() == set(range(100, 100 + len(some)))
    for i, t in enumerate(some, 100):
        assert found[i] == dict(
            inputs=t.tokens[:-1].tolist(),
            targets=t.tokens[1:].tolist(),
            position=list(range(len(t.tokens) - 1)),
            mask=t.sampled[1:].tolist(),
        )


def samples_of(prompt, response, count):
    tokens = np.arange(1, prompt + response + 1)
    return [trajectory(tokens, tokens > prompt) for _ in range(count)]


def test_a_prompt_is_stored_once_where_that_costs_less():
    """A prompt of 10 and six responses of 60: 9 + 6 * 60 entries against 6 * 69; with dear pairs a row for each."""
    some, sizes = samples_of(10, 60, 6), dict(max_length=70, max_tokens_per_row=370, tokens_per_micro=480, sequences=6)
    sizes["shared"] = (10, 60)
    (cheap,) = packing.pack(some, range(6), plan(row_lengths=5, **sizes))
    assert cheap.inputs.shape == (1, 376)
    assert (cheap.segment < 0).sum() == 9 and (cheap.sequence >= 0).sum() == 6 * 60
    dear = packing.pack(some, range(6), plan(row_lengths=5, price=lambda length: length, **sizes))
    assert all(rows.inputs.shape[1] == 80 and (rows.segment >= 0).all() for rows in dear)


def test_a_prompt_whose_samples_need_several_rows_is_in_each():
    some = samples_of(11, 10, 5)  # 10 entries shared, 10 of each: three rows of two, or less
    micros = packing.pack(some, range(5), plan(max_length=21, max_tokens_per_row=30, row_lengths=1))
    starts = sum(int(((rows.segment == -1) & (rows.position == 0)).sum()) for rows in micros)
    assert starts == 2 and len(read_back(micros)) == 5  # the fifth sample is alone with its prompt, as a segment


@pytest.mark.parametrize(
    "prompt, response, samples, expected",
    [(64, 128, 3, 64 + 3 * 128), (64, 128, 16, 512), (10, 300, 16, 310), (100, 300, 1, 400)],
)
def test_the_longest_row_holds_all_samples_or_many_times_their_prompt(prompt, response, samples, expected):
    assert packing.longest_row(prompt, response, samples=samples) == expected


@pytest.mark.parametrize("opening", [0, pytest.param(5, marks=pytest.mark.slow), 11])
def test_log_probs_are_those_of_whole_rows_where_an_opening_text_makes_the_prompt_longer(
    new_learner, make_recipe, opening
):
    """Attention looks for a shared prompt in the first `max_prompt_length` entries alone."""
    rng = np.random.default_rng(0)
    beginning = rng.integers(0, 32, 8 + opening)
    some = [trajectory([*beginning, *rng.integers(0, 32, 12)], np.arange(20 + opening) >= 8 + opening)] * 12
    ours = new_learner(recipe=make_recipe("grpo"), shared=(8, 23), sequences=12)
    how = dict(max_length=31, row_lengths=1, tokens_per_micro=512, sequences=12, row_multiple=1)
    found = {}
    for kind, row in (("none", 31), ("prefix", 256)):
        p = packing.make_plan(kind, max_tokens_per_row=row, shared=(8, 23), **how)
        data = batch.flatten(some, [Reward(0.0, {}, None)] * 12, np.zeros(12, np.int32), shape=ours.shape)
        micros = batch.pack_micros(data, some, plan=p, mesh=ours.mesh)
        data = ppo.with_old_logprob(ours.passes, ours.recipe, data, micros, ours.weights("actor", 0))
        found[kind] = data["old_logprob"]
        assert kind == "none" or (micros[0].host.segment[0] == -1).any()
    assert (found["none"][data.mask] < 0).all() and data.mask.sum() == 12 * 12
    np.testing.assert_allclose(found["prefix"], found["none"], atol=1e-5)


@pytest.fixture(scope="module")
def shared(drawn):
    """16 trajectories of prompts that 1, 2, 3 or 5 of them have, all over the batch."""
    trajectories, scores = drawn(16)
    groups = [[0, 1, 9], [2, 6, 7, 8, 15], [3], [4, 5, 12], [10, 14], [11], [13]]
    out = list(trajectories)
    for members in groups:
        first = trajectories[members[0]]
        prompt = int(first.sampled.argmax())
        for i in members:
            own = slice(int(trajectories[i].sampled.argmax()), 24 - prompt + int(trajectories[i].sampled.argmax()))
            parts = {
                name: np.concatenate([getattr(first, name)[:prompt], getattr(trajectories[i], name)[own]])
                for name in ("tokens", "sampled", "logprob", "version")
            }
            out[i] = dataclasses.replace(trajectories[i], uid=first.uid, **parts)
    return out, scores


@pytest.fixture(scope="module", params=["gae", "grpo"])
def base(request, learner, shared):
    """One row for each trajectory, one micro-batch for each mini-batch, on one device."""
    return request.param, learner(estimator=request.param).update(*shared, **START)


@pytest.mark.parametrize(
    "base, tokens_per_micro, shuffled",
    [
        ("grpo", 10**6, False),
        ("grpo", 60, True),
        pytest.param("gae", 10**6, False, marks=pytest.mark.slow),
        pytest.param("gae", 60, True, marks=pytest.mark.slow),
    ],
    indirect=["base"],
)
def test_the_update_is_that_of_whole_rows(new_learner, make_recipe, shared, base, tokens_per_micro, shuffled):
    """Log-probs, values, advantages, losses, gradients; with mini-batches that have only some samples of a prompt."""
    estimator, expected = base
    ours = new_learner(recipe=make_recipe(estimator), shared=(8, 23))
    p = ours.plan("prefix", tokens_per_micro, 8)
    rows = [one for start in (0, 8) for one in packing.pack(shared[0][start : start + 8], range(8), p)]
    assert sum((one.segment < 0).any(axis=1).sum() for one in rows) >= 2
    order = np.concatenate([np.random.default_rng(7).permutation(8), np.arange(8, 16)]) if shuffled else None
    found = ours.update(*shared, kind="prefix", tokens_per_micro=tokens_per_micro, order=order, **START)
    assert_same(found, expected)


@pytest.mark.parametrize(
    "base, mesh_shape",
    [
        ("grpo", (1, 1, 1, 2)),
        pytest.param("gae", (1, 1, 1, 2), marks=pytest.mark.slow),
        *(
            pytest.param(estimator, shape, marks=pytest.mark.slow)
            for estimator in ("gae", "grpo")
            for shape in [(2, 1, 2, 1), (1, 2, 1, 1), (1, 2, 2, 2)]
        ),
    ],
    indirect=["base"],
)
def test_devices(new_learner, make_recipe, shared, base, mesh_shape):
    estimator, expected = base
    ours = new_learner(mesh_shape, make_recipe(estimator), shared=(8, 23))
    assert_same(ours.update(*shared, kind="prefix", tokens_per_micro=100, **START), expected)
