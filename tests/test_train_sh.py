"""scripts/train.sh: where each option and variable lands, and what is refused."""

import itertools
import os
import re
import shlex
import subprocess
import sys

import pytest

from jppo import settings
from jppo.settings import configfile, table
from tests.make import ROOT

SCRIPT = ROOT / "scripts/train.sh"
# By hand: where a value given by an option, or by a variable, must arrive.
OPTIONS = {
    "--model": ("some/model", "model.path", "some/model"),
    "--epochs": ("3", "trainer.total_epochs", 3),
    "--lr": ("5e-7", "actor.lr", 5e-7),
    "--batch_size": ("128", "data.train_batch_size", 128),
    "--n_gpus": ("4", "mesh.data", 4),
    "--kl_coef": ("0.02", "algorithm.kl_coef", 0.02),
    "--reward_model": ("some/rm", "reward.model.path", "some/rm"),
    "--data": ("train.json", "data.train_files", "train.json"),
    "--val_data": ("val.jsonl", "data.val_files", "val.jsonl"),
    "--reward_function": ("mine.py", "reward.function", "mine.py"),
    "--algorithm": ("grpo", "algorithm.adv_estimator", "grpo"),
    "--n": ("8", "rollout.n", 8),
    "--max_response_length": ("99", "data.max_response_length", 99),
    "--steps": ("7", "trainer.total_training_steps", 7),
    "--run_dir": ("runs/mine", "trainer.run_dir", "runs/mine"),
}
VARIABLES = {
    "MODEL_PATH": ("some/model", "model.path", "some/model"),
    "REWARD_MODEL_PATH": ("some/rm", "reward.model.path", "some/rm"),
    "CLIP_RATIO": ("0.3", "actor.clip_ratio", 0.3),
    "GAE_GAMMA": ("0.9", "algorithm.gamma", 0.9),
    "GAE_LAMBDA": ("0.8", "algorithm.lam", 0.8),
    "KL_COEF": ("0.02", "algorithm.kl_coef", 0.02),
    "PPO_EPOCHS": ("2", "actor.ppo_epochs", 2),
    "CRITIC_LR": ("2e-5", "critic.lr", 2e-5),
    "CRITIC_EPOCHS": ("3", "critic.ppo_epochs", 3),
    "CLIPRANGE_VALUE": ("0.4", "critic.cliprange_value", 0.4),
    "ROLLOUT_N": ("4", "rollout.n", 4),
    "ROLLOUT_TEMPERATURE": ("0.7", "rollout.temperature", 0.7),
    "ROLLOUT_TP_SIZE": ("2", "rollout.tensor_model_parallel_size", 2),
    "GPU_MEMORY_UTILIZATION": ("0.5", "rollout.gpu_memory_utilization", 0.5),
    "N_GPUS": ("2", "mesh.data", 2),
    "NNODES": ("2", "trainer.nnodes", 2),
    "NODE_RANK": ("0", "trainer.node_rank", 0),
}
JUDGE = ["--use_api_reward", "--rm_api_type", "openai", "--rm_model", "judge", "--rm_prompt_preset", "math"]
KNOWN = {*VARIABLES, "MASTER_ADDR", "MASTER_PORT", "PYTHON", "CUDA_VISIBLE_DEVICES", "WORLD_SIZE"}
# A stand-in for the interpreter, which says what it was given and ends as it is told.
STAND_IN = """#!/usr/bin/env bash
printf '%s\\0' "${CUDA_VISIBLE_DEVICES-none}" "$@" >"$RECORD"
exit "${CODE:-0}"
"""


@pytest.fixture
def folder(tmp_path):
    for name in ("train.json", "val.jsonl"):
        (tmp_path / name).write_text('{"prompt": "1+1=", "ground_truth": "2", "data_source": "arithmetic"}\n')
    for name in ("my model", "empty"):
        (tmp_path / name).mkdir()
    (tmp_path / "my model/config.json").write_text("{}")
    (tmp_path / "mine.py").write_text("def compute_score(completions, **kwargs): return [1.0] * len(completions)\n")
    (tmp_path / "python").write_text(STAND_IN)
    (tmp_path / "python").chmod(0o755)
    return tmp_path


def run(folder, *words, **env):
    """What the script says, and the arguments that the interpreter was given: the first is what GPUs it sees."""
    record = folder / "record"
    record.unlink(missing_ok=True)
    env = {k: v for k, v in os.environ.items() if k not in KNOWN} | {"PYTHON": str(folder / "python")} | env
    done = subprocess.run(
        [SCRIPT, *words], cwd=folder, env=env | {"RECORD": str(record)}, capture_output=True, text=True, timeout=60
    )
    return done, record.read_bytes().decode().split("\0")[:-1] if record.exists() else None


def resolved(folder, *words, **env):
    """The settings that the command leads to, once they have passed the checks, and those that it names."""
    done, (_, *command) = run(folder, *words, **env)
    assert done.returncode == 0, done.stderr
    assert command[:2] == ["-m", "jppo.train"]
    config, _ = configfile.parse(command[2:], "", settings.default())
    settings.check(config)
    named = [word.split("=")[0].removeprefix("--config.") for word in command[3:] if word.startswith("--config.")]
    assert len(named) == len(set(named))
    return table.by_name(config), set(named)


def recipe():
    config, _ = configfile.parse(["--config=jppo://gsm8k"], "", settings.default())
    return table.by_name(config)


ALSO = {"algorithm.use_kl_in_reward": True, "reward.weights": "rm_score=1"}


def test_options_and_variables_are_their_settings(folder):
    """Alone it is the recipe; of two words with the same setting one is given."""
    assert resolved(folder) == (recipe(), set())
    joined = ("--model", "--lr", "--kl_coef", "--data")
    words = [w for o, (v, *_) in OPTIONS.items() for w in ([f"{o}={v}"] if o in joined else [o, v])]
    for given, (found, named) in (
        (OPTIONS, resolved(folder, *words)),
        (VARIABLES, resolved(folder, **{name: value for name, (value, *_) in VARIABLES.items()})),
    ):
        wanted = {setting: value for _, setting, value in given.values()}
        assert all(value != recipe()[setting] for setting, value in wanted.items())
        wanted |= ALSO | ({} if given is OPTIONS else {"mesh.data": 2 * 2})  # of 2 hosts
        assert found == recipe() | wanted and named == set(wanted)
    one = resolved(folder, "--epochs", "2")[0]
    assert one == recipe() | {"trainer.total_epochs": 2} == resolved(folder, "--epochs=2")[0]


def test_the_help_names_all_of_them_and_nothing_else(folder):
    done, command = run(folder, "--help")
    said = set(done.stdout.replace(",", " ").split())
    judge = {word for word in JUDGE if word.startswith("--")} | {"--rm_system_prompt", "--rm_scoring_prompt"}
    assert (done.returncode, command) == (0, None)
    assert {*OPTIONS, *VARIABLES, *judge, "MASTER_ADDR", "--print_only", "--help"} <= said
    listed = {line.strip() for line in done.stdout.splitlines() if line.startswith("  ") and line[2] in "-ABCDEGMNPR"}
    names = {name for line in listed for name in line.split(", ")}
    assert names == {*OPTIONS, *VARIABLES, *judge, "MASTER_ADDR", "--print_only", "--help"}


def test_ppo_is_the_estimator_gae(folder):
    found, _ = resolved(folder, "--algorithm=ppo", "--data", "hub:openai/gsm8k:main/train")
    assert found["algorithm.adv_estimator"] == "gae" and found["data.train_files"] == "hub:openai/gsm8k:main/train"


def test_a_zero_survives(folder):
    found, _ = resolved(folder, "--lr", "0", "--kl_coef=0.0", "--config.algorithm.gamma=0")
    assert all(found[name] == 0.0 != recipe()[name] for name in ("actor.lr", "algorithm.kl_coef", "algorithm.gamma"))
    zeros = dict(CLIP_RATIO="0.0", GAE_GAMMA="0.0", KL_COEF="0.0", ROLLOUT_TEMPERATURE="0.0", NODE_RANK="0")
    _, (_, *command) = run(folder, **zeros)
    assert {f"--config.{VARIABLES[name][1]}={value}" for name, value in zeros.items()} <= set(command)


def test_an_option_goes_before_the_environment_and_so_does_a_setting(folder):
    found, _ = resolved(
        folder, "--kl_coef", "0", "--config.rollout.n=2", KL_COEF="0.5", ROLLOUT_N="9", GAE_GAMMA="", CLIP_RATIO="0.1"
    )
    wanted = {"algorithm.kl_coef": 0.0, "rollout.n": 2, "algorithm.gamma": 1.0, "actor.clip_ratio": 0.1}
    assert {name: found[name] for name in wanted} == wanted


def test_a_judge_takes_the_place_of_the_rules(folder):
    system, scoring = 'You\'re "strict"; say $HOME, `ls` \\ and\nno more, a=b.', "Q: {prompt} A: {response} * ?"
    prompts = ["--rm_system_prompt", system, f"--rm_scoring_prompt={scoring}"]
    found, named = resolved(folder, *JUDGE[:-2], *prompts)
    wanted = {
        "reward.judge.api_type": "openai",
        "reward.judge.model": "judge",
        "reward.judge.system_prompt": system,
        "reward.judge.scoring_prompt": scoring,
        "reward.weights": "judge_score=1",
    }
    assert found == recipe() | wanted and named == set(wanted)
    assert resolved(folder, *JUDGE)[0]["reward.judge.preset"] == "math"


@pytest.mark.parametrize(
    "words, changed",
    [
        ([], {}),
        (["--rm_api_type", "dashscope", "--rm_model", "qwen-max"], {"model": "qwen-max"}),
        (["--rm_api_type", "openai"], {"api_type": "openai", "model": "gpt-4o"}),
        (["--rm_api_type", "claude", "--rm_model", "name"], {"api_type": "claude", "model": "name"}),
        (["--rm_prompt_preset=safety"], {"preset": "safety"}),
        (["--rm_system_prompt", "Be brief."], {"system_prompt": "Be brief."}),
        (["--rm_scoring_prompt", "Rate {response}"], {"preset": "", "scoring_prompt": "Rate {response}"}),
        (["--config.reward.judge.model=own"], {"model": "own"}),
    ],
)  # fmt: skip
def test_a_judge_has_the_usual_defaults(folder, words, changed):
    usual = {"api_type": "dashscope", "model": "qwen-plus", "preset": "math"} | changed
    found, _ = resolved(folder, "--use_api_reward", *words)
    assert found == recipe() | {f"reward.judge.{k}": v for k, v in usual.items()} | {"reward.weights": "judge_score=1"}


def test_a_judge_of_the_config_is_kept(folder):
    _, (_, *command) = run(folder, "--use_api_reward", "--config=jppo://judge", "--rm_model=name")
    assert [word for word in command if ".judge." in word] == ["--config.reward.judge.model=name"]


def translated(folder, *words, **env):
    """The settings that the printed command names, with the real interpreter."""
    done, _ = run(folder, "--print_only", *words, **{"PYTHON": sys.executable, "PYTHONPATH": str(ROOT), **env})
    named = [word.removeprefix("--config.").split("=", 1) for word in shlex.split(done.stdout)]
    return done, {pair[0]: pair[1] for pair in named if len(pair) == 2 and "." in pair[0]}


def forms():
    """The commands of the script's page and of its own comment."""
    for file in (ROOT / "docs/quickstart.md", SCRIPT):
        found = re.findall(r"^(?:#   )?scripts/train\.sh (--model .*)", file.read_text(), re.MULTILINE)
        assert len(found) >= 3
        yield from found


@pytest.mark.parametrize("form", sorted(set(forms())))
def test_each_form_of_the_page_runs_alone_and_with_dry_run_a_config_and_an_override(folder, form):
    """The printed command names what the words name, once, and settings that pass the checks."""
    for name in ("train.jsonl", "test.jsonl"):
        (folder / name).write_text("{}\n")
    (folder / "own.py").write_text(
        "def get_config():\n    return __import__('jppo.settings').settings.recipe('gsm8k')\n"
    )
    (folder / "DIR").mkdir()
    (folder / "DIR/config.json").write_text("{}")
    (folder / "reward.py").write_text("def compute_score(completions, **kwargs): return [1.0] * len(completions)\n")
    for use in itertools.product((False, True), repeat=3):
        more = list(itertools.compress(("--dry_run", "--config=own.py", "trainer.save_freq=7"), use))
        done, named = translated(folder, *form.split(), *more)
        assert done.returncode == 0, (more, done.stderr)
        words = shlex.split(done.stdout)
        assert words.count("--dry_run") == ("--dry_run" in more)
        assert ("--config=own.py" if "--config=own.py" in more else "--config=jppo://gsm8k") in words
        assert named.get("trainer.save_freq") == ("7" if "trainer.save_freq=7" in more else None)
        assert named.get("model.lora_rank") == ("8" if "lora_rank=8" in form else None)
        assert named["model.path"] == "DIR" and named["data.train_files"] == "train.jsonl"
        words = [word.replace("own.py", str(folder / "own.py")) for word in words]
        config, _ = configfile.parse(words[words.index("jppo.train") + 1 :], "", settings.default())
        settings.check(config)


def test_overrides_in_verls_names_are_translated(folder):
    verl = ["actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.actor.ppo_mini_batch_size=16"]
    done, named = translated(folder, "--lr=1e-5", *verl, ROLLOUT_N="4")
    wanted = {"actor.lr": "1e-5", "rollout.n": "4", "model.lora_rank": "8", "actor.ppo_mini_batch_size": "64"}
    assert done.returncode == 0 and named == wanted
    assert "actor_rollout_ref.model.lora_rank=8 -> model.lora_rank=8" in done.stderr
    _, named = translated(folder, "actor_rollout_ref.rollout.n=2", "trainer.logger=['console','wandb']", ROLLOUT_N="4")
    assert named == {"rollout.n": "2", "trainer.logger": "console,wandb,jsonl"}


@pytest.mark.parametrize(
    "words, complaint",
    [
        (["actor_rollout_ref.actor.no_such=1"], "verl 0.9.1 has no such key"),
        (["--lr", "1", "actor_rollout_ref.actor.optim.lr=2"], "gives actor.lr as --lr does"),
        (["--config.actor.lr=1", "actor_rollout_ref.actor.optim.lr=2"], "gives actor.lr as --config.actor.lr does"),
    ],
)
def test_an_override_that_cannot_be_is_one_line(folder, words, complaint):
    done, _ = translated(folder, *words)
    assert (done.returncode, done.stdout) == (2, "") and complaint in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ")


def test_a_judge_and_a_reward_model_are_added_up_unless_the_weights_are_given(folder):
    both = [*JUDGE, "--reward_model", "my model"]
    assert resolved(folder, *both)[0]["reward.weights"] == "rm_score=1,judge_score=1"
    own = "--config.reward.weights=rule_score=1,rm_score=1,judge_score=0.5"
    assert resolved(folder, *both, own)[0]["reward.weights"] == "rule_score=1,rm_score=1,judge_score=0.5"


def test_tests_have_their_own_data_and_the_run_its_folder(folder):
    done, _ = run(folder, "--data", "train.json")
    assert done.stderr == "no --val_data: tests ask the first 256 prompts of --data\n"
    own = ["--val_data", "val.jsonl", "--config.trainer.run_dir=runs/mine"]
    found, named = resolved(folder, "--data", "train.json,val.jsonl", *own)
    assert named == {"data.train_files", "data.val_files", "trainer.run_dir"}
    assert found["data.val_files"] == "val.jsonl" and found["trainer.run_dir"] == "runs/mine"
    _, named = resolved(folder, "--data=train.json", f"--config={ROOT}/configs/quickstart.py:there")
    assert named == {"data.train_files"}


def test_the_first_gpus_are_taken_on_each_host(folder):
    _, (seen, *command) = run(folder, "--n_gpus", "2")
    assert seen == "0,1" and "--config.mesh.data=2" in command
    _, (seen, *command) = run(folder, NNODES="3", N_GPUS="2", CUDA_VISIBLE_DEVICES="5,3,1", NODE_RANK="0")
    assert seen == "5,3" and "--config.mesh.data=6" in command
    _, (seen, *command) = run(folder, "--n_gpus=2", "--config.mesh.fsdp=2")
    assert seen == "0,1" and [word for word in command if ".mesh." in word] == ["--config.mesh.fsdp=2"]
    _, (seen, *_) = run(folder, CUDA_VISIBLE_DEVICES="7")
    assert seen == "7"


def test_hosts_are_told_of_the_first(folder):
    several = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "node-a"}
    assert resolved(folder, **several)[0]["trainer.coordinator_address"] == "node-a:29500"
    found, _ = resolved(folder, **several, MASTER_PORT="1234")
    assert found["trainer.coordinator_address"] == "node-a:1234" and found["trainer.node_rank"] == 1
    assert resolved(folder, NNODES="1", NODE_RANK="0", MASTER_ADDR="node-a")[0]["trainer.coordinator_address"] == ""
    assert resolved(folder, MASTER_ADDR="node-a")[1] == set()


def test_what_is_printed_is_what_is_run(folder):
    words = ["--model", "my model", "--n_gpus=2", *JUDGE, "--rm_system_prompt", "it's\ntwo", "--dry_run"]
    done, command = run(folder, *words, CODE="3")
    assert done.returncode == 3
    only, nothing = run(folder, "--print_only", *words)
    assert only.stdout == done.stdout and only.returncode == 0 and nothing is None
    env = {"PATH": os.environ["PATH"], "RECORD": str(folder / "record")}
    subprocess.run(["bash", "-c", only.stdout], env=env, check=True)
    assert (folder / "record").read_bytes().decode().split("\0")[:-1] == command
    assert "--dry_run" in command and shlex.split(done.stdout.split(" -m ")[0])[1] == str(folder / "python")


@pytest.mark.parametrize(
    "words, complaint",
    [
        (["--learning_rate", "1"], "--learning_rate is not understood"),
        (["1e-6"], "1e-6 is not understood"),
        (["--x[$(touch hit)]=1"], "is not understood"),
        (["--lr"], "--lr needs a value"),
        (["--model="], "--model needs a value"),
        (["--lr", "fast"], "--lr=fast is no number"),
        (["--epochs", "1.5"], "--epochs=1.5 is no whole number"),
        (["--lr", "1", "--lr", "2"], "--lr is given twice"),
        (["--lr", "1", "--config.actor.lr=2"], "--lr and --config.actor.lr say the same twice"),
        (["--config.actor.lr=1", "--config.actor.lr=2"], "--config.actor.lr is given twice"),
        (["--config.actor.lr", "2"], "--config.actor.lr is not understood"),
        (["--config=no.py"], "--config=no.py: no such file"),
        (["--data", "no.json"], "--data=no.json: no file no.json"),
        (["--data", "train.json, no.json"], "no file no.json"),
        (["--data", ","], "--data=, names no file"),
        (["--val_data", "no.json"], "--val_data=no.json: no file no.json"),
        (["--model", "./no"], "--model=./no: no such folder"),
        (["--model", "train.json"], "--model=train.json: no such folder"),
        (["--model", "empty"], "--model=empty has no config.json"),
        (["--reward_model", "/no/rm"], "--reward_model=/no/rm: no such folder"),
        (["--use_api_reward=yes"], "--use_api_reward takes no value"),
        (["--use_api_reward", "--rm_api_type", "bard"], "--rm_api_type bard is not known"),
        (["--use_api_reward", "--config.reward.judge.base_url=http://127.0.0.1:1/v1"], "needs --rm_model"),
        (JUDGE[1:3], "--rm_api_type is for a judge"),
        (["--rm_system_prompt", "be strict"], "--rm_system_prompt is for a judge"),
        (["--kl_coef", "1", "--config.algorithm.use_kl_in_reward=False"], "--kl_coef=1 is of the KL in the reward"),
        (["--reward_function", "no.py:f"], "--reward_function=no.py:f: no file no.py"),
        (["--reward_function", "mine"], "--reward_function=mine must be FILE.py or FILE.py:NAME"),
        (["--n_gpus", "0"], "--n_gpus=0 must be 1 or more"),
        (["--n_gpus", "two"], "--n_gpus=two is no whole number"),
    ],
)
def test_what_cannot_be_is_one_line(folder, words, complaint):
    done, command = run(folder, *words)
    assert (done.returncode, command, done.stdout) == (2, None, "")
    assert complaint in done.stderr and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert not (folder / "hit").exists()


@pytest.mark.parametrize(
    "env, complaint",
    [
        ({"KL_COEF": "much"}, "KL_COEF=much is no number"),
        ({"N_GPUS": "2", "CUDA_VISIBLE_DEVICES": "3"}, "CUDA_VISIBLE_DEVICES=3 names 1"),
        ({"N_GPUS": "1", "CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES= names 0"),
        ({"MODEL_PATH": "./no"}, "MODEL_PATH=./no: no such folder"),
        ({"PYTHON": "/no/python"}, "PYTHON=/no/python cannot be run"),
    ],
)
def test_an_environment_that_cannot_be_is_one_line(folder, env, complaint):
    done, _ = run(folder, **env)
    assert done.returncode == 2 and complaint in done.stderr and done.stderr.count("\n") == 1


def test_without_one_of_its_own_the_python_of_the_path_is_taken(folder):
    (folder / "scripts").mkdir()
    copy = folder / "scripts/train.sh"
    copy.write_bytes(SCRIPT.read_bytes())
    env = {"PATH": f"{folder}:{os.environ['PATH']}", "RECORD": str(folder / "record")}
    subprocess.run(["bash", copy], cwd=folder, env=env, check=True, capture_output=True)
    assert (folder / "record").read_bytes().decode().split("\0")[1:-1] == ["-m", "jppo.train", "--config=jppo://gsm8k"]
