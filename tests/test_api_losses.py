"""The losses of `jppo.open` are those of `jppo.train`: by its rules, of whole mini-batches, in parts too."""

import dataclasses
import json

import jax
import numpy as np
import pytest

import jppo
from examples import arithmetic
from jppo import settings
from jppo.errors import UserError
from jppo.learner import batch
from jppo.run.api.losses import NO_REFERENCE, Losses
from jppo.run.make import make_passes, make_recipe
from jppo.settings import changed
from jppo.settings.table import TABLE
from jppo.types import Reward
from tests import make

N, MINI = 8, 4
DATA = dict(max_prompt_length=8, max_response_length=6, row_lengths=1)
SELECT = dict(clip_cov_ratio=0.4, clip_cov_lb=-9.0, clip_cov_ub=9.0)
ACTOR = dict(lr=1e-2, ppo_mini_batch_size=MINI, max_tokens_per_device=28, loss_mode="clip_cov", **SELECT)
ACTOR |= dict(use_kl_loss=True, kl_loss_coef=0.3, kl_loss_type="full")
LOW_VAR, TOP_K = dict(kl_loss_type="low_var_kl"), dict(kl_loss_type="forward_kl_topk", kl_topk=5)
ROUTERS = dict(router_aux_loss_coef=0.2, router_z_loss_coef=0.2)
UNSELECTED = {name: TABLE[f"actor.{name}"].default for name in SELECT}
ALL = ROUTERS | dict(entropy_coeff=0.1, kl_loss_max_clamp=0.5)


@pytest.fixture(scope="module")
def m(tmp_path_factory):
    """A mixture with a critic and the initial policy as reference, which it has left by one step."""
    path = tmp_path_factory.mktemp("own") / "model"
    arithmetic.write_model(path, experts=4)
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "moe_intermediate_size": 16}
    (path / "config.json").write_text(json.dumps(json.loads((path / "config.json").read_text()) | shape))
    make.write_weights(path)
    with jppo.open(str(path), critic=dict(loss_agg_mode="token-mean"), data=DATA, actor=ACTOR) as made:
        made.forward_backward(made.examples([[2, 3, 4, 5, 6]]), "cross_entropy")
        made.optim_step(lr=3e-2)
        made.publish()
        yield made


@pytest.fixture(scope="module")
def whole(m):
    """Eight responses and all that a loss reads of them; one response and a fifth of the other tokens are rejected."""
    rng = np.random.default_rng(0)
    lengths = [(int(rng.integers(1, 9)), int(rng.integers(1, 7))) for _ in range(N)]
    made = m.batch([make.trajectory(rng.integers(2, 32, a + b), np.arange(a + b) >= a) for a, b in lengths])
    drawn = {name: rng.normal(size=made.mask.shape) for name in ("advantage", "value", "returns")}
    mask = made.mask & (rng.random(made.mask.shape) > 0.2)
    mask[2] = False
    mask[0, 0] = True
    made = made.replace(mask=mask, weight=rng.random(mask.shape) + 0.5, **drawn)
    return made.replace(old_logprob=m.logprobs(made) + 0.3 * drawn["value"], ref_logprob=m.reference_logprobs(made))


def leaves(carry, params):
    """The gradient of an exchanged carry: all groups of devices have the same."""
    pairs = zip(jax.tree.leaves(carry[0]), jax.tree.leaves(params), strict=True)
    return [np.asarray(x).reshape(-1, *p.shape)[0] for x, p in pairs]


def trained(m, loss):
    return m.critic if loss == "value" else m.policy


def of_train(c):
    """A run of `jppo.train` whose models, lengths and updates are those of a loop, with a KL in the reward."""
    config = settings.default()
    config.update_from_flattened_dict(settings.by_name(c))
    config.data.train_files = config.data.val_files = config.trainer.run_dir = "unread"
    config.data.train_batch_size, config.algorithm.use_kl_in_reward = MINI, True
    return settings.table.sections(config, settings.Settings)


def settings_with(m, loss, options):
    """The settings of `jppo.train` with the options of a loss."""
    section = "critic" if loss == "value" else "actor"
    changes = {f"{section}.{name}": x for name, x in options.items()} | {"rollout.servers": -1}
    if loss not in (None, "value"):
        changes["actor.loss_mode"] = "vanilla" if loss == "ppo" else loss
    c = changed(of_train(m.settings), changes)
    unread = {} if c.actor.loss_mode == "clip_cov" else {f"actor.{name}": x for name, x in UNSELECTED.items()}
    return changed(c, {name: x for name, x in unread.items() if name not in changes})


def by_training(m, whole, loss, options):
    """The gradients of the mini-batches of a step of `jppo.train`."""
    learner, rows, one = m._parts.learner, np.arange(N), trained(m, loss)
    c = settings_with(m, loss, options)
    recipe = make_recipe(c)
    passes = make_passes(c, recipe, m._parts.inputs, learner.mesh)
    shape = (2 * N, whole.mask.shape[1])  # as with padding
    flat = batch.flatten(whole.trajectories, [Reward(0.0, {}, None)] * N, rows, shape=shape)

    def padded(x):
        return np.pad(x, [(0, N), *[(0, 0)] * (x.ndim - 1)])

    cut = dict(order=rows, mini_batch_size=MINI, plan=learner.plan, mesh=learner.mesh)
    seen, compiled = [], passes.critic if loss == "value" else passes.actor
    known = {name: padded(x) for name, x in whole.data.arrays.items()}
    flat = dataclasses.replace(flat, mask=padded(whole.data.mask)).with_arrays(**known)
    minis = batch.mini_batches(flat, whole.trajectories, reads=compiled.reads, **cut)

    def apply(params, opt, carry, step, learns):
        seen.append(leaves(carry, params))
        return params, opt, {"skipped": 0.0}

    further = () if loss == "value" else (recipe.reference_for_loss(learner.reference),)
    how, params = dataclasses.replace(one.trainable, loss=compiled, apply=apply), jax.tree.map(lambda x: x, one.params)
    how.learn(params, one.opt, m._now.step, minis, *further, key=m._now.key)
    return seen


def by_loop(m, whole, loss, options, cuts=None):
    """The gradients of the same mini-batches by `jppo.open`, each in parts if `cuts` has their rows."""
    one, seen, total = trained(m, loss), [], []
    for first in range(0, N, MINI):
        mini = whole[first : first + MINI]
        given = [mini] if cuts is None else [mini[rows] for rows in cuts]
        found = [m.forward_backward(part, loss, of=None if cuts is None else mini, **options) for part in given]
        total.append(sum(x.metrics["critic/vf_loss" if loss == "value" else "actor/loss"] for x in found))
        carry = one._carry if one.trainable.exchange is None else one.trainable.exchange(one._carry)
        one._carry = None
        seen.append(leaves(carry, one.params))
        m.discard()
        one.stepped += 1  # without a step, so that all see the same weights
    one.stepped = 0
    return seen, total


CASES = {
    None: ALL,
    "kl_cov": dict(kl_cov_ratio=0.3, ppo_kl_coef=0.5, loss_agg_mode="token-sum", router_aux_loss_coef=0.2) | LOW_VAR,
    "value": dict(loss_agg_mode="seq-mean-token-sum-norm", loss_scale_factor=3.0, cliprange_value=0.2),
}
SLOW = {
    "vanilla": ALL | TOP_K | dict(clip_ratio=0.1, loss_agg_mode="seq-mean-token-mean"),
    "gspo": dict(kl_loss_type="full+", loss_agg_mode="seq-mean-token-sum"),
    "geo_mean": dict(loss_agg_mode="seq-mean-token-mean"),
    "cispo": dict(use_kl_loss=False, calculate_entropy=False, router_z_loss_coef=0.1),
    "sapo": dict(tau_pos=0.7, tau_neg=1.3, kl_loss_type="k3+"),
    "gpg": TOP_K | dict(kl_log_prob_min_clamp=-3.0),
    "dro": dict(dro_beta=0.3, use_kl_loss=False),
    "dppo_tv": dict(clip_ratio_low=0.1, clip_ratio_high=0.3),
    "dppo_kl": ALL,
    "clip_cov": dict(use_kl_loss=False, clip_cov_ratio=0.3),
}


@pytest.mark.parametrize(
    "loss,options", [*CASES.items(), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW.items())]
)
def test_gradients_are_those_of_training_in_parts_too(m, whole, loss, options):
    expected = by_training(m, whole, loss, options)
    found, total = by_loop(m, whole, loss, options)
    in_parts, sums = by_loop(m, whole, loss, options, cuts=[[3, 0], [1], [2]])
    assert sums == pytest.approx(total, rel=1e-5)
    for ours in (found, in_parts):
        for mine, theirs in zip(ours, expected, strict=True):
            assert (norm := np.sqrt(sum((x**2).sum() for x in theirs))) > 0
            apart = np.sqrt(sum(((x - y) ** 2).sum() for x, y in zip(mine, theirs, strict=True)))
            assert apart <= 2e-6 * norm


def test_each_mini_batch_of_a_step_has_a_draw_of_its_own(m, whole):
    """The second of two equal mini-batches leaves out other tokens than the first, and a step later again others."""
    other, seen = m.another(seed=1), []
    for step in range(2):
        for _ in range(2):
            for part in (whole[:1], whole[1:]):
                other.forward_backward(part, of=whole, **ALL)
            seen.append(leaves(other.policy._carry, other.policy.params))
            other.optim_step(lr=0.0, weight_decay=0.0)
        assert other.publish() == step + 1
    assert len({tuple(np.concatenate([x.ravel() for x in one]).tolist()) for one in seen}) == 4


def losses_of(m, **changes):
    """The losses of the model, opened with other settings of `actor`."""
    c = changed(m.settings, {f"actor.{name}": x for name, x in (UNSELECTED | changes).items()})
    return Losses(c, m._parts.inputs, m._parts.learner.mesh, m._parts.learner.passes)


def test_options_obey_the_rules_of_training(m, whole):
    cases = [
        ("geo_mean", dict(loss_agg_mode="token-sum")),
        ("sapo", dict(loss_agg_mode="seq-mean-token-sum")),
        ("ppo", dict(clip_cov_ratio=0.1)),
        ("kl_cov", dict(clip_cov_lb=0.5)),
        ("vanilla", dict(use_kl_loss=False, kl_loss_max_clamp=1.0)),
        ("vanilla", dict(kl_topk=3)),
        ("gspo", dict(dro_beta=0.3)),
        ("dro", {}),
        (None, dict(kl_cov_ratio=0.1, dro_beta=0.3)),
    ]
    for loss, options in cases:
        with pytest.raises(UserError) as theirs:
            settings.check(settings_with(m, loss, options))
        with pytest.raises(UserError) as ours:
            m.forward_backward(whole, loss, **options)
        assert str(ours.value) == str(theirs.value)
    assert not m.policy.accumulated


def test_settings_that_a_named_loss_does_not_read_are_no_fault_of_it(m):
    opened = losses_of(m, loss_mode="geo_mean", kl_loss_max_clamp=0.5)
    assert opened.find("ppo", dict(use_kl_loss=False)).needs == ("old_logprob", "advantage")
    opened = losses_of(m, loss_mode="vanilla", loss_agg_mode="token-sum")
    with pytest.raises(UserError, match="loss_mode='geo_mean' is always averaged by seq-mean-token-mean"):
        opened.find("geo_mean", {})
    opened.find("geo_mean", dict(loss_agg_mode="seq-mean-token-mean"))


def test_an_exact_kl_needs_a_reference(m):
    inputs = dataclasses.replace(m._parts.inputs, reference=None)
    opened = Losses(m.settings, inputs, m._parts.learner.mesh, m._parts.learner.passes)
    for kind in ("full", "full+", "forward_kl_topk"):
        with pytest.raises(UserError) as e:
            opened.find("ppo", dict(kl_loss_type=kind))
        assert str(e.value) == f"actor.kl_loss_type={kind!r} reads the reference's weights, and {NO_REFERENCE}"
    assert "ref_logprob" in opened.find("ppo", LOW_VAR).needs


def test_the_mean_of_a_function_is_its_own(m, whole):
    """Not that of the critic's settings, nor of a loss whose average is fixed."""
    other = m.another()
    other._parts = dataclasses.replace(m._parts, losses=losses_of(m, loss_mode="geo_mean"))
    values, logprob = other.values(whole)[whole.mask], other.logprobs(whole)[whole.mask]
    ones = whole.replace(weight=np.ones(N))
    found = other.forward_backward(ones, lambda view: view.value, loss_agg_mode="token-sum")
    assert found.metrics["critic/vf_loss"] == pytest.approx(values.sum(), rel=1e-5)
    metrics, tokens = other.forward_backward(ones, "cross_entropy", loss_agg_mode="token-sum")
    assert metrics["actor/loss"] == pytest.approx(-logprob.sum(), rel=1e-5)
    np.testing.assert_allclose(tokens[whole.mask], logprob, atol=1e-5)
    assert other.forward_backward(ones, "cross_entropy").metrics["actor/loss"] == pytest.approx(-logprob.mean(), 1e-5)


def test_a_part_is_one_of_the_whole(m, whole):
    selects = dict(use_kl_loss=False)
    again = m.batch(whole.trajectories).replace(old_logprob=whole.old_logprob, advantage=whole.advantage)
    for part, of in ((again[:2], whole), (whole[:2], whole[1:]), (whole[[0, 0]], whole)):
        with pytest.raises(UserError, match=r"`of` has not all rows of this one; make a part as in of\[rows\]"):
            m.forward_backward(part, of=of, **selects)
    with pytest.raises(UserError, match="reads advantage, which `of` lacks"):
        m.forward_backward(again[:2], of=m.batch(whole.trajectories).replace(old_logprob=0.0 * whole.value), **selects)
    twice = whole[[0, 0, 1]]
    m.forward_backward(twice[1:], of=twice, **selects)
    m.forward_backward(again[:2], "ppo", of=whole, **selects)  # only the numbers of tokens and sequences are read
    m.discard()
