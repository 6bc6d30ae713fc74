"""Every config that comes with jppo passes --dry_run, with stand-ins that have the shapes of the models it names."""

import json
import pathlib
import re
import shutil
import sys

import numpy as np
import pytest

from examples import arithmetic, multiplication
from jppo import settings, sft, train
from jppo.errors import UserError
from jppo.models import hf, params
from jppo.preflight import machine
from jppo.settings import configfile
from tests.make import write_lines

QWEN = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "rope_theta": 1e6, "rms_norm_eps": 1e-6}
QWEN |= {"hidden_act": "silu", "max_position_embeddings": 32768, "initializer_range": 0.02}
GEMMA = {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "rms_norm_eps": 1e-6, "head_dim": 256}
GEMMA |= {"hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 8192, "query_pre_attn_scalar": 256}
GEMMA |= {"sliding_window": 4096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
GEMMA |= {"initializer_range": 0.02, "rope_theta": 1e4}
QWEN3 = QWEN | {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "max_position_embeddings": 40960}
QWEN3 |= {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
QWEN3 |= {"norm_topk_prob": True}
# Of the published models: width, MLP, layers, heads, key/value heads, vocabulary, tied; and their parameters.
SHAPES = {
    "Qwen/Qwen2.5-0.5B-Instruct": (QWEN, (896, 4864, 24, 14, 2, 151936, True), 494_032_768),
    "Qwen/Qwen2.5-3B-Instruct": (QWEN, (2048, 11008, 36, 16, 2, 151936, True), 3_085_938_688),
    "Qwen/Qwen2.5-7B-Instruct": (QWEN, (3584, 18944, 28, 28, 4, 152064, False), 7_615_616_512),
    "Qwen/Qwen2-7B-Instruct": (QWEN, (3584, 18944, 28, 28, 4, 152064, False), 7_615_616_512),
    "Qwen/Qwen2.5-32B-Instruct": (QWEN, (5120, 27648, 64, 40, 8, 152064, False), 32_763_876_352),
    "Qwen/Qwen2.5-32B": (QWEN, (5120, 27648, 64, 40, 8, 152064, False), 32_763_876_352),
    "Qwen/Qwen3-30B-A3B": (QWEN3, (2048, 6144, 48, 32, 4, 151936, False), 30_532_122_624),
    "google/gemma-2-2b-it": (GEMMA, (2304, 9216, 26, 8, 4, 256000, True), 2_614_341_888),
}
FIELDS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
QUICK = ("gsm8k",)
SLOW = ("lora", "gsm8k_7b", "math_grpo", "gsm8k_gemma", "gsm8k_moe", "judge", "async", "multi_host", "long_context")
SLOW += ("dapo", "vapo", "sao", "distill", "small_card")
RECIPES = (*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW))
OWN = ("quickstart", "quickstart_sft", "agent_calculator", "agent_calculator_sft")  # that make what they need
ELSEWHERE = {"rlhf", "rlhf_reward_model", "tinystories_sft", "tinystories_reward_model", "tinystories_ppo"}
ELSEWHERE |= {"tinystories_dpo", "smollm2_sums", "smollm2_instructions", "verifiers", "learning", "reasoning_gym"}


# The published recipe; its numbers are typed from it, not read from the code.
GSM8K = {
    "model.path": "Qwen/Qwen2.5-0.5B-Instruct",
    "data.train_batch_size": 256,
    "data.max_prompt_length": 1024,
    "data.max_response_length": 512,
    "algorithm.adv_estimator": "gae",
    "algorithm.gamma": 1.0,
    "algorithm.lam": 1.0,
    "algorithm.use_kl_in_reward": True,
    "algorithm.kl_coef": 0.001,
    "actor.ppo_mini_batch_size": 64,
    "actor.ppo_epochs": 1,
    "actor.clip_ratio": 0.2,
    "actor.entropy_coeff": 0.001,
    "actor.use_kl_loss": False,
    "actor.lr": 1e-6,
    "actor.grad_clip": 1.0,
    "critic.path": "",  # the policy's, so that one local path replaces both
    "critic.cliprange_value": 0.5,
    "critic.lr": 1e-5,
    "critic.grad_clip": 1.0,
    "rollout.n": 1,
    "rollout.temperature": 1.0,
    "trainer.test_freq": 10,
    "trainer.total_epochs": 15,
}


def test_gsm8k_is_the_published_recipe():
    config = configfile.recipe("gsm8k")
    assert {name: config[name.split(".")[0]][name.split(".")[1]] for name in GSM8K} == GSM8K and config.is_locked
    with pytest.raises(UserError, match="takes no argument"):
        settings.parse(["--config=configs/gsm8k.py:big"], "", settings.default())


def test_every_config_is_tried():
    tried = {*QUICK, *SLOW, *OWN, *ELSEWHERE}  # the last by test_rlhf_config, test_smollm2 and agent/test_verifiers
    assert tried == set(configfile.shipped_names())


def write_stand_in(path: pathlib.Path, family, shape, tokenizer: pathlib.Path, *, weights: bool = False) -> None:
    """A model directory without weights, or with a file of zeros that takes no room on the disk."""
    path.mkdir()
    *sizes, vocab, tied = shape
    described = family | dict(zip(FIELDS, sizes, strict=True), vocab_size=vocab, tie_word_embeddings=tied)
    (path / "config.json").write_text(json.dumps(described | {"eos_token_id": 1, "torch_dtype": "bfloat16"}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, path)
    if weights:
        about, end = {}, 0
        for entry in params.table(hf.read_config(path)[1], head="lm"):
            for tensor in entry.hf_names:
                begin, end = end, end + 2 * int(np.prod(entry.hf_shape))
                about[tensor] = {"dtype": "BF16", "shape": list(entry.hf_shape), "data_offsets": [begin, end]}
        head = json.dumps(about).encode()
        with (path / "model.safetensors").open("wb") as file:
            file.write(len(head).to_bytes(8, "little") + head)
            file.truncate(8 + len(head) + end)


@pytest.fixture(autouse=True)
def no_programs_are_looked_for(monkeypatch):
    """The doctor's tests look for them."""
    monkeypatch.setattr(machine, "check_environment", lambda *_: [])


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_passes_a_dry_run(name, tiny_model, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    config = configfile.recipe(name)
    family, shape, parameters = SHAPES[config.model.path]
    write_stand_in(tmp_path / "model", family, shape, tiny_model)
    if config.ref.path in SHAPES:
        write_stand_in(tmp_path / "teacher", *SHAPES[config.ref.path][:2], tiny_model, weights=True)
    rows = [{"prompt": f"{i % 90 + 10}+11=", "ground_truth": "1", "data_source": "gsm8k"} for i in range(1536)]
    write_lines(tmp_path / "data.jsonl", rows)
    here = {"model.path": "model", "data.train_files": "data.jsonl", "data.val_files": "data.jsonl"}
    here |= {"ref.path": "teacher"} if config.ref.path in SHAPES else {}
    words = [f"--config.{key}={tmp_path / value}" for key, value in here.items()]
    if config.rollout.multi_turn.enable:
        words.append("--config.rollout.multi_turn.format=plain")  # the stand-in has no chat template
    words.append("--config.data.row_lengths=1")  # a quarter of the programs to compile, the largest among them
    train.main(
        [f"--config=jppo://{name}", *words, "--config.model.init=random", "--config.trainer.nnodes=1", "--dry_run"]
    )
    out = capsys.readouterr().out
    [held] = re.findall(r"^  policy +([\d,]+)$", out, flags=re.M)
    copies = 8 if config.mesh.data == -1 else 1
    width = 2 if config.model.param_dtype == "bfloat16" else 4
    expected = copies * parameters * width / 2**20
    assert 0.999 * expected < float(held.replace(",", "")) < 1.1 * expected  # adapters are the rest


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN)
def test_what_makes_its_own_model_passes_a_dry_run(name, tmp_path, capsys, monkeypatch):
    task = multiplication if name.startswith("agent") else arithmetic
    monkeypatch.setattr(sys, "argv", ["task", "--out", str(tmp_path / "data")])
    task.main()
    capsys.readouterr()
    shutil.copytree(tmp_path / "data" / "model", tmp_path / "sft" / "hf")
    command = sft if name.endswith("_sft") else train
    command.main([f"--config=jppo://{name}:{tmp_path}", "--config.model.init=random", "--dry_run"])
    out = capsys.readouterr().out
    assert json.loads(out[: out.index("\n}\n") + 3])["trainer"]["run_dir"].startswith(str(tmp_path))
    assert "to compile" in out
