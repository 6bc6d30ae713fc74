"""verl's command lines become jppo's: every key is accounted for, and what is printed passes jppo's own check."""

import contextlib
import json
import math
import re
import shlex

import pytest

from jppo import from_verl, settings
from jppo.plugins.verl import names, overrides
from jppo.plugins.verl.overrides import read_value
from jppo.plugins.verl.translate import translate
from jppo.settings import table
from tests.make import ROOT, one_line
from tests.plugins.verl.verl_scripts import SCRIPTS


@pytest.fixture(autouse=True)
def home(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.chdir(ROOT)


def said(capsys, *argv: str) -> tuple[dict, str]:
    """The settings of the command that is printed, read back and checked as a run does, and all that is printed."""
    with contextlib.suppress(SystemExit):
        from_verl.main(list(argv))
    out = capsys.readouterr().out
    words = shlex.split(out.partition("\n\n#")[0].replace("\\\n", ""))
    assert words[:3] == ["python", "-m", "jppo.train"]
    config, _ = settings.parse(words[3:], "", settings.default())
    settings.check(config)
    return table.by_name(config), out


def refusal(capsys, *argv: str) -> str:
    error = one_line(capsys, from_verl.main, *argv)
    assert error.startswith("error: ")
    return error


# What each must come to, by hand from the script, verl's documentation of its defaults and jppo's of its settings.
EXPECTED = {
    "sao": {
        "algorithm.old_logprob": "bypass",
        "algorithm.rollout_is": "token",
        "algorithm.rollout_is_threshold": "0.2_4.0",
        "algorithm.lam_alpha": 1.5,
        "actor.loss_mode": "gpg",
        "actor.ppo_epochs": 1,
        "critic.lam": 1.0,
        "critic.freeze": "*.self_attn.*",
        "critic.ppo_epochs": 2,
        "critic.lr": 5e-6,
        "critic.lr_warmup_steps": 10,
        "trainer.critic_warmup": 9,  # verl's N is N - 1 steps
        "rollout.n": 1,
    },
    "quickstart": {
        "data.train_files": "/home/me/data/gsm8k/train.parquet",
        "actor.ppo_mini_batch_size": 64,
        "actor.max_tokens_per_device": 4 * 1024,
        "actor.entropy_coeff": 0.0,
        "algorithm.use_kl_in_reward": False,
        "critic.path": "",
        "critic.lr": 1e-5,
        "rollout.servers": 1,
        "data.filter_overlong_prompts": False,
        "trainer.logger": "console,jsonl",
        "trainer.run_dir": "runs/gsm8k",
        "model.compute_dtype": "bfloat16",
    },
    "ppo with a reward model": {
        "reward.model.path": "sfairXC/FsfairX-LLaMA3-RM-v0.1",
        "reward.weights": "rm_score=1",
        "reward.model.batch_size": 32,
        "reward.model.max_length": 1536,
        "reward.model.dtype": "bfloat16",
        "actor.use_kl_loss": True,
        "actor.kl_loss_coef": 0.01,
        "actor.lr_warmup_steps_ratio": 0.1,
        "critic.lr_warmup_steps_ratio": 0.05,
    },
    "dapo 32b": {
        "model.path": "/home/me/verl/models/Qwen2.5-32B",
        "actor.clip_ratio_low": 0.2,
        "actor.clip_ratio_high": 0.28,
        "actor.clip_ratio_c": 10.0,
        "actor.max_tokens_per_device": 22 * 1024,
        "actor.ppo_mini_batch_size": 32 * 16,
        "actor.lr_warmup_steps": 10,
        "actor.param_offload": True,
        "mesh.sequence": 8,
        "reward.overlong_buffer_tokens": 4096,
        "reward.weights": "rule_score=1,length_score=1",
        "rollout.val_kwargs.temperature": 1.0,
        "rollout.val_kwargs.top_p": 0.7,
        "trainer.nnodes": 16,
        "data.truncation": "left",
    },
    "72b by sglang": {
        "rollout.name": "sglang",
        "rollout.servers": 1,
        "mesh.fsdp": 16,
        "mesh.data": -1,
        "trainer.run_dir": "/ckpts/72b",
        "data.train_batch_size": 1024,
        "trainer.total_epochs": 30,
    },
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_of_verls_is_a_command_of_jppos(name, tmp_path, capsys):
    script = tmp_path / "run.sh"
    script.write_text(SCRIPTS[name])
    config, out = said(capsys, str(script))
    assert {key: config[key] for key in EXPECTED[name]} == EXPECTED[name]
    sections = "data|algorithm|actor_rollout_ref|critic|reward_model|trainer"
    keys = set(re.findall(rf"(?<![\w.$/])((?:{sections})\.[\w.]+)=", SCRIPTS[name]))
    assert len(keys) > 8
    comments = out.partition("\n\n#")[2]
    assert not [key for key in keys if not re.search(rf"#   \+?{re.escape(key)}=", comments)]
    assert "# unknown" not in out


def test_what_becomes_of_each_key_is_said(tmp_path, capsys):
    script = tmp_path / "run.sh"
    script.write_text(SCRIPTS["dapo 32b"])
    _, out = said(capsys, str(script), "actor_rollout_ref.actor.no_such=3")
    sections = dict(re.findall(r"# ([\w' ]+) \(\d+\):\n((?:#   .*\n?)+)", out))
    assert "use_dynamic_bsz=True: packing does it" in sections["no meaning in jppo"]
    assert "data.gen_batch_size=1536 -> data.gen_batch_size=1536" in sections["jppo's settings"]
    metric = "algorithm.filter_groups.metric=acc -> algorithm.filter_groups_metric=rule_score"
    assert metric in sections["jppo's settings"]
    assert "not supported" not in sections
    assert "actor_rollout_ref.actor.no_such=3" in sections["unknown"]
    assert "reward_model.overlong_buffer.len=4096 -> reward.overlong_buffer_tokens=4096" in sections["jppo's settings"]


def test_control_characters_are_shown_and_not_executed(capsys):
    _, out = said(capsys, "+x.y=\x1b[2J", "trainer.experiment_name=a\x1bb")
    assert "\x1b" not in out
    assert r"+x.y=\x1b[2J" in out and r"experiment_name=a\x1bb" in out


def test_verls_defaults_are_in_the_command(capsys):
    """The base has other values of these, or jppo: those of verl 0.9.1's ppo_trainer.yaml."""
    config, out = said(capsys, "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2")
    verl = {
        "data.train_batch_size": 1024,
        "data.max_prompt_length": 512,
        "data.max_response_length": 512,
        "data.filter_overlong_prompts": False,
        "actor.ppo_mini_batch_size": 256 * 2,
        "actor.entropy_coeff": 0.0,
        "actor.clip_ratio_low": 0.2,
        "actor.clip_ratio_high": 0.2,
        "algorithm.use_kl_in_reward": False,
        "rollout.dtype": "bfloat16",
        "trainer.total_epochs": 30,
        "actor.use_kl_loss": False,
        "actor.loss_agg_mode": "token-mean",
        "algorithm.norm_adv_by_std_in_grpo": True,
        "rollout.temperature": 1.0,
        "rollout.val_kwargs.temperature": 0.0,
    }
    assert {key: config[key] for key in verl} == verl
    assert "model.path, data.train_files, data.val_files: not given" in out


def test_a_coefficient_that_verl_does_not_read_is_said(capsys):
    for used in (False, True):
        _, out = said(capsys, "algorithm.kl_ctrl.kl_coef=0.01", f"algorithm.use_kl_in_reward={used}")
        assert ("kl_coef is read only with algorithm.use_kl_in_reward=True" in out) is not used


def test_words_that_are_no_settings_are_left_out():
    found, kept = overrides.read_overrides(["--x=1", "word", "=3", "a.b=2"])
    assert (list(found), list(kept)) == (["a.b"], ["--x=1", "word", "=3"])


def test_nothing_of_the_base_is_left_where_verl_says_otherwise(capsys):
    base, _ = settings.parse([f"--config={from_verl.BASE}"], "", settings.default())
    usual, base = table.by_name(settings.default()), table.by_name(base)
    config, _ = said(capsys, "actor_rollout_ref.rollout.dtype=float32", "algorithm.kl_ctrl.kl_coef=0.5")
    assert base["rollout.dtype"] != usual["rollout.dtype"] == config["rollout.dtype"]
    assert config["algorithm.kl_coef"] == 0.5


ACTOR = "actor_rollout_ref.actor"


@pytest.mark.parametrize(
    "given, setting, value",
    [
        ("trainer.critic_warmup=10", "trainer.critic_warmup", 9),
        ("critic.optim.warmup_steps=7", "critic.lr_warmup_steps", 7),
        ("actor_rollout_ref.actor.optim.warmup_steps=7", "actor.lr_warmup_steps", 7),
        ("actor_rollout_ref.actor.fsdp_config.gradient_checkpointing=False", "model.remat", "none"),
        ("critic.fsdp_config.param_offload=True", "critic.param_offload", True),
        ("actor_rollout_ref.actor.megatron_config.tensor_model_parallel_size=4", "mesh.tensor", 4),
        ("actor_rollout_ref.rollout.max_new_tokens=2048", "data.max_response_length", 2048),
        ("actor_rollout_ref.rollout.max_concurrent_requests=512", "rollout.max_concurrent_requests", 512),
        ("actor_rollout_ref.actor.optim.optimizer=SGD", "actor.optimizer", "sgd"),
        ("actor_rollout_ref.actor.optim.lr_decay_style=cosine", "actor.lr_scheduler_type", "cosine"),
        ("actor_rollout_ref.actor.optim.clip_grad=inf", "actor.grad_clip", 1e30),
        ("critic.optim.min_lr=5e-6", "critic.min_lr_ratio", 0.5),
        ("critic.optim.lr_warmup_init=5e-6", "critic.init_lr_ratio", 0.5),
        ("algorithm.adv_estimator=grpo", "algorithm.adv_estimator", "reinforce_no_baseline"),  # rollout.n is 1
        ("trainer.logger=['trackio','clearml']", "trainer.logger", "trackio,clearml,jsonl"),
        ("+actor_rollout_ref.rollout.engine_kwargs.vllm.swap_space=8", "rollout.engine_args", "--swap-space 8"),
        (
            "+actor_rollout_ref.rollout.engine_kwargs.vllm={enforce_eager: true, seed: null, async_scheduling: false}",
            "rollout.engine_args",
            "--enforce-eager --no-async-scheduling",
        ),
        ("actor_rollout_ref.model.lora.rank=8", "model.lora_alpha", 32),
        ("reward.sandbox_fusion.url=http://127.0.0.1:8080/run_code", "reward.sandbox", "container"),
        ("trainer.default_local_dir=my/${trainer.project_name}", "trainer.run_dir", "my/verl_examples"),
        ("trainer.total_training_steps=null", "trainer.total_training_steps", -1),
        ("actor_rollout_ref.actor.clip_ratio_low=null", "actor.clip_ratio_low", None),
        ("critic.model.path=other/model", "critic.path", "other/model"),
        ("actor_rollout_ref.actor.ppo_epochs=3", "critic.ppo_epochs", 3),
        ("actor_rollout_ref.actor.optim.betas=[0.9,0.95]", "actor.betas", (0.9, 0.95)),
        ("actor_rollout_ref.rollout.top_k=0", "rollout.top_k", -1),
        ("actor_rollout_ref.rollout.free_cache_engine=False", "rollout.sleep_level", 0),
        ("custom_reward_function.path=mine.py", "reward.function", "mine.py:compute_score"),
        ("+trainer.val_before_train=false", "trainer.val_before_train", False),
        ("actor_rollout_ref.actor.checkpoint.save_contents=[model,extra]", "trainer.save_contents", "model,extra"),
        (f"{ACTOR}.checkpoint.save_contents=[hf_model]", "trainer.save_contents", "model,extra,hf_model"),
        ("algorithm.rollout_correction.bypass_mode=True", "algorithm.old_logprob", "bypass"),
        ("algorithm.rollout_correction.rollout_is=token", "algorithm.old_logprob", "correction"),
        ("algorithm.rollout_correction=bypass_pg_is", "algorithm.rollout_correction", "bypass_pg_is"),
        (f"{ACTOR}.policy_loss.loss_mode=dppo_kl", "actor.loss_mode", "dppo_kl"),
        (f"{ACTOR}.policy_loss.loss_mode=bypass_mode", "actor.loss_mode", "vanilla"),
        ("model_engine=veomni", "actor.lr_scheduler_type", "cosine"),
        ("model_engine=torchtitan", "actor.lr_scheduler_type", "linear"),
        (f"{ACTOR}.loss_agg_mode=token-sum", "actor.loss_agg_mode", "token-sum"),
        ("actor_rollout_ref.actor.fsdp_config={param_offload: true}", "actor.param_offload", True),
        ("data.train_batch_size=${actor_rollout_ref.actor.ppo_mini_batch_size}", "data.train_batch_size", 1024),
        ("actor_rollout_ref.actor.optim.lr=${oc.env:NO_SUCH_RATE,1e-5}", "actor.lr", 1e-5),
        ("trainer.default_local_dir=${oc.env:NO_SUCH,/ckpts}/x", "trainer.run_dir", "/ckpts/x"),
        ("data.train_files=${oc.env:NO_SUCH,${oc.env:NO_OTHER,/d/a.parquet}}", "data.train_files", "/d/a.parquet"),
        ("actor_rollout_ref.actor.clip_ratio_low=${oc.env:NO_SUCH,null}", "actor.clip_ratio_low", None),
    ],
)
def test_a_value_is_what_it_means(given, setting, value, capsys):
    extra = ["actor_rollout_ref.actor.ppo_mini_batch_size=1024"] if "${" in given else []
    config, _ = said(capsys, given, *extra)
    assert config[setting] == value


def test_epochs_beside_steps_are_told(capsys):
    """verl's loop ends at total_epochs, and total_training_steps is its horizon; the number of rows is not known."""
    steps = "trainer.total_training_steps=100"
    from_verl.main([steps, "trainer.total_epochs=3"])
    told = "note: trainer.total_training_steps=100 ends the run; in verl trainer.total_epochs=3"
    assert capsys.readouterr().err.startswith(told)
    from_verl.main([steps])
    assert capsys.readouterr().err == ""


def test_a_reference_to_a_reference_is_its_value(capsys):
    chain = ["actor_rollout_ref.actor.optim.lr=${critic.optim.lr}", "critic.optim.lr=${mine.lr}", "+mine.lr=3e-6"]
    assert said(capsys, *chain)[0]["actor.lr"] == 3e-6


@pytest.mark.parametrize("value", ("${oc.env:NO_SUCH}", "${now:%Y}/x", "${no.such.key}", "[a,${no.such}]"))
def test_a_reference_to_what_is_not_known_is_left_out(value, capsys):
    word = f"data.train_files={value}"
    error = one_line(capsys, from_verl.main, word, code=3)
    assert error.startswith(f"left out: {word}: ") and "give data.train_files=VALUE" in error
    assert translate([f"data.tool_config_path={value}"]).lines[0].kind == "needless"


def test_verl_0_6s_names_of_a_correction_count_where_its_threshold_is_given(capsys):
    level = "algorithm.rollout_is_level=token"
    _, out = said(capsys, level, "algorithm.rollout_is=True", "algorithm.rollout_is_threshold=null")
    assert f"{level}: read only with algorithm.rollout_is_threshold" in out
    with pytest.raises(SystemExit) as e:
        from_verl.main([level, "algorithm.rollout_is_threshold=2.0"])
    assert e.value.code == 3 and f"left out: {level}: give the names of verl 0.9.1" in capsys.readouterr().err


def test_what_leaves_prompts_out_leaves_nothing_to_cut(capsys):
    for leaves_out, cut in (("False", "left"), ("True", "error")):
        config, _ = said(capsys, "data.truncation=left", f"data.filter_overlong_prompts={leaves_out}")
        assert config["data.truncation"] == cut


def test_a_rejection_rule_of_older_verl_is_a_band(capsys):
    place = "algorithm.rollout_correction.rollout_rs"
    config, _ = said(capsys, f"{place}=geometric", f"{place}_threshold=1.25")
    assert (config["algorithm.rollout_rs"], config["algorithm.rollout_rs_threshold"]) == ("seq_mean_k1", "0.8_1.25")


@pytest.mark.parametrize(
    "given, tokens, weights",
    [
        ("reward.reward_manager.name=dapo", 1024, "rule_score=1,length_score=0.5"),
        ("reward.reward_manager.name=naive", 0, ""),
        ("", 0, ""),  # naive
        # The penalty starts at 4096 - 1024 of 8192 tokens and falls by 0.5 in 1024: by 2.5 in the last 5120.
        ("reward_model.reward_manager=dapo reward.reward_kwargs.max_resp_len=4096", 5120,
         "rule_score=1,length_score=2.5"),
        ("reward.reward_manager.name=dapo reward.reward_kwargs.max_resp_len=8704", 512,
         "rule_score=1,length_score=0.25"),
        ("reward.reward_manager.name=dapo reward.reward_kwargs.max_resp_len=9216", 0, ""),  # starts at 8192
    ],
)  # fmt: skip
def test_the_over_long_penalty_is_of_the_dapo_reward_manager(given, tokens, weights, capsys):
    """By reward_manager/dapo.py of verl 0.9.0, the only one that reads overlong_buffer_cfg."""
    buffer = "reward.reward_kwargs.overlong_buffer_cfg"
    words = ["data.max_response_length=8192", f"{buffer}.enable=True", f"{buffer}.len=1024"]
    config, _ = said(capsys, *words, f"{buffer}.penalty_factor=0.5", *given.split())
    assert (config["reward.overlong_buffer_tokens"], config["reward.weights"]) == (tokens, weights)


def test_a_reward_model_by_the_short_name(capsys):
    config, _ = said(capsys, "reward_model.enable=True", "reward_model.path=some/rm")
    assert (config["reward.model.path"], config["reward.weights"]) == ("some/rm", "rm_score=1")


def test_fp8_of_the_rollout_is_corrected(capsys):
    fp8 = "actor_rollout_ref.rollout.quantization=fp8"
    config, _ = said(capsys, fp8, "algorithm.rollout_correction.rollout_is=token")
    assert config["rollout.quantization"] == "fp8_per_block" and config["rollout.dtype"] == "bfloat16"
    assert translate([fp8]).lines[0].kind == "missing"


def test_hosts_of_a_launchers_script(capsys):
    hosts = ["trainer.nnodes=2", "trainer.node_rank=1", "trainer.master_addr=10.0.0.1"]
    config, _ = said(capsys, *hosts)
    assert (config["trainer.node_rank"], config["trainer.coordinator_address"]) == (1, "10.0.0.1:29500")
    config, _ = said(capsys, *hosts, "trainer.master_port=1234")
    assert config["trainer.coordinator_address"] == "10.0.0.1:1234"
    config, _ = said(capsys, "trainer.nnodes=1", "trainer.node_rank=0", "trainer.master_addr=10.0.0.1")
    assert (config["trainer.node_rank"], config["trainer.coordinator_address"]) == (-1, "")


@pytest.mark.parametrize(
    "words, shares, lacking",
    [
        ("trainer.nnodes=3", (8, -1, 4, 2), ["trainer.nnodes=3"]),
        ("trainer.n_gpus_per_node=6", (2, -1, 3, 2), ["trainer.n_gpus_per_node=6"]),
        ("trainer.nnodes=2 actor_rollout_ref.rollout.tensor_model_parallel_size=16", (-1, 1, 1, 8),
         ["actor_rollout_ref.rollout.tensor_model_parallel_size=16"]),
        ("trainer.nnodes=3 actor_rollout_ref.actor.fsdp_config.fsdp_size=8", (8, -1, 4, 2), []),
        ("trainer.n_gpus_per_node=1", (-1, 1, 1, 1), []),
    ],
)  # fmt: skip
def test_devices_that_share_parameters_or_a_server(words, shares, lacking):
    """A width is a multiple of the devices that share it, and a server is on one host."""
    found = translate(words.split())
    names = ("mesh.fsdp", "mesh.data", "rollout.servers", "rollout.tensor_model_parallel_size")
    assert tuple(found.settings[name] for name in names) == shares
    assert [line.text for line in found.lines if line.kind == "missing"] == lacking


def test_tools_by_the_agent_loop(capsys):
    loop = "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent"
    tools = "actor_rollout_ref.rollout.multi_turn.tool_config_path=configs/agent_calculator.yaml"
    config, _ = said(capsys, loop, tools, "actor_rollout_ref.rollout.multi_turn.format=openai")
    assert config["rollout.multi_turn.enable"] and config["rollout.multi_turn.format"] == "openai"
    assert config["rollout.multi_turn.tool_config_path"] == "configs/agent_calculator.yaml"
    assert translate([loop.replace("tool_agent", "single_turn_agent")]).lines[0].kind == "needless"


def test_what_is_given_behind_a_file_counts_more(tmp_path, capsys):
    script = tmp_path / "run.sh"
    script.write_text(SCRIPTS["ppo with a reward model"])
    config, _ = said(capsys, str(script), "actor_rollout_ref.rollout.n=2", "trainer.save_freq=7")
    assert (config["rollout.n"], config["actor.ppo_mini_batch_size"], config["trainer.save_freq"]) == (2, 512, 7)


@pytest.mark.parametrize(
    "text, value",
    [
        ("null", None), ("None", None), ("True", True), ("false", False), ("3", 3), ("-1", -1), ("1e-6", 1e-6),
        ("0.", 0.0), ("'3'", "3"), ("[a,'b,c',[1, 2]]", ["a", "b,c", [1, 2]]),
        ("{a: 1, b: {c: x}}", {"a": 1, "b": {"c": "x"}}),
        ("Null", None), ("inf", math.inf), ("-INF", -math.inf), ("info", "info"),
        ("[]", []), ("Qwen/Qwen2-7B", "Qwen/Qwen2-7B"), ("1e", "1e"), ("1_000", 1000), ("0", 0), ("+1.5e-06", 1.5e-06),
        (".5_0", 0.5), ("-0.0", 0.0), ("2024_", "2024_"), ("1__2", "1__2"), ("007", "007"), ("01.5", "01.5"),
        ("_1", "_1"), ("1._5", "1._5"), ("1e5_", "1e5_"), ("\u0663", "\u0663"), (".", "."), ("00", "00"),
    ],
)  # fmt: skip
def test_values_are_those_of_hydra(text, value):
    assert read_value(text) == value and type(read_value(text)) is type(value)


@pytest.mark.parametrize("key", ("fsdp_config.dtype", "megatron.dtype", "veomni.dtype", "torchtitan.dtype"))
@pytest.mark.parametrize("value", ("fp16", "float16", "half"))
def test_float16_is_of_products_and_samples(key, value, capsys):
    words = f"actor_rollout_ref.actor.{key}={value}", f"actor_rollout_ref.rollout.dtype={value}"
    half, _ = said(capsys, *words)
    assert half["model.compute_dtype"] == half["rollout.dtype"] == "float16"
    assert half["model.param_dtype"] == "float32"


def test_parameters_in_float16_are_not_supported(capsys):
    words = ("actor_rollout_ref.actor.fsdp_config.model_dtype=fp16",)
    error = one_line(capsys, from_verl.main, *words, code=3)
    assert error.endswith(": float16 lacks the range for parameters; model.compute_dtype may be float16\n")


@pytest.mark.parametrize(
    "words", (["data.image_key=images"], ["actor_rollout_ref.model.path=Qwen/Qwen2.5-VL-7B-Instruct"])
)
def test_models_that_see_are_not_supported(words, capsys):
    assert "not supported: jppo's models read text" in refusal(capsys, *words)


MODEL = "actor_rollout_ref.model.path"


@pytest.mark.parametrize(
    "name", ("zai-org/GLM-4.5-Air", "ByteDance-Seed/Seed-OSS-36B-Instruct", "XiaomiMiMo/MiMo-7B-RL", "DeepSeek-V3.2")
)
def test_a_published_model_of_a_family_that_jppo_lacks_is_not_supported(name, capsys):
    assert "not supported: jppo has no" in refusal(capsys, f"{MODEL}={name}")


def test_a_model_on_this_machine_is_read(tmp_path, capsys):
    (tmp_path / "GLM-4-Llama").mkdir()
    config = tmp_path / "GLM-4-Llama" / "config.json"
    llama = {"model_type": "llama", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32}
    llama |= {"num_hidden_layers": 1, "num_attention_heads": 4, "max_position_embeddings": 4096}
    config.write_text(json.dumps(llama))
    found, _ = said(capsys, f"{MODEL}={config.parent}", "actor_rollout_ref.rollout.name=sglang")
    assert found["model.path"] == str(config.parent) and found["rollout.name"] == "sglang"
    config.write_text('{"model_type": "seed_oss"}')
    assert "model_type='seed_oss' is not supported" in refusal(capsys, f"{MODEL}={config.parent}")


@pytest.mark.parametrize(
    "word", (f"{MODEL}=Qwen/Qwen3-30B-A3B-Base", "actor_rollout_ref.actor.megatron.expert_model_parallel_size=4")
)
def test_sglang_does_not_sample_from_experts(word):
    """jppo refuses to publish them to SGLang."""
    found = translate([word, "actor_rollout_ref.rollout.name=sglang"])
    assert "rollout.name" not in found.settings  # vllm
    assert [line.text for line in found.lines if line.kind == "missing"] == ["actor_rollout_ref.rollout.name=sglang"]
    dense = translate([f"{MODEL}=deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "actor_rollout_ref.rollout.name=sglang"])
    assert dense.settings["rollout.name"] == "sglang" and {line.kind for line in dense.lines} == {"same"}


def test_steps_of_a_decay_are_read_where_the_rate_decays():
    steps = "actor_rollout_ref.actor.optim.lr_decay_steps=512"
    assert translate([steps]).lines[0].kind == "needless"  # verl's default is a constant rate
    assert translate([steps, "model_engine=veomni"]).lines[0].kind == "missing"


def test_what_jppo_refuses_is_said_in_its_own_words(capsys):
    error = refusal(capsys, "algorithm.adv_estimator=gpg")
    assert "algorithm.adv_estimator='gpg' compares the samples of a prompt" in error
    assert "algorithm.adv_estimator='other' is not known" in refusal(capsys, "algorithm.adv_estimator=other")
    assert "must be of type bool" in refusal(capsys, "data.shuffle=perhaps")
    assert "it must be a number" in refusal(capsys, "trainer.total_epochs=soon")
    assert "no such file" in refusal(capsys, "/no/such/run.sh").lower()
    assert "nothing is given" in refusal(capsys)


def test_every_row_of_the_table_can_be_met():
    known = table.by_name(settings.default()) | table.by_name(settings.sft_default())
    for name in names.KEYS:
        found = names.find_row(name.key)
        assert found is not None and (found is name or "*" in name.key or found.key == name.key), name.key
        assert (name.kind == "same") == bool(name.setting) and (not name.setting or name.setting in known), name.key
        assert name.kind == "same" or name.why, name.key
    keys = [name.key for name in names.KEYS]
    assert len(keys) == len(set(keys))
    assert all(
        names.current_key(new) == new and (new.endswith(".") or names.find_row(new)) for new in names.OLDER.values()
    )


def test_the_page_is_the_table(capsys):
    from_verl.main(["--names"])
    printed = capsys.readouterr().out
    assert printed == names.page()
    shown = printed.partition("\n### What follows from several")[0]
    assert shown.count("\n- ") == sum(name.kind == "same" for name in names.KEYS)
    assert (ROOT / "docs/verl.md").read_text(encoding="utf-8").endswith(shown)


def test_names_of_columns_and_arguments_of_the_chat_template():
    words = ["data.prompt_key=question", "data.reward_fn_key=task", "data.train_max_samples=100"]
    words += ["+data.apply_chat_template_kwargs.enable_thinking=False", "+data.apply_chat_template_kwargs.effort=low"]
    found = translate(words)
    assert {line.kind for line in found.lines} == {"same"}
    assert found.settings["data.prompt_key"] == "question" and found.settings["data.reward_fn_key"] == "task"
    assert found.settings["data.train_max_samples"] == 100
    assert found.settings["data.apply_chat_template_kwargs"] == "enable_thinking=False,effort=low"
    assert translate(["data.apply_chat_template_kwargs={}"]).settings["data.apply_chat_template_kwargs"] == ""
