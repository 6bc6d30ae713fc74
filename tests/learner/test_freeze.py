"""Updates with frozen parameters, against AdamW in numpy on gradients of the whole model without theirs."""

import jax
import numpy as np
import pytest

from jppo import settings
from jppo.errors import UserError
from jppo.learner import make, state
from jppo.learner.make import Trained
from jppo.learner.trainable import Trainable
from jppo.models import freeze
from jppo.models.lora import Base
from tests.make import typed

FROZEN = "*.self_attn.*, *norm*"
RATE, DECAY, CLIP, BETAS = 0.05, 0.1, 0.5, (0.9, 0.99)


def section(name, config):
    """The optimizer of `make` as its settings have it."""
    s = config[name]
    s.lr, s.weight_decay, s.grad_clip, s.betas = RATE, DECAY, CLIP, BETAS
    return getattr(typed(config), name)


def adamw(params, gradients):
    """AdamW on flat dicts of arrays, over the gradients of consecutive steps, each clipped by its global norm."""
    params = {name: np.float64(x) for name, x in params.items()}
    first, second = (dict.fromkeys(params, 0.0) for _ in range(2))
    for step, gradient in enumerate(gradients(params), 1):
        norm = np.sqrt(sum(np.sum(np.float64(g) ** 2) for g in gradient.values()))
        for name, g in gradient.items():
            g = np.float64(g) * min(1.0, CLIP / norm)
            first[name] = BETAS[0] * first[name] + (1 - BETAS[0]) * g
            second[name] = BETAS[1] * second[name] + (1 - BETAS[1]) * g**2
            moments = first[name] / (1 - BETAS[0] ** step), second[name] / (1 - BETAS[1] ** step)
            params[name] -= RATE * (moments[0] / (np.sqrt(moments[1]) + 1e-8) + DECAY * params[name])
    return params


def flat(tree):
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree.leaves_with_path(tree)}


@pytest.mark.parametrize(
    "mesh_shape, name",
    [
        ((1, 1, 1, 1), "critic"),
        ((2, 2, 2, 1), "actor"),
        pytest.param((2, 2, 2, 1), "critic", marks=pytest.mark.slow),
        pytest.param((1, 1, 1, 1), "actor", marks=pytest.mark.slow),
    ],
)
def test_the_rest_learns_as_with_their_gradients_left_out(learner, drawn, config, mesh_shape, name):
    ours = learner(mesh_shape)
    trajectories, scores = drawn(16)
    whole, reference = ours.weights(name, 0), ours.weights("actor", 1)
    plan, further = ours.plan("none", 10**6, 8), (reference,) if name == "actor" else ()
    models = dict(policy=ours.weights("actor", 0), reference=reference, value=ours.weights("critic", 2))
    data, _ = ours.score(trajectories, scores, plan=plan, **models)
    minis = [*ours.minis(data, trajectories, plan=plan, mini=8, name=name)]
    what, loss = ours.what[name], getattr(ours.passes, name)

    def full_gradients(learned):
        """Yields the gradient of each mini-batch by the whole model with these weights, its frozen ones left out."""
        how = Trainable(name, loss, None, ours.zeros[name], ours.exchange[name])
        for mini in minis:
            now = jax.tree.map_with_path(
                lambda path, x: np.float32(learned.get(jax.tree_util.keystr(path), x)), jax.device_get(whole)
            )
            carry, _ = how.forward_backward(
                jax.device_put(now, what.shardings), None, how.zeros(), mini, None, *further
            )
            summed = carry if how.exchange is None else how.exchange(carry)
            of_all = {key: g if g.ndim == whole_flat[key].ndim else g[0] for key, g in flat(summed[0]).items()}
            yield {key: of_all[key] for key in learned}

    whole_flat = flat(whole)
    frozen = freeze.find_frozen(what.cfg, FROZEN, f"{name}.freeze", head=what.head)
    learned, rest = freeze.divide(what.cfg, whole, frozen, head=what.head)
    expected = adamw(flat(learned), full_gradients)
    before = flat(rest)

    layout = state.model_weights(what.cfg, ours.mesh, head=what.head, param_dtype="float32", frozen=frozen)
    trained = Trained(layout, learned, Base(rest))
    how, opt = make.make_trainable(section(name, config), name, loss, trained, 1, scaled=False)
    after, opt, metrics = how.learn(learned, opt, np.int32(0), minis, *further)

    assert flat(after).keys() == expected.keys() == whole_flat.keys() - before.keys() and before
    for key, x in flat(after).items():
        np.testing.assert_allclose(x, expected[key], rtol=2e-3, atol=2e-4, err_msg=key)
        assert np.any(x != whole_flat[key]), f"{key} has not learned"
    for key, x in flat(how.model(after).base.params).items():
        np.testing.assert_array_equal(x, whole_flat[key], err_msg=key)
    of_states = [key for key in flat(opt) if any(key.endswith(path) for path in before)]
    assert not of_states and any(key.endswith("['embed']['embedding']") for key in flat(opt))
    assert metrics[f"{name}/skipped"] == 0


def test_a_frozen_weight_has_no_gradient_program(learner):
    """The sums of gradients, one argument of every update, are of what learns alone."""
    ours = learner()
    what = ours.what["critic"]
    frozen = freeze.find_frozen(what.cfg, "*.self_attn.*", "critic.freeze", head="value")
    layout = state.model_weights(what.cfg, ours.mesh, head="value", param_dtype="float32", frozen=frozen)
    count = [sum(x.size for x in jax.tree.leaves(one.shapes)) for one in (what, layout)]
    D, HA, KA, L = 16, 16, 8, 2
    assert count[0] - count[1] == L * (2 * D * HA + 2 * D * KA + HA + 2 * KA)  # q and o, k and v, biases of q, k and v


def test_adapters_leave_nothing_to_freeze(config):
    c = config
    c.critic.freeze, c.model.lora_rank = "*.self_attn.*", 4
    with pytest.raises(UserError, match=r"critic.freeze=.*: with adapters of rank 4 all weights"):
        settings.check(c)
    c.critic.lora_rank = 0
    settings.check(c)
    c.actor.freeze = "*.mlp.*"
    with pytest.raises(UserError, match=r"actor.freeze='\*.mlp.\*': with adapters of rank 4"):
        settings.check(c)
