"""Mini-batches in which every sample was rejected: nothing to learn from, so nothing changes."""

import jax
import numpy as np


def assert_equal(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_step_whose_samples_were_all_rejected_changes_no_weight(learner, drawn):
    ours, (trajectories, scores) = learner(), drawn(16)
    out, metrics, _ = ours.update(trajectories, scores, unusable=range(16))
    assert_equal(out["actor"], jax.device_get(ours.weights("actor", 0)))
    assert_equal(out["critic"], jax.device_get(ours.weights("critic", 2)))
    assert np.isfinite(list(metrics.values())).all(), {k: v for k, v in metrics.items() if not np.isfinite(v)}
    assert (metrics["actor/empty"], metrics["critic/empty"], metrics["actor/skipped"]) == (1.0, 1.0, 0.0)


def test_a_mini_batch_whose_samples_were_all_rejected_is_as_if_it_were_not_there(learner, drawn):
    """AdamW would go on by momentum and decay."""
    ours, (trajectories, scores) = learner(), drawn(16)
    some = dict(epochs=1, unusable=range(8, 16))
    whole, metrics, _ = ours.update(trajectories, scores, **some)
    half, _, _ = ours.update(trajectories, scores, **some, order=np.arange(8))
    assert_equal(whole, half)
    assert metrics["actor/empty"] == 0.5
