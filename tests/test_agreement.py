"""Before the first step: the proof that sampler and trainer have one policy, and the warning where samples are cut."""

import dataclasses
import json
import math
import pathlib

import jax
import numpy as np
import pytest

from jppo import settings, train
from jppo.errors import UserError
from jppo.learner import batch, estimate, ppo
from jppo.learner.make import make_mesh
from jppo.models import config_reader, decoder, hf
from jppo.plugins.forecast.report import preview_run
from jppo.preflight import models_and_data
from jppo.rollout.make import make_publish_settings, open_engine
from jppo.rollout.protocol import RolloutError
from jppo.rollout.publish import publish_policy
from jppo.run import agreement
from jppo.run.agreement import LogpGap, Match, Mismatch, MismatchLimits, agree, sampling_warnings
from jppo.run.inputs import read_inputs
from jppo.run.make import make_learner
from jppo.samples.make import step_sampling
from jppo.types import Batch, Reward
from tests import agreements, make
from tests.make import read_lines, typed

CUT = {"rollout.top_p": 0.7, "rollout.top_k": 5, "rollout.min_p": 0.1}
WEIGHED = {"algorithm.old_logprob": "correction", "algorithm.rollout_is": "token"}


def steps_of(run):
    return [line["step"] for line in read_lines(run / "metrics.jsonl")]


def test_sampler_and_trainer_agree_whatever_is_cut_and_at_the_temperature_of_sampling(small_run, quick_compilation):
    c, file = small_run, pathlib.Path(small_run.model.path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"initializer_range": 0.3}))  # some tokens are likelier
    c.update_from_flattened_dict(CUT | {"rollout.name": "inprocess", "rollout.temperature": 0.5})
    c.rollout.logp_tolerance = 1e-4
    settings.check(c)
    inputs, mesh = read_inputs(typed(c)), make_mesh(typed(c))
    learner, now = make_learner(typed(c), inputs, mesh)
    engine = open_engine(typed(c), file.parent)
    sampler = engine.ready(eos_token_ids=inputs.end_tokens, decode=str)
    publish_policy(make_publish_settings(typed(c), None), learner, sampler, now)
    assert "agree" in agree(typed(c), inputs, learner, now, sampler, 0)
    # what the run then samples is cut: by the same comparison it would not agree
    drawn = sampler.generate(inputs.train.prompts, step_sampling(typed(c), 0), version=0)
    rewards = [Reward(0.0, {}, None)] * len(drawn)
    data = batch.flatten(drawn, rewards, np.zeros(len(drawn), np.int32), shape=learner.shape)
    micros = batch.pack_micros(data, drawn, plan=learner.plan, mesh=learner.mesh)
    data = ppo.with_old_logprob(learner.passes, learner.recipe, data, micros, learner.policy(now))
    assert estimate.mismatch(data)["rollout/logp_gap_max"] > 0.1
    c.rollout.temperature = 0.6  # the compiled passes have 0.5
    with pytest.raises(RolloutError, match=r"differ by .*; rollout.logp_tolerance allows 2.5e-05 and 0.0001: "):
        agree(typed(c), inputs, learner, now, sampler, 0)


def test_right_engines_with_the_published_spread_pass():
    assert {(one["start"], one["publish"]) for one in agreements.published(100)} == {(0, 0)}


def test_right_weights_pass_and_wrong_ones_do_not():
    cfg = config_reader.parse_config(agreements.SHAPE, path="here")
    values = decoder.init_params(cfg, jax.random.key(0), head="lm", param_dtype="float32")
    for one in agreements.of_model("mixture", agreements.make_model(cfg, values), 6, 24):
        assert one["start"] == one["publish"] == (0 if one["weights"] == "right" else one["cases"]), one


@pytest.mark.parametrize(
    "changes, mean, high",
    [
        ({}, 2.5e-4, 1e-3),
        ({"rollout.dtype": "bfloat16"}, 0.15, 0.6),
        ({"model.compute_dtype": "bfloat16"}, 0.15, 0.6),
        ({"model.compute_dtype": "float16"}, 0.025, 0.1),
        ({"model.compute_dtype": "float16", "rollout.dtype": "float16"}, 0.025, 0.1),
        ({"model.compute_dtype": "float16", "rollout.dtype": "bfloat16"}, 0.15, 0.6),
        (
            {"rollout.quantization": "fp8_per_channel", "rollout.dtype": "bfloat16"}
            | {"algorithm.old_logprob": "correction", "algorithm.rollout_is": "token"},
            0.375,
            1.5,
        ),
        ({"rollout.dtype": "float16", "rollout.logp_tolerance": 0.2}, 0.05, 0.2),
    ],
)
def test_bounds_follow_the_dtypes_unless_the_tolerance_is_set(config, changes, mean, high):
    config.update_from_flattened_dict(changes)
    assert agreement.limits(typed(config)) == MismatchLimits(mean, high)


def test_one_token_of_many_may_be_far_off_and_nan_is_not_within():
    gaps = np.full(1000, 0.02)
    gaps[:10] = 5.0
    assert LogpGap(gaps).within(MismatchLimits.of(0.5)) and LogpGap(gaps).largest == 5.0
    gaps[:60] = 1.0
    assert not LogpGap(gaps).within(MismatchLimits.of(0.5))
    assert not LogpGap(np.full(9, math.nan)).within(MismatchLimits.of(math.inf))


@pytest.mark.parametrize(
    "changes, said",
    [
        ({}, None),
        ({"rollout.val_kwargs.top_p": 0.9, "rollout.val_kwargs.temperature": 1.0}, None),
        ({"rollout.top_p": 0.9}, "rollout.top_p=0.9"),
        ({"rollout.top_k": 20, "algorithm.old_logprob": "bypass", "rollout.max_kl_jump": 0.0}, "rollout.top_k=20"),
        ({**CUT, "rollout.top_k": -1}, "rollout.top_p=0.7, rollout.min_p=0.1"),
        ({**CUT, **WEIGHED}, None),
        ({**CUT, "rollout.mask_replay": True}, None),
        (
            {
                **CUT, **WEIGHED, "algorithm.rollout_is": "none", "algorithm.rollout_rs": "token_k1",
                "algorithm.rollout_rs_threshold": "2",
            },
            "rollout.top_p=0.7, rollout.top_k=5, rollout.min_p=0.1",  # what is rejected is not undone
        ),
    ],
)  # fmt: skip
def test_a_run_that_learns_from_a_cut_policy_is_warned(config, changes, said):
    config.update_from_flattened_dict(changes)
    settings.check(config)
    found = sampling_warnings(typed(config), 3)
    assert [one.found.split(":")[0] for one in found] == ([] if said is None else [said])
    for one in found:
        assert one.step == 3 and "algorithm.rollout_is=token" in one.remedy
    assert [one.verdict for one in models_and_data.check_sampling(typed(config))] == ["OK", *(["WARN"] if said else [])]


def test_a_jump_that_nothing_would_notice_is_warned_of(config):
    config.algorithm.old_logprob = "bypass"
    (found,) = sampling_warnings(typed(config))
    assert found.name == "mismatch_unchecked" and found.found.startswith("rollout.max_kl_jump=1:")
    config.rollout.name = "inprocess"  # whose weights nobody else reaches
    assert sampling_warnings(typed(config)) == []


def test_it_is_said_at_the_start_and_by_dry_run(small_run, engine, quick_compilation, capsys):
    c = small_run
    c.rollout.top_p, c.rollout.stop, c.rollout.ignore_eos, c.trainer.val_before_train = 0.5, r"#\n", True, False
    c.algorithm.adv_estimator = "remax"
    c.trainer.total_training_steps = 1
    train.train(c)
    [row] = read_lines(pathlib.Path(c.trainer.run_dir) / "warnings.jsonl")
    assert (row["step"], row["name"]) == (0, "sampling_cut") and "rollout.top_p=0.5" in row["found"]
    said = capsys.readouterr()
    assert (said.out + said.err).count("warning: sampling_cut: rollout.top_p=0.5") == 1
    for asked in engine.asked:  # to train, to compare with, to test: one end for all
        assert (asked.stop, asked.ignore_eos) == (("#\n",), True)
    assert {asked.temperature for asked in engine.asked} == {0.0, 1.0}
    assert {asked.top_p for asked in engine.asked if asked.n == 1 and asked.temperature} == {0.5, 1.0}
    text = preview_run(typed(c))
    assert r"sampling         temperature 1, top_p 0.5; a response ends with '#\n' or 6 tokens" in text
    assert "warning: rollout.top_p=0.5: responses are drawn from a part" in text


def test_rows_longer_than_config_json_allows(small_run):
    c = typed(small_run)
    bound = hf.read_config(c.model.path)[1].max_position_embeddings
    small_run.data.max_prompt_length, small_run.data.max_response_length = bound, 1
    with pytest.raises(UserError, match=rf"max_position_embeddings={bound}; .*raise model\.max_position_embeddings"):
        read_inputs(typed(small_run))
    small_run.model.max_position_embeddings = bound + 1
    assert read_inputs(typed(small_run)).policy.max_position_embeddings == bound


def test_a_stop_text_that_no_response_can_hold_is_refused(small_run, tmp_path):
    tokenizer = read_inputs(typed(small_run)).tokenizer
    special = tokenizer.eos_token
    small_run.rollout.stop = f"a,b{special}"
    with pytest.raises(UserError, match=r"'b.*' has the special token .*generation_config\.json"):
        read_inputs(typed(small_run))


def test_a_jump_of_the_mismatch_stops_the_run_before_it_learns(small_run, engine, quick_compilation, monkeypatch):
    c, honest = small_run, engine.generate
    c.trainer.total_training_steps, c.trainer.save_freq, c.trainer.test_freq = 3, -1, -1
    c.trainer.val_before_train = False

    def replaced(prompts, sampling, *, version, done=None):
        """From the second step on one of two servers has other weights than those whose version it names."""
        found = honest(prompts, sampling, version=version)
        other = [
            dataclasses.replace(
                t, logprob=t.logprob + 5 * t.sampled * (i % 2) * (version > 0), server=f"http://h:{i % 2}"
            )
            for i, t in enumerate(found)
        ]
        for number, t in enumerate(other if done else []):
            done(number, t)
        return other

    monkeypatch.setattr(engine, "generate", replaced)
    said = r"rollout_corr/kl rose from .* than rollout\.max_kl_jump=1: http://h:1 did not sample from version 1 of"
    with pytest.raises(Mismatch, match=said):
        train.train(c)
    run = pathlib.Path(c.trainer.run_dir)
    assert steps_of(run) == [1]
    assert [path.name for path in (run / "checkpoints").glob("[0-9]*")] == ["1"]
    monkeypatch.setattr(engine, "generate", honest)
    train.train(c)
    assert steps_of(run) == [1, 2, 3]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"data.packing": "prefix", "rollout.n": 2},
        pytest.param({"algorithm.old_logprob": "bypass", "rollout.top_p": 0.9}, marks=pytest.mark.slow),
        pytest.param({"rollout.mode": "async", "rollout.max_staleness": 1}, marks=pytest.mark.slow),
    ],
)
def test_a_publish_of_wrong_weights_ends_the_run_before_it_learns_from_them(
    small_run, engine, quick_compilation, monkeypatch, changes
):
    c, honest = small_run, engine.probe
    c.update_from_flattened_dict(changes)
    c.trainer.total_training_steps, c.trainer.save_freq, c.trainer.test_freq = 3, -1, -1
    c.trainer.val_before_train, c.data.max_response_length = False, 3
    asked = []

    def probe(prompts, sampling):
        """The second publish fails on one of two servers."""
        asked.append((len(prompts), sampling.n, sampling.max_tokens, sampling.top_p))
        wrong = 40.0 if engine.version == 2 else 0.0
        return [
            dataclasses.replace(t, logprob=t.logprob - wrong * t.sampled * (i % 2), server=f"http://h:{i % 2}")
            for i, t in enumerate(honest(prompts, sampling))
        ]

    monkeypatch.setattr(engine, "probe", probe)
    said = r"publish of version 2, the log-probs of http://h:1 differ .* by (39|40) nats .*tolerance allows 25 and 100"
    with pytest.raises(Mismatch, match=said):
        train.train(c)
    copies = 4 if "data.packing" in changes else 1  # where a row has one prompt for several samples
    first, again = (8, copies, 3, 1.0), (8, 1, 3, 1.0)
    assert asked == [first, first, again]  # few tokens of few responses, and not cut; again where they are off
    run = pathlib.Path(c.trainer.run_dir)
    assert [path.name for path in (run / "checkpoints").glob("[0-9]*")] == ["2"]
    assert not (run / "samples/step_3.jsonl").exists()
    monkeypatch.setattr(engine, "probe", honest)
    train.train(c)  # resumes after the last good step, with new samples
    assert steps_of(run) == [1, 2, 3]


def test_the_check_of_the_mismatch_can_be_off_and_looks_at_jumps_only(config, monkeypatch):
    def seen(values):
        match = Match(config)
        for value in values:
            match.require({"rollout_corr/kl": value}, None, [], [])

    def jumps(values):
        monkeypatch.setattr(agreement, "_find_worst_server", lambda *_: ("", "1", 5.0))
        try:
            seen(values)
        except Mismatch:
            return True
        return False

    assert jumps([1.5]) and jumps([0.0, 0.5, 2.0]) and jumps([math.inf])
    assert not jumps([0.9, 1.8, 2.7]) and not jumps([math.nan, 0.5, math.nan, 1.2])
    config.rollout.top_p = 0.5  # the first step's mismatch is what the cut takes away
    assert not jumps([3.0, 3.5]) and jumps([3.0, 4.5])
    config.rollout.max_kl_jump = 0.0
    assert not jumps([3.0, 40.5])


def batch_of(mask, ours, theirs):
    rows = len(mask)
    nothing = np.zeros(rows, np.int32), np.zeros(rows, np.float32), np.arange(rows), np.ones(rows, np.float32)
    return Batch(mask, theirs, *nothing, {"old_logprob": ours})


def test_a_jump_names_the_server_that_is_furthest_off_and_its_versions():
    sampled = [False, True, True]
    trajectories = [
        make.trajectory([1, 2, 3], sampled, server=f"http://h:{i}", version=version)
        for i, version in ((0, 7), (1, 4), (1, 5))
    ]
    ours, theirs = np.zeros((4, 2), np.float32), np.zeros((4, 2), np.float32)
    theirs[1:3] = [[0.5, 1.5], [1.0, 3.0]]
    theirs[3] = 100.0  # a row of padding
    data = batch_of(np.arange(4)[:, None] < [3, 3], ours, theirs)
    assert agreement._find_worst_server(data, trajectories) == ("http://h:1", "4, 5", 1.5)


def test_a_jump_is_not_blamed_on_given_responses():
    """They have no server, and the engine in the process has no name."""
    sampled, shown = make.trajectory([1, 2], [0, 1], version=3), make.trajectory([1, 2], [0, 1], version=-1)
    theirs = np.array([[0.5], [-100.0]], np.float32)
    data = batch_of(np.ones((2, 1), bool), np.zeros((2, 1)), theirs)
    assert agreement._find_worst_server(data, [sampled, shown]) == ("", "3", 0.5)
