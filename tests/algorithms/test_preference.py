"""The loss of pairs, by hand and by torch."""

import math

import jax
import numpy as np
import pytest

from jppo.algorithms.preference import bradley_terry, dpo, ipo


def test_by_hand():
    # e^2 = 7.389056: σ(2) = 0.880797, -log of it 0.126928; σ(0) = 1/2; σ(-3 - 0.5) = 1 / (1 + e^3.5) = 0.029312
    chosen, rejected, margin = np.array([3.0, 1.0, -1.0]), np.array([1.0, 1.0, 2.0]), np.array([0.0, 0.0, 0.5])
    loss = bradley_terry(chosen, rejected, margin, center=0.0)
    np.testing.assert_allclose(loss, [0.126928, math.log(2), 3.529750], atol=2e-6)
    centred = bradley_terry(chosen, rejected, margin, center=0.1)
    np.testing.assert_allclose(centred - loss, [1.6, 0.4, 0.1], rtol=1e-5)


def test_dpo_and_ipo_by_hand():
    # β = 0.5: σ(1) = 0.731059 and σ(-0.5) = 0.377541, -log of them 0.313262 and 0.974077; IPO's aim is 1 / (2 * 0.2)
    chosen, rejected = np.array([3.0, 0.0]), np.array([1.0, 1.0])
    np.testing.assert_allclose(dpo(chosen, rejected, beta=0.5), [0.313262, 0.974077], atol=2e-6)
    np.testing.assert_allclose(ipo(chosen, rejected, beta=0.2), [(2 - 2.5) ** 2, (-1 - 2.5) ** 2], rtol=1e-6)


def test_far_scores_are_finite():
    far = np.array([1e4, -1e4], np.float32)
    slope = jax.grad(lambda x: bradley_terry(x, -x, np.zeros(2, np.float32), center=0.0).sum())(far)
    np.testing.assert_allclose(bradley_terry(far, -far, np.zeros(2, np.float32), center=0.0), [0.0, 2e4])
    np.testing.assert_allclose(slope, [0.0, -2.0])  # -2 (1 - σ(2x))


@pytest.mark.parametrize("center", [0.0, 0.3])
def test_loss_and_slope_are_torchs(center):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    chosen, rejected, margin = rng.normal(0, 2, (3, 7)).astype(np.float32)
    theirs = [torch.tensor(x, requires_grad=True) for x in (chosen, rejected)]
    probability = 1 / (1 + torch.exp(-(theirs[0] - theirs[1] - torch.tensor(margin))))
    expected = (-torch.log(probability) + center * (theirs[0] + theirs[1]) ** 2).sum()
    expected.backward()
    loss, slopes = jax.value_and_grad(
        lambda pair: bradley_terry(*pair, margin, center=center).sum(),
    )((chosen, rejected))
    np.testing.assert_allclose(loss, expected.item(), rtol=1e-5)
    for ours, tensor in zip(slopes, theirs, strict=True):
        np.testing.assert_allclose(ours, tensor.grad.numpy(), atol=1e-5)
