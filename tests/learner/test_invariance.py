"""Loss, gradient and update do not depend on how the work is cut: packing, micro-batches, order, devices."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jppo.errors import UserError
from jppo.learner import optim, state, update
from jppo.learner.algorithm import Algorithm, Term
from jppo.learner.trainable import Trainable
from jppo.models import lora
from jppo.models.lora import Lora, join

SGD = optim.at_rate(optax.sgd)  # the gradient itself, scaled by the learning rate
START = dict(mini=8, epochs=2, lr=0.1, tx=SGD)


def by_token(flat, field):
    """{(trajectory, token of its response): value} of the masked entries of a batch."""
    at = np.nonzero(flat.mask)
    keys = zip(*(x.tolist() for x in at), strict=True)
    return dict(zip(keys, flat[field][at].tolist(), strict=True))


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
QUICK = [
    ("grpo", (2, 2, 1, 1), "segments", 48, "none"),
    ("gae", (1, 2, 2, 2), "none", 100, "none"),
    ("gae", (2, 1, 1, 4), "segments", 10**6, "full"),
]
CUTS = [
    ((2, 1, 1, 1), "buckets", 48, "none"),
    ((1, 2, 1, 1), "segments", 10**6, "full"),
    ((1, 1, 2, 1), "none", 100, "full"),
    ((1, 1, 4, 1), "segments", 48, "none"),  # more than there are key/value heads
    ((1, 1, 1, 2), "buckets", 24, "none"),
    ((1, 1, 1, 4), "none", 10**6, "full"),
    ((1, 1, 2, 2), "segments", 48, "full"),
    ((1, 2, 1, 2), "buckets", 48, "none"),
    ((2, 1, 1, 2), "none", 100, "none"),
    ((8, 1, 1, 1), "segments", 10**6, "none"),
    ((1, 8, 1, 1), "buckets", 10**6, "none"),
    ((2, 2, 2, 1), "none", 100, "none"),
    ((2, 2, 1, 2), "segments", 48, "full"),
    ((2, 1, 2, 2), "buckets", 10**6, "full"),
    *(case[1:] for case in QUICK),
]
SLOW = [(estimator, *case) for estimator in ("gae", "grpo") for case in CUTS if (estimator, *case) not in QUICK]


@pytest.mark.parametrize(
    "base,mesh_shape,kind,tokens_per_micro,remat",
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
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


def draw_kept(t, most):
    """Kept tokens of a response with the sampled one among them; some samples are of the whole vocabulary."""
    rng, out = np.random.default_rng(t.tokens), np.full((len(t.tokens), most), -1, np.int32)
    for i in np.flatnonzero(t.sampled & (rng.random(len(t.tokens)) < 0.8)):
        ids = rng.permutation(32)[: rng.integers(1, most + 1)]
        out[i, : len(ids)] = np.where(np.isin(t.tokens[i], ids), ids, np.append(ids[1:], t.tokens[i]))
    return dataclasses.replace(t, kept=out)


@pytest.fixture(scope="module")
def truncated(new_learner, make_recipe, drawn):
    """Responses with kept tokens, a recipe with an exact KL and its update on one device."""
    (trajectories, scores), made = drawn(16), make_recipe("gae", kl_loss_type="full")
    data = [draw_kept(t, 3 + i % 4) for i, t in enumerate(trajectories)], scores
    return data, made, new_learner((1,), made, kept=6).update(*data, **START)


@pytest.mark.parametrize(
    "mesh_shape,kind,tokens_per_micro,shared",
    [
        ((1, 2, 2, 1), "segments", 48, None),
        ((1, 1, 1, 1), "prefix", 48, (8, 16)),
        pytest.param((2, 1, 2, 2), "buckets", 24, None, marks=pytest.mark.slow),
    ],
)
def test_kept_tokens(new_learner, truncated, mesh_shape, kind, tokens_per_micro, shared):
    data, made, expected = truncated
    ours = new_learner(mesh_shape, made, kept=6, shared=shared)
    assert_same(ours.update(*data, kind=kind, tokens_per_micro=tokens_per_micro, **START), expected)


def test_kept_tokens_change_log_probs_entropies_and_kls(new_learner, make_recipe, drawn, truncated):
    """Fewer tokens have more probability each and less entropy; one alone is certain, whatever the model."""
    (trajectories, scores), made, (_, metrics, scored) = drawn(16), *truncated[1:]
    _, whole_metrics, whole = new_learner((1,), made).update(trajectories, scores, **START)
    more = scored["old_logprob"] - whole["old_logprob"]
    assert (more >= -1e-6).all() and more[scored.mask].mean() > 0.5
    assert metrics["actor/entropy"] < 0.7 * whole_metrics["actor/entropy"]
    assert metrics["actor/kl_loss"] < whole_metrics["actor/kl_loss"]
    one = [dataclasses.replace(t, kept=np.where(t.sampled, t.tokens, -1)[:, None]) for t in trajectories]
    alone = new_learner((1,), made, kept=6).update(one, scores, **START)
    assert not alone[2]["old_logprob"].any() and not alone[2]["ref_logprob"].any() and not alone[1]["actor/kl_loss"]


@pytest.mark.parametrize("mesh_shape, kind", [((1, 1, 2), "buckets"), ((2, 1, 1), "segments")])
def test_a_term_of_the_logits_and_of_a_whole_mini_batch(new_learner, make_recipe, drawn, mesh_shape, kind):
    """A z-loss on the tokens of more than the mini-batch's median surprise: no mesh and no cut changes it."""

    def surprising(view):
        surprise = jnp.where(view.mask, -view.logprob, jnp.nan)
        return view.mask & (surprise > jnp.nanmedian(surprise))

    loss = Algorithm(
        terms=(
            Term(lambda view: -view.advantage * view.logprob, "mine/surrogate"),
            Term(lambda view: view.before * view.statistic("z") ** 2, "mine/z", 0.1, corrected=False),
        ),
        before=surprising,
        statistics={"z": lambda logits, targets, vocabulary: vocabulary.logsumexp(logits)},
    )
    data, made = drawn(16), make_recipe("grpo", loss=loss)
    expected = new_learner((1, 1, 1), made).update(*data, **START)
    found = new_learner(mesh_shape, made).update(*data, kind=kind, tokens_per_micro=48, **START)
    assert_same(found, expected)
    assert expected[1]["mine/z"] > 0.1


def test_the_losses_of_routers_are_in_the_update(new_learner, make_recipe, routed):
    (data, *_), how = routed, dict(experts=8, replay=True)
    made = make_recipe("grpo", router_aux_loss_coef=0.5, router_z_loss_coef=0.1)  # a critic's would be the same
    params, metrics, _ = new_learner((1,), made, **how).update(*data, **START)
    plain, others, _ = new_learner((1,), make_recipe("grpo"), **how).update(*data, **START)
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
    stats = [flat["value_norm"] for _, _, flat in (found, expected)]
    np.testing.assert_allclose(*stats, rtol=1e-5)
    assert stats[0][0] == np.float32(0.8) * np.float32(0.5) + np.float32(0.2), "the batch is in them"


def dropped_out(ours, data, *, rate, seed=0, kind="none", tokens_per_micro=10**6):
    """The adapters after two epochs of two mini-batches, with dropout of their inputs."""
    how = Lora(3, 6, ("q_proj", "o_proj", "down_proj"), rate)
    what = state.adapters(ours.cfg, ours.mesh, how, head="lm")
    learned, base = state.adapt(what, ours.weights("actor", 0), how, key=jax.random.key(3))
    learned = jax.tree.map(lambda x: x + 0.3 * np.sin(np.arange(x.size, dtype=np.float32)).reshape(x.shape), learned)
    learned = jax.device_put(learned, what.shardings)
    plan, reference = ours.plan(kind, tokens_per_micro, 8), ours.weights("actor", 1)
    flat, _ = ours.score(*data, plan=plan, policy=join(learned, base), reference=reference, value=None)
    opt, places = state.init_optimizer(SGD, what, learned)
    schedule = optim.make_schedule("constant", lr=0.1, warmup_steps=0, total_steps=1, min_lr_ratio=0.0)
    trainable = Trainable(
        "actor", ours.passes.actor, update.make_apply(SGD, schedule, shardings=(what.shardings, places)),
        update.make_zeros(what.shapes, what.shardings), update.make_exchange(what.shardings), base=base,
    )  # fmt: skip
    minis = ours.minis(flat, data[0], plan=plan, mini=8, epochs=2)
    key = jax.random.key(seed)
    return jax.device_get(trainable.learn(learned, opt, np.int32(5), minis, reference, key=key)[0])


def test_dropout_of_adapters(learner, drawn):
    """It follows from the key, the trajectory and the position: not from rows, micro-batches or devices."""
    data, one = drawn(16), learner(estimator="grpo")
    expected = dropped_out(one, data, rate=0.4)

    def distance(found):
        return max(jax.tree.leaves(jax.tree.map(lambda a, b: np.abs(a - b).max(), found, expected)))

    assert distance(dropped_out(one, data, rate=0.4, kind="segments", tokens_per_micro=48)) < 1e-5
    assert distance(dropped_out(learner((2, 2, 1, 1), "grpo"), data, rate=0.4)) < 1e-5
    assert distance(dropped_out(one, data, rate=0.4, seed=1)) > 1e-3


def test_dropout_of_routed_experts_is_refused(new_learner, make_recipe):
    cfg = new_learner((1,), make_recipe("grpo"), experts=4).cfg
    lora.adapter_table(cfg, Lora(2, 4, ("q_proj",), 0.1), head="lm")
    with pytest.raises(UserError, match=r"adapters of routed experts .*gate_proj.* have no dropout"):
        lora.adapter_table(cfg, Lora(2, 4, ("q_proj", "gate_proj"), 0.1), head="lm")


@pytest.mark.slow  # test_optim.py has AdamW's numbers and shards, and the meshes above the gradient
@pytest.mark.parametrize("base", ["gae", "grpo"], indirect=True)
def test_adamw_on_eight_devices(learner, base):
    estimator, data, _ = base
    how = dict(mini=8, epochs=1, lr=1e-4)  # Adam divides by the size of the gradient, and so of its rounding
    expected = learner(estimator=estimator).update(*data, **how)
    assert_same(learner((2, 2, 2), estimator).update(*data, kind="none", tokens_per_micro=100, **how), expected)
