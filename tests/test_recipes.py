"""Whole runs with every way of learning, the sampler at random: what is built, skipped, kept and said."""

import contextlib
import dataclasses
import errno
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
import safetensors.numpy

from jppo import settings, train
from jppo.errors import UserError
from jppo.learner import ppo, state
from jppo.learner.make import make_adapters
from jppo.learner.trainable import Trainable
from jppo.models import hf, hf_write, lora
from jppo.rewards import graders
from jppo.run import start
from jppo.run.make import make_learner
from jppo.runlog.checkpoint import Checkpoints
from jppo.samples import make as prefetch
from jppo.types import Reward
from tests.make import read_lines, typed, untimed, write_weights

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture
def digits_are_worth_something(monkeypatch):
    """Random responses are never right: this grader finds some better than others."""
    monkeypatch.setitem(graders.GRADERS.own, "arithmetic", lambda text, _: Reward(int(f"0{text}"[-1]) / 9, {}, None))


@pytest.fixture
def learn(small_run, digits_are_worth_something):
    """changes -> the metrics of a run of two steps with them."""

    def learn(changes, stop=None):
        for name, value in changes.items():
            section, leaf = name.split(".")
            small_run[section][leaf] = value
        settings.check(small_run)
        with pytest.raises(train.Diverged) if stop else contextlib.nullcontext() as e:
            train.train(small_run)
        assert stop is None or stop in str(e.value)
        return read_lines(pathlib.Path(small_run.trainer.run_dir) / "metrics.jsonl")

    return learn


def saved(config):
    """The names of all arrays of the last checkpoint."""
    about = pathlib.Path(config.trainer.run_dir, "checkpoints/2/about/metadata")
    return json.loads(about.read_text())["arrays"].keys()


@pytest.mark.parametrize("estimator", [pytest.param("grpo", marks=pytest.mark.slow), "remax"])
def test_no_critic_is_built_trained_or_saved_where_none_is_asked_for(learn, small_run, engine, monkeypatch, estimator):
    loaded = []
    load = state.load_sharded
    monkeypatch.setattr(state, "load_sharded", lambda what, *a, **k: (loaded.append(what.head), load(what, *a, **k))[1])
    changes = {"rollout.n": 2, "critic.path": "/no/such/model", "actor.calculate_entropy": False}
    metrics = learn({"algorithm.adv_estimator": estimator, **changes})
    assert loaded == ["lm"]
    assert not any("value" in name for name in saved(small_run))
    for line in metrics[1:]:
        assert not {name for name in line if "vf_" in name or "critic/lr" in name or "values" in name}
        assert np.isfinite(line["actor/pg_loss"]) and line["actor/grad_norm"] > 0
        assert not {"timing_s/update_critic", "actor/entropy"} & line.keys()
    greedy = [s for s in engine.asked if s.temperature == 0.0]
    assert len(greedy) == (3 if estimator != "remax" else 5), "three tests; remax asks once more in each step"


def both_kls(kind):
    """The KL in the reward and in the loss, and a rate by which the policy leaves its reference."""
    both = {"algorithm.use_kl_in_reward": True, "algorithm.kl_penalty": kind}
    return both | {"actor.use_kl_loss": True, "actor.kl_loss_type": kind, "actor.lr": 1e-2}


def test_bypass_skips_the_pass_and_takes_the_samplers_log_probs(learn, monkeypatch):
    """With the exact KL, which knows the policy all the same."""
    passes = []
    with_old_logprob = ppo.with_old_logprob

    def counted(these, recipe, data, micros, policy, *done):
        spied = dataclasses.replace(these, logprob=lambda *a: (passes.append(recipe.bypass), these.logprob(*a))[1])
        return with_old_logprob(spied, recipe, data, micros, policy, *done)

    monkeypatch.setattr(ppo, "with_old_logprob", counted)
    metrics = learn(both_kls("full") | {"algorithm.old_logprob": "bypass"})
    assert passes and not any(passes), "only the comparison before the first step asks for a pass"
    assert all(line["actor/ratio_max"] > 1.1 for line in metrics[1:]), "the sampler is far from the policy"
    assert all("rollout/logp_gap_max" not in line and line["actor/entropy"] > 0.1 for line in metrics[1:])
    first, second = metrics[1:]
    assert first["actor/reward_kl_penalty"] == pytest.approx(0, abs=1e-5)
    assert second["actor/reward_kl_penalty"] > 1e-4 and second["actor/kl_loss"] > 1e-4


CORRECTION = {
    "algorithm.old_logprob": "correction",
    "algorithm.rollout_is": "sequence",
    "algorithm.rollout_is_threshold": "0.5_2.0",
    "algorithm.rollout_is_batch_normalize": True,
    "algorithm.rollout_rs": "token_k1",
    "algorithm.rollout_rs_threshold": "0.8_1.25",
}


def test_correction_mixed_sources_and_what_the_critic_has_of_its_own(learn, small_run, tmp_path, monkeypatch):
    """In one run: warm-up, mini-batches and epochs of the critic; three prompts of four from one file in every step.

    Also after a resume in the middle of an epoch.
    """
    rows = (tmp_path / "train.jsonl").read_text().splitlines()
    (tmp_path / "other.jsonl").write_text("\n".join(reversed(rows)))
    small_run.data.train_files = f"{tmp_path / 'train.jsonl'},{tmp_path / 'other.jsonl'}"
    steps, learning = [], Trainable.learn

    def counted(how, params, opt, step, minis, *further, **named):
        minis = list(minis)
        steps.append((how.name, len(minis)))
        return learning(how, params, opt, step, minis, *further, **named)

    monkeypatch.setattr(Trainable, "learn", counted)
    actor = {"actor.ppo_epochs": 3, "actor.lr_warmup_steps_ratio": 0.0, "actor.lr": 1e-2}
    critic = {"critic.ppo_mini_batch_size": 2, "critic.ppo_epochs": 2, "critic.shuffle": True}
    warm_up = {"trainer.critic_warmup": 1, "critic.warmup_epochs": 5}
    mixed = {"data.mix": "train=0.75,other=0.25", "data.val_batch_size": 3}
    metrics = learn(CORRECTION | actor | critic | warm_up | mixed)
    assert steps == [("critic", 5 * 2), ("actor", 3), ("critic", 2 * 2)]
    assert "actor/pg_loss" not in metrics[1] and metrics[1]["critic/grad_norm"] > 0
    assert metrics[2]["actor/lr"] == pytest.approx(1e-2) and metrics[2]["actor/grad_norm"] > 0
    for line in metrics[1:]:
        assert 0 < line["rollout_corr/rollout_rs_masked_fraction"] < 1
        seen = line["rollout_corr/rollout_rs_seq_masked_fraction"]
        assert line["rollout_corr/rollout_rs_masked_fraction"] <= seen <= 1
        assert line["rollout_corr/rollout_is_mean"] <= line["rollout_corr/rollout_is_max"] <= 2.0
        assert line["rollout_corr/rollout_is_min"] >= 0.0
        assert 0 <= line["rollout_corr/rollout_is_eff_sample_size"] <= 1
        assert line["rollout_corr/k3_kl"] > 0 and line["rollout_corr/chi2_token"] > -1
    learn({"trainer.total_training_steps": 4})
    for step in (1, 2, 3, 4):
        samples = read_lines(pathlib.Path(small_run.trainer.run_dir) / f"samples/step_{step}.jsonl")
        assert sorted(row["uid"].split(":")[0] for row in samples) == ["other", "train", "train", "train"]


def test_both_kls_and_an_adaptive_coefficient_which_follows_the_kl_and_survives_a_resume(learn):
    adaptive = {"algorithm.kl_ctrl_type": "adaptive", "algorithm.kl_coef": 0.5, "algorithm.target_kl": 0.1}
    first, second = learn(both_kls("k3+") | adaptive | {"algorithm.horizon": 40})[1:]
    assert first["actor/reward_kl_penalty"] == pytest.approx(0, abs=1e-5)  # the policy begins as its own reference
    assert second["actor/reward_kl_penalty"] > 1e-4 and second["actor/kl_loss"] > 1e-4
    assert first["actor/reward_kl_penalty_coeff"] == 0.5
    # The KL of step 1 is 0: the coefficient falls by the most that it may, 0.2 of 4 sequences in 40.
    assert second["actor/reward_kl_penalty_coeff"] == pytest.approx(0.5 * (1 - 0.2 * 4 / 40))
    third = learn({"trainer.total_training_steps": 3})[-1]
    error = np.clip(second["actor/reward_kl_penalty"] / 0.1 - 1, -0.2, 0.2)
    expected = second["actor/reward_kl_penalty_coeff"] * (1 + error * 4 / 40)
    assert third["step"] == 3 and third["actor/reward_kl_penalty_coeff"] == pytest.approx(expected)


def test_a_step_that_is_no_number_is_skipped_counted_and_kept(learn, small_run):
    """An infinite learning signal: the value loss overflows, the actor goes on."""
    infinite = {"algorithm.kl_coef": 1e38, "algorithm.use_kl_in_reward": True, "algorithm.kl_penalty": "k2"}
    infinite |= {"algorithm.old_logprob": "bypass", "trainer.max_bad_steps": 2, "trainer.total_training_steps": 5}
    metrics = learn(infinite, stop="2 steps in a row had a non-finite loss or gradient")
    run = pathlib.Path(small_run.trainer.run_dir)
    assert [line["trainer/bad_steps"] for line in metrics[1:]] == [1.0, 2.0]
    assert all(line["critic/skipped"] > 0 for line in metrics[1:])
    assert sorted(path.name for path in (run / "bad_steps").iterdir()) == ["step_1.npz", "step_2.npz"]
    with np.load(run / "bad_steps/step_1.npz") as kept:
        assert kept["tokens"].shape == kept["advantage"].shape == kept["returns"].shape
        assert not np.isfinite(kept["returns"][kept["mask"]]).all() or np.abs(kept["returns"]).max() > 1e30
    with Checkpoints(run / "checkpoints", keep=2) as checkpoints:
        assert checkpoints.latest() == 2


def test_a_step_whose_samples_were_all_rejected_changes_its_number_alone(learn, small_run, tmp_path, monkeypatch):
    """The second of three, so that momentum and decay would move the weights, and the target the coefficient.

    The run has a reference of its own.
    """
    other = shutil.copytree(small_run.model.path, tmp_path / "other")
    write_weights(other)
    step, mark_stale, states = train.ppo_step, prefetch.mark_stale, []

    def stepped(run, now):
        before = jax.device_get(dataclasses.replace(now, key=None))
        out = step(run, now)
        states.append((before, jax.device_get(dataclasses.replace(out.state, key=None))))
        return out

    def rejected(c, drawn, version, rewards):
        rewards, found = mark_stale(typed(c), drawn, version, rewards)
        why = "said so" if version == 1 else None
        return [dataclasses.replace(reward, unusable=why) for reward in rewards], found

    monkeypatch.setattr(train, "ppo_step", stepped)
    monkeypatch.setattr(train, "mark_stale", rejected)
    kl = {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl_type": "adaptive"}
    kl |= {"ref.path": str(other), "algorithm.kl_penalty": "full"}
    metrics = learn(kl | {"trainer.total_training_steps": 3, "actor.lr": 1e-2, "actor.weight_decay": 0.1})
    same = [bits(dataclasses.replace(a, step=0)) == bits(dataclasses.replace(b, step=0)) for a, b in states]
    assert same == [False, True, False] and [int(b.step) for _, b in states] == [1, 2, 3]
    assert [line["actor/empty"] for line in metrics[1:]] == [0.0, 1.0, 0.0]
    assert all(np.isfinite(value) for line in metrics for value in line.values() if value is not None)
    a_token, a_response = (metrics[1][f"actor/reward_kl_penalty{what}"] for what in ("", "_seq"))
    assert a_token > 1e-3, "drawn at random from another key than the policy"
    assert a_token < a_response < 6 * a_token  # responses have up to 6 tokens, and the exact KL is nowhere below 0


ADAPTED = {"model.lora_rank": 4, "model.lora_alpha": 8, "algorithm.use_kl_in_reward": True, "algorithm.gamma": 0.9}


def bits(params):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(params)]


def test_only_adapters_are_trained_kept_stepped_and_published(learn, small_run, engine, tmp_path):
    """The base is held once, by the policy, the critic and the reference; both are exported; a resume continues."""
    made, engine.folder = [], tmp_path

    def spied(*args):
        made.append(make_learner(*args))
        before.extend(bits(made[0][0].actor.base.params))
        return made[0]

    before: list[bytes] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jppo.run.start.make_learner", spied)
        metrics = learn(ADAPTED | {"rollout.lora_sync": "adapter"})
    learner, begin = made[0]
    base = learner.actor.base.params
    assert learner.reference is base
    assert learner.critic.base.params["layers"] is base["layers"]
    assert before == bits(base), "the base changed"
    assert all(line["actor/grad_norm"] > 0 and line["critic/grad_norm"] > 0 for line in metrics[1:])
    assert metrics[1]["rollout/logp_gap_mean"] > 0
    names = saved(small_run)
    of_policy = {name for name in names if "policy" in name}
    assert of_policy and all("lora" in name or "count" in name for name in of_policy), of_policy
    of_value = {name for name in names if "value" in name}
    assert all("lora" in name or "score" in name or "count" in name for name in of_value) and of_value
    learned = sum(x.size for x in jax.tree.leaves(begin.policy))
    moments = sum(x.size for x in jax.tree.leaves(begin.policy_opt) if x.ndim)
    assert moments == 2 * learned < sum(x.size for x in jax.tree.leaves(base))
    run = pathlib.Path(small_run.trainer.run_dir)
    assert {path.name for path in (run / "adapter").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    assert (run / "hf/model.safetensors").is_file()
    assert [version for version, _ in engine.adapters] == [0, 1, 2]
    first, last = (safetensors.numpy.load_file(engine.adapters[i][1] / "adapter_model.safetensors") for i in (0, -1))
    up = "base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"
    assert (first[up] == 0).all() and (last[up] != 0).any()
    kept = safetensors.numpy.load_file(run / "adapter/adapter_model.safetensors")
    assert all((last[name] == kept[name]).all() for name in kept)
    again = learn({"trainer.total_training_steps": 3})
    assert [line["step"] for line in again] == [0, 1, 2, 3]
    assert again[: len(metrics)] == metrics


def test_a_run_starts_from_the_adapters_of_another(learn, small_run, tmp_path):
    """The first publish, before any step, is of the other run's last adapters; a wrong rank is refused in one line."""
    learn(ADAPTED | {"algorithm.adv_estimator": "reinforce_plus_plus", "actor.lr": 1e-2})
    last = pathlib.Path(small_run.trainer.run_dir, "adapter")
    stored = safetensors.numpy.load_file(last / "adapter_model.safetensors")
    assert any(np.any(x) for name, x in stored.items() if ".lora_B." in name), "nothing was learned"
    adapters, begun = lora.Lora(4, 8, lora.parse_targets("all-linear")), {}

    def spied(*args):
        learner, begin = make_learner(*args)
        begun.update((name, x.copy()) for name, x in hf_write.adapter_tensors(begin.policy, learner.cfg, adapters))
        return learner, begin

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jppo.run.start.make_learner", spied)
        learn({"trainer.run_dir": str(tmp_path / "second"), "model.lora_adapter_path": str(last)})
    assert begun.keys() == stored.keys()
    for name, x in begun.items():
        np.testing.assert_array_equal(x, stored[name])
    for changes, said in (
        ({"model.lora_rank": 2}, "its rank is 4; set model.lora_rank=4"),
        ({"model.lora_rank": 4, "model.lora_alpha": 4}, "its alpha is 8; set model.lora_alpha=8"),
        ({"model.lora_adapter_path": str(tmp_path)}, "it needs adapter_model.safetensors and adapter_config.json"),
    ):
        for name, value in changes.items():
            small_run.model[name.removeprefix("model.")] = value
        with pytest.raises(UserError, match=said):
            make_adapters(settings.typed(small_run, settings.Settings))
    fewer = lora.Lora(4, 8, lora.parse_targets("q_proj"))
    with pytest.raises(UserError, match="also has base_model"):
        hf.load_adapters(str(last), hf.read_config(small_run.model.path)[1], fewer, shardings=None)


@pytest.mark.slow
def test_rank_0_is_no_adapter_to_the_bit(learn, small_run):
    learn({})
    first = small_run.trainer.run_dir
    small_run.trainer.run_dir += "-again"
    learn({"model.lora_rank": 0, "model.lora_alpha": 32, "model.target_modules": "q_proj"})
    assert untimed(first) == untimed(small_run.trainer.run_dir)


@pytest.mark.slow
def test_a_critic_may_have_adapters_of_its_own_or_none(learn, small_run):
    learn({"model.lora_rank": 4, "critic.lora_rank": 0})
    names = saved(small_run)
    assert any("value" in name and "embed" in name for name in names)
    small_run.trainer.run_dir += "-other"
    learn({"model.lora_rank": 0, "critic.lora_rank": 2, "critic.lora_alpha": 4})
    names = saved(small_run)
    assert any("policy" in name and "embed" in name for name in names)
    assert not any("value" in name and "embed" in name for name in names)


def test_a_reward_that_says_nothing_is_warned_of_once_and_a_full_disk_ends_no_run(learn, small_run, monkeypatch, capfd):
    monkeypatch.setitem(graders.GRADERS.own, "arithmetic", lambda text, _: Reward(0.0, {}, None))
    write = pathlib.Path.write_text

    def full(path, *a, **k):
        if path.parent.name == "samples":
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, *a, **k)

    monkeypatch.setattr(pathlib.Path, "write_text", full)
    metrics = learn({"trainer.total_training_steps": 4, "trainer.test_freq": -1})
    assert [line["step"] for line in metrics] == [0, 1, 2, 3, 4]
    run = pathlib.Path(small_run.trainer.run_dir)
    [found] = map(json.loads, (run / "warnings.jsonl").read_text().splitlines())
    assert (found["step"], found["name"]) == (3, "equal_rewards")
    said = capfd.readouterr().out
    assert said.count("warning: equal_rewards: all responses of 3 steps") == 1
    assert said.count("warning: samples fails: OSError: [Errno 28]") == 1
    assert all(0.5 < line["actor/ratio_mean"] < 2 for line in metrics[1:])


@pytest.mark.slow
def test_a_prompt_that_is_there_once_changes_no_metric(learn, small_run, tmp_path):
    """Two steps of grpo with three samples a prompt, mini-batches that tear them apart, both ways."""
    changes = {"algorithm.adv_estimator": "grpo", "rollout.n": 3, "actor.shuffle": True, "data.row_lengths": 2}
    changes |= {"actor.ppo_mini_batch_size": 6, "actor.max_tokens_per_device": 28, "model.compute_dtype": "float32"}
    expected = learn(changes | {"data.packing": "buckets"})
    small_run.trainer.run_dir = str(tmp_path / "again")
    found = learn(changes | {"data.packing": "prefix"})
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        a, b = ({k: v for k, v in one.items() if not k.startswith(("timing", "perf", "mem"))} for one in (a, b))
        assert a.keys() == b.keys()
        assert {k: a[k] for k in b if isinstance(b[k], float)} == pytest.approx(
            {k: v for k, v in b.items() if isinstance(v, float)}, rel=1e-3, abs=1e-5
        )


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm.adv_estimator": "optimal_token_baseline", "actor.loss_mode": "clip_cov", "actor.clip_cov_lb": -9.0,
         "actor.clip_cov_ratio": 0.5},
        {"algorithm.adv_estimator": "gdpo", "algorithm.gdpo_reward_keys": "rule_score,length_score",
         "reward.overlong_buffer_tokens": 4, "algorithm.rollout_correction": "bypass_pg_geo_rs_token_tis",
         "algorithm.rollout_rs_threshold": "0.01_100"},
    ],
    ids=["selected tokens", "parts of the reward, bypass by policy gradient"],
)  # fmt: skip
def test_verls_latest_methods_train(learn, small_run, changes):
    small_run.rollout.n, small_run.actor.lr = 2, 1e-2
    lines = [line for line in learn(changes) if "actor/loss" in line]
    assert len(lines) == 2 and all(line["actor/grad_norm"] > 0 and line["actor/skipped"] == 0 for line in lines)
    if changes["algorithm.adv_estimator"] == "gdpo":
        assert all(line["rollout_corr/rollout_is_mean"] > 0 for line in lines)
        assert {"rollout_corr/rollout_rs_masked_fraction"} <= lines[0].keys() and "rollout_corr/kl" not in lines[0]
    else:
        assert all(0 < line["actor/pg_clipfrac"] <= 0.5 for line in lines)


ESTIMATOR = """
from jppo.learner.algorithm import Algorithm
def styled(c):
    return Algorithm(outcome=lambda view: view.part("style"))
"""
FUNCTION = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 1.0, "style": 0.5}
"""


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"algorithm.gdpo_reward_keys": "rule_score,style"},
         r"gdpo_reward_keys='rule_score,style': 'style' is no part of a reward, whose parts are rule_score for"),
        ({"algorithm.gdpo_reward_keys": "rule_scor"}, "'rule_scor' is no part of .* did you mean 'rule_score'"),
        ({"algorithm.gdpo_reward_keys": "rule_score/exat", "reward.grader": "exact"},
         "'rule_score/exat' is no part of .* are rule_score, rule_score/exact .* did you mean 'rule_score/exact'"),
        ({"algorithm.gdpo_reward_keys": "length_score/x", "reward.overlong_buffer_tokens": 4},
         "'length_score/x' is no part of a reward, whose parts are rule_score, length_score for"),
        ({"algorithm.gdpo_reward_keys": "function_score/stile", "reward.function": "function.py"},
         "'function_score/stile' is no part of .* did you mean 'function_score/style'"),
        ({"algorithm.adv_estimator": "estimator.py:styled"}, r"adv_estimator='.*estimator.py:styled': 'style' is no"),
        ({"algorithm.adv_estimator": "grpo", "algorithm.filter_groups": True,
          "algorithm.filter_groups_metric": "format_score"}, "filter_groups_metric='format_score' is no part of"),
        ({"algorithm.adv_estimator": "grpo", "reward.weights": "rule_scor=1"}, "'rule_scor=1' must be PART=NUMBER"),
        ({"algorithm.adv_estimator": "grpo", "reward.grader": "gsm8"}, "reward.grader='gsm8' has no grader"),
        ({"algorithm.adv_estimator": "grpo", "reward.function": "function.py:score"}, r"\.py:score': .* no 'score'"),
    ],
)  # fmt: skip
def test_a_name_that_the_reward_lacks_ends_the_run_before_anything_starts(
    learn, small_run, tmp_path, monkeypatch, changes, said
):
    """Each is one line that blames the setting with the name."""
    (tmp_path / "estimator.py").write_text(ESTIMATOR)
    (tmp_path / "function.py").write_text(FUNCTION)
    started = []
    monkeypatch.setattr(start, "open_engine", lambda *_: started.append("a server"))
    monkeypatch.setattr(start, "prepare_programs", lambda *_: started.append("a compilation"))
    small_run.rollout.n, small_run.algorithm.adv_estimator = 2, "gdpo"
    placed = {name: f"{tmp_path}/{value}" if ".py" in str(value) else value for name, value in changes.items()}
    with pytest.raises(UserError, match=said) as e:
        learn(placed)
    assert started == [] and "\n" not in str(e.value)


@pytest.mark.parametrize("keys", ["rule_score,rule_score/exact", "function_score,function_score/style"])
def test_values_of_a_rule_and_of_a_function_are_parts(learn, small_run, tmp_path, keys):
    (tmp_path / "function.py").write_text(FUNCTION)
    small_run.rollout.n = 2
    small_run.reward.grader, small_run.reward.function = (
        ("exact", "") if "rule" in keys else ("", f"{tmp_path}/function.py")
    )
    assert len(learn({"algorithm.adv_estimator": "gdpo", "algorithm.gdpo_reward_keys": keys})) == 3
