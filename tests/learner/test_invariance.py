"""Loss, gradient and update do not depend on how the work is cut: packing, micro-batches, order, devices."""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest

from jppo.learner import optim

SGD = optim.at_rate(optax.sgd)  # the gradient itself, scaled by the learning rate
START = dict(mini=8, epochs=2, lr=0.1, tx=SGD)


def by_token(flat, field):
    """{(trajectory, token of its response): value} of the masked entries of a batch."""
    at = np.nonzero(flat.mask)
    keys = zip(*(x.tolist() for x in at), strict=True)
    return dict(zip(keys, getattr(flat, field)[at].tolist(), strict=True))


def assert_same(found, expected, rename=None):
    (params, metrics, scored), (params0, metrics0, scored0) = found, expected
    for field in ("advantage", "old_logprob"):
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


@pytest.fixture(scope="module", params=["gae", "grpo"])
def base(request, learner, drawn):
    """One device, one row for each trajectory, one micro-batch for each mini-batch; by a critic, and by groups."""
    data = drawn(16)
    return request.param, data, learner(estimator=request.param).update(*data, **START)


def test_the_update_is_no_small_thing(learner, base):
    """Else the tests below would compare nothing with nothing."""
    estimator, _, (params, metrics, _) = base
    before = jax.device_get(learner().weights("actor", 0))
    change = jax.tree.map(lambda a, b: np.abs(a - b).max(), params["actor"], before)
    assert min(jax.tree.leaves(change)) > 1e-4
    assert ("critic" in params) == (estimator == "gae")
    names = ["actor/pg_clipfrac", "actor/kl_loss", "actor/reward_kl_penalty", "actor/reward_kl_penalty_seq"]
    for name in names + (["critic/vf_clipfrac"] if estimator == "gae" else []):
        assert abs(metrics[name]) > 0.01, name


@pytest.mark.parametrize(
    "base,kind,tokens_per_micro",
    [
        ("gae", "none", 60),
        ("gae", "buckets", 24),
        ("gae", "segments", 48),
        ("grpo", "segments", 48),
        pytest.param("gae", "segments", 10**6, marks=pytest.mark.slow),
        *(
            pytest.param("grpo", *case, marks=pytest.mark.slow)
            for case in [("none", 60), ("buckets", 24), ("segments", 10**6)]
        ),
    ],
    indirect=["base"],
)
def test_packing_and_micro_batches(learner, base, kind, tokens_per_micro):
    estimator, data, expected = base
    ours = learner(estimator=estimator)
    found = ours.update(*data, kind=kind, tokens_per_micro=tokens_per_micro, **START)
    if tokens_per_micro < 10**6:
        plan = ours.plan(kind, tokens_per_micro, 8)
        assert all(len(mini.micros) > 1 for mini in ours.minis(found[2], data[0], plan=plan, mini=8))
    assert_same(found, expected)


def test_order_within_a_mini_batch(learner, base):
    estimator, (trajectories, scores), expected = base
    rng = np.random.default_rng(5)
    pairs = np.concatenate([rng.permutation(4), 4 + rng.permutation(4)])  # samples of a prompt stay side by side
    order = (2 * pairs[:, None] + np.array([1, 0])).reshape(-1)
    found = learner(estimator=estimator).update(
        [trajectories[i] for i in order], scores[order], kind="segments", tokens_per_micro=48, **START
    )
    assert_same(found, expected, rename=order)


def test_mini_batches_in_another_order_of_the_same_members(learner, base):
    """A shuffle moves what was scored into new rows, and nothing else."""
    estimator, data, expected = base
    order = np.concatenate([np.random.default_rng(7).permutation(8), np.arange(8, 16)])
    assert_same(learner(estimator=estimator).update(*data, kind="buckets", order=order, **START), expected)


# data, fsdp, tensor, sequence: each alone, and products of them, on 2, 4 and 8 devices
@pytest.mark.parametrize(
    "base,mesh_shape,kind,tokens_per_micro,remat",
    [
        ("grpo", (2, 2, 1, 1), "segments", 48, "none"),
        ("gae", (1, 2, 2, 2), "none", 100, "none"),
        ("gae", (2, 1, 1, 4), "segments", 10**6, "full"),
        pytest.param("gae", (1, 1, 1, 2), "buckets", 24, "none", marks=pytest.mark.slow),
        pytest.param("gae", (2, 2, 1, 1), "segments", 48, "none", marks=pytest.mark.slow),
        *(
            pytest.param("grpo", *case, marks=pytest.mark.slow)
            for case in [
                ((1, 1, 1, 2), "buckets", 24, "none"),
                ((1, 2, 2, 2), "none", 100, "none"),
                ((2, 1, 1, 4), "segments", 10**6, "full"),
            ]
        ),
        *(
            pytest.param(estimator, *case, marks=pytest.mark.slow)
            for estimator in ("gae", "grpo")
            for case in [
                ((2, 1, 1, 1), "buckets", 48, "none"),
                ((1, 2, 1, 1), "segments", 10**6, "full"),
                ((1, 1, 2, 1), "none", 100, "full"),
                ((1, 1, 4, 1), "segments", 48, "none"),  # more than there are key/value heads
                ((1, 1, 1, 4), "none", 10**6, "full"),
                ((1, 1, 2, 2), "segments", 48, "full"),
                ((1, 2, 1, 2), "buckets", 48, "none"),
                ((2, 1, 1, 2), "none", 100, "none"),
                ((8, 1, 1, 1), "segments", 10**6, "none"),
                ((1, 8, 1, 1), "buckets", 10**6, "none"),
                ((2, 2, 2, 1), "none", 100, "none"),
                ((2, 2, 1, 2), "segments", 48, "full"),
                ((2, 1, 2, 2), "buckets", 10**6, "full"),
            ]
        ),
    ],
    indirect=["base"],
)
def test_devices(new_learner, make_recipe, base, mesh_shape, kind, tokens_per_micro, remat):
    estimator, data, expected = base
    ours = new_learner(mesh_shape, make_recipe(estimator), remat=remat)  # a dozen of them would fill the memory
    assert ours.mesh.size == np.prod(mesh_shape)
    assert_same(ours.update(*data, kind=kind, tokens_per_micro=tokens_per_micro, **START), expected)


@pytest.fixture(scope="module")
def routed(new_learner, make_recipe, drawn, drawn_experts):
    """An update of mixtures with the losses of routers: data, recipe, experts, replay -> the result of one device."""
    (trajectories, scores), made = drawn(16), make_recipe("gae", router_aux_loss_coef=0.5, router_z_loss_coef=0.1)
    data = [dataclasses.replace(t, experts=drawn_experts(t.tokens, t.sampled)) for t in trajectories], scores

    def one_device(count, replay):
        return new_learner((1,), made, experts=count, replay=replay).update(*data, **START)

    return data, made, functools.cache(one_device)


@pytest.mark.parametrize("replay", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "mesh_shape,kind,tokens_per_micro,remat",
    [
        ((1, 2, 1, 1, 2), "none", 100, "none"),
        # groups of devices sum gradients apart
        pytest.param((2, 2, 1, 1), "segments", 48, "none", marks=pytest.mark.slow),
        pytest.param((1, 2, 1, 1, 2), "buckets", 24, "none", marks=pytest.mark.slow),
        pytest.param((1, 1, 1, 1), "segments", 48, "none", marks=pytest.mark.slow),
        pytest.param((1, 2, 2, 1), "none", 100, "full", marks=pytest.mark.slow),
        pytest.param((1, 1, 1, 2), "buckets", 24, "none", marks=pytest.mark.slow),
        pytest.param((2, 1, 1, 1), "buckets", 10**6, "none", marks=pytest.mark.slow),
        pytest.param((1, 1, 1, 1, 2), "none", 100, "none", marks=pytest.mark.slow),
        pytest.param((2, 1, 1, 1, 2), "segments", 48, "full", marks=pytest.mark.slow),
        pytest.param((1, 1, 2, 1, 4), "buckets", 10**6, "none", marks=pytest.mark.slow),
        pytest.param((1, 1, 1, 2, 2), "segments", 48, "none", marks=pytest.mark.slow),
        pytest.param((1, 1, 1, 1, 8), "none", 10**6, "full", marks=pytest.mark.slow),
    ],
)
def test_experts(new_learner, routed, mesh_shape, kind, tokens_per_micro, remat, replay):
    data, made, of_one = routed
    count = 8 if len(mesh_shape) == 5 else 5
    expected = of_one(count, replay)
    found = new_learner(mesh_shape, made, remat=remat, experts=count, replay=replay)
    assert_same(found.update(*data, kind=kind, tokens_per_micro=tokens_per_micro, **START), expected)
    assert not replay or count != 5 or 0.4 < expected[1]["rollout/routing_differs"] < 0.75, "two of five, at random"


def test_the_losses_of_routers_are_in_the_update(new_learner, make_recipe, routed):
    data, _, of_one = routed
    params, metrics, _ = of_one(8, True)
    plain, others, _ = new_learner((1,), make_recipe("gae"), experts=8, replay=True).update(*data, **START)
    assert metrics["actor/router_aux_loss"] > 1.8 and metrics["actor/router_z_loss"] > 0.1
    assert metrics["actor/experts_dropped"] == 0 and metrics["actor/expert_load_max"] > 1
    assert {"actor/expert_load_min", "actor/router_entropy"} <= others.keys()
    routers = [tree["actor"]["layers1"]["experts"]["router"] for tree in (params, plain)]
    assert np.abs(routers[0] - routers[1]).max() > 1e-3


@pytest.mark.parametrize("value_range", [pytest.param(None, marks=pytest.mark.slow), (-1.0, 1.0)])
def test_normalised_values_and_two_lambdas(new_learner, make_recipe, drawn, value_range):
    data, made = drawn(16), make_recipe("decoupled", value_norm_decay=0.8, value_range=value_range)
    expected = new_learner((1, 1, 1, 1), made).update(*data, **START)
    found = new_learner((2, 2, 1, 1), made, padding=8).update(*data, kind="segments", tokens_per_micro=48, **START)
    assert_same(found, expected)
    stats = [flat.value_norm for _, _, flat in (found, expected)]
    np.testing.assert_allclose(*stats, rtol=1e-5)
    assert stats[0][0] == np.float32(0.8) * np.float32(0.5) + np.float32(0.2), "the batch is in them"


@pytest.mark.parametrize("base", ["gae", pytest.param("grpo", marks=pytest.mark.slow)], indirect=True)
def test_adamw_on_eight_devices(learner, base):
    estimator, data, _ = base
    how = dict(mini=8, epochs=1, lr=1e-4)  # Adam divides by the size of the gradient, and so of its rounding
    expected = learner(estimator=estimator).update(*data, **how)
    assert_same(learner((2, 2, 2), estimator).update(*data, kind="none", tokens_per_micro=100, **how), expected)
