"""What waits on the host changes no bit of a run; a run compiles nothing once it steps, and holds what is estimated."""

import pathlib

import jax
import numpy as np
import pytest

from jppo import settings, sft, train
from jppo.errors import UserError
from jppo.learner import batch, packing
from jppo.learner.make import make_mesh
from jppo.models import placing
from jppo.preflight import preview
from jppo.run.inputs import read_inputs
from jppo.run.make import make_learner
from tests.make import changed, typed, untimed, weights, write_lines

COMPILED = "/jax/core/compile/backend_compile_duration"
OFFLOAD = dict.fromkeys(
    [f"{model}.{part}_offload" for model in ("actor", "critic") for part in ("param", "optimizer")], True
) | {"ref.param_offload": True}


def in_folder(config, run, changes=None):
    """The same run in another folder with these settings."""
    return changed(config, {"trainer.run_dir": str(run), **(changes or {})})


def outcome(c):
    """What a run has left: its model, and its metrics but for time and memory."""
    return weights(c.trainer.run_dir), untimed(c.trainer.run_dir)


def test_a_run_whose_models_wait_on_the_host_is_the_same_to_the_bit(small_run, tmp_path, capsys, monkeypatch):
    small_run.algorithm.use_kl_in_reward = True
    small_run.trainer.total_training_steps = 3
    plain = in_folder(small_run, tmp_path / "plain")
    train.train(plain)
    waiting = in_folder(small_run, tmp_path / "waiting", OFFLOAD)
    kinds, real = [], train.resume.save_checkpoint

    def look(c, checkpoints, learner, now, meta, **more):
        trees = (now.policy, now.policy_opt, now.value, now.value_opt, learner.reference)
        kinds.append([{x.sharding.memory_kind for x in jax.tree.leaves(tree)} for tree in trees])
        return real(c, checkpoints, learner, now, meta, **more)

    monkeypatch.setattr(train.resume, "save_checkpoint", look)
    for steps in (1, 2):
        train.train(changed(waiting, {"trainer.total_training_steps": steps}))
    train.train(in_folder(plain, waiting.trainer.run_dir))  # goes on from the same checkpoints
    assert kinds == [[{"pinned_host"}] * 5] * 2 + [[{"device"}] * 5]
    said = capsys.readouterr().out
    assert "offloaded to pinned_host memory between their uses: policy, policy's optimizer, critic" in said
    assert outcome(waiting) == outcome(plain)


@pytest.mark.slow
def test_adapters_and_the_trainers_own_engine_read_what_waits(small_run, tmp_path):
    """The engine agrees with the scorer, base and reference are one, and files are the same to the byte."""
    small_run.rollout.name, small_run.rollout.logp_tolerance = "inprocess", 1e-3
    small_run.model.lora_rank, small_run.algorithm.use_kl_in_reward = 2, True
    small_run.actor.lr = small_run.critic.lr = 1e-2
    runs = {"plain": {}, "waiting": OFFLOAD}
    for name, changes in runs.items():
        runs[name] = in_folder(small_run, tmp_path / name, changes)
        train.train(runs[name])
    assert outcome(runs["waiting"]) == outcome(runs["plain"])
    adapters = [pathlib.Path(c.trainer.run_dir) / "adapter/adapter_model.safetensors" for c in runs.values()]
    assert adapters[0].read_bytes() == adapters[1].read_bytes()


@pytest.mark.slow
def test_a_master_copy_is_of_the_weights_that_a_checkpoint_has(small_run, tmp_path):
    """Without the optimizers' state, too: with a rate of 0 the next step leaves what was learned."""
    narrow = {"model.param_dtype": "bfloat16", "trainer.save_contents": "model,extra", "actor.lr": 1e-2}
    narrow |= {"critic.value_head_std": 0.2}  # else equal scores have no gradient
    c = in_folder(small_run, tmp_path / "run", narrow | {"trainer.total_training_steps": 1})
    train.train(c)
    learned, _ = outcome(c)
    train.train(changed(c, {"trainer.total_training_steps": 2, "actor.lr": 0.0}))
    assert outcome(c)[0] == learned
    other = in_folder(c, tmp_path / "other", {"actor.lr": 0.0})
    train.train(other)
    assert outcome(other)[0] != learned


@pytest.mark.slow  # learner/test_offload.py updates with what waits, and has no other bit
@pytest.mark.parametrize("narrow", [False, True])
def test_fine_tuning_with_an_optimizer_that_waits(small_run, tmp_path, narrow):
    c = settings.sft_default()
    c.model = small_run.model
    rows = [{"prompt": "12+34=", "response": "46"}, {"prompt": "1+2=", "response": "3"}]
    c.data.train_files, c.optim.lr = str(write_lines(tmp_path / "demonstrations.jsonl", rows)), 1e-2
    c.data.train_batch_size, c.data.max_prompt_length, c.data.max_response_length = 2, 8, 6
    c.trainer.total_epochs, c.data.row_lengths = 2, 1
    if narrow:
        c.update_from_flattened_dict({"model.param_dtype": "bfloat16", "optim.moments_dtype": "bfloat16"})
    runs = {"plain": {}, "waiting": {"optim.optimizer_offload": True}}
    for name, changes in runs.items():
        runs[name] = in_folder(c, tmp_path / name, changes)
        sft.train(runs[name])
    assert outcome(runs["waiting"]) == outcome(runs["plain"])


def held(tree, kind):
    """Bytes on the first device, or for it on the host."""
    found = [x for x in jax.tree.leaves(tree) if x.sharding.memory_kind == kind]
    return sum(x.addressable_shards[0].data.nbytes for x in found)


NARROW = {"model.param_dtype": "bfloat16", "actor.moments_dtype": "bfloat16", "critic.master_dtype": "bfloat16"}


@pytest.mark.parametrize("changes", [pytest.param({}, marks=pytest.mark.slow), OFFLOAD | NARROW])
def test_the_estimate_is_what_the_programs_of_a_run_hold(small_run, tmp_path, changes):
    c = in_folder(small_run, tmp_path / "run", {"algorithm.use_kl_in_reward": True} | changes)
    inputs, mesh = read_inputs(typed(c)), make_mesh(typed(c))
    _, found, (room,) = preview.look_up_sizes(typed(c), inputs, mesh)
    learner, now = make_learner(typed(c), inputs, mesh)
    trees = {
        "policy": now.policy,
        "policy's optimizer": now.policy_opt,
        "critic": now.value,
        "critic's optimizer": now.value_opt,
        "reference": learner.reference,
    }
    for name, tree in trees.items():
        assert found.host.get(name, 0) == held(tree, "pinned_host"), name
        assert found.parts.get(name, 0) == held(tree, "device"), name
        assert (name in found.host) == bool(changes)
    assert "prefill" not in {one.name for one in found.moments}  # only with rollout.name=inprocess
    waiting = sum(found.host.values())
    assert sum(bytes_ for name, bytes_ in room.parts.items() if name.endswith(", waiting")) == 8 * waiting
    zeros = learner.actor.zeros()
    step = learner.actor.apply.lower(*placing.on_device_shapes((now.policy, now.policy_opt)), zeros, now.step, np.True_)
    true = step.compile().memory_analysis()
    needs = true.argument_size_in_bytes + true.temp_size_in_bytes
    needs += true.output_size_in_bytes - true.alias_size_in_bytes
    moment = next(one for one in found.moments if one.name == "actor step")
    there = sum(found.parts.get(name, 0) for name in ("policy", "policy's optimizer"))
    assert there + moment.needs == pytest.approx(needs, rel=0.2)
    assert moment.brought == found.host.get("policy", 0) + found.host.get("policy's optimizer", 0)
    assert found.peak == sum(found.parts.values()) + max(one.needs for one in found.moments)


@pytest.mark.parametrize("exact", [False, True])
def test_each_stage_brings_the_models_that_it_reads(small_run, exact):
    kl = {"algorithm.use_kl_in_reward": True, "actor.use_kl_loss": True}
    kl |= {"algorithm.kl_penalty": "full", "actor.kl_loss_type": "full"} if exact else {}
    c = typed(changed(small_run, OFFLOAD | kl))
    _, found, _ = preview.look_up_sizes(c, read_inputs(c), make_mesh(c))
    bytes_of, brought = found.host, {one.name: one.brought for one in found.moments}
    policy, reference = bytes_of["policy"], bytes_of["reference"]
    update = policy + (reference if exact else 0)
    assert brought == {
        "log-probs": policy,
        "reference": reference + (policy if exact else 0),
        "values": bytes_of["critic"],
        "actor gradient": update,
        "actor exchange": update,
        "actor step": update + bytes_of["policy's optimizer"],
        "critic gradient": bytes_of["critic"],
        "critic exchange": bytes_of["critic"],
        "critic step": bytes_of["critic"] + bytes_of["critic's optimizer"],
    }


def test_devices_without_such_memory_are_refused_before_anything_starts(small_run, tmp_path, monkeypatch):
    monkeypatch.setattr(placing, "KINDS", ("tape",))
    c = in_folder(small_run, tmp_path / "run", {"ref.param_offload": True})
    with pytest.raises(UserError, match=r"ref\.param_offload=True: cpu has no memory of the host"):
        train.train(c)


def test_no_step_of_six_compiles(small_run, tmp_path, monkeypatch):
    how = {"data.row_lengths": 2, "rollout.n": 8, "actor.max_tokens_per_device": 14, "actor.shuffle": True}
    kl = {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl_type": "adaptive"}
    length = {"trainer.total_training_steps": 6, "trainer.save_freq": -1, "trainer.test_freq": -1}
    c = in_folder(small_run, tmp_path / "run", how | kl | length | OFFLOAD)
    steps, shapes, plans = [], set(), []
    step, save, make, cut = train.ppo_step, train.resume.save_checkpoint, batch.pack_micros, batch.mini_batches
    seen, listening = [], True
    monkeypatch.setattr(packing, "MICRO_TOKENS", 0)  # else rows so short would have one shape

    def listen(event, _, **about):
        if listening and event == COMPILED:
            seen.append((len(steps), about.get("fun_name", "?")))

    def stepped(run, now):
        steps.append(1)
        plans.append(run.learner.plan)
        return step(run, now)

    def saved(*args, **more):
        nonlocal listening
        listening = False
        return save(*args, **more)

    def made(*args, **more):
        rows = make(*args, **more)
        shapes.update(one.host.inputs.shape for one in rows)
        return rows

    def minis(*args, **more):
        for mini in cut(*args, **more):
            shapes.update(micro.rows.inputs.shape for micro in mini.micros)
            yield mini

    jax.clear_caches()
    jax.monitoring.register_event_duration_secs_listener(listen)
    monkeypatch.setattr(train, "ppo_step", stepped)
    monkeypatch.setattr(train.resume, "save_checkpoint", saved)
    monkeypatch.setattr(batch, "pack_micros", made)
    monkeypatch.setattr(batch, "mini_batches", minis)
    train.train(c)
    assert len(steps) == 6 and seen and not [one for one in seen if one[0]]
    assert len(shapes) > 1 and shapes <= set(plans[0].shapes)
