"""Loss, gradient and update do not depend on how the work is cut: packing, micro-batches, order, devices."""

import jax
import numpy as np
import optax
import pytest

SGD = optax.identity()  # the gradient itself, scaled by the learning rate
START = dict(mini=8, epochs=2, lr=0.1, tx=SGD)


def by_token(scored, field):
    """{(trajectory, position): value} of the masked entries of a batch."""
    out = {}
    for mini in scored:
        for micro in mini:
            rows, values = jax.device_get((micro.rows, getattr(micro, field)))
            at = np.nonzero(rows.mask)
            keys = zip(rows.sequence[at].tolist(), rows.position[at].tolist(), strict=True)
            out |= dict(zip(keys, values[at].tolist(), strict=True))
    return out


def assert_same(found, expected, rename=None):
    (params, metrics, scored), (params0, metrics0, scored0) = found, expected
    for field in ("advantage", "returns", "logp"):
        a, b = by_token(scored, field), by_token(scored0, field)
        a = a if rename is None else {(rename[s], p): v for (s, p), v in a.items()}
        assert a.keys() == b.keys()
        np.testing.assert_allclose([a[k] for k in b], list(b.values()), atol=1e-5, err_msg=field)
    jax.tree.map_with_path(
        lambda path, a, b: np.testing.assert_allclose(a, b, atol=1e-5, err_msg=jax.tree_util.keystr(path)),
        params,
        params0,
    )
    assert metrics.keys() == metrics0.keys()
    for name in metrics0:
        np.testing.assert_allclose(metrics[name], metrics0[name], rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.fixture(scope="module")
def base(learner, drawn):
    """One device, one row for each trajectory, one micro-batch for each mini-batch."""
    data = drawn(16)
    return data, learner().update(*data, **START)


def test_the_update_is_no_small_thing(learner, base):
    """Else the tests below would compare nothing with nothing."""
    (_, metrics, _), policy = base[1], jax.device_get(learner().weights("actor", 0))
    change = jax.tree.map(lambda a, b: np.abs(a - b).max(), base[1][0]["actor"], policy)
    assert min(jax.tree.leaves(change)) > 1e-4
    for name in ("actor/pg_clipfrac", "critic/vf_clipfrac", "actor/kl_loss", "actor/reward_kl_penalty"):
        assert abs(metrics[name]) > 0.01, name


@pytest.mark.parametrize(
    "kind,tokens_per_micro",
    [("none", 60), ("buckets", 24), ("segments", 10**6), ("segments", 48)],
)
def test_packing_and_micro_batches(learner, base, kind, tokens_per_micro):
    data, expected = base
    found = learner().update(*data, kind=kind, tokens_per_micro=tokens_per_micro, **START)
    if tokens_per_micro < 10**6:
        assert all(len(mini) > 1 for mini in found[2]), "the case must have several micro-batches"
    assert_same(found, expected)


def test_order_within_a_mini_batch(learner, base):
    (trajectories, scores), expected = base
    rng = np.random.default_rng(5)
    order = np.concatenate([rng.permutation(8), 8 + rng.permutation(8)])
    found = learner().update(
        [trajectories[i] for i in order], scores[order], kind="segments", tokens_per_micro=48, **START
    )
    assert_same(found, expected, rename=order)


@pytest.mark.parametrize(
    "mesh_shape,kind,tokens_per_micro",
    [((8, 1, 1), "segments", 10**6), ((1, 8, 1), "buckets", 10**6), ((2, 2, 2), "none", 100)],
)
def test_eight_devices(learner, base, mesh_shape, kind, tokens_per_micro):
    data, expected = base
    found = learner(mesh_shape).update(*data, kind=kind, tokens_per_micro=tokens_per_micro, **START)
    assert_same(found, expected)


def test_adamw_on_eight_devices(learner, base):
    data, _ = base
    how = dict(mini=8, epochs=1, lr=1e-4)  # Adam divides by the size of the gradient, and so of its rounding
    expected = learner().update(*data, **how)
    assert_same(learner((2, 2, 2)).update(*data, kind="none", tokens_per_micro=100, **how), expected)
