"""The loss of pairs whose halves are anywhere in a batch: by hand, and each half with its own score and slope."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jppo.learner import preference, sharding
from jppo.types import Counts, Rows

CHOSEN, REJECTED = np.float32([2.0, -1.0, 0.5]), np.float32([1.0, 0.5, 0.5])
MARGIN, CENTER = np.float32([0.0, 0.3, 1.0]), 0.1


def log_sigmoid(x):
    return -np.log1p(np.exp(-x))


def test_the_slope_is_bradley_and_terrys_by_hand():
    (loss, metrics), slope = preference.make_slope(center=CENTER)(np.concatenate([CHOSEN, REJECTED]), MARGIN)
    gap, total = CHOSEN - REJECTED - MARGIN, CHOSEN + REJECTED
    np.testing.assert_allclose(loss, np.mean(-log_sigmoid(gap) + CENTER * total**2), rtol=1e-6)
    pull = 1 / (1 + np.exp(gap))  # -d log σ / dgap
    expected = np.concatenate([-pull + 2 * CENTER * total, pull + 2 * CENTER * total]) / 3
    np.testing.assert_allclose(slope, expected, rtol=1e-5)
    about = {"loss": loss, "accuracy": 1 / 3, "margin": -0.5 / 3, "chosen": 0.5, "rejected": 2 / 3}
    assert set(metrics) == set(about)
    for name, value in about.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("kind", ["sigmoid", "ipo"])
def test_the_slopes_of_dpo_and_ipo_by_hand(kind):
    """log π - log π_ref of three pairs whose responses have 1 to 5 tokens; metrics are of rewards, β of each."""
    reference, tokens = np.float32([0.5, -1.0, 2.0, 0.0, 1.0, -3.0]), np.float32([1, 2, 5, 4, 3, 2])
    ratio, beta = np.concatenate([CHOSEN, REJECTED]), 0.25
    made = preference.make_dpo_slope(kind, beta=beta)
    (loss, metrics), slope = made(ratio + reference, reference, tokens)
    if kind == "sigmoid":
        won = beta * (CHOSEN - REJECTED)
        losses, pull, each = -log_sigmoid(won), -beta / (1 + np.exp(won)), np.ones(6)
    else:
        means = ratio / tokens
        gap = means[:3] - means[3:] - 1 / (2 * beta)
        losses, pull, each = gap**2, 2 * gap, 1 / tokens
    np.testing.assert_allclose(loss, losses.mean(), rtol=1e-6)
    np.testing.assert_allclose(slope, np.concatenate([pull, -pull]) * each / 3, rtol=1e-5)
    about = {"loss": loss, "accuracy": 1 / 3, "margin": beta * -0.5 / 3, "chosen": beta * 0.5, "rejected": beta * 2 / 3}
    np.testing.assert_allclose([metrics[name] for name in about], list(about.values()), rtol=1e-5)


@pytest.fixture
def rows():
    """Two rows with the scored tokens of sequences 2, 0 and 1; other entries belong to none, or are not scored."""
    zeros = np.zeros((2, 4), np.int32)
    mask = np.bool_([[0, 1, 0, 1], [0, 0, 1, 0]])
    sequence = np.int32([[2, 2, 0, 0], [-1, 1, 1, -1]])
    return Rows(zeros, zeros, np.maximum(sequence + 1, 0), zeros, mask, sequence)


def test_scores_and_slopes_belong_to_their_sequences(rows):
    table = jnp.arange(8, dtype=jnp.float32).reshape(2, 4) + 1

    def value(params, _):
        return params["w"] * table

    params, mesh = {"w": jnp.float32(2.0)}, sharding.mesh_of_shape((1, 1, 1))
    scores = preference.make_scores(value, mesh=mesh)(params, None, rows, jnp.float32([10.0, 20.0, 30.0, 40.0]))
    np.testing.assert_array_equal(scores, [10 + 2 * 4, 20 + 2 * 7, 30 + 2 * 2, 40])
    slope = jnp.float32([0.5, -1.0, 3.0, 100.0])
    counts = Counts(np.float32(3), np.float32(3))
    (loss, found), grads = jax.value_and_grad(preference.make_pullback(value), has_aux=True)(
        params, rows, counts, slope
    )
    np.testing.assert_allclose(grads["w"], 0.5 * 4 - 1.0 * 7 + 3.0 * 2)
    assert float(loss) == 2.0 * float(grads["w"]) and found.stats == {}
