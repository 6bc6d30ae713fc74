"""Comparisons of two steps, on numbers that were made by hand."""

import dataclasses

import numpy as np
import pytest

from jppo.plugins.replay.bundle import Computed
from jppo.plugins.replay.compare import STAGES, compare
from jppo.plugins.replay.tables import cosine


def a_step(**changes):
    """Two samples of two tokens, and two optimizer steps."""
    batch = {
        "tokens": np.array([[5, 6], [7, 0]]),
        "score": np.array([1.0, np.nan], np.float32),
        "old_logprob": np.array([[-1.0, -2.0], [-4.0, 0.0]], np.float32),
        "advantage": np.array([[0.5, 0.5], [-0.5, 0.0]], np.float32),
    }
    updates = [{"model": "actor", "loss": 0.1 * k, "grad_norm": 1.0, "lr": 1e-3} for k in (1, 2)]
    step = Computed(
        models={"policy.hidden_size": "32"},
        rewards={"score": np.array([1.0, np.nan])},
        batch=batch,
        updates=updates,
        metrics={"actor/pg_clipfrac": 0.25},
        weights={".policy['w']": [12345, 0.5, -2.0]},
    )
    return dataclasses.replace(step, **changes)


def changed(name, index, value):
    """The arrays of such a step with another number."""
    batch = {**a_step().batch}
    batch[name] = batch[name].copy()
    batch[name][index] = value
    return batch


def first(step, tolerance=0.0):
    """Stage, place and the two numbers of the first difference from `a_step`; None without one."""
    differences = compare(a_step(), step, tolerance)[1]
    return differences and dataclasses.astuple(differences[0])


def test_equal_steps_do_not_differ_and_a_stage_without_numbers_counts_none():
    results, differences = compare(a_step(), a_step(), 0.0)
    assert not differences and [*results] == [*STAGES] and all(r.largest == 0 for r in results.values())
    counts = {stage: r.count for stage, r in results.items() if r.count}
    # of an optimizer step model and rate, of the state a checksum and two entries; scores as graded, and in the batch
    expected = {"model": 1, "tokens": 4, "rewards": 4, "log-probs": 4, "advantages": 4, "loss": 2, "gradient norm": 2}
    assert counts == expected | {"update": 2 * 2 + 3, "metrics": 1}


@pytest.mark.parametrize(
    "changes,expected",
    [
        ({"models": {"policy.hidden_size": "64"}}, ("model", "policy.hidden_size", "32", "64")),
        ({"batch": changed("tokens", (0, 1), 8)}, ("tokens", "tokens of sample 0, token 1", "6", "8")),
        ({"rewards": {"score": np.array([1.0, 0.0])}}, ("rewards", "score of sample 1", "nan", "0")),
        ({"batch": changed("old_logprob", (1, 0), -3)}, ("log-probs", "old_logprob of sample 1, token 0", "-4", "-3")),
        ({"metrics": {"actor/pg_clipfrac": 0.5}}, ("metrics", "actor/pg_clipfrac", "0.25", "0.5")),
        ({"weights": {".policy['w']": [12345, 0.5, -2.5]}}, ("update", "an entry of .policy['w']", "-2", "-2.5")),
        ({"weights": {}}, ("update", ".policy['w']", "some", "none")),
        ({"updates": a_step().updates[:1]}, ("update", "number of optimizer steps", "2", "1")),
        ({"batch": {**a_step().batch, "value": np.zeros(2)}}, ("values", "value", "none", "some")),
        (
            {"batch": {**a_step().batch, "advantage": np.zeros(2)}},
            ("advantages", "shape of advantage", "(2, 2)", "(2,)"),
        ),
    ],
)
def test_the_first_difference_has_its_stage_place_and_numbers(changes, expected):
    assert first(a_step(**changes)) == expected


def test_of_two_differences_the_one_that_is_computed_first_is_first():
    """A rate of the first optimizer step comes before the loss of the second one, which follows from it."""
    updates = [dict(a_step().updates[0], lr=1e-2), dict(a_step().updates[1], loss=0.3)]
    results, differences = compare(a_step(), a_step(updates=updates), 0.0)
    assert [d.stage for d in differences] == ["update", "loss"]
    assert differences[0].place == "lr of actor in optimizer step 1" and results["loss"].first == differences[1]


def test_a_tolerance_is_relative_to_the_largest_number_and_integers_are_exact():
    near = a_step(batch=changed("old_logprob", (0, 0), -1.0 - 4e-4))  # of 4, the largest: 1e-4
    assert compare(a_step(), near, 0.0)[0]["log-probs"].largest == pytest.approx(1e-4, rel=1e-2)
    assert first(near, 1.1e-4) == [] and first(near, 0.9e-4)[:2] == ("log-probs", "old_logprob of sample 0, token 0")
    later = changed("old_logprob", (0, 0), -1.0 - 4e-4)
    later["old_logprob"][1, 0] = -3.9
    assert first(a_step(batch=later), 1e-3)[1] == "old_logprob of sample 1, token 0", "the first one above it"
    assert first(a_step(batch=changed("tokens", (1, 0), 8)), 10.0) == (
        "tokens",
        "tokens of sample 1, token 0",
        "7",
        "8",
    )
    assert first(a_step(weights={".policy['w']": [999, 0.5, -2.0]}), 1e-9) == [], "checksums say nothing elsewhere"
    assert first(a_step(weights={".policy['w']": [999, 0.5, -2.0]}))[0] == "update"
    nan = a_step(batch=changed("old_logprob", (0, 0), np.nan))
    assert first(nan, 10.0) == ("log-probs", "old_logprob of sample 0, token 0", "-1", "nan")


def test_a_loss_that_cancels_is_compared_with_1():
    tiny = [dict(row, loss=1e-9) for row in a_step().updates]
    recorded = dataclasses.replace(a_step(), updates=[dict(row, loss=3e-9) for row in tiny])
    assert compare(recorded, a_step(updates=tiny), 1e-6)[1] == []
    assert compare(recorded, a_step(updates=tiny), 0.0)[1][0].stage == "loss"


def test_the_cosine_of_gradients():
    a, b = {"x": np.array([3.0, 0.0]), "y": np.array([[4.0]])}, {"x": np.array([0.0, 1.0]), "y": np.array([[0.0]])}
    assert cosine(a, a) == pytest.approx(1.0) and cosine(a, b) == 0.0
    assert cosine(a, {"x": np.array([-6.0, 0.0]), "y": np.array([[-8.0]])}) == pytest.approx(-1.0)
    assert cosine({"x": np.array([1.0])}, {"x": np.array([1.0])}) == 1.0
    assert np.isnan(cosine(None, a))
