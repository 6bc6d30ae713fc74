"""Mini-batches in which every sample was rejected: nothing to learn from; tests/test_recipes.py has whole steps."""

import jax
import numpy as np


def test_a_mini_batch_whose_samples_were_all_rejected_is_as_if_it_were_not_there(learner, drawn):
    """AdamW would go on by momentum and decay."""
    ours, (trajectories, scores) = learner(), drawn(16)
    some = dict(epochs=1, unusable=range(8, 16))
    whole, metrics, _ = ours.update(trajectories, scores, **some)
    half, _, _ = ours.update(trajectories, scores, **some, order=np.arange(8))
    jax.tree.map(np.testing.assert_array_equal, whole, half)
    assert metrics["actor/empty"] == 0.5 and np.isfinite(list(metrics.values())).all()
