"""Runs with frozen parameters: what a checkpoint, an export and the account of memory have of them."""

import json
import pathlib

import jax
import numpy as np
import pytest
import safetensors.numpy

from jppo import export, settings, sft, train
from jppo.errors import UserError
from jppo.learner.make import make_mesh
from jppo.models import hf
from jppo.preflight import preview
from jppo.run.inputs import read_inputs
from jppo.run.make import make_learner
from tests.make import changed, typed, untimed, weights, write_weights

FREEZE = {"actor.freeze": "*.mlp.*, model.embed_tokens.weight", "critic.freeze": "*.self_attn.*"}


@pytest.fixture
def frozen_run(small_run, tmp_path):
    """Two steps with frozen parts of the policy and the critic, and a KL to the initial policy."""
    write_weights(tmp_path / "model")
    more = {"model.init": "pretrained", "algorithm.use_kl_in_reward": True, "critic.value_head_std": 0.2}
    rates = {"actor.lr": 1e-2, "critic.lr": 1e-2}
    return changed(small_run, FREEZE | more | rates)


def tensors(path):
    return safetensors.numpy.load_file(path / "model.safetensors")


def assert_learned(before, after, is_frozen):
    """Every tensor is there; the frozen ones are those of before to the bit, and all others differ."""
    assert before.keys() == after.keys()
    for name, x in before.items():
        assert np.array_equal(x, after[name]) == is_frozen(name), name


def is_frozen(name):
    return ".mlp." in name or "embed_tokens" in name


def test_a_run_resumes_to_the_bit_and_exports_every_weight(frozen_run, tmp_path, capsys):
    train.train(frozen_run)
    run, model = pathlib.Path(frozen_run.trainer.run_dir), tmp_path / "model"
    assert_learned(tensors(model), tensors(run / "hf"), is_frozen)

    again = changed(frozen_run, {"trainer.run_dir": str(tmp_path / "again"), "trainer.total_training_steps": 1})
    train.train(again)
    train.train(changed(again, {"trainer.total_training_steps": 2}))
    assert untimed(again.trainer.run_dir) == untimed(run) and weights(again.trainer.run_dir) == weights(run)

    arrays = json.loads((run / "checkpoints/2/about/metadata").read_text())["arrays"]
    assert any(".policy[" in name and "['attn']" in name for name in arrays)
    assert any(".value_opt" in name and "['mlp']" in name for name in arrays)
    for name in arrays:
        assert not (".policy" in name and ("['mlp']" in name or "embed" in name)), name
        assert not (".value" in name and "['attn']" in name), name

    export.main([str(run), "--out", str(tmp_path / "out")])
    assert (tmp_path / "out/model.safetensors").read_bytes() == weights(run)
    capsys.readouterr()
    with pytest.raises(UserError, match=r"critic.freeze='' was '\*.self_attn.\*' when the checkpoint was written"):
        train.train(changed(frozen_run, {"critic.freeze": "", "trainer.total_training_steps": 3}))
    write_weights(model, seed=6)
    with pytest.raises(UserError, match=r"checksum of its frozen weights has changed"):
        train.train(changed(frozen_run, {"trainer.total_training_steps": 3}))
    with pytest.raises(SystemExit):
        export.main([str(run), "--out", str(tmp_path / "other")])
    assert "those that were frozen in training" in capsys.readouterr().err


def held(tree):
    """Bytes on the first device."""
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


def test_the_account_of_memory_counts_each_weight_once(frozen_run):
    c = typed(frozen_run)
    inputs, mesh = read_inputs(c), make_mesh(c)
    _, found, _ = preview.look_up_sizes(c, inputs, mesh)
    learner, now = make_learner(c, inputs, mesh)
    base, critic_base = learner.actor.base.params, learner.critic.base.params
    whole = hf.load_params(c.model.path, learner.cfg, head="lm", param_dtype="float32")
    assert jax.tree.structure(learner.reference) == jax.tree.structure(whole)
    assert learner.reference["embed"]["embedding"] is base["embed"]["embedding"]
    trees = {
        "policy": (now.policy, base),
        "policy's optimizer": now.policy_opt,
        "critic": (now.value, critic_base),
        "critic's optimizer": now.value_opt,
        "reference": now.policy,  # a copy of what learns; the frozen weights are the policy's
    }
    for name, tree in trees.items():
        assert found.parts[name] == held(tree), name
    assert held((now.policy, base)) == sum(x.nbytes for x in jax.tree.leaves(whole))
    gradients = {one.name: one.gradients for one in found.moments if one.name.endswith("gradient")}
    sums = {f"{one.name} gradient": held(one.zeros()) for one in (learner.actor, learner.critic)}
    assert gradients == sums


def test_fine_tuning_leaves_frozen_weights_as_they_are(small_run, tmp_path):
    write_weights(tmp_path / "model")
    (tmp_path / "sft.jsonl").write_text('{"prompt": "1+2=", "response": "3"}\n' * 4)
    c = settings.sft_default()
    c.model.path, c.trainer.run_dir = str(tmp_path / "model"), str(tmp_path / "tuned")
    c.data.train_files, c.optim.lr = str(tmp_path / "sft.jsonl"), 1e-2
    c.data.train_batch_size, c.data.max_prompt_length, c.data.max_response_length = 4, 8, 8
    c.trainer.total_training_steps, c.optim.freeze = 2, FREEZE["actor.freeze"]
    settings.check(c)
    sft.train(c)
    assert_learned(tensors(tmp_path / "model"), tensors(tmp_path / "tuned/hf"), is_frozen)


def test_a_pattern_is_checked_before_anything_starts(frozen_run):
    frozen_run.critic.freeze = "*.attention.*"
    with pytest.raises(UserError, match=r"critic.freeze='\*.attention.\*': no parameter .*self_attn.q_proj.weight"):
        read_inputs(typed(frozen_run))


def test_the_trainers_own_engine_samples_from_both_parts(frozen_run):
    c = changed(frozen_run, {"rollout.name": "inprocess", "rollout.logp_tolerance": 1e-3})
    train.train(c)  # compares the engine's log-probs with the trainer's
