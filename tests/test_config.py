"""Settings: rules refuse with value, rule and remedy; every setting is read; bad arguments are one line."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import ml_collections
import numpy as np
import pytest

from jppo import build, train
from jppo import config as settings
from jppo.data import arithmetic
from jppo.structs import Trajectory

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture
def config():
    """The defaults with the paths that have none."""
    c = settings.default()
    c.model.path, c.data.train_files, c.data.val_files = "some/model", "train.jsonl", "val.jsonl"
    return c


@pytest.fixture
def sft_config():
    c = settings.sft_default()
    c.model.path, c.data.train_files = "some/model", "train.jsonl"
    return c


def put(config, name, value):
    section, leaf = name.split(".")
    config[section][leaf] = value


def names(config):
    return {f"{s}.{leaf}" for s, section in config.items() for leaf in section}


def refusal(config, name, value):
    """What check says of one changed setting; that must be one line which names the setting."""
    put(config, name, value)
    with pytest.raises(settings.UserError) as e:
        settings.check(config)
    said = str(e.value)
    assert "\n" not in said and name in said
    return said


def test_the_defaults_are_lawful(config, sft_config):
    settings.check(config)
    settings.check(sft_config)
    assert config.is_locked and sft_config.is_locked


@pytest.mark.parametrize("name", settings.CHOICES)
def test_a_choice_that_is_not_known(config, sft_config, name):
    said = refusal(sft_config if name.startswith("optim") else config, name, "quik")
    assert "'quik'" in said
    for choice in settings.CHOICES[name]:
        assert repr(choice) in said


@pytest.mark.parametrize("name,least", settings.AT_LEAST.items())
def test_below_the_least(config, sft_config, name, least):
    c = sft_config if name.startswith("optim") else config
    kind = type(c[name.split(".")[0]][name.split(".")[1]])
    assert refusal(c, name, kind(least - 1)) == f"{name}={kind(least - 1)} must be at least {least}"


@pytest.mark.parametrize("name", [n for n, least in settings.AT_LEAST.items() if isinstance(least, float)])
def test_no_number_is_refused_and_the_bound_itself_is_not(config, sft_config, name):
    c = sft_config if name.startswith("optim") else config
    put(c, name, settings.AT_LEAST[name])
    settings.check(c)
    refusal(c, name, float("nan"))


@pytest.mark.parametrize("name", settings.ABOVE_ZERO)
@pytest.mark.parametrize("value", [0, -1])
def test_not_above_0(config, sft_config, name, value):
    c = sft_config if name.startswith("optim") else config
    kind = type(c[name.split(".")[0]][name.split(".")[1]])
    assert refusal(c, name, kind(value)) == f"{name}={kind(value)} must be above 0"


@pytest.mark.parametrize("name", settings.OFF_OR_POSITIVE)
@pytest.mark.parametrize("value", [0, -2])
def test_neither_off_nor_positive(config, name, value):
    assert refusal(config, name, value) == f"{name}={value} must be 1 or more, or -1"


@pytest.mark.parametrize("name", settings.AT_MOST_ONE)
def test_above_1(config, sft_config, name):
    c = sft_config if name.startswith("optim") else config
    assert refusal(c, name, 1.01) == f"{name}=1.01 must be at most 1"


@pytest.mark.parametrize("value", [(0.9,), (0.9, 1.0), (-0.1, 0.9), (0.9, "x"), (0.9, 0.99, 0.999)])
def test_betas_that_are_none(config, value):
    assert "two numbers in [0, 1)" in refusal(config, "actor.betas", value)


@pytest.mark.parametrize("name", ["model.path", "data.train_files", "data.val_files", "trainer.run_dir"])
def test_an_empty_path(config, name):
    assert f"--config.{name}=PATH" in refusal(config, name, "")


@pytest.mark.parametrize("batch,n,mini,fits", [(256, 1, 48, 32), (100, 3, 64, 60), (8, 1, 64, 8), (7, 1, 2, 1)])
def test_a_mini_batch_that_does_not_divide(config, batch, n, mini, fits):
    config.data.train_batch_size, config.rollout.n = batch, n
    said = refusal(config, "actor.ppo_mini_batch_size", mini)
    rule = f"must divide data.train_batch_size*rollout.n={batch * n}; try {fits}"
    assert said == f"actor.ppo_mini_batch_size={mini} {rule}"
    config.actor.ppo_mini_batch_size = fits
    settings.check(config)


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


def test_sft_lengths_are_checked_by_their_own_names(sft_config):
    assert "try 1536" in refusal(sft_config, "optim.max_tokens_per_device", 1000)


def test_the_tables_name_settings_that_exist():
    known = names(settings.default()) | names(settings.sft_default())
    tables = (
        settings.CHOICES,
        settings.AT_LEAST,
        settings.ABOVE_ZERO,
        settings.OFF_OR_POSITIVE,
        settings.AT_MOST_ONE,
    )
    assert {name for table in tables for name in table} <= known


def test_actor_and_critic_and_sft_obey_the_same_rules():
    """A rule for one optimizer is a rule for all."""
    for table in (settings.AT_LEAST, settings.ABOVE_ZERO, settings.CHOICES):
        for leaf in settings.OPTIM:
            held = [f"{section}.{leaf}" in table for section in ("actor", "critic", "optim")]
            assert len(set(held)) == 1, f"{leaf}: {held}"


def test_a_misspelt_setting_and_a_wrong_type_are_refused_by_the_config_itself(config):
    with pytest.raises(AttributeError, match="lr"):
        config.actor.lrr = 1e-6
    with pytest.raises(TypeError):
        config.actor.ppo_epochs = "two"


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
    ],
)
def test_a_bad_argument_is_one_line(parse, argument, said):
    with pytest.raises(settings.UserError) as e:
        parse(argument)
    assert said in str(e.value) and "\n" not in str(e.value)


def test_a_config_that_is_not_there():
    with pytest.raises(settings.UserError, match=r"--config=no\.py: no such file"):
        settings.parse(["--config=no.py"], "about", settings.default())
    with pytest.raises(settings.UserError, match="given 0 times"):
        settings.parse([], "about", settings.default())


def run(*argv):
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [sys.executable, "-m", "jppo.train", *argv], cwd=ROOT, env=environment, capture_output=True, text=True
    )


@pytest.mark.parametrize(
    "argument,said", [("--config.actor.lrr=1", "lrr"), ("--config.actor.clip_ratio=-0.1", "at least 0.0")]
)
def test_the_command_ends_with_2_and_one_line(argument, said):
    done = run("--config=configs/quickstart.py", argument)
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: ") and said in line


class Recorder:
    """A config that remembers what was read of it."""

    def __init__(self, config, seen, prefix=""):
        self._config, self._seen, self._prefix = config, seen, prefix

    def __getattr__(self, name):
        value = getattr(self._config, name)
        if isinstance(value, ml_collections.ConfigDict):
            return Recorder(value, self._seen, f"{name}.")
        self._seen.add(self._prefix + name)
        return value


class RandomEngine:
    """An engine that answers at random, at once."""

    def ready(self, *, eos_token_ids, decode):
        self.end, self.decode = eos_token_ids[0], decode
        return self

    def generate(self, prompts, sampling, *, version):
        rng = np.random.default_rng(sampling.seed)
        out = []
        for prompt in (p for p in prompts for _ in range(sampling.n)):
            response = np.append(rng.integers(2, 12, rng.integers(1, sampling.max_tokens)), self.end)
            sampled = np.repeat([False, True], [len(prompt.ids), len(response)])
            tokens = np.concatenate([prompt.ids, response]).astype(np.int32)
            logp = np.where(sampled, -2.0, 0.0).astype(np.float32)
            of = np.where(sampled, version, -1).astype(np.int32)
            out.append(Trajectory(prompt.uid, tokens, sampled, logp, of, self.decode(response[:-1]), "stop", 1))
        return out

    def load(self, tensors, *, version):
        assert all(np.isfinite(array).all() for _, array in tensors)

    def close(self):
        pass


@pytest.fixture
def small_run(config, tmp_path):
    """Two steps of the arithmetic task with a model of one layer; every part of the algorithm is on."""
    made = arithmetic.make(seed=0, test=4, sloppy=0.5, demonstrations=1)
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made[name][:8]))
    arithmetic.write_model(tmp_path / "model")
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    (tmp_path / "model/config.json").write_text(json.dumps(arithmetic.MODEL | shape))
    config.model.path, config.model.init = str(tmp_path / "model"), "random"
    config.data.train_files, config.data.val_files = (
        str(tmp_path / "train.jsonl"),
        str(tmp_path / "test.jsonl"),
    )
    config.data.train_batch_size, config.actor.ppo_mini_batch_size = 4, 4
    config.data.max_prompt_length, config.data.max_response_length, config.data.row_lengths = 8, 6, 1
    config.algorithm.use_kl_in_reward = config.actor.use_kl_loss = True
    config.trainer.run_dir, config.rollout.logp_tolerance = str(tmp_path / "run"), 100.0
    config.trainer.total_training_steps, config.trainer.test_freq, config.trainer.save_freq = 2, 1, 1
    settings.check(config)
    return config


def test_every_setting_is_read(small_run, monkeypatch):
    """Training as it is, but for the server; a setting with one choice is there to be named, not read."""
    engine, seen = RandomEngine(), set()
    monkeypatch.setattr(build, "start_vllm", lambda *_, **__: engine)  # build's own start_engine reads the settings
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        train.train(Recorder(small_run, seen))
    finally:
        jax.config.update("jax_disable_most_optimizations", False)
    named = {name for name, allowed in settings.CHOICES.items() if len(allowed) == 1}
    assert names(small_run) - seen - named == set()
    assert (pathlib.Path(small_run.trainer.run_dir) / "hf/model.safetensors").is_file()
