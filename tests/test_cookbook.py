"""Recipes of the tinker cookbook, unchanged, learn on `python -m jppo.tinker`.

They get their data sets and their model by name from the working directory. The model is small, has the name of one
whose renderer is plain text, and answers every prompt here with one of ten replies, each as likely.
"""

import json
import os
import subprocess

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

import jppo
from examples import arithmetic
from tests import make
from tests.plugins.tinker import test_tinker

MODEL = "Qwen/Qwen3-8B-Base"
SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512}
LENGTH = {"max_position_embeddings": 512}
DIGIT, WHO = "Say a digit.", "Who are you?"  # the second is of the recipe `shorter`
SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
SPELL = (
    "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r 9) r 10) y. We have"
    " r's at positions 3, 8, and 9. \\boxed{3}"
)
BOXED = [f"\\boxed{{{digit}}}" for digit in range(10)]
# Conversations with the replies of the model to the last turn.
TURNS = [
    (["How many r's are in strawberry?" + SUFFIX, SPELL, DIGIT + SUFFIX], BOXED),  # of rl_loop
    ([DIGIT], BOXED),
    ([WHO], ["!" * length for length in range(1, 11)]),
]
PACKAGES = (
    "tinker==0.38.0",
    "datasets",
    "chz",
    "blobfile",
    "pyrage",
    "termcolor",
    "tiktoken",
    "pylatexenc",
    "math-verify",
)
COOKBOOK = "tinker-cookbook==0.6.1"


def pieces(turns, reply):
    """The texts of a conversation, each tokenised alone as the renderer does; the last two are of the reply."""
    roles = ["User", "Assistant"] * 2
    before = [text for role, turn in zip(roles, turns, strict=False) for text in (f"{role}:", f" {turn}\n\n")]
    return [*before, "Assistant:", f" {reply}\n\n", "User:"]


def write_tokenizer(path):
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    how = dict(vocab_size=500, special_tokens=list(arithmetic.SPECIAL), initial_alphabet=alphabet, show_progress=False)
    texts = [text for turns, replies in TURNS for text in pieces(turns, replies[0])]
    made.train_from_iterator(3 * texts, trainers.BpeTrainer(**how))
    made.save(str(path / "tokenizer.json"))


def write_model(path, begin):
    """Trains the model on all replies to all conversations."""
    arithmetic.write_model(begin)
    write_tokenizer(begin)
    described = json.loads((begin / "tokenizer_config.json").read_text()) | {"model_max_length": 512}
    (begin / "tokenizer_config.json").write_text(json.dumps(described))
    (begin / "config.json").write_text(json.dumps(arithmetic.MODEL | SHAPE | LENGTH))
    make.write_weights(begin)
    data = dict(max_prompt_length=240, max_response_length=16, row_lengths=1)
    with jppo.open(str(begin), data=data, actor=dict(lr=3e-3, ppo_mini_batch_size=32)) as m:
        rows = [
            [m.tokenizer.encode(text, add_special_tokens=False) for text in pieces(turns, reply)]
            for turns, replies in TURNS
            for reply in replies
        ]
        weight = [np.repeat([0.0, 1.0], [sum(map(len, row[:-2])) - 1, sum(map(len, row[-2:]))]) for row in rows]
        batch = m.examples([np.concatenate(row) for row in rows], weight=weight)
        for _ in range(100):
            loss = m.forward_backward(batch, "cross_entropy", loss_agg_mode="token-sum").metrics["actor/loss"]
            m.optim_step()
        m.export(path)
    assert abs(loss / len(rows) - np.log(10)) < 0.2


def write_data(folder, rows, config="default"):
    """A data set as `datasets` reads it from a folder, by split."""
    folder.mkdir(parents=True)
    files = [f"  - split: {split}\n    path: {split}.jsonl\n" for split in rows]
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{''.join(files)}---\n")
    for split, some in rows.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """Runs a recipe on a server; returns its metrics by step."""
    folder = tmp_path_factory.mktemp("cookbook")
    python = make.python_with(folder / "python", *PACKAGES)
    done = subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", COOKBOOK], capture_output=True)
    if done.returncode:
        pytest.skip(f"needs the cookbook: pip install {COOKBOOK}")
    write_model(folder / MODEL, folder / "begin")
    say = dict(role="user", content=DIGIT)
    pair = {name: f"\n\nHuman: {DIGIT}\n\nAssistant: {BOXED[d]}" for name, d in dict(chosen=7, rejected=3).items()}
    write_data(folder / "openai/gsm8k", {"train": 128 * [dict(question=DIGIT, answer="Seven. #### 7")]}, "main")
    reply = dict(role="assistant", content=BOXED[3])
    write_data(folder / "HuggingFaceH4/no_robots", {"train": 64 * [dict(messages=[say, reply])]})
    write_data(folder / "Anthropic/hh-rlhf", {"train": 64 * [pair], "test": 4 * [pair]})
    settings = [
        "--data.max_prompt_length=200",
        "--data.max_response_length=16",
        "--rollout.kv_cache_memory_bytes=16777216",
    ]
    with test_tinker.served(folder, MODEL, "--lora=32", *settings) as url:
        env = {"TINKER_BASE_URL": url, "TINKER_API_KEY": test_tinker.KEY, "TINKER_TELEMETRY": "0"}
        env |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hub")}

        def run(name, **options):
            given = dict(model_name=MODEL, log_path=folder / name, **options)
            command = [python, "-m", f"tinker_cookbook.recipes.{name}", *(f"{k}={v}" for k, v in given.items())]
            done = subprocess.run(
                command, env=os.environ | env, cwd=folder, capture_output=True, text=True, timeout=500
            )
            assert done.returncode == 0, done.stderr[-4000:]
            return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]

        yield run


@pytest.mark.slow
def test_sl_loop_learns(recipe):
    found = recipe("sl_loop", batch_size=8, learning_rate=1e-2, max_steps=8)
    losses = [one["train_mean_nll"] for one in found]
    assert losses[-1] < 0.1 * losses[0]


@pytest.mark.slow
def test_rl_loop_learns(recipe):
    """One digit of ten earns the reward."""
    how = dict(batch_size=4, group_size=8, max_tokens=12, loss_fn="importance_sampling")
    found = recipe("rl_loop", learning_rate=3e-3, max_steps=24, **how)
    rewards = [one["reward/total"] for one in found]
    assert rewards[0] < 0.4 and np.mean(rewards[-12:]) > 0.8, rewards  # of 32 samples each


@pytest.mark.slow
def test_dpo_learns(recipe):
    """At the start policy and reference are equal, and the loss is log 2."""
    found = recipe("preference.dpo.train", dataset="hhh", batch_size=4, learning_rate=3e-3, max_steps=8, max_length=64)
    assert found[0]["dpo_loss"] == pytest.approx(np.log(2), abs=1e-5) and abs(found[0]["margin"]) < 1e-5
    assert found[-1]["accuracy"] == 1 and found[-1]["dpo_loss"] < 0.9 * found[0]["dpo_loss"]
    assert found[-1]["chosen_reward"] > 0 > found[-1]["rejected_reward"]
