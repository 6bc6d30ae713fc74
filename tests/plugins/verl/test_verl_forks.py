"""Scripts of forks and of older versions: their YAML counts, and names have the meaning that their trainer gives them.

The checkouts are a few lines of verl 0.1's and 0.3's trainers each; settings are worked out by hand from these lines.
"""

import os
import pathlib
import shlex
import subprocess
import sys
import time

import pytest

from jppo import from_verl, settings
from jppo.errors import UserError
from jppo.plugins.sandbox import choice
from jppo.plugins.verl import own_code
from jppo.plugins.verl.compose import Config, read_file
from jppo.plugins.verl.own_code import fingerprints
from jppo.plugins.verl.translate import translate
from jppo.settings import table
from tests.make import ROOT, one_line

PPO = "python3 -m verl.trainer.main_ppo"
GROUP = "actor_rollout_ref.rollout.n=2"
BASICS = "data.train_files=a data.val_files=b actor_rollout_ref.model.path=m trainer.logger=console"
YAML = """
data: {max_prompt_length: 256, train_batch_size: 64}
actor_rollout_ref:
  actor: {ppo_mini_batch_size: 32, clip_ratio: 0.3, entropy_coeff: 0.001, use_kl_loss: False, optim: {lr: 2e-6}}
  rollout: {n: 1, top_p: 0.95, prompt_length: '${data.max_prompt_length}'}
algorithm: {adv_estimator: grpo}
trainer: {total_epochs: 3, default_local_dir: 'checkpoints/${trainer.project_name}/${trainer.experiment_name}'}
"""
TRAINER = """
meta_info = {'do_sample': False}
if not self.config.actor_rollout_ref.actor.use_kl_loss: batch = apply_kl_penalty(batch)
if self.config.trainer.critic_warmup <= self.global_steps: pass
"""
WORKERS = "self.config.actor.ppo_mini_batch_size *= self.config.rollout.n\n"
CLIP = "grad_norm = clip_grad_norm_(self.module.parameters(), max_norm=self.config.grad_clip)\n"
LOADER = """
batch_size=self.config.data.get("gen_batch_size", self.config.data.train_batch_size)
"""
V1 = f"""{LOADER}
if config.trainer.use_v1: filter_groups_metric = self.config.algorithm.get("filter_groups", None).metric
sample_batch_size = train_batch_size // self.parameter_sync_step
"""
FILTER = "+algorithm.filter_groups.enable=True +algorithm.filter_groups.metric=acc"
DAPO = "python3 -m recipe.dapo.main_dapo"
confined = pytest.mark.skipif(bool(choice.lacks(choice.probe())), reason="this machine cannot confine a script")


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout of verl 0.2, with one change of its sources if asked for; returns what a script in it comes to."""
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.chdir(tmp_path)

    def make(words: str, yaml: str = YAML, trainer: str = TRAINER, workers: str = WORKERS, main: str = PPO, verl=""):
        files = {"trainer/ppo/ray_trainer.py": trainer, "workers/fsdp_workers.py": workers}
        for name, text in (files | {"trainer/config/ppo_trainer.yaml": yaml}).items():
            path = tmp_path / "verl" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        (tmp_path / ".git").mkdir(exist_ok=True)
        return translated(f"{main} {BASICS} {words}", verl)

    return make


def translated(script: str, verl: str = "") -> tuple[dict, list[str], list[str]]:
    """Returns the command's settings, what it leaves out, and the names whose meaning has changed."""
    pathlib.Path("run.sh").write_text(script)
    output = from_verl.translate_script(from_verl.read_arguments(["run.sh"]), verl)
    command = shlex.split(output.text.partition("\n\n#")[0].replace("\\\n", ""))
    return table.by_name(settings.parse(command[3:], "", settings.default())[0]), [*output.missing], [*output.changes]


@confined
def test_the_log_probs_of_the_engine_had_another_name(checkout):
    """Until 0.8, with use_rollout_log_probs, the asynchronous trainer takes rollout_log_probs as old_log_probs."""
    for value, old in ((True, "bypass"), (False, "decoupled")):
        yaml = f"{YAML}async_training: {{use_rollout_log_probs: {value}}}\n"
        assert checkout("", yaml=yaml)[0]["algorithm.old_logprob"] == old


@confined
def test_the_yaml_of_a_checkout_counts(checkout):
    config, missing, _ = checkout("actor_rollout_ref.rollout.n=4 trainer.total_epochs=5")
    assert missing == []
    assert (config["rollout.top_p"], config["actor.lr"], config["actor.entropy_coeff"]) == (0.95, 2e-6, 0.001)
    assert (config["data.max_prompt_length"], config["algorithm.adv_estimator"]) == (256, "grpo")
    assert (config["trainer.total_epochs"], config["trainer.run_dir"]) == (5, "runs/gsm8k")
    assert config["actor.ppo_mini_batch_size"] == 32 * 4
    config, _, _ = checkout("actor_rollout_ref.rollout.n=4 --config-path=$PWD/mine", yaml=YAML.replace("3", "7"))
    assert config["trainer.total_epochs"] == 7  # no mine/: verl's own place


@confined
def test_verl_is_that_of_the_folder_where_a_script_starts(checkout, tmp_path):
    """As for Python, also where the script is in a checkout of another verl below it."""
    checkout("")
    inner = tmp_path / "third_party/inner"
    for name, text in (("config/ppo_trainer.yaml", YAML.replace("0.3", "0.4")), ("ppo/ray_trainer.py", TRAINER)):
        path = inner / "verl/trainer" / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    (inner / ".git").mkdir()
    (inner / "run.sh").write_text(f"{PPO} {BASICS} {GROUP}")
    output = from_verl.translate_script(from_verl.read_arguments(["third_party/inner/run.sh"]), "")
    assert "--config.actor.clip_ratio_low=0.3 " in output.text


@confined
def test_the_trainer_names_its_yaml(checkout, tmp_path):
    checkout("")
    (tmp_path / "verl/trainer/main_ppo.py").write_text(
        "@hydra.main(config_path='config', config_name='mine')\ndef main(config): ...\n"
    )
    (tmp_path / "verl/trainer/config/mine.yaml").write_text(
        "defaults: [ppo_trainer, _self_]\nactor_rollout_ref: {rollout: {n: 6}, actor: {use_token_level_loss: False}}"
    )
    config, missing, _ = checkout("")
    assert (config["rollout.n"], config["actor.loss_agg_mode"], missing) == (6, "seq-mean-token-mean", [])


@confined
@pytest.mark.parametrize("use_kl_loss", (False, True))
def test_names_mean_what_they_meant_before_0_3(checkout, use_kl_loss):
    config, missing, changes = checkout(
        f"actor_rollout_ref.rollout.n=2 actor_rollout_ref.actor.use_kl_loss={use_kl_loss}"
        " +actor_rollout_ref.rollout.val_kwargs.temperature=1"
    )
    assert missing == [] and any(f"use_kl_loss={use_kl_loss}" in change for change in changes)
    assert (config["algorithm.use_kl_in_reward"], config["actor.use_kl_loss"]) == (not use_kl_loss, use_kl_loss)
    assert (config["actor.clip_ratio_low"], config["actor.clip_ratio_high"]) == (0.3, 0.3)
    assert config["actor.clip_ratio_c"] == 1e4 and config["data.filter_overlong_prompts"]
    assert config["rollout.val_kwargs.temperature"] == 0.0
    for first, steps in ((TRAINER, 2), (TRAINER.replace("self.global_steps", "global_steps"), 3)):  # from 1, from 0
        words = "algorithm.adv_estimator=gae trainer.critic_warmup=3"
        assert checkout(words, trainer=first)[0]["trainer.critic_warmup"] == steps


@confined
def test_a_newer_checkout_keeps_the_meaning_of_today(checkout):
    newer = "use_kl_in_reward, clip_ratio_low, clip_ratio_c, filter_overlong_prompts, val_kwargs, rollout_n\n"
    newer += "vf_loss = 0.5 * squares; batch = apply_kl_penalty(batch)"
    config, missing, changes = checkout("actor_rollout_ref.rollout.n=2", trainer=newer)
    assert missing == changes == [] and not config["algorithm.use_kl_in_reward"]
    assert (config["actor.clip_ratio_low"], config["actor.clip_ratio_c"]) == (0.2, 3.0)
    assert not config["data.filter_overlong_prompts"] and config["actor.entropy_coeff"] == 0.001  # its YAML's
    tests = "actor_rollout_ref.rollout.n=2 actor_rollout_ref.rollout.val_kwargs.temperature=0.6"
    assert checkout(tests, trainer=newer)[0]["rollout.val_kwargs.temperature"] == 0.6
    greedy = f"{newer}\nif not do_sample: temperature = 0"
    assert checkout(tests, trainer=greedy)[0]["rollout.val_kwargs.temperature"] == 0
    sampled = f"{tests} actor_rollout_ref.rollout.val_kwargs.do_sample=True"
    assert checkout(sampled, trainer=greedy)[0]["rollout.val_kwargs.temperature"] == 0.6


@confined
def test_code_that_a_fork_has_commented_out_has_no_meaning(checkout, tmp_path):
    quiet = "\n".join(f"#{line}" if "apply_kl" in line else line for line in TRAINER.splitlines())
    config, missing, changes = checkout("", trainer=quiet)
    assert missing == [] and not config["algorithm.use_kl_in_reward"] and "the KL is nowhere" in changes[0]
    assert config["data.filter_overlong_prompts"]
    path = tmp_path / "verl/utils/dataset/rl_dataset.py"
    path.parent.mkdir(parents=True)
    for line, filters in (("if len(ids) <= self.max_prompt_length: ...", True), ("# <= self.max_prompt_length", False)):
        path.write_text(line)
        config, _, changes = checkout("")
        assert config["data.filter_overlong_prompts"] == filters == any("are left out" in one for one in changes)


@confined
def test_the_critics_loss_of_0_4_0_is_twice_that_of_others(checkout):
    for loss, clip in (("vf_loss = 0.5 * agg_loss(squares)", 3.0), ("vf_loss = agg_loss(squares)", 1.5)):
        words = "algorithm.adv_estimator=gae critic.grad_clip=3"
        assert checkout(words, workers=f"{WORKERS}{CLIP}{loss}\n")[0]["critic.grad_clip"] == clip
    for verl, clip in (("0.3", 1.0), ("0.4.0", 0.5), ("0.4.1", 1.0)):
        pathlib.Path("verl/trainer/ppo/ray_trainer.py").unlink(missing_ok=True)
        assert translated(f"{PPO} {BASICS} algorithm.adv_estimator=gae", verl)[0]["critic.grad_clip"] == clip


@confined
def test_a_step_of_the_older_trainers_has_the_prompts_that_are_loaded_at_once(checkout):
    """Of 0.4 to 0.8, and of 0.9 without use_v1: the loader's batch is gen_batch_size. 0.3 has no such key."""
    words = f"{GROUP} data.train_batch_size=16 +data.gen_batch_size=64"
    for trainer, given, prompts in (
        (LOADER, "", 64),
        (V1, "", 16),
        (V1, "+trainer.use_v1=False", 64),
        ("", "", 16),
        (LOADER, "+data.gen_batch_size=null", 16),
    ):
        config, missing, changes = checkout(f"{words} {given}", trainer=TRAINER + trainer)
        assert (config["data.train_batch_size"], missing) == (prompts, [])
        assert any("data.gen_batch_size=64" in change for change in changes) == (prompts == 64)
        assert config["actor.ppo_mini_batch_size"] == min(32, prompts) * 2 and config["data.gen_batch_size"] is None
    assert checkout(words, trainer=TRAINER + LOADER, main=DAPO)[0]["data.train_batch_size"] == 64
    config, missing, _ = checkout(f"{words} {FILTER}", trainer=TRAINER + LOADER, main=DAPO)
    assert (config["data.train_batch_size"], config["data.gen_batch_size"], missing) == (16, 64, [])


@confined
def test_the_filter_of_groups_is_of_the_dapo_recipe_and_of_0_9(checkout):
    fork = f"{LOADER}if self.config.algorithm.filter_groups.enable: batch = new_batch[kept]\n"
    for trainer, main, given, filters in (
        (LOADER, PPO, "", False),
        (LOADER, DAPO, "", True),
        (V1, PPO, "", True),
        (V1, PPO, "+trainer.use_v1=False", False),
        (fork, PPO, "", True),
    ):
        config, missing, changes = checkout(f"{GROUP} {FILTER} {given}", trainer=TRAINER + trainer, main=main)
        assert (config["algorithm.filter_groups"], missing) == (filters, [])
        assert any("does not read algorithm.filter_groups" in change for change in changes) != filters


OF_RECIPE = "reward_fn = load_reward_manager(config, overlong_buffer_cfg=config.reward_model.overlong_buffer)\n"
OF_ALL = "reward_fn = load_reward_manager(config, **config.reward_model.get('reward_kwargs', {}))\n"


@confined
@pytest.mark.parametrize(
    "main,source,reward,verl,recipes,usual",
    [
        (PPO, OF_ALL, "", "", 0, 512),
        (PPO, OF_ALL, OF_RECIPE, "", 512, 512),  # a fork's
        (PPO, None, "", "", 0, 512),
        (PPO, None, "", "0.9", 0, 512),
        (DAPO, OF_RECIPE, OF_ALL, "", 512, 0),  # verl's until 0.7
        (DAPO, f"# {OF_ALL}{OF_RECIPE}", "", "", 512, 0),
        (DAPO, OF_ALL, "", "", 0, 512),  # verl-recipe's
        (DAPO, None, "", "", 512, 512),
        (DAPO, None, "", "0.5", 512, 0),
    ],
    ids=range(9),
)
def test_the_penalty_has_the_name_that_the_trainer_reads(
    checkout, tmp_path, main, source, reward, verl, recipes, usual
):
    path = tmp_path.joinpath(*main.split()[-1].split(".")).with_suffix(".py")
    for file, text in ((path, source), (tmp_path / "verl/trainer/ppo/reward.py", reward)):
        file.parent.mkdir(parents=True, exist_ok=True)
        if text is not None:
            file.write_text(text)
    for name, tokens in (("overlong_buffer", recipes), ("reward_kwargs.overlong_buffer_cfg", usual)):
        words = f"+reward_model.{name}.enable=True +reward_model.{name}.len=512 +reward_model.{name}.penalty_factor=0.5"
        words += f" {GROUP} reward_model.reward_manager=dapo data.max_response_length=1024"
        config, missing, changes = checkout(words, main=main, verl=verl)
        weights = "rule_score=1,length_score=0.5" if tokens else ""
        assert (config["reward.overlong_buffer_tokens"], config["reward.weights"], missing) == (tokens, weights, [])
        assert any("does not read reward_model" in change for change in changes) == (not tokens)


@confined
def test_a_place_of_the_penalty_that_another_refers_to_is_read(checkout, tmp_path):
    place = "reward_kwargs: {overlong_buffer_cfg: '${reward_model.overlong_buffer}'}"
    yaml = f"{YAML}reward_model: {{reward_manager: dapo, {place}, overlong_buffer: {{enable: False, len: 256}}}}\n"
    (tmp_path / "verl/trainer").mkdir(parents=True)
    (tmp_path / "verl/trainer/main_ppo.py").write_text(OF_ALL)
    config, _, changes = checkout(f"{GROUP} reward_model.overlong_buffer.enable=True", yaml=yaml)
    assert config["reward.overlong_buffer_tokens"] == 256 and not any("does not read" in one for one in changes)


@confined
def test_the_clip_of_the_older_workers_is_not_the_optimizers(checkout):
    """By dp_actor.py and dp_critic.py until 0.7; the engines of 0.8 read optim.clip_grad alone, as Megatron does."""
    actor = "actor_rollout_ref.actor"
    words = f"{actor}.grad_clip=0.3 critic.grad_clip=0.2 +{actor}.optim.clip_grad=0.7 +critic.optim.clip_grad=0.8"
    for workers, given, clips in (
        (CLIP, "", (0.3, 0.1)),  # the critic's loss is of the squares
        (CLIP, f"~{actor}.grad_clip", (1.0, 0.1)),
        (CLIP, "+trainer.use_legacy_worker_impl=disable", (0.7, 0.4)),
        (CLIP, f"{actor}.strategy=megatron", (0.7, 0.4)),
        ("", "", (0.7, 0.4)),
    ):
        config, missing, _ = checkout(f"algorithm.adv_estimator=gae {words} {given}", workers=WORKERS + workers)
        assert (config["actor.grad_clip"], config["critic.grad_clip"], missing) == (*clips, [])


@confined
def test_the_warm_up_of_the_older_workers(checkout):
    """Until 0.7 FSDP takes the ratio below 0 steps, an engine at 0, too; a cosine of 0.4 starts at min_lr_ratio."""
    place = "actor_rollout_ref.actor.optim"
    words = f"+{place}.lr_warmup_steps=0 +{place}.lr_warmup_steps_ratio=0.1 +{place}.lr_scheduler_type=cosine"
    words += f" +{place}.min_lr_ratio=0.2"
    cosine = f"{CLIP}actor_lr_scheduler = get_cosine_schedule_with_warmup(optimizer)\n"
    later = f"{cosine}return min_lr_ratio + (1.0 - min_lr_ratio) * (current_step / num_warmup_steps)\n"
    names = ("actor.lr_warmup_steps", "actor.lr_warmup_steps_ratio", "actor.init_lr_ratio", "actor.lr_scheduler_type")
    for workers, given, values in (
        (CLIP, "", (-1, 0.0, 0.0, "constant")),  # 0.3 has no other
        (cosine, "", (-1, 0.0, 0.0, "cosine")),
        (later, "", (-1, 0.0, 0.2, "cosine")),
        (later, f"{place}.lr_scheduler_type=constant", (-1, 0.0, 0.0, "constant")),
        (later, "actor_rollout_ref.actor.strategy=megatron", (-1, 0.1, 0.0, "cosine")),
        ("", "", (-1, 0.1, 0.0, "cosine")),
        ("", f"actor_rollout_ref.actor.strategy=veomni {place}.lr_warmup_steps=7", (-1, 0.1, 0.0, "cosine")),
        ("", f"{place}.lr_warmup_steps=7", (7, 0.0, 0.0, "cosine")),
    ):
        config, missing, _ = checkout(f"{GROUP} {words} {given}", workers=WORKERS + workers)
        assert (*(config[name] for name in names), missing) == (*values, [])


@confined
def test_megatron_recomputes_what_its_yaml_says(checkout, tmp_path):
    """Until 0.6 the YAML of Megatron's trainer has neither the key nor the group of it."""
    checkout("")
    megatron = "actor_rollout_ref.actor.strategy=megatron"
    for yaml, remat in (
        ("a: 1", "none"),
        ("defaults: [\n - model@actor_rollout_ref.model: hf_model]", "full"),
        ("defaults: [\n - ppo_trainer]", "full"),
    ):
        (tmp_path / "verl/trainer/config/ppo_megatron_trainer.yaml").write_text(yaml)
        (tmp_path / "verl/trainer/config/model").mkdir(exist_ok=True)
        assert checkout(f"{GROUP} {megatron}")[0]["model.remat"] == remat
        assert checkout(GROUP)[0]["model.remat"] == "full"


@confined
def test_updates_were_the_steps_of_separate_async_before_0_9(checkout):
    words = f"{GROUP} +trainer.v1.trainer_mode=separate_async +rollout.nnodes=1"
    assert checkout(words, trainer=TRAINER + V1)[1] == []
    (line,) = checkout(words, trainer=TRAINER + V1.replace(" // ", " * "))[1]
    assert line.startswith("trainer.v1.trainer_mode=separate_async") and "updates as steps" in line


@confined
def test_functions_that_a_fork_changes_are_named(checkout, tmp_path, monkeypatch):
    """Functions of other estimators, comments and layout do not count."""
    body = '"""Advantages of GRPO."""\n    return agg_loss(\n        scores - baseline,  # GRPO\n    )\n'
    source = "def compute_{}_outcome_advantage(scores, baseline):\n    {}"
    names = ("grpo", "rloo")
    known = fingerprints("".join(source.format(name, body) for name in names), r"compute_\w+")
    known = {f"core_algos.{name}": f"000000 {fingerprint}" for name, (_, fingerprint) in known.items()}
    monkeypatch.setattr(own_code, "KNOWN", known)
    path = tmp_path / "verl/trainer/ppo/core_algos.py"
    checkout("")
    for text, missing in (
        (body, []),
        ("return agg_loss(scores-baseline)\n", []),
        (body.replace("-", "+"), [f"core_algos.compute_grpo_outcome_advantage: changed in {path}:2"]),
        (body.replace(")", "]"), [f"core_algos: {path} cannot be read as Python"]),
    ):
        path.write_text("\n" + source.format("grpo", text) + source.format("rloo", "return 0\n"))
        said = checkout("")[1]
        assert len(said) == len(missing) and all(
            one.startswith(start) for one, start in zip(said, missing, strict=True)
        )


def test_the_table_of_verls_functions_is_made_from_its_history(tmp_path):
    verl = tmp_path / "verl/trainer/ppo"
    verl.mkdir(parents=True)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    sources = [f"def agg_loss(x):\n    return x {sign} 1\n" for sign in "+-"]
    for source in sources:
        (verl / "core_algos.py").write_text(source)
        subprocess.run([*git, "add", "."], check=True)
        subprocess.run([*git, "commit", "-qm", "x"], check=True)
    command = [sys.executable, str(ROOT / "scripts/verl_functions.py"), str(tmp_path)]
    table: dict = {}
    exec(subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout, table)
    (name, values), *others = table["KNOWN"].items()
    assert name == "core_algos.agg_loss" and not others
    assert {*values.split()} == {fingerprints(source, "agg_loss")["agg_loss"][1] for source in sources}
    assert len(own_code.KNOWN["core_algos.compute_policy_loss"].split()) == 10  # counted in verl's history by hand


@confined
def test_small_names_of_forks(checkout):
    """Clips of -1 in code that takes clip_ratio then; rollouts; a critic's mini-batch above the batch; a late test."""
    yaml = YAML.replace("clip_ratio: 0.3", "clip_ratio: 0.3, clip_ratio_low: -1, clip_ratio_high: -1")
    own = f"{TRAINER}clip_ratio_low\n"
    with pytest.raises(UserError, match=r"actor\.clip_ratio_\w+=-1\.0 must be at least 0"):
        checkout("", yaml=yaml, trainer=own)
    own += "low = cliprange_low if cliprange_low != -1 else cliprange\n"
    config, missing, _ = checkout("trainer.test_freq=10000000000000", yaml=yaml, trainer=own)
    assert (config["actor.clip_ratio_low"], config["actor.clip_ratio_high"], missing) == (0.3, 0.3, [])
    assert config["trainer.test_freq"] == 2**31 - 1
    assert checkout("+actor_rollout_ref.rollout.mode=async")[1] == []
    (line,) = checkout("+actor_rollout_ref.rollout.mode=sync_with_tool")[1]
    assert "a rollout of the checkout's own" in line
    words = "algorithm.adv_estimator=gae data.train_batch_size=16 critic.ppo_mini_batch_size=32"
    assert checkout(words)[0]["critic.ppo_mini_batch_size"] == 16
    main = "python3 -m recipe.dapo.src.main_dapo"
    assert checkout("", main=main)[0]["trainer.project_name"] == "verl-dapo"


@confined
@pytest.mark.parametrize("key", ("actor_rollout_ref.rollout.n_agent", "data.n_samples", "agent_grpo.n"))
def test_a_group_by_another_name_is_a_group(checkout, key):
    config, missing, _ = checkout(f"{key}=5")
    assert (config["algorithm.adv_estimator"], config["rollout.n"]) == ("grpo", 5) and missing == []
    assert config["actor.ppo_mini_batch_size"] == 32  # its workers multiply by rollout.n alone
    assert checkout(f"{key}=5", workers="")[0]["actor.ppo_mini_batch_size"] == 32
    with pytest.raises(UserError, match=r"with a jppo --config, give actor_rollout_ref\.rollout\.n"):
        from_verl.on_top(["--config=jppo://gsm8k", f"{key}=5"])


@confined
def test_without_a_group_the_change_of_the_estimator_is_reported(checkout, capsys):
    config, _, changes = checkout("")
    assert config["algorithm.adv_estimator"] == "reinforce_no_baseline"
    assert [change for change in changes if "adv_estimator=grpo" in change and "reinforce_no_baseline" in change]
    from_verl.main(["algorithm.adv_estimator=grpo"])
    assert capsys.readouterr().err.startswith("note: algorithm.adv_estimator=grpo with one sample a prompt")


@confined
def test_keys_of_a_fork_are_left_out_aloud_unless_they_are_off(checkout):
    own = YAML + "do_search: %s\nreward_model: {enable: False, rm_type: %s}\n"
    assert checkout("", yaml=own % (False, "null"))[1] == []
    missing = checkout("", yaml=own % (True, "prime"))[1]
    assert [line.partition(":")[0] for line in missing] == ["do_search=True", "reward_model.rm_type=prime"]


@confined
def test_a_loss_that_subtracts_the_kl_is_another(checkout):
    loss = "policy_loss = policy_loss - kl_loss * self.config.kl_loss_coef"
    assert checkout("", workers=f"{WORKERS}{loss}")[1] == []
    (line,) = checkout("actor_rollout_ref.actor.use_kl_loss=True", workers=f"{WORKERS}{loss}")[1]
    assert "subtracts the KL" in line


@confined
def test_the_trainer_of_another_package_is_not_verls(checkout):
    (line,) = checkout("", main="python3 -m mine.trainer.main_ppo")[1]
    assert line.startswith("mine.trainer.main_ppo: a trainer of another package")


@confined
def test_an_unknown_version_is_left_out_aloud(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    old = f"{PPO} {BASICS} data.max_prompt_length=100 actor_rollout_ref.actor.clip_ratio=0.1"
    (line,) = translated(old)[1]
    assert line.startswith("the version of verl: unknown") and "--verl=0.2" in line
    config, missing, _ = translated(old, "0.2")
    assert missing == [] and config["algorithm.use_kl_in_reward"] and config["actor.clip_ratio_high"] == 0.1
    assert config["actor.entropy_coeff"] == 0.001 and config["data.filter_overlong_prompts"]
    config, missing, _ = translated(old, "0.3.0.post1")
    assert config["algorithm.use_kl_in_reward"] and not config["data.filter_overlong_prompts"]
    config, missing, _ = translated(old, "0.9.1")
    assert missing == [] and not config["algorithm.use_kl_in_reward"] and config["actor.entropy_coeff"] == 0
    assert translated(f"{old} algorithm.use_kl_in_reward=False")[1] == []  # 0.3 refuses this key
    with pytest.raises(UserError, match="--verl=new: no version"):
        translated(old, "new")


def test_refusals_without_need():
    kept = translate(["trainer.max_actor_ckpt_to_keep=0"])
    assert kept.lines[0].kind == "needless" and "trainer.max_ckpt_to_keep" not in kept.settings
    whole = translate(["data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=64"])
    assert whole.settings["actor.ppo_mini_batch_size"] == 8
    for key in ("actor_rollout_ref.ref.param_offload", "actor_rollout_ref.actor.checkpoint.contents",
      "trainer.val_generations_to_log_to_wandb", "reward_manager.name"):  # fmt: skip
        assert translate([f"{key}=null"]).lines[0].kind != "unknown", key


@confined
def test_the_variable_that_is_empty_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"trainer\.nnodes=: it must be a number.*empty in the script: HOSTS, MODEL;"):
        translated(f"{PPO} trainer.nnodes=$HOSTS actor_rollout_ref.model.path='' ".replace("''", '"${MODEL}"'))


def test_a_config_of_many_files_is_hydras(tmp_path):
    """Groups of the folder above, packages, choices of the command line, and the order of `defaults`."""
    files = {
        "main": "defaults: [{engine: dp}, {actor@a.b: '${engine}_actor'}, tests@checks, _self_]\nc: 1\na: {b: {x: 9}}",
        "engine/dp": "# @package _global_\nengine: dp",
        "engine/mega": "# @package _global_\nengine: mega",
        "actor/dp_actor": "defaults: [../optim@optim: fast, base, _self_]\nx: 1\nz: 2",
        "actor/mega_actor": "defaults: [base]\nx: 3\nlr: 1e-6",
        "actor/base": "x: 0\ny: 5",
        "optim/fast": "lr: 3",
        "tests": "run: True",
        "large": "defaults: [main, override engine: mega, _self_]\nc: 2",
    }
    for name, text in files.items():
        (tmp_path / f"{name}.yaml").parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.yaml").write_text(text)
    options = {"--config-name": "main", "--config-path": str(tmp_path)}
    found = {key: value for key, value, _ in Config(options, {}, "", "", "").settings()}
    assert found == {"engine": "dp", "a.b.optim.lr": 3, "a.b.x": 9, "a.b.y": 5, "a.b.z": 2, "checks.run": True, "c": 1}
    chosen = Config(options, {"engine": "mega"}, "", "", "")
    found = {key: value for key, value, _ in chosen.settings()}
    assert found == {"engine": "mega", "a.b.x": 9, "a.b.y": 5, "a.b.lr": 1e-6, "checks.run": True, "c": 1}
    assert chosen.found == {"engine"}
    large = Config({**options, "--config-name": "large"}, {}, "", "", "").settings()
    assert {key: value for key, value, _ in large} == found | {"c": 2}


@confined
def test_files_that_are_no_scripts_end_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("fifo.sh")
    pathlib.Path("zero.sh").symlink_to("/dev/zero")
    pathlib.Path("wide.sh").write_bytes(f"{PPO} a.b=1".encode("utf-16-le"))
    pathlib.Path("large.sh").write_bytes(b"#" * (2**22 + 1))
    pathlib.Path("far.sh").write_text(f"tmux new-session -d '{PPO} a.b=1'")
    named = {"fifo": "a device", "zero": "a device", "wide": "UTF-16", "large": "larger than 4 MiB", "far": "of tmux"}
    for name, why in named.items():
        assert why in one_line(capsys, from_verl.main, f"{name}.sh"), name
    pathlib.Path("latin.sh").write_bytes(f"# gr\u00fcn\n{PPO} a.b=1".encode("latin-1"))
    assert from_verl.read_arguments(["latin.sh"]).words == ("a.b=1",)
    assert read_file(pathlib.Path("latin.sh")).startswith("# gr\u00fcn")


@confined
def test_a_long_line_takes_no_longer_than_a_short_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("run.sh").write_text(f"X={'a./' * 14000}\n{PPO} a.b=1")
    start = time.process_time()
    assert from_verl.read_arguments(["run.sh"]).words == ("a.b=1",)
    assert time.process_time() - start < 5
