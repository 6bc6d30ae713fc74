"""An update with what waits on the host, is computed anew or given away: the same numbers, and what it holds."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jppo import settings
from jppo.learner import make, ppo
from jppo.learner.trainable import CompiledLoss
from jppo.models import placing
from jppo.models.decoder import Decoder
from tests.make import typed


def kinds(tree):
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree)}


def updated(ours, drawn, *, params=False, optimizer=False, reference=False, tokens_per_micro=60):
    """Policy and optimizer after two steps of an update whose parts wait on the host as asked."""
    place = {True: placing.to_host, False: lambda tree: tree}
    trajectories, scores = drawn(16)
    policy, judge = ours.weights("actor", 0), place[reference](ours.weights("actor", 1))
    how, opt = ours.make_trainable("actor", policy, lr=1e-2, tx=ours.adamw)
    policy, opt = place[params](policy), place[optimizer](opt)
    plan = ours.plan("none", tokens_per_micro, 8)
    flat, _ = ours.score(trajectories, scores, plan=plan, policy=policy, reference=judge, value=None)
    minis = ours.minis(flat, trajectories, plan=plan, mini=8)
    after = how.learn(policy, opt, np.int32(0), minis, ours.recipe.reference_for_loss(judge))
    assert all(x.is_deleted() for x in jax.tree.leaves((policy, opt)))  # wherever it lay
    assert kinds(judge) == ({"pinned_host"} if reference else {"device"})
    return after


@pytest.mark.parametrize("mesh_shape", [pytest.param((1, 1, 1), marks=pytest.mark.slow), (2, 2, 2)])
def test_what_waits_on_the_host_changes_no_bit(new_learner, make_recipe, drawn, mesh_shape):
    ours = new_learner(mesh_shape, make_recipe("grpo", kl_loss_type="full", kl_penalty="full"))
    expected = updated(ours, drawn)
    each = ("params", "optimizer", "reference")
    for where in (*({name: True} for name in each), dict.fromkeys(each, True)):
        policy, opt, metrics = updated(ours, drawn, **where)
        assert kinds(policy) == ({"pinned_host"} if "params" in where else {"device"})
        assert kinds(opt) == ({"pinned_host"} if "optimizer" in where else {"device"})
        jax.tree.map(np.testing.assert_array_equal, jax.device_get((policy, opt)), jax.device_get(expected[:2]))
        assert metrics == expected[2]


@pytest.mark.parametrize("remat", ["dots", pytest.param("full", marks=pytest.mark.slow)])
def test_what_is_computed_anew_is_the_same(new_learner, make_recipe, drawn, remat):
    plain, ours = (new_learner((1, 1, 1), make_recipe("grpo")) for _ in range(2))
    model = (Decoder(ours.cfg, remat=remat), ours.cfg)
    ours.passes = ppo.make_passes(ppo.Models(model, None, model), ours.recipe, temperature=0.8, chunk_tokens=64)
    expected = updated(plain, drawn)
    for found in (updated(ours, drawn), updated(ours, drawn, params=True, optimizer=True)):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), *map(jax.device_get, (found[0], expected[0]))
        )


def test_one_array_in_two_trees_comes_once_and_what_is_there_stays():
    there, waiting = jnp.arange(4.0), placing.to_host(jnp.arange(3.0))
    a, (b, c, none) = placing.to_device((waiting, (waiting, there, None)))
    assert a is b and c is there and none is None and kinds((a, c)) == {"device"}
    assert not waiting.is_deleted() and kinds(waiting) == {"pinned_host"}
    back = placing.put_back((a, c), (waiting, there))
    assert [x.sharding.memory_kind for x in back] == ["pinned_host", "device"]
    taken = placing.take((waiting, there))
    assert waiting.is_deleted() and not there.is_deleted() and taken[1] is there
    np.testing.assert_array_equal(taken[0], np.arange(3.0))


def test_a_line_names_the_offloaded_parts_that_there_are():
    c, here = settings.default(), jax.devices()[0]
    without = SimpleNamespace(critic=None, reference=None)
    assert make.describe_offload(typed(c), None, here) is None
    c.critic.param_offload = c.ref.param_offload = True
    assert make.describe_offload(typed(c), without, here) is None
    assert ": critic, reference" in make.describe_offload(typed(c), None, here)
    c.actor.optimizer_offload = True
    assert ": policy's optimizer; on a CPU" in make.describe_offload(typed(c), without, here)


def watched(ours, drawn, sequences):
    """The most bytes in live arrays while a mini-batch of so many sequences is at work, and its micro-batches."""
    trajectories, scores = drawn(16)
    policy, reference = ours.weights("actor", 0), ours.weights("actor", 1)
    how, opt = ours.make_trainable("actor", policy, lr=1e-2, tx=ours.adamw)
    plan = ours.plan("none", 23, 8)
    flat, _ = ours.score(trajectories, scores, plan=plan, policy=policy, reference=reference, value=None)
    most, calls = 0, 0

    def accumulate(*args):
        nonlocal most, calls
        out = how.loss.accumulate(*args)
        del args
        calls += 1
        most = max(most, sum(x.nbytes for x in jax.live_arrays() if not x.is_deleted()))
        return out

    (mini,) = ours.minis(flat, trajectories[:sequences], plan=plan, mini=sequences)
    assert len({micro.rows.mask.shape for micro in mini.micros}) == 1
    dataclasses.replace(how, loss=CompiledLoss(accumulate)).learn(policy, opt, np.int32(0), [mini], None)
    return most, calls


def test_memory_does_not_grow_with_the_micro_batches(new_learner, make_recipe, drawn):
    ours = new_learner((1, 1, 1), make_recipe("grpo", kl_loss_type=None))
    watched(ours, drawn, 2)  # what is made once
    few, many = watched(ours, drawn, 2), watched(ours, drawn, 16)
    assert (few[1], many[1]) == (2, 16)
    rows = 23 * (7 * 4 + 4 * 4)  # of one micro-batch, a few bytes more than it has
    scalars = 16 * 10 * 4  # sums that wait for the metrics
    assert many[0] - few[0] <= rows + scalars


def test_what_is_replaced_is_given_away(new_learner, make_recipe):
    ours = new_learner((1, 1, 1), make_recipe("grpo"))
    policy = ours.weights("actor", 0)
    how, opt = ours.make_trainable("actor", policy, lr=1e-2, tx=ours.adamw)
    weights = sum(x.nbytes for x in jax.tree.leaves(policy))
    held = how.apply.lower(policy, opt, how.zeros(), np.int32(0), np.True_).compile().memory_analysis()
    assert held.alias_size_in_bytes >= 3 * weights  # parameters and both means
    assert held.temp_size_in_bytes < 0.2 * weights
    after = how.apply(policy, opt, how.zeros(), np.int32(0), np.True_)
    assert all(x.is_deleted() for x in jax.tree.leaves((policy, opt)))
    assert not any(x.is_deleted() for x in jax.tree.leaves(after))
