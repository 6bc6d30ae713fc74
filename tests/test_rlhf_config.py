"""configs/rlhf.py and its reward model's, on small stand-ins for the model and the data: every setting is read."""

import dataclasses
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys

import jax
import pytest

from examples import arithmetic
from jppo import reward_model, settings
from jppo.learner.make import make_mesh
from jppo.models import decoder, hf, hf_write
from jppo.plugins.forecast.report import preview_run
from jppo.rewards.make import make_reward_sum
from jppo.run.inputs import read_inputs
from tests.make import ROOT, read_lines, typed, write_lines

TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}={% endif %}"
)


@pytest.fixture
def small(tmp_path):
    """A chat model of the quickstart's tokens with random weights, and the same as a reward model."""
    source = tmp_path / "source"
    arithmetic.write_model(source)
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "max_position_embeddings": 2048}
    (source / "config.json").write_text(json.dumps(arithmetic.MODEL | shape))
    said = json.loads((source / "tokenizer_config.json").read_text())
    (source / "tokenizer_config.json").write_text(json.dumps(said | {"model_max_length": 2048}))
    (source / "chat_template.jinja").write_text(TEMPLATE)
    cfg = dataclasses.replace(hf.read_config(source)[1], value_head_std=0.2)
    for head, name in (("lm", "chat"), ("value", "run/reward_model/hf")):
        values = decoder.init_params(cfg, jax.random.key(0), head=head, param_dtype="float32")
        hf_write.save_model(tmp_path / name, values, cfg, source=source, dtype="float32", head=head)
    return tmp_path


def parsed(name, small, defaults, **files):
    argv = [f"--config=configs/{name}.py:{small / 'run'}", f"--config.model.path={small / 'chat'}"]
    c, _ = settings.parse([*argv, *(f"--config.data.{k}={v}" for k, v in files.items())], "", defaults)
    settings.check(c)
    return c


@pytest.mark.slow
def test_ppo_against_a_reward_model(small, quick_compilation):
    prompt = {"prompt": [{"role": "user", "content": "1+2"}], "data_source": "chat", "ground_truth": "-"}
    files = {k: write_lines(small / f"{k}.jsonl", [prompt] * 256) for k in ("train_files", "val_files")}
    c = parsed("rlhf", small, settings.default(), **files)
    said = preview_run(typed(c))
    assert "reference " in said and "critic " in said and "steps            1, each of 256" in said
    reward_sum = make_reward_sum(typed(c), make_mesh(typed(c)), **read_inputs(typed(c)).reward_arguments())
    reward_sum.close()
    assert c.algorithm.kl_ctrl_type == "adaptive" and c.algorithm.use_kl_in_reward


def test_its_reward_model(small, quick_compilation):
    turns = [{"role": "user", "content": "1+2"}]
    pair = {k: [*turns, {"role": "assistant", "content": v}] for k, v in (("chosen", "3"), ("rejected", "4"))}
    files = {k: write_lines(small / f"{k}.jsonl", [pair] * 64) for k in ("train_files", "val_files")}
    c = parsed("rlhf_reward_model", small, settings.reward_model_default(), **files)
    said = reward_model.dry_run(typed(c))
    assert "pairs            64 (0 over-long" in said and "steps            1, each of 64 pairs" in said


@pytest.mark.parametrize(
    "name, defaults",
    [
        ("tinystories_sft", settings.sft_default),
        ("tinystories_reward_model", settings.reward_model_default),
        ("tinystories_dpo", settings.dpo_default),
        ("tinystories_ppo", settings.default),
    ],
)
def test_the_stages_of_the_example_find_each_other(name, defaults):
    c, _ = settings.parse([f"--config=configs/{name}.py:here"], "", defaults())
    with c.unlocked():
        c.model.path = c.model.path or "given"
    settings.check(c)
    stage = name.removeprefix("tinystories_").replace("reward_model", "rm")
    assert c.trainer.run_dir == f"here/{stage}" and (stage not in ("rm", "dpo") or c.model.path == "here/sft/hf")


PAGE = ROOT / "docs/examples/tinystories.md"
# Changes by command, for a run in minutes; the second number of stories is of those for pairs.
SMALL = {
    "--n=16": "--n=5",
    "--n=40": "--n=16",
    "configs/tinystories_reward_model.py": "--config.trainer.total_training_steps=80",
    "configs/tinystories_ppo.py": "--config.trainer.total_training_steps=24 --config.trainer.test_freq=24",
}


def commands():
    """The commands of the page, each on one line, up to the first PPO run."""
    section = PAGE.read_text().partition("\n## Commands\n")[2].partition("\n## ")[0]
    blocks = "\n".join(re.findall(r"^```\n(.*?)^```", section, re.S | re.M)).replace("\\\n", " ")
    lines = [" ".join(line.split()) for line in blocks.splitlines() if line]
    return lines[: next(i for i, line in enumerate(lines) if "jppo.train " in line) + 1]


def smaller(line):
    """The command with other numbers: an option in place of its own, or more options of a config."""
    for name, new in SMALL.items():
        if name in line.split():
            line = line.replace(name, new)
        elif line.endswith(f"--config={name}"):
            line += f" {new}"
    return line


def test_the_commands_of_the_example_page_are_found():
    lines = commands()
    modules = ["examples.stories", "jppo.evaluate", "examples.stories", "jppo.sft"]
    modules += ["jppo.evaluate", "jppo.data.pairs", "jppo.reward_model", "jppo.train"]
    assert [line.split()[:3] for line in lines] == [["python", "-m", module] for module in modules]
    assert all("\\" not in line for line in lines)
    assert sum(smaller(line) != line for line in lines) == len(SMALL)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make setup")
def test_the_example_page_trains_from_an_empty_folder(shared, tmp_path):
    for name in ("configs", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"PYTHONPATH": str(ROOT)}
    for line in commands():
        words = shlex.split(smaller(line).replace("MODEL", str(shared / "models/tinystories-656k-hd64")))
        done = subprocess.run([sys.executable, *words[1:]], cwd=tmp_path, env=environment, capture_output=True)
        assert done.returncode == 0, (line, (done.stdout + done.stderr)[-1500:])
    runs = tmp_path / "runs/tinystories"
    ppo = read_lines(runs / "ppo/metrics.jsonl")
    scores = [line["val/score"] for line in ppo if "val/score" in line]
    cats = [line["reward/rule_score/mean"] for line in ppo if "reward/rule_score/mean" in line]
    ranked = [line["rm/val_accuracy"] for line in read_lines(runs / "rm/metrics.jsonl") if "rm/val_accuracy" in line]
    assert ranked[-1] > 0.8
    assert scores[-1] > scores[0] + 0.6
    assert sum(cats[-3:]) / 3 > cats[0] + 0.1
