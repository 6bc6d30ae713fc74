"""Going on from a checkpoint: to the bit, on other devices, with other settings; and what is refused."""

import importlib.metadata
import itertools
import json
import os
import pathlib
import shutil
import subprocess
import sys
import types

import jax
import numpy as np
import pytest

from jppo import __version__, settings, train
from jppo.errors import UserError
from jppo.learner import loss_scale, state
from jppo.learner.make import make_mesh
from jppo.learner.trainable import Trainable
from jppo.rollout.protocol import RolloutError
from jppo.run import resume, start
from jppo.run.inputs import read_inputs
from jppo.run.make import make_learner
from jppo.run.out_of_memory import OutOfMemory
from jppo.run.resume import finished
from jppo.runlog.checkpoint import steps_in
from jppo.runlog.watchdog import Stopped
from tests import xla_flags
from tests.make import ROOT, changed, typed, untimed, weights


def again(config, **changes):
    """The config of the same command, given once more with these settings."""
    return changed(config, {}, **changes)


def saved_steps(config):
    return steps_in(pathlib.Path(config.trainer.run_dir) / "checkpoints")


@pytest.fixture
def whole(finished_run, engine, tmp_path):
    """The config of a finished run of two steps, in a copy of its folder."""
    c = again(finished_run, trainer__run_dir=str(tmp_path / "run"))
    shutil.copytree(finished_run.trainer.run_dir, c.trainer.run_dir)
    return c


def broken_off(config, run, monkeypatch, *, in_call_of, at, error):
    """The same run in another folder, which ends by an error in the call number `at` that train.py makes of it."""
    c = again(config, trainer__run_dir=str(run))
    calls = []
    raised = OutOfMemory if isinstance(error, jax.errors.JaxRuntimeError) else type(error)

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) == at:
            raise error
        return in_call_of(*args, **kwargs)

    with monkeypatch.context() as patch:
        name = in_call_of.__name__
        owner = next(x for x in (train, train.ppo, train.sample_log) if getattr(x, name, None) is in_call_of)
        patch.setattr(owner, name, failing)
        with pytest.raises(raised):
            train.train(c)
    assert len(calls) == at
    return c


@pytest.mark.parametrize(
    "function,at,error",
    [
        (train.ppo.learn, 2, Stopped(0, "asked")),  # in the second step: it is done again
        # In the test after the first step: the step stays done, the test is made.
        pytest.param(train.validate, 2, Stopped(0, "asked"), marks=pytest.mark.slow),
        (train.validate, 3, RolloutError("the server died")),  # in the test after the last
    ],
)
def test_whatever_ends_a_run_each_step_counts_once(whole, monkeypatch, tmp_path, function, at, error):
    c = broken_off(whole, tmp_path / "other", monkeypatch, in_call_of=function, at=at, error=error)
    train.train(c)
    assert untimed(c.trainer.run_dir) == untimed(whole.trainer.run_dir)
    assert weights(c.trainer.run_dir) == weights(whole.trainer.run_dir)


def test_loss_scales_resume_to_the_bit(small_run, monkeypatch, tmp_path):
    """Of the policy and the critic, which here change in every step."""
    monkeypatch.setattr(loss_scale, "INTERVAL", 1)
    half = {"model.compute_dtype": "float16", "trainer.total_training_steps": 3, "trainer.test_freq": -1}
    c = changed(small_run, half)
    train.train(c)
    lines = untimed(c.trainer.run_dir)[-3:]
    for name in ("actor", "critic"):
        overflowed = [line[f"{name}/overflowed"] for line in lines]
        scales = [line[f"{name}/loss_scale"] for line in lines]
        assert scales[0] == 2.0**16
        assert [b / a for a, b in itertools.pairwise(scales)] == [0.5 if x else 2.0 for x in overflowed[:-1]]
        assert not any(line[f"{name}/skipped"] for line in lines)
    other = broken_off(c, tmp_path / "other", monkeypatch, in_call_of=train.ppo.learn, at=3, error=Stopped(0, "asked"))
    train.train(other)
    assert untimed(other.trainer.run_dir) == untimed(c.trainer.run_dir)
    assert weights(other.trainer.run_dir) == weights(c.trainer.run_dir)
    saved = [
        json.loads((run / "checkpoints/3/about/metadata").read_text())["arrays"]
        for run in (pathlib.Path(c.trainer.run_dir), pathlib.Path(other.trainer.run_dir))
    ]
    assert saved[0] == saved[1] and {".policy_opt.scale", ".value_opt.scale"} <= saved[0].keys()


@pytest.mark.parametrize(
    "function,at,error",
    [
        (train.ppo.learn, 2, UserError("custom code said so")),
        (train.require_progress, 1, MemoryError("of the host")),  # the step is logged
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                (train.ppo.learn, 2, KeyboardInterrupt()),
                (train.ppo.learn, 2, jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")),
                (train.sample_log.record_tokens, 2, OSError(28, "No space left on device")),
                (train.sample_log.sample_metrics, 2, SystemExit(3)),
                (train.mark_stale, 2, ZeroDivisionError("a bug")),
                (train.require_published, 1, RuntimeError("the step is neither tested nor logged")),
                (train.validate, 2, UserError("a grader")),
            ]
        ),
    ],
)
def test_any_error_leaves_a_checkpoint(whole, monkeypatch, tmp_path, function, at, error):
    """Without regular ones; the same command then resumes to the bit."""
    config = again(whole, trainer__save_freq=-1)
    c = broken_off(config, tmp_path / "other", monkeypatch, in_call_of=function, at=at, error=error)
    assert saved_steps(c) == [1]
    train.train(c)
    assert untimed(c.trainer.run_dir) == untimed(whole.trainer.run_dir)
    assert weights(c.trainer.run_dir) == weights(whole.trainer.run_dir)


@pytest.mark.parametrize("name", ["actor", pytest.param("critic", marks=pytest.mark.slow)])
def test_a_state_whose_update_broke_off_is_not_saved(small_run, engine, monkeypatch, name):
    """The optimizer step has donated the old weights; those of the checkpoint before remain."""
    real = Trainable.learn

    def broken(how, params, opt, step, *rest, **named):
        found = real(how, params, opt, step, *rest, **named)
        if how.name == name and int(step) == 1:
            raise MemoryError("in the middle")
        return found

    monkeypatch.setattr(Trainable, "learn", broken)
    small_run.trainer.save_freq = 1
    with pytest.raises(MemoryError, match="in the middle"):
        train.train(small_run)
    assert saved_steps(small_run) == [1]
    monkeypatch.setattr(Trainable, "learn", lambda *_, **__: (_ for _ in ()).throw(MemoryError("before it")))
    small_run.trainer.run_dir += "-other"
    with pytest.raises(MemoryError, match="before it"):
        train.train(small_run)
    assert saved_steps(small_run) == [0]


def test_a_broken_update_says_that_nothing_is_saved(small_run, engine, monkeypatch, capsys):
    real = Trainable.learn

    def broken(*given, **named):
        real(*given, **named)
        raise MemoryError("in the middle")

    monkeypatch.setattr(Trainable, "learn", broken)
    with pytest.raises(MemoryError):
        train.train(small_run)
    said = " ".join(capsys.readouterr().out.split())
    assert "step 1 broke off in its update: nothing is saved, there is no checkpoint yet" in said


FAILS = """
class curriculum:
    def __init__(self, prompts, seed):
        self.n = len(prompts)
    def begin(self):
        return 0
    def batch(self, state, size):
        return range(size), state
    def update(self, state, indices, scores):
        assert state == 0, "a bug in the second step"
        return 1
"""


def test_a_curriculum_that_fails_costs_its_step_alone(small_run, engine, tmp_path):
    """Its rewards are passed to it before the update."""
    (tmp_path / "mine.py").write_text(FAILS)
    c = again(small_run, data__sampler=f"{tmp_path}/mine.py:curriculum", trainer__save_freq=-1)
    with pytest.raises(UserError, match="a bug in the second step"):
        train.train(c)
    assert saved_steps(c) == [1]


@pytest.mark.slow
@pytest.mark.parametrize("head", [{}, dict(critic__value_bins=9, critic__value_range=(-3.0, 3.0))])
def test_a_resume_keeps_the_statistics_that_normalise_values(
    small_run, engine, quick_compilation, monkeypatch, tmp_path, head
):
    critic = dict(critic__value_norm_decay=0.5, critic__lam=1.0, critic__warmup_epochs=3, trainer__critic_warmup=1)
    config = again(small_run, **critic, **head)
    train.train(config)
    c = broken_off(config, tmp_path / "other", monkeypatch, in_call_of=train.ppo.learn, at=2, error=Stopped(0, "asked"))
    train.train(c)
    assert untimed(c.trainer.run_dir) == untimed(config.trainer.run_dir)
    assert weights(c.trainer.run_dir) == weights(config.trainer.run_dir)
    with pytest.raises(UserError, match=r"critic.value_norm_decay=None was 0.5 when the checkpoint was written"):
        train.train(again(c, critic__value_norm_decay=None, trainer__total_training_steps=3))
    with pytest.raises(UserError, match=r"critic.value_bins=5 was (0|9) when the checkpoint .* whose critic's head"):
        train.train(again(c, critic__value_bins=5, trainer__total_training_steps=3))


def test_a_step_whose_test_was_broken_off_is_saved_as_any_other_by_the_run_that_resumes(
    whole, monkeypatch, tmp_path, capsys
):
    changes = dict(trainer__test_freq=1, trainer__save_freq=1, trainer__max_ckpt_to_keep=9)
    config = again(whole, trainer__save_contents="model,optimizer,extra,hf_model", **changes)
    c = broken_off(config, tmp_path / "other", monkeypatch, in_call_of=train.validate, at=2, error=Stopped(0, "asked"))
    train.train(c)
    run, said = pathlib.Path(c.trainer.run_dir), capsys.readouterr().out
    assert "could not be written" not in said
    for step in (1, 2):
        assert (run / f"checkpoints/{step}/hf/model.safetensors").is_file()
        about = json.loads(next((run / f"checkpoints/{step}/about").glob("metadata")).read_text())
        assert about["meta"].get("pending") is None, "a later kill would repeat the test"
    assert json.loads((run / "checkpoints/best.json").read_text())["step"] in (1, 2)


@pytest.mark.parametrize("section, rate", [("actor", 1e30), pytest.param("critic", 1e30, marks=pytest.mark.slow)])
def test_a_run_that_diverges_leaves_the_checkpoint_before(whole, section, rate):
    """Non-finite weights are not saved, and the same command with another rate resumes."""
    run = pathlib.Path(whole.trainer.run_dir)
    before = {path.name for path in (run / "checkpoints").glob("[0-9]*")}
    wild = again(whole, **{"trainer__total_training_steps": 4, f"{section}__lr": rate})
    with pytest.raises(train.Diverged, match=r"step 3: .* not finite numbers.*lower the learning rate"):
        train.train(wild)
    assert {path.name for path in (run / "checkpoints").glob("[0-9]*")} == before
    train.train(again(whole, trainer__total_training_steps=4))
    assert [m["step"] for m in untimed(run)] == [0, 1, 2, 3, 4]


def test_the_start_of_a_new_value_head_may_not_change(whole):
    with pytest.raises(UserError, match=r"critic.value_head_std=0.5 was 0.2 when the checkpoint was written"):
        train.train(again(whole, trainer__total_training_steps=3, critic__value_head_std=0.5))


@pytest.mark.parametrize(
    "function, changes, error",
    [
        (
            "make_learner",
            {"algorithm__adv_estimator": "grpo", "rollout__n": 2, "critic__value_head_std": 0.0},
            "run/checkpoints/2 is of a run by gae, which has a critic, and this is one by grpo; give it",
        ),
        ("make_learner", {"actor__freeze": "model.embed*"}, "actor.freeze=.* was '' when the checkpoint was"),
        (
            "prepare_programs",
            {"model__lora_rank": 2, "trainer__total_training_steps": 3},
            "model.path: the checksum of",
        ),
    ],
)
def test_a_folder_of_another_run_is_refused_before_it_compiles(whole, monkeypatch, function, changes, error):
    """Also where that run has finished, and this one would have as many steps."""
    monkeypatch.setattr(start, function, lambda *_, **__: pytest.fail(f"{function} is called"))
    with pytest.raises(UserError, match=error):
        train.train(again(whole, **changes))


def test_a_run_that_has_finished_says_so(whole, capsys):
    train.train(whole)
    assert capsys.readouterr().out.splitlines()[0] == (
        "all 2 steps are done: nothing is left to train; trainer.resume_mode=disable restarts"
    )
    train.train(again(whole, actor__lr=0.25))
    assert "; not tried: actor.lr 1e-06 → 0.25, for which take another trainer.run_dir" in capsys.readouterr().out


def test_what_the_place_in_the_data_hangs_on_may_not_change(whole, tmp_path):
    for name, value in (("trainer__seed", 7), ("data__shuffle", False)):
        with pytest.raises(UserError, match=rf"{name.replace('__', '.')}=.* was .* when the checkpoint was written"):
            train.train(again(whole, trainer__total_training_steps=3, **{name: value}))
    lines, file = pathlib.Path(whole.data.train_files).read_text().splitlines(), tmp_path / "train.jsonl"
    whole.data.train_files = str(file)
    row = json.loads(lines[0])
    file.write_text("\n".join([json.dumps(row | {"ground_truth": row["ground_truth"] + "1"}), *lines[1:]]) + "\n")
    with pytest.raises(UserError, match=r"data.train_files: source 'train' has changed since the checkpoint"):
        train.train(again(whole, trainer__total_training_steps=3))
    train.train(again(whole, trainer__total_training_steps=3, trainer__resume_mode="disable"))  # as the line says


def test_the_weights_that_stay_must_be_the_same(small_run, quick_compilation):
    small_run.algorithm.use_kl_in_reward = True
    small_run.critic.value_head_std = 0.2  # all scores are 0: only such values move the policy
    train.train(small_run)
    with pytest.raises(UserError, match=r"ref.path: the checksum of its frozen weights has changed"):
        folder = pathlib.Path(small_run.trainer.run_dir)
        other = again(small_run, trainer__total_training_steps=3)
        other.model.init, other.model.path = "pretrained", str(folder / "hf")  # the trained one is no reference
        train.train(other)


def test_without_the_optimizers_they_begin_anew_and_a_change_of_settings_is_told(small_run, quick_compilation, capsys):
    small_run.trainer.save_contents = "model,extra,hf_model"
    train.train(small_run)
    last = pathlib.Path(small_run.trainer.run_dir) / "checkpoints/2"
    names = json.loads((last / "about/metadata").read_text())["arrays"]
    assert any(".policy[" in name for name in names) and not any("_opt" in name for name in names)
    assert (last / "hf/model.safetensors").read_bytes() == weights(small_run.trainer.run_dir)
    train.train(again(small_run, trainer__total_training_steps=3, actor__lr=1e-3))
    said = capsys.readouterr().out
    assert "no optimizer state (trainer.save_contents): the optimizers start fresh" in said
    assert "checkpoint's: actor.lr 1e-06 → 0.001, trainer.total_training_steps 2 → 3" in said
    assert [m["step"] for m in untimed(small_run.trainer.run_dir)] == [0, 1, 2, 3]
    for contents, why in (("model", "without extra"), ("model,extra,all", "'all' is not known")):
        small_run.trainer.save_contents = contents
        with pytest.raises(UserError, match=why):
            settings.check(small_run)


def test_a_state_is_the_same_on_any_mesh(config, small_run):
    """The vocabulary of the small model is odd: over tensor=2 it gets a row that is no token."""
    small_run.mesh.tensor, small_run.mesh.fsdp = 2, 4
    inputs = read_inputs(typed(small_run))
    learner, begin = make_learner(typed(small_run), inputs, make_mesh(typed(small_run)))
    vocabulary = inputs.policy.vocab_size
    assert learner.cfg.padded_vocab_size == vocabulary + vocabulary % 2
    small = state.remove_padding(begin, learner.spare())
    for tree in (small.policy, small.policy_opt, small.value, small.value_opt):
        embeddings = [x for path, x in jax.tree.leaves_with_path(tree) if "'embedding'" in jax.tree_util.keystr(path)]
        assert embeddings and all(x.shape[0] == vocabulary for x in embeddings)
    there = state.restore_padding(small, learner.spare(), begin)
    for one, other in zip(jax.tree.leaves(there), jax.tree.leaves(begin), strict=True):
        assert one.sharding == other.sharding and one.shape == other.shape
    back = state.remove_padding(there, learner.spare())
    jax.tree.map(np.testing.assert_array_equal, (back.policy, back.policy_opt), (small.policy, small.policy_opt))


def by_command(small_run, run, devices, *more):
    """The training command over so many devices, with the engine in the process."""
    c = small_run
    given = [
        f"--config={ROOT / 'configs/quickstart.py'}:{run}",
        "--config.rollout.name=inprocess",
        *(f"--config.{name}={c[name.split('.')[0]][name.split('.')[1]]}" for name in (
            "model.path", "model.init", "data.train_files", "data.val_files", "data.train_batch_size",
            "data.max_prompt_length", "data.max_response_length", "data.row_lengths", "actor.ppo_mini_batch_size",
        )),
        "--config.algorithm.kl_ctrl_type=adaptive", "--config.trainer.test_freq=2", "--config.trainer.save_freq=1",
        "--config.trainer.max_ckpt_to_keep=9", "--config.trainer.total_training_steps=4", *more,
    ]  # fmt: skip
    environment = os.environ | {
        "XLA_FLAGS": xla_flags.quick(devices),
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "jppo.train", *given], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_one_devices_checkpoint_goes_on_over_eight(small_run, tmp_path):
    one, eight = tmp_path / "one", tmp_path / "eight"
    by_command(small_run, one, 1)
    eight.mkdir()
    (eight / "checkpoints").mkdir()
    shutil.copytree(one / "checkpoints/2", eight / "checkpoints/2")
    shutil.copy(one / "metrics.jsonl", eight)
    said = by_command(small_run, eight, 8, "--config.mesh.fsdp=4", "--config.mesh.tensor=2")
    assert "resuming from the checkpoint of step 2" in said
    assert "mesh.fsdp 1 → 4" in said and "devices '1 x cpu' → '8 x cpu'" in said
    alone, spread = untimed(one), untimed(eight)
    assert [m["step"] for m in spread] == [0, 1, 2, 3, 4] and spread[:3] == alone[:3]
    for a, b in zip(alone[3:], spread[3:], strict=True):
        assert a.keys() == b.keys()
        for name in a:
            np.testing.assert_allclose(b[name], a[name], rtol=1e-4, atol=1e-5, err_msg=f"step {a['step']} {name}")


def test_a_model_older_than_the_last_checkpoint_is_no_end(tmp_path):
    """A run that is killed between its last checkpoint and its model has the model of an earlier end in hf/."""
    config = settings.default()
    config.trainer.run_dir = str(tmp_path)
    (tmp_path / "hf").mkdir()
    (tmp_path / "checkpoints/3").mkdir(parents=True)
    latest = types.SimpleNamespace(latest=lambda: 3)
    os.utime(tmp_path / "hf", ns=(0, 0))
    assert not finished(typed(config), latest, 3)
    os.utime(tmp_path / "hf")
    assert finished(typed(config), latest, 3)
    assert not finished(typed(config), latest, 4)
    (tmp_path / "config.json").write_text(settings.dump(settings.sft_default()))
    with pytest.raises(UserError, match=r"has a run of jppo\.sft, and this is jppo\.train; give it another folder"):
        finished(typed(config), latest, 3)


def test_a_checkout_that_is_not_installed_has_its_version(small_run, monkeypatch):
    def of_package(name, version=importlib.metadata.version):
        if name == "jppo":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", of_package)
    c = typed(small_run)
    found = resume.run_identity(c, make_mesh(c), data={}, frozen={})["versions"]
    assert found["jppo"] == __version__ and found["jax"] == jax.__version__ and "devices" in found
