"""User-defined estimators, losses, KL estimators, optimizers and engines, in a file outside the package."""

import json
import pathlib

import pytest

from jppo import settings, train
from jppo.errors import UserError
from jppo.rewards import graders
from jppo.types import Reward
from tests.make import ROOT, one_line, read_lines

FILE = """
import jax.numpy as jnp
import optax

from jppo.algorithms import advantage
from jppo.learner.algorithm import Algorithm, Term

def sign(c):
    def outcome(view):
        return c.algorithm.gamma * jnp.sign(advantage.grpo(view.score, view.group, norm_adv_by_std=False))

    return Algorithm(outcome=outcome)

def misread(c):
    return Algorithm(lambda view: view.reward - view.values)

def unclipped(c):
    return Algorithm(terms=(Term(surrogate, "actor/pg_loss"),))

def surrogate(view):
    ratio = jnp.exp(jnp.where(view.mask, view.logprob - view.old_logprob, 0.0))
    return -view.advantage * ratio, {"mine/ratio": ratio}

def both(c):
    return Algorithm(outcome=lambda view: view.score, terms=(Term(surrogate),))

def against(c):
    return Algorithm(terms=(Term(lambda view: view.kl * view.mask),))

def wide(c):
    return Algorithm(terms=(Term(lambda view: view.logprob.sum(1)),))

def by_sum(c):
    return Algorithm(terms=(Term(surrogate, aggregation="seq-mean-token-sum"),))

def squared(logp, ref_logp):
    return jnp.square(logp - ref_logp)

def plain(section, learning_rate, matrices):
    return optax.chain(optax.add_decayed_weights(section.weight_decay), optax.sgd(learning_rate))

def strange(c):
    return Algorithm(outcome=lambda view, gamma=c.algorithm.gama: gamma * view.score)

def without():
    return Algorithm()

def empty(c):
    return Algorithm()

def number(c):
    return 3

def engine(c, run, hosts=None):
    return 3

"""


@pytest.fixture
def parts(tmp_path):
    (tmp_path / "parts.py").write_text(FILE)
    return tmp_path / "parts.py"


@pytest.mark.usefixtures("quick_compilation")
def test_a_run_with_user_defined_estimator_loss_kl_and_optimizer(small_run, parts, monkeypatch):
    c = small_run
    monkeypatch.setitem(graders.GRADERS.own, "arithmetic", lambda text, _: Reward(float(len(text)), {}, None))
    c.rollout.name, c.rollout.n, c.rollout.multi_turn.enable = "inprocess", 2, False
    c.algorithm.adv_estimator, c.actor.loss_mode = f"{parts}:sign", f"{parts}:unclipped"
    c.actor.use_kl_loss, c.actor.kl_loss_type, c.actor.lr = True, f"{parts}:squared", 1e-2
    c.actor.ppo_mini_batch_size, c.algorithm.gamma, c.actor.optimizer = 4, 0.5, f"{parts}:plain"
    settings.check(c)
    train.train(c)
    run = pathlib.Path(c.trainer.run_dir)
    steps = [step for step in read_lines(run / "metrics.jsonl") if "actor/pg_loss" in step]
    assert len(steps) == 2
    for step in steps:
        assert step["critic/advantages/max"] == 0.5 and step["critic/advantages/min"] == -0.5
        assert step["mine/ratio"] == pytest.approx(step["actor/ratio_mean"])
    assert steps[-1]["actor/kl_loss"] > 0
    assert json.loads((run / "config.json").read_text())["actor"]["loss_mode"] == f"{parts}:unclipped"


@pytest.mark.parametrize(
    ("setting", "spec", "said"),
    [
        ("algorithm.adv_estimator", "{}:plain", "missing 2 required positional arguments"),
        ("algorithm.adv_estimator", "{}:number", "returns int; it must return a jppo.learner.algorithm.Algorithm"),
        ("algorithm.adv_estimator", "{}:empty", "its Algorithm has no advantage; give it one"),
        ("actor.loss_mode", "{}:sign", "has no terms"),
        ("actor.loss_mode", "{}:both", "has an advantage, which only algorithm.extension and algorithm.adv_estimator"),
        (
            "algorithm.adv_estimator",
            "{}:both",
            "has terms of a loss, which only algorithm.extension and actor.loss_mode",
        ),
        ("actor.loss_mode", "{}:against", "a term reads kl, and actor.use_kl_loss=False has no reference for it"),
        ("actor.loss_mode", "{}:wide", "ValueError: a term is [R, T], a number for each token, or one number"),
        ("algorithm.adv_estimator", "{}:strange", "AttributeError: 'Algorithm' object has no attribute 'gama'"),
        ("algorithm.adv_estimator", "{}:without", "takes 0 positional arguments but 1 was given"),
        ("algorithm.adv_estimator", "{}:misread", "AttributeError: 'TokenView' object has no attribute 'values'"),
        ("algorithm.adv_estimator", "{}:sign", "compares the samples of a prompt, and rollout.n=1"),
        ("actor.loss_mode", "{}:unclaped", "did you mean 'unclipped'?"),
        ("actor.kl_loss_type", "{}:cubed", "defines no 'cubed'"),
        ("actor.optimizer", "{}:plane", "defines no 'plane'"),
        ("rollout.name", "{}:motor", "defines no 'motor'"),
    ],
)
def test_a_user_defined_part_that_cannot_be_is_one_line(parts, capsys, setting, spec, said):
    spec = spec.format(parts)
    words = (f"--config={ROOT}/configs/quickstart.py", f"--config.{setting}={spec}", "--config.rollout.n=1")
    line = one_line(capsys, train.main, *words)
    assert line.startswith("error: ") and said in line and spec in line


def test_the_needs_of_a_user_defined_loss_are_checked(config, parts):
    config.actor.loss_mode, config.actor.loss_agg_mode = f"{parts}:by_sum", "seq-mean-token-mean"
    with pytest.raises(UserError, match=r"is always averaged by seq-mean-token-sum; set that"):
        settings.check(config)


def test_an_engine_that_is_none_is_one_line(small_run, parts):
    small_run.rollout.name = f"{parts}:engine"
    settings.check(small_run)
    with pytest.raises(UserError, match=r"returns int, which has no ready\(\)"):
        train.train(small_run)
