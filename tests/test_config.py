"""Settings: rules refuse with value, rule and remedy; every setting is read; bad arguments are one line."""

import errno
import functools
import importlib
import json
import math
import os
import pathlib
import pickle
import re
import subprocess
import sys

import pytest

from jppo import settings, train
from jppo.data import gsm8k
from jppo.errors import UserError, UserErrors
from jppo.learner import make, sharding
from jppo.plugins.agents import make as agent
from jppo.plugins.judge import make as judge
from jppo.plugins.reward_models import make as reward
from jppo.plugins.reward_models.classifier import Classifier
from jppo.rollout.servers.member import ServerSettings
from jppo.run.make import batch_shape, make_epochs
from jppo.settings import parts, table, texts
from jppo.settings.setting import OTHER_NAMES, OTHER_VALUES
from jppo.settings.table import TABLE
from tests.make import record_reads, typed, unread

ROOT = pathlib.Path(__file__).parents[1]
TALKS = {"rollout.multi_turn.enable": True, "rollout.multi_turn.interaction": "examples/second_try.py:SecondTry"}


@pytest.fixture
def sft_config():
    c = settings.sft_default()
    c.model.path, c.data.train_files = "some/model", "train.jsonl"
    return c


@pytest.fixture
def rm_config():
    c = settings.reward_model_default()
    c.model.path, c.data.train_files, c.data.val_files = "some/model", "train.jsonl", "val.jsonl"
    return c


@pytest.fixture
def dpo_config():
    c = settings.dpo_default()
    c.model.path, c.data.train_files, c.data.val_files = "some/model", "train.jsonl", "val.jsonl"
    return c


def having(name, *configs):
    """The first config that has the setting."""
    return next(c for c in configs if name in names(c))


def section_of(config, name):
    """The section that holds a setting, and what it is called there."""
    *sections, leaf = name.split(".")
    return functools.reduce(lambda node, part: node[part], sections, config), leaf


def put(config, name, value):
    section, leaf = section_of(config, name)
    section[leaf] = value


def names(config):
    return set(table.by_name(config))


def refusal(config, name, value):
    """What check says of one changed setting; that must be one line which names the setting."""
    put(config, name, value)
    with pytest.raises(UserError) as e:
        settings.check(config)
    said = str(e.value)
    assert "\n" not in said and name in said
    return said


def test_the_defaults_are_lawful(config, sft_config, rm_config, dpo_config):
    for c in (config, sft_config, rm_config, dpo_config):
        settings.check(c)
        assert c.is_locked


def outside(setting):
    """Values that the entry does not allow."""
    low, high = setting.interval
    number = setting.type if setting.type in (int, float) else float
    if isinstance(setting.default, tuple):
        yield from ((0.9,), (0.9, "x"), (0.9, 0.99, 0.999), (math.nan, 0.9), (0.9, math.inf))
        yield from ((0.9, 1.0), (-0.1, 0.9)) if setting.bounds else ()
        return
    if low is not None:
        yield from (number(value) for value in (low - 1, low - 2) if value != setting.off)
        if setting.bounds.startswith("("):
            yield number(low)
    if high is not None:
        yield number(high + 1)
        if setting.bounds.endswith(")"):
            yield number(high)
    if setting.type is float:
        yield from (math.nan, math.inf, -math.inf)
    if setting.choices:
        yield {str: "quik", int: 77}[setting.type]
    if setting.required:
        yield ""


def inside(setting):
    """Values that the entry allows."""
    if not setting.required:
        yield setting.default
    yield from setting.choices
    low, high = setting.interval
    number = setting.type if setting.type in (int, float) else float
    if low is not None and not isinstance(setting.default, tuple):
        yield number(low) if setting.bounds.startswith("[") else number(low + (1 if number is int else 1e-6))
        yield number(low + 0.5 if high is not None else low + 10**6)
    if high is not None and setting.bounds.endswith("]"):
        yield number(high)
    if setting.off is not None:
        yield setting.off


@pytest.mark.parametrize("setting", TABLE.values(), ids=TABLE)
def test_every_setting_takes_what_it_allows_and_refuses_the_rest_in_one_line(setting):
    for value in inside(setting):
        setting.check(value)
    for value in outside(setting):
        with pytest.raises(UserError) as e:
            setting.check(value)
        assert setting.name in str(e.value) and "\n" not in str(e.value)
        assert f"{value!r}" in str(e.value) or f"{value}" in str(e.value)
        for choice in setting.choices:
            assert repr(choice) in str(e.value)


def test_every_setting_has_its_type(config, sft_config, rm_config, dpo_config):
    for name, setting in TABLE.items():
        c = having(name, config, sft_config, rm_config, dpo_config)
        for wrong in ({"a": 1}, "text" if setting.type is not str else 3):
            with pytest.raises(TypeError):
                put(c, name, wrong)


@pytest.mark.parametrize(
    ("name", "refused", "taken", "said"),
    [
        ("algorithm.gamma", 1.01, 1.0, "algorithm.gamma=1.01 must be at most 1; the default is 1.0"),
        ("algorithm.lam", -0.01, 0.0, "must be at least 0.0"),
        ("actor.lr", -1e-9, 0.0, "must be at least 0.0"),
        ("actor.ppo_epochs", 0, 1, "must be at least 1; the default is 1"),
        ("actor.clip_ratio_c", 1.0, 1.5, "must be above 1"),
        ("critic.lora_alpha", 0, 1, "must be above 0; the default is None"),
        ("rollout.top_p", 0.0, 1.0, "must be above 0"),
        ("rollout.min_p", 1.0, 0.99, "must be below 1"),
        ("rollout.top_k", 0, 5, "must be at least 1, or -1"),
        ("trainer.save_freq", -2, -1, "must be at least 1, or -1"),
        ("actor.lr_warmup_steps", -2, -1, "must be at least 0, or -1"),
        ("reward.memory_bytes", 2**28 - 1, 2**28, "must be at least 268435456"),
        ("trainer.stop_exit_code", 1, 75, "it is one of 143, 75"),
        ("actor.betas", (0.9, 1.0), (0.0, 0.5), "must be 2 numbers in [0, 1), such as (0.9, 0.999)"),
        ("algorithm.adv_estimator", "grppo", "gae", "did you mean 'grpo'?"),
        ("algorithm.adv_estimator", "ppo", "gae", "did you mean 'gae'?"),
        ("actor.kl_loss_type", "low_var", "full+", "did you mean 'low_var_kl'"),
        (
            "rollout.name",
            "vlm",
            "sglang",
            "'vllm', 'sglang', 'inprocess', or PATH.py:NAME, or MODULE:NAME; did you mean",
        ),
        ("model.path", "", "some/model", "--config.model.path=PATH"),
    ],
)
def test_a_value_is_checked_as_part_of_the_config(config, name, refused, taken, said):
    put(config, name, taken)
    settings.check(config)
    assert said in refusal(config, name, refused)


def test_a_setting_that_no_table_has_is_refused(config):
    with config.unlocked():
        config.actor.lrr = 1.0
    with pytest.raises(UserError, match=r"no setting 'actor\.lrr'.*did you mean 'actor\.lr'"):
        settings.check(config)


@pytest.mark.parametrize("name", ["data.train_files", "data.val_files", "trainer.run_dir"])
def test_an_empty_path(config, name):
    assert f"--config.{name}=PATH" in refusal(config, name, "")


def test_what_is_none_unless_given_may_be_given(config):
    for name in names(config):
        section, leaf = section_of(config, name)
        assert section[leaf] is not None or section.get_type(leaf) in (int, float, str), name
    config.actor.clip_ratio_low, config.critic.ppo_mini_batch_size = 0.0, 32
    settings.check(config)
    assert '"clip_ratio_low": 0.0' in settings.dump(config)


@pytest.mark.parametrize(
    "changes,said",
    [
        ({"algorithm.adv_estimator": "grpo"}, ["rollout.n=1", "raise rollout.n"]),
        ({"algorithm.adv_estimator": "rloo"}, ["rollout.n=1", "raise rollout.n"]),
        ({"algorithm.adv_estimator": "remax", "trainer.critic_warmup": 3}, ["trainer.critic_warmup=3", "take gae"]),
        ({"algorithm.adv_estimator": "remax", "critic.lam": 1.0}, ["critic.lam=1.0", "take gae"]),
        ({"algorithm.adv_estimator": "remax", "critic.value_norm_decay": 0.9}, ["critic.value_norm_decay=0.9", "None"]),
        ({"algorithm.adv_estimator": "remax", "critic.value_bins": 51}, ["critic.value_bins=51", "leave it at 0"]),
        ({"algorithm.adv_estimator": "remax", "critic.value_head_std": 0.02}, ["head_std=0.02", "at 0.0"]),
        ({"critic.value_bins": 51, "critic.value_range": (1.0, 1.0)}, ["critic.value_range=(1.0, 1.0)", "a lower and"]),
        ({"critic.value_bins": 51, "critic.value_range": (0.0, float("inf"))}, ["critic.value_range=", "finite"]),
        ({"critic.value_range": (0.0, 1.0)}, ["critic.value_range=(0.0, 1.0) is read only with critic.value_bins set"]),
        ({"critic.value_bins": 51, "critic.cliprange_value": 0.2}, ["critic.cliprange_value=0.2", "leave"]),
        ({"critic.warmup_epochs": 4}, ["critic.warmup_epochs=4 is read only with trainer.critic_warmup set"]),
        ({"algorithm.adv_estimator": "remax", "algorithm.lam_alpha": 0.05}, ["algorithm.lam_alpha=0.05", "take gae"]),
        ({"algorithm.gamma_by": "turn"}, ["algorithm.gamma_by='turn'", "multi_turn.enable is False", "set it to True"]),
        (
            {
                "algorithm.gamma_by": "turn",
                "algorithm.adv_estimator": "remax",
                **TALKS,
            },
            ["algorithm.gamma_by='turn'", "'remax' does not discount", "take gae"],
        ),
        *(
            ({f"rollout.{name}": value}, [f"rollout.{name}={value!r} is read only with rollout.agent set", "leave"])
            for name, value in (("history", "sampled"), ("agent_branches", 2))
        ),
        *(
            (TALKS | {"rollout.multi_turn.format": "plain", f"rollout.{name}": value},
             [f"rollout.{name}={value!r}", "rollout.multi_turn.format='plain'", "another format", f"at {usual!r}"])
            for name, value, usual in (("history", "sampled", "template"), ("agent_branches", 2, 4))
        ),
        (
            {"rollout.agent": "true", "rollout.agent_format": "plain", "rollout.history": "sampled"},
            ["rollout.history='sampled'", "rollout.agent_format='plain'", "another format", "at 'template'"],
        ),
        (
            TALKS | {"rollout.history": "sampled", "rollout.agent_branches": 2},
            ["rollout.agent_branches=2", "has one with rollout.history='sampled'", "set that to 'template'", "at 4"],
        ),
        ({"actor.weight_decay": 1e308}, ["actor.weight_decay=1e+308", "finite number, at most 3.4e+38 in float32"]),
        (
            {"actor.loss_mode": "sapo", "actor.loss_agg_mode": "seq-mean-token-sum"},
            ["'seq-mean-token-sum'", "set that", "'sapo'"],
        ),
        (
            {"algorithm.use_kl_in_reward": True, "actor.use_kl_loss": True, "ref.path": ""},
            ["use_kl_in_reward=True", "use_kl_loss=True", "ref.path is empty"],
        ),
        (
            {
                "actor.use_kl_loss": True, "actor.kl_loss_type": "full", "algorithm.old_logprob": "bypass",
                "ref.path": "",
            },
            ["kl_loss_type='full'", "ref.path is empty"],
        ),
        ({"algorithm.kl_ctrl_type": "adaptive"}, ["use_kl_in_reward is False"]),
        ({"algorithm.adv_estimator": "distill"}, ["'distill' learns from a teacher", "set algorithm.use_kl_in_reward"]),
        (
            {"algorithm.adv_estimator": "distill", "algorithm.use_kl_in_reward": True},
            ["ref.path='policy'", "the teacher's directory"],
        ),
        (
            {
                "algorithm.adv_estimator": "distill", "algorithm.use_kl_in_reward": True, "algorithm.gamma": 0.0,
                "algorithm.kl_penalty": "full_forward", "ref.path": "some/teacher",
            },
            ["kl_penalty='full_forward'", "algorithm.gamma=0.0", "take kl"],
        ),
        *(
            ({"ref.url": "http://h:1", "algorithm.use_kl_in_reward": True} | changes, ["ref.url has", *said])
            for changes, said in (
                ({"ref.path": "some/teacher"}, ["'some/teacher' names another", "leave one of them out"]),
                ({"algorithm.use_kl_in_reward": False}, ["no KL to it is used", "use_kl_in_reward=True"]),
                ({"algorithm.kl_penalty": "full"}, ["algorithm.kl_penalty='full' needs all", "ref.path"]),
                ({"actor.use_kl_loss": True, "actor.kl_loss_type": "full_forward"}, ["kl_loss_type='full_forward'"]),
                ({"rollout.temperature": 0.7}, ["rollout.temperature=0.7", "set that to 1"]),
            )
        ),
        ({"ref.url": "http://me:p4ss@h:1"}, ["ref.url has a password or a query", "leave it out"]),
        ({"ref.url": "a=http://h:1,b=http://me:p4ss@h:2"}, ["ref.url has a password or a query", "leave it out"]),
        ({"ref.url": "me:p4ss@h:2"}, ["ref.url has a password or a query", "leave it out"]),
        ({"ref.url": "h:8000"}, ["ref.url", "'h:8000' is no address", "http://127.0.0.1:8000"]),
        ({"ref.url": "a=http://h,b=h:2"}, ["'b=h:2' is no address", "http://127.0.0.1:8000"]),
        ({"ref.url": " , "}, ["ref.url=' , ' has no address", "leave it empty"]),
        ({"ref.url": "a=http://h:1,http://h:2"}, ["'http://h:2' has no data source", "SOURCE=ADDRESS,SOURCE=ADDRESS"]),
        ({"ref.url": "a=http://h:1,a=http://h:2"}, ["data source 'a' is given twice", "name it once"]),
        ({"algorithm.rollout_is_threshold": "2_0.5"}, ["'2_0.5'", "low_high"]),
        ({"algorithm.rollout_is_threshold": "0"}, ["'0'", "above 0"]),
        ({"algorithm.rollout_is_threshold": "x"}, ["'x'", "above 0"]),
        ({"algorithm.rollout_is": "token"}, ["old_logprob='correction'", "'decoupled'"]),
        ({"algorithm.old_logprob": "correction"}, ["corrects nothing", "rollout_rs"]),
        (
            {"algorithm.old_logprob": "bypass", "algorithm.rollout_is": "token"},
            ["algorithm.rollout_is='token'", "the ratio of actor.loss_mode='vanilla'", "actor.loss_mode=gpg"],
        ),
        (
            {"algorithm.rollout_correction": "bypass_pg_is", "algorithm.rollout_is_batch_normalize": True},
            ["algorithm.rollout_is='sequence'", "rollout_is_batch_normalize=True", "old_logprob=correction"],
        ),
        ({"algorithm.rollout_correction": "bypass_pg"}, ["'bypass_pg' is not known", "did you mean 'bypass_pg_is'"]),
        (
            {"algorithm.rollout_correction": "decoupled_geo_rs", "algorithm.rollout_is": "token"},
            ["algorithm.rollout_is='token'", "'decoupled_geo_rs' sets it to 'none'", "leave it at 'none'"],
        ),
        (
            {"algorithm.rollout_correction": "bypass_pg_is", "actor.loss_mode": "gspo"},
            ["actor.loss_mode='gspo'", "'bypass_pg_is' sets it to 'gpg'", "leave it at 'vanilla'"],
        ),
        (
            {"algorithm.rollout_correction": "decoupled_seq_is", "algorithm.rollout_rs_threshold": "2"},
            ["algorithm.rollout_rs_threshold='2'", "sets it to ''"],
        ),
        ({"actor.loss_mode": "dro"}, ["actor.dro_beta=None", "set it"]),
        ({"actor.clip_cov_lb": 0.0}, ["actor.clip_cov_lb=0.0", "actor.loss_mode='clip_cov'"]),
        ({"algorithm.adv_estimator": "gdpo", "rollout.n": 2}, ["algorithm.gdpo_reward_keys is empty", "rule_score"]),
        (
            {
                "algorithm.adv_estimator": "gdpo", "rollout.n": 2, "algorithm.gdpo_reward_keys": "a,b",
                "algorithm.gdpo_reward_weights": "1",
            },
            ["algorithm.gdpo_reward_weights='1'", "'a,b'"],
        ),
        (
            {
                "algorithm.adv_estimator": "gdpo", "rollout.n": 2, "algorithm.gdpo_reward_keys": "a",
                "algorithm.use_kl_in_reward": True,
            },
            ["algorithm.use_kl_in_reward=True", "'gdpo'", "actor.use_kl_loss=True"],
        ),
        ({"algorithm.adv_estimator": "gpg"}, ["'gpg' compares the samples", "raise rollout.n"]),
        (
            {
                "algorithm.adv_estimator": "optimal_token_baseline", "rollout.n": 2, "algorithm.old_logprob": "bypass",
            },
            ["algorithm.old_logprob='bypass'", "'optimal_token_baseline'", "decoupled"],
        ),
        ({"algorithm.old_logprob": "correction", "algorithm.rollout_rs": "token_k1"}, ["give one threshold"]),
        ({"algorithm.rollout_rs_threshold": "2"}, ["give one threshold"]),
        (
            {"algorithm.rollout_rs": "token_k1,seq_max_k1", "algorithm.rollout_rs_threshold": "2"},
            ["'seq_max_k1' is not known", "token_k3"],
        ),
        ({"algorithm.rollout_rs": "token_k3", "algorithm.rollout_rs_threshold": "0.5_2"}, ["upper bound only"]),
        ({"algorithm.rollout_rs": "seq_sum_k1", "algorithm.rollout_rs_threshold": "0.5"}, ["0.5 alone", "low_high"]),
        ({"algorithm.rollout_rs": "token_k3,token_k3", "algorithm.rollout_rs_threshold": "2"}, ["twice"]),
        ({"rollout.temperature": 0.0}, ["rollout.temperature=0.0", "above 0", "try 1.0"]),
        ({"rollout.temperature": 0.0, "rollout.n": 4}, ["rollout.temperature=0.0", "all the same"]),
        ({"rollout.temperature": 0.005}, ["rollout.temperature=0.005", "from 0.01 to 2.0", "rollout.name=inprocess"]),
        ({"rollout.temperature": 2.5}, ["rollout.temperature=2.5", "from 0.01 to 2.0"]),
        ({"rollout.val_kwargs.temperature": 3.0}, ["rollout.val_kwargs.temperature=3.0", "from 0.01 to 2.0"]),
        ({"rollout.mask_replay": True}, ["rollout.mask_replay=True", "all are off"]),
        (
            {"rollout.mask_replay": True, "rollout.top_k": 300},
            ["rollout.top_k=300", "set rollout.mask_replay_tokens=300"],
        ),
        (
            {"rollout.mask_replay": True, "rollout.top_p": 0.9, "rollout.name": "sglang"},
            ["rollout.mask_replay=True", "rollout.name='sglang'", "vllm or inprocess"],
        ),
        *(
            ({f"rollout.val_kwargs.{name}": value}, [f"rollout.val_kwargs.{name}={value}", "raise the temperature"])
            for name, value in (("top_p", 0.9), ("top_k", 5), ("min_p", 0.1))
        ),
        ({"rollout.stop": "a,,b"}, ["rollout.stop='a,,b'", "empty", r"write \, for a comma"]),
        ({"rollout.stop": "a,b,a"}, ["rollout.stop='a,b,a'", "'a' is given twice"]),
        ({"rollout.stop": "x\n\\boxed"}, [r"rollout.stop='x\n\boxed'", "here comes b", r"write \\ for a backslash"]),
        ({"rollout.stop": "end\\"}, ["here comes none"]),
        ({"rollout.val_kwargs.n": 2}, ["rollout.val_kwargs.n=2", "temperature=0.0", "raise the temperature"]),
        ({"reward.judge.model": "m"}, ["reward.judge.model='m'", "reward.judge.api_type set", "leave"]),
        ({"reward.model.normalize": True}, ["reward.model.normalize=True", "reward.model.path set"]),
        ({"reward.function": "f.py:f", "reward.grader": "gsm8k"}, ["reward.grader='gsm8k'", "'f.py:f'"]),
        ({"rollout.lora_sync": "adapter"}, ["rollout.lora_sync='adapter'", "model.lora_rank=0", "take merge"]),
        *(
            ({"rollout.name": "inprocess", name: value}, [f"{name}={value!r}", f"leave {name} at {usual!r}"])
            for name, value, usual in (
                ("rollout.python", "/other/python", ""),
                ("rollout.urls", "http://127.0.0.1:8000", ""),
                ("rollout.servers", 2, -1),
                ("rollout.port", 8000, 0),
                ("rollout.publish_via", "tcp", "file"),
                ("rollout.publish_dir", "/shared", ""),
                ("rollout.gpu_memory_utilization", 0.5, 0.4),
                ("rollout.omp_threads", 2, -1),
                ("rollout.start_timeout_s", 1.0, 900.0),
                ("rollout.request_timeout_s", 1.0, 600.0),
            )
        ),
        (
            {"rollout.name": "inprocess", "rollout.lora_sync": "adapter", "model.lora_rank": 2},
            ["rollout.lora_sync='adapter'", "rollout.name='inprocess'", "take rollout.lora_sync=merge"],
        ),
        *(
            ({"rollout.urls": url}, ["password or a query", "JPPO_SERVER_TOKEN in the environment"])
            for url in ("http://me:p4ss@h:1", "http://h:1,http://me@h:2", "http://h:1/?key=p4ss", "me:p4ss@h:1")
        ),
        *(
            ({"rollout.urls": url}, ["is no address", "http://127.0.0.1:8000"])
            for url in ("h:8000", "ftp://h", "http://", "http://h:x", "http://[h", "http://h:99999", "http://h:0",
                        "http://a b", "http://a\nb:1", "http://\x00:1")
        ),
        ({"rollout.urls": "http://h:1,http://i:1,http://h:1/"}, ["a server is given twice", "name it once"]),
        *(
            ({"rollout.engine_args": f"--seed 1 {option}"}, ["settings are printed and saved", "leave it out"])
            for option in ("--api-key p4ss", "--api_key=p4ss", "--hf-token p4ss", "--admin-api-key p4ss", "--hf_token",
                           "--ssl-keyfile-password p4ss", "--x.client-secret=p4ss")
        ),
        ({"rollout.quantization": "fp8_per_tensor"}, ["rollout.dtype='float32'", "set rollout.dtype=bfloat16"]),
        (
            {"rollout.quantization": "fp8_per_tensor", "rollout.dtype": "bfloat16"},
            ["algorithm.old_logprob='decoupled' does not correct", "old_logprob=correction"],
        ),
        (
            {"rollout.engine_args": "--spec-method ngram", "rollout.val_kwargs.min_p": 0.1},
            ["rollout.val_kwargs.min_p=0.1", "cannot speculate", "set it to 0.0"],
        ),
        ({"rollout.publish_host": "10.0.0.1"}, ["rollout.publish_host='10.0.0.1'", "other than 'file'"]),
        (
            {"rollout.publish_via": "tcp", "rollout.publish_host": "0.0.0.0"},
            ["rollout.publish_host='0.0.0.0'", "the trainer's own"],
        ),
        (
            {"rollout.publish_via": "tcp", "rollout.urls": "http://localhost:1,http://10.0.0.2:8000"},
            ["rollout.publish_via='tcp' needs", "the server at http://10.0.0.2:8000", "set rollout.publish_host"],
        ),
        (
            {"rollout.publish_via": "auto", "rollout.urls": "dns://vllm.svc:8000"},
            ["rollout.publish_via='auto' (here tcp)", "dns://vllm.svc:8000", "set rollout.publish_host"],
        ),
        (
            {
                "rollout.publish_via": "auto",
                "rollout.urls": "file:servers",
                "rollout.lora_sync": "adapter",
                "model.lora_rank": 2,
            },
            ["rollout.publish_via='auto' (here tcp) sends whole weights", "rollout.publish_dir", "take merge"],
        ),
        (
            {"rollout.publish_via": "nccl", "rollout.sleep_level": 1},
            ["rollout.publish_via='nccl'", "rollout.sleep_level=1", "use file"],
        ),
        (
            {"rollout.publish_via": "nccl", "rollout.name": "sglang"},
            ["rollout.publish_via='nccl' is for vLLM", "rollout.publish_dir"],
        ),
        (
            {"rollout.publish_via": "nccl", "rollout.publish_delta": True},
            ["rollout.publish_delta=True compares weights in host memory", "'nccl'; set it to tcp"],
        ),
        (
            {"rollout.publish_via": "ipc", "rollout.urls": "http://127.0.0.1:8000"},
            ["rollout.publish_via='ipc' is for servers that are started here", "rollout.urls", "tcp"],
        ),
        ({"rollout.publish_via": "ipc", "rollout.name": "sglang"}, ["rollout.publish_via='ipc' is for vLLM"]),
        (
            {"rollout.publish_via": "tcp", "rollout.lora_sync": "adapter", "model.lora_rank": 2},
            ["rollout.publish_via='tcp'", "rollout.publish_dir", "take merge"],
        ),
        (
            {
                "rollout.lora_sync": "adapter",
                "model.lora_rank": 2,
                "rollout.mode": "async",
                "rollout.on_update": "keep",
            },
            ["rollout.on_update='keep'", "take abort or wait"],
        ),
        ({"rollout.lora_sync": "adapter", "model.lora_rank": 513}, ["model.lora_rank=513", "512 at most"]),
        ({"actor.lr_warmup_steps": 3, "actor.lr_warmup_steps_ratio": 0.1}, ["actor.lr_warmup_steps=3", "leave one"]),
        ({"critic.master_dtype": "bfloat16"}, ["critic.master_dtype='bfloat16'", "set model.param_dtype=bfloat16"]),
        (
            {"actor.master_dtype": "bfloat16", "model.param_dtype": "bfloat16", "model.lora_rank": 2},
            ["actor.master_dtype='bfloat16'", "adapters of rank 2 are float32"],
        ),
        ({"ref.param_offload": True, "model.lora_rank": 2}, ["ref.param_offload=True", "actor.param_offload"]),
    ],
)  # fmt: skip
def test_settings_that_contradict_each_other(config, changes, said):
    for name, value in changes.items():
        put(config, name, value)
    with pytest.raises(UserError) as e:
        settings.check(config)
    assert "\n" not in str(e.value)
    for part in said:
        assert part in str(e.value)


@pytest.mark.parametrize(
    "changes",
    [
        TALKS | {"rollout.history": "sampled"},
        TALKS | {"rollout.agent_branches": 2},
        {"rollout.agent": "true", "rollout.history": "sampled", "rollout.agent_branches": 2},
        {"rollout.agent": "true", "rollout.agent_format": "plain", "rollout.agent_branches": 2},
    ],
)
def test_the_history_of_conversations_may_be_set_where_it_is_read(config, changes):
    for name, value in changes.items():
        put(config, name, value)
    settings.check(config)


@pytest.mark.parametrize("via", ["tcp", "auto"])
@pytest.mark.parametrize(
    "urls, host",
    [("", ""), ("http://localhost:1", ""), ("file:servers", ""), ("http://10.0.0.2:8000", "10.0.0.1")],
)
def test_weights_over_a_socket_need_the_trainers_address_only_for_other_machines(config, via, urls, host):
    config.rollout.publish_via, config.rollout.urls, config.rollout.publish_host = via, urls, host
    settings.check(config)


def test_a_test_alone_needs_no_training_set_and_no_batch_that_divides(config):
    config.data.train_files, config.actor.ppo_mini_batch_size, config.actor.max_tokens_per_device = "", 7, 1
    settings.check(config, training=False)
    config.rollout.val_kwargs.n = 3
    with pytest.raises(UserError, match=r"temperature=0\.0"):
        settings.check(config, training=False)


def test_a_command_may_do_without_a_file():
    c, _ = settings.parse(["--config.actor.lr=0.5"], "about", settings.default(), needs_file=False)
    assert c.actor.lr == 0.5 and c.is_locked and settings.default().actor.lr != 0.5
    for argument, said in (
        ("--config.actr.lr=1", "'actr'"),
        ("--config.trainer.seed=x", "type int"),
        ("--config=", "name one file"),
    ):
        with pytest.raises(UserError, match=said):
            settings.parse([argument], "about", settings.default(), needs_file=False)


@pytest.mark.parametrize(
    "urls, found",
    [
        ("", {}),
        (" http://h:1 ", {"": "http://h:1"}),
        ("a=http://h:1", {"a": "http://h:1"}),
        ("openai/gsm8k = http://h:1 , c#=https://h:2", {"openai/gsm8k": "http://h:1", "c#": "https://h:2"}),
        ("a=b=http://h", {"a=b": "http://h"}),
    ],
)
def test_addresses_by_data_source(config, urls, found):
    assert texts.addresses_by_source(urls) == found
    config.ref.url, config.algorithm.use_kl_in_reward = urls, bool(urls)
    settings.check(config)


@pytest.mark.parametrize(
    "written, texts",
    [
        ("", ()),
        ("</answer>", ("</answer>",)),
        (r"\n\n, User:", ("\n\n", " User:")),
        (r"a\,b,\t,\\n,\r", ("a,b", "\t", r"\n", "\r")),
        ("line\nbreak", ("line\nbreak",)),
        (r"\,", (",",)),
    ],
)
def test_stop_texts(config, parse, written, texts):
    c, _ = parse(f"--config.rollout.stop={written}")
    assert c.rollout.stop == written and settings.typed(c).rollout.stop_texts == texts
    settings.check(c)


def test_temperatures_that_vllm_has_not_are_the_trainers_own(config):
    config.rollout.name, config.rollout.temperature, config.rollout.val_kwargs.temperature = "inprocess", 0.005, 2.5
    settings.check(config)
    config.rollout.temperature = 0.0
    with pytest.raises(UserError, match=r"rollout\.temperature=0\.0"):
        settings.check(config)
    settings.check(config, training=False)


def test_rules_of_rejection():
    assert settings.rejection_rules("token_k1, seq_mean_k3", "0.5_2.0,0.05") == (
        ("token_k1", 0.5, 2.0),
        ("seq_mean_k3", 0.0, 0.05),
    )
    assert settings.rejection_rules("token_k1,seq_max_k2", 4) == (("token_k1", 0.25, 4.0), ("seq_max_k2", 0.0, 4.0))
    assert settings.rejection_rules("", "") == ()
    assert settings.importance_band(2) == (None, 2.0) and settings.importance_band("0.5_2") == (0.5, 2.0)


@pytest.mark.parametrize("batch,n,mini,fits", [(256, 1, 48, 32), (100, 3, 64, 60), (8, 1, 64, 8), (7, 1, 2, 1)])
def test_a_mini_batch_that_does_not_divide(config, batch, n, mini, fits):
    config.data.train_batch_size, config.rollout.n = batch, n
    said = refusal(config, "actor.ppo_mini_batch_size", mini)
    rule = f"must divide data.train_batch_size*rollout.n={batch * n}; try {fits}"
    assert said == f"actor.ppo_mini_batch_size={mini} {rule}"
    config.actor.ppo_mini_batch_size = fits
    settings.check(config)
    assert refusal(config, "critic.ppo_mini_batch_size", mini) == f"critic.ppo_mini_batch_size={mini} {rule}"


@pytest.mark.parametrize("name", ["data.max_tokens_per_row", "actor.max_tokens_per_device"])
def test_rows_shorter_than_prompt_and_response(config, name):
    config.data.packing = "segments"
    assert "=1536; try 1536" in refusal(config, name, 1535)
    config.data.max_tokens_per_row = config.actor.max_tokens_per_device = 1536
    settings.check(config)


def test_a_micro_batch_that_holds_no_row(config):
    config.data.packing = "segments"
    config.data.max_tokens_per_row = 4096
    assert "data.max_tokens_per_row=4096" in refusal(config, "actor.max_tokens_per_device", 4095)
    config.data.packing, config.actor.max_tokens_per_device = "buckets", 4096
    said = "data.max_tokens_per_row=4096 is not read with data.packing='buckets'; leave it at -1"
    assert refusal(config, "data.max_tokens_per_row", 4096) == said


def test_a_prompt_of_one_sample_is_shared_by_none(config, sft_config):
    for c in (config, sft_config):
        assert "raise rollout.n" in refusal(c, "data.packing", "prefix")
    config.rollout.n = 2
    settings.check(config)


def test_sft_lengths_are_checked_by_their_own_names(sft_config):
    assert "try 1536" in refusal(sft_config, "optim.max_tokens_per_device", 1000)


@pytest.fixture
def parse():
    """The command line, with the quickstart's config, as it is parsed."""

    def parse(*argv):
        argv = ["--config=" + str(ROOT / "configs/quickstart.py"), *argv]
        return settings.parse(argv, "about", settings.default())

    return parse


def test_overrides_reach_the_config_and_an_explicit_0_survives(parse):
    c, switches = parse("--config.algorithm.kl_coef=0.0", "--config.actor.lr=0.0", "--config.trainer.seed=0")
    assert c.algorithm.kl_coef == 0.0 and c.actor.lr == 0.0 and c.trainer.seed == 0
    assert not switches["dry_run"]
    settings.check(c)
    assert '"kl_coef": 0.0' in settings.dump(c)


def test_a_config_that_is_not_named_is_suggested():
    for word, said in (("configs/gsm8k.py", "--config=configs/gsm8k.py"), ("--dry_run", "--config=jppo://quickstart")):
        with pytest.raises(UserError, match=f"--config is given 0 times; name one file, as in {said}$"):
            settings.parse([word], "about", settings.default())


@pytest.mark.parametrize(
    "argument,said",
    [
        ("--config.actor.lrr=1", "there is no setting 'lrr'"),
        ("--config.actr.lr=1", "there is no setting 'actr'"),
        ("--config.actor.ppo_epochs=two", "--config.actor.ppo_epochs=two must be of type int"),
        ("--config.data.shuffle=maybe", "--config.data.shuffle=maybe must be of type bool"),
        ("--speed=3", "speed"),
        ("extra", "'extra' is not understood"),
        ("--config=other.py", "--config is given 2 times"),
        ("--config.actor.lr=1e-4,2e-4", "a run has one; python -m jppo.sweep trains with each of them"),
    ],
)
def test_a_bad_argument_is_one_line(parse, argument, said):
    with pytest.raises(UserError) as e:
        parse(argument)
    assert said in str(e.value) and "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("raise OSError('no disk')", "line 4: OSError: no disk; fix the file"),
        ("1 / 0", "line 4: ZeroDivisionError"),
        ("import nothing_here", "line 4: ModuleNotFoundError"),
        ("x = = 1", "line 4: SyntaxError"),
        ("c.actor.lrr = 1", "line 4: there is no setting 'lrr'; did you mean 'lr'?"),
        ("c.actor.lr = 'fast'", "line 4: TypeError"),
        ("c.data = 7", "line 4: TypeError"),
        ("c = None", "get_config() returns None; it must return settings"),
        ("return", "get_config() returns None"),
        ("c.model = {}", "model.attention is missing"),
        ("c.unlock(); c.new = 3", "new is no setting"),
        ("c.model.path = None", "model.path=None must be of type str"),
    ],
)
def test_a_fault_in_a_config_file_is_one_line_with_its_place(tmp_path, line, said):
    file = tmp_path / "mine.py"
    file.write_text(
        f"from jppo import settings\ndef get_config():\n    c = settings.default()\n    {line}\n    return c\n"
    )
    with pytest.raises(UserError) as e:
        settings.parse([f"--config={file}"], "about", settings.default())
    assert str(e.value).startswith(str(file)) and said in str(e.value) and "\n" not in str(e.value)


def test_a_file_without_get_config_or_with_an_argument_that_it_does_not_take(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("x = 1\n")
    with pytest.raises(UserError, match=r"has no get_config\(\)"):
        settings.parse([f"--config={file}"], "about", settings.default())
    file.write_text("def get_config():\n    return 1\n")
    with pytest.raises(UserError, match="takes no argument"):
        settings.parse([f"--config={file}:x"], "about", settings.default())


def test_an_error_reaches_the_terminal_as_one_line_without_controls(capsys):
    @settings.exit_on_user_error
    def command(error):
        raise error

    for error in (UserError("a\nb\x1b[2J"), OSError(errno.ENAMETOOLONG, "File name too long", "x")):
        with pytest.raises(SystemExit) as e:
            command(error)
        assert e.value.code == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first == r"error: a\nb\x1b[2J" and second == "error: x: File name too long; name another path"
    with pytest.raises(OSError, match="No space"):  # nothing that a path is to blame for
        command(OSError(errno.ENOSPC, "No space", "x"))
    with pytest.raises(SystemExit) as e:
        command(KeyboardInterrupt())
    assert (e.value.code, capsys.readouterr().err) == (130, "interrupted\n")


@pytest.mark.parametrize(
    "module, words",
    [
        ("jppo.sft", ["--config=configs/quickstart_sft.py", "--config.model.path=~nobody-here/x", "--dry_run"]),
        ("jppo.data.check", ["~nobody-here/x"]),
        ("jppo.chat", ["~nobody-here/x"]),
        ("jppo.sweep", ["--config=configs/quickstart.py", "--out=~nobody-here/x", "--print"]),
    ],
)
def test_a_home_folder_of_nobody_is_one_line(module, words, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as e:
        importlib.import_module(module).main(words)
    (line,) = capsys.readouterr().err.splitlines()
    assert e.value.code == 2 and "~nobody-here is no user's home folder; write the path out" in line


def test_a_path_with_controls_is_escaped_where_a_command_prints_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gsm8k").mkdir()
    for split in ("train", "test"):
        row = {"question": "How much is 1 + 1?", "answer": "#### 2"}
        (tmp_path / f"gsm8k/{split}.jsonl").write_text(json.dumps(row) + "\n")
    monkeypatch.setattr(sys, "argv", ["gsm8k", "--from=gsm8k", "--out=a\x1b[2J"])
    gsm8k.main()
    assert r"a\x1b[2J" in capsys.readouterr().out and (tmp_path / "a\x1b[2J").is_dir()


def test_a_config_that_is_not_there():
    with pytest.raises(UserError, match=r"--config=no\.py: no such file"):
        settings.parse(["--config=no.py"], "about", settings.default())
    with pytest.raises(UserError, match="given 0 times"):
        settings.parse([], "about", settings.default())


@pytest.mark.parametrize(
    "names, said",
    [
        ("console", "has no jsonl: .* try 'console,jsonl'"),
        ("", "try 'jsonl'"),
        ("jsonl,tensorbord", "'tensorbord' is not known; the names are console, jsonl"),
        ("jsonl, jsonl", "'jsonl' is given twice"),
    ],
)
def test_loggers_that_cannot_be(config, names, said):
    config.trainer.logger = names
    with pytest.raises(UserError, match=said):
        settings.check(config)


def test_loggers_are_names_with_or_without_blanks():
    assert settings.loggers(" jsonl, console,wandb,") == ("jsonl", "console", "wandb")


def run(*argv):
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [sys.executable, "-m", "jppo.train", *argv], cwd=ROOT, env=environment, capture_output=True, text=True
    )


def test_the_command_ends_with_2_and_one_line():
    done = run("--config=configs/quickstart.py", "--config.actor.clip_ratio=-0.1")
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: ") and "at least 0.0" in line


def test_every_fault_of_a_config_is_listed_at_once(config, capsys):
    config.algorithm.adv_estimator, config.algorithm.gamma, config.rollout.temperature = "gea", 1.5, 0.0
    config.data.train_batch_size, config.actor.ppo_mini_batch_size, config.data.truncation = 100, 64, "lft"
    with pytest.raises(UserErrors) as e:
        settings.check(config)
    named = ("algorithm.adv_estimator='gea'", "algorithm.gamma=1.5", "data.truncation='lft'", "rollout.temperature=0.0")
    for part in (*named, "actor.ppo_mini_batch_size=64"):
        assert sum(fault.startswith(part) for fault in e.value.faults) == 1
    assert len(e.value.faults) == 5 and str(e.value) == "; ".join(e.value.faults)
    assert pickle.loads(pickle.dumps(e.value)).faults == e.value.faults  # from one process to another
    with pytest.raises(SystemExit):
        settings.exit_on_user_error(settings.check)(config)
    assert [line[:7] for line in capsys.readouterr().err.splitlines()] == ["error: "] * 5


def test_a_rule_is_not_checked_by_a_value_that_is_wrong_itself(config):
    config.data.train_batch_size, config.actor.ppo_mini_batch_size = -3, 7  # 256 % 7, of the default, is no fault
    with pytest.raises(UserError) as e:
        settings.check(config)
    assert str(e.value).startswith("data.train_batch_size=-3") and not isinstance(e.value, UserErrors)


def test_unknown_settings_of_a_command_line_are_listed_at_once(parse):
    with pytest.raises(UserErrors) as e:
        parse("--config.actor.lrr=1", "--config.actr.lr=1")
    assert [fault[:28] for fault in e.value.faults] == ["there is no setting 'lrr'; d", "there is no setting 'actr'; "]


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("--config.learning_rate=1", "did you mean actor.lr?"),
        ("--config.lr=1", "did you mean actor.lr?"),
        ("--config.actor.learning_rate=1", "did you mean 'lr'?"),
        ("--config.batch_size=1", "did you mean data.train_batch_size?"),
        ("--config.num_epochs=1", "did you mean trainer.total_epochs?"),
        ("--config.trainer.epochs=1", "did you mean 'total_epochs'?"),
        ("--config.beta=1", "did you mean actor.kl_loss_coef?"),
        ("--config.actor.temperature=1", "did you mean rollout.temperature?"),
        ("--config.actor.lrr=1", "did you mean 'lr'?"),
        (
            "--num_generations=8",
            "'--num_generations' is not understood; settings are given as --config.rollout.n=VALUE",
        ),
        ("max_completion_length=8", "settings are given as --config.data.max_response_length=VALUE"),
        ("actor.lr=8", "settings are given as --config.actor.lr=VALUE"),
        ("--speed=3", "'--speed' is not understood; settings are given as --config.SECTION.NAME=VALUE"),
    ],
)
def test_names_of_other_libraries_lead_to_the_setting(parse, word, meant):
    with pytest.raises(UserError, match=re.escape(meant)):
        parse(word)


def test_other_names_are_none_of_jppos_and_lead_to_settings():
    for name, meant in OTHER_NAMES.items():
        assert set(meant) <= set(TABLE), name
    values = [(TABLE[name], value, meant) for name, of in OTHER_VALUES.items() for value, meant in of.items()]
    assert values and all(value not in setting.choices and meant in setting.choices for setting, value, meant in values)
    with pytest.raises(UserError, match=r"did you mean optim\.lr\?"):
        settings.parse(["--config.learning_rate=1"], "", settings.sft_default(), needs_file=False)


def read_by_parts(config, monkeypatch):
    """What the parts read that need a server, a model or tools: they are made, not run."""

    def read():
        return table.sections(config, settings.Settings)

    config.reward.judge.api_type, config.reward.judge.model, config.reward.judge.preset = "openai", "m", "math"
    config.reward.judge.base_url = "http://127.0.0.1:9/v1"
    judge.make_judge(read().reward.judge).close()
    for name in ("JaxRewardModel", "TransformersRewardModel", "VllmRewardModel", "Texts"):
        monkeypatch.setattr(reward, name, lambda *_, **__: None)
    for name in ("load_tokenizer", "check_vllm"):
        monkeypatch.setattr(reward, name, lambda *_: None)
    what = Classifier(path="", directory=config.model.path, model_type="qwen2", vocab_size=9, pad_token_id=0)
    monkeypatch.setattr(reward, "read_classifier", lambda *_, **__: what)
    mesh = sharding.mesh_of_shape((8, 1, 1))
    log = pathlib.Path(config.trainer.run_dir)
    for engine, steps in (("jax", ""), ("transformers", ""), ("vllm", ""), ("jax", "min")):
        config.reward.model.engine, config.reward.model.step_aggregation = engine, steps
        reward.make_reward_model(read().reward.model, None, mesh, log).testing()
    talks = config.rollout.multi_turn
    talks.enable, talks.format, talks.tool_config_path = True, "plain", str(ROOT / "configs/agent_calculator.yaml")
    agent.make_agent(read(), None, ()).close()
    monkeypatch.setattr(agent, "character_limit", lambda *_: 1)
    monkeypatch.setattr(agent.turn_tokens, "template_chat", lambda *_, **__: None)
    config.rollout.agent, config.rollout.agent_format = "true", "hermes"
    agent.make_gateway(read(), None, ())
    assert batch_shape(read(), mesh)[0] >= config.rollout.agent_branches
    config.model.lora_rank = 2
    make.make_adapters(read())
    config.model.lora_rank = 0
    config.algorithm.gdpo_reward_keys = "rule_score"
    for name in parts.ESTIMATORS:
        config.algorithm.adv_estimator = name
        parts.estimator(read())
    config.actor.dro_beta = 0.1
    for name in parts.POLICY_LOSSES:
        config.actor.loss_mode = name
        parts.policy_loss(read())


def test_every_setting_is_read(small_run, quick_compilation, monkeypatch):
    """Training as it is, but for the server."""
    a = small_run.algorithm
    a.use_kl_in_reward = small_run.actor.use_kl_loss = True
    a.kl_ctrl_type, a.old_logprob, a.rollout_is, a.rollout_rs = "adaptive", "correction", "token", "token_k2"
    a.rollout_rs_threshold = "100"
    small_run.rollout.mode, small_run.critic.value_bins = "async", 9
    small_run.rollout.top_p, small_run.rollout.mask_replay = 0.9, True
    checked = settings.typed(small_run, settings.Settings)
    seen = record_reads(monkeypatch)
    train.train(checked)
    read_by_parts(small_run, monkeypatch)
    replaced = {"trainer.total_epochs", "algorithm.rollout_correction"}  # by total_training_steps, by what it names
    assert unread(small_run, seen) == replaced | {"algorithm.max_num_gen_batches"}  # of algorithm.filter_groups
    assert (pathlib.Path(small_run.trainer.run_dir) / "hf/model.safetensors").is_file()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", {}),
        ("enable_thinking=False", {"enable_thinking": False}),
        ("enable_thinking=false, effort=low,budget=512", {"enable_thinking": False, "effort": "low", "budget": 512}),
    ],
)
def test_arguments_of_the_chat_template(text, found):
    assert settings.template_arguments(text) == found


@pytest.mark.parametrize("text", ["enable_thinking", "a b=1", "=1", "a=1,a=2"])
def test_arguments_of_the_chat_template_that_are_none(config, text):
    assert "enable_thinking=False" in refusal(config, "data.apply_chat_template_kwargs", text)


VERLS = json.loads((ROOT / "tests/algorithms/golden/presets.json").read_text())


@pytest.mark.parametrize("name", VERLS)
def test_a_preset_of_the_rollout_correction_is_verls(config, name):
    """verl has two modes, each with and without weights and rejection; REINFORCE is only in bypass."""
    config.algorithm.rollout_correction, verl = name, VERLS[name]
    found = settings.typed(config, settings.Settings)
    a = found.algorithm
    corrects = verl["rollout_is"] or verl["rollout_rs"]
    mode = "bypass" if verl["bypass_mode"] else "correction" if corrects else "decoupled"
    expected = mode, verl["rollout_is"] or "none", verl["rollout_rs"] or ""
    assert (a.old_logprob, a.rollout_is, a.rollout_rs) == expected
    assert a.rollout_is_threshold == str(verl["rollout_is_threshold"])
    assert a.rollout_rs_threshold == str(verl["rollout_rs_threshold"] or "")
    assert a.rollout_is_batch_normalize == verl["rollout_is_batch_normalize"]
    reinforce = verl["bypass_mode"] and verl["loss_type"] == "reinforce"
    assert found.actor.loss_mode == ("gpg" if reinforce else "vanilla")


def test_all_presets_are_there_and_a_threshold_replaces_the_presets(config):
    assert TABLE["algorithm.rollout_correction"].choices == ("", *texts.PRESETS)
    assert set(VERLS) == set(texts.PRESETS) and len(VERLS) == 19
    config.algorithm.rollout_correction, config.algorithm.rollout_is_threshold = "bypass_pg_geo_rs_seq_tis", "5.0"
    config.algorithm.rollout_rs_threshold = "0.9_1.1"
    a = settings.typed(config, settings.Settings).algorithm
    assert (a.rollout_is_threshold, a.rollout_rs_threshold, a.rollout_rs) == ("5.0", "0.9_1.1", "seq_mean_k1")


def test_critic_epochs_are_the_actors_unless_set():
    config = settings.default()
    config.actor.ppo_epochs = 3
    assert [epochs.of_step(0) for epochs in make_epochs(typed(config))] == [3, 3]
    config.critic.ppo_epochs = 2
    assert [epochs.of_step(0) for epochs in make_epochs(typed(config))] == [3, 2]


def test_requests_in_flight_follow_max_num_seqs():
    made = functools.partial(ServerSettings, max_model_len=64, vocab_size=99)
    assert [made(max_num_seqs=rows).connections for rows in (8, 1024)] == [256, 1024]
    assert made(max_num_seqs=1024, max_concurrent_requests=64).connections == 64
