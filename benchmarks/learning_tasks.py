"""The tasks and algorithms of learning.py: data, starting models and settings.

| task | response | rewards |
|---|---|---|
| `quickstart` | the sum of two numbers, up to 4 tokens | 1 at the end for a right sum |
| `rlhf` | 32 tokens of a story | a reward model's score at the end, less a KL to the starting model |
| `chain` | 20 numbers, each the one before plus an addend, 60 tokens | 1/20 at the end of each right number |
| `bisection` | up to 5 guesses, each answered by `<` or `>` | the information gained by each guess, at its end |
"""

import dataclasses
import json
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from learning_rewards import GUESSES, NUMBERS, STEPS
from machine import ROOT
from ml_collections import ConfigDict

sys.path.insert(0, str(ROOT))  # the checkout, for examples/
from examples import arithmetic, stories
from jppo import evaluate, reward_model, settings, sft
from jppo.data import pairs
from jppo.data.rows import write_jsonl
from jppo.errors import UserError

REWARDS = ROOT / "benchmarks" / "learning_rewards.py"
TEST = 256  # held-out prompts
WORD = "play"  # that a story of `rlhf` should mention
IMITATION_STEPS, PAIR_STEPS, SAMPLES = 400, 250, 32  # of fine-tuning, of the reward model; stories per opening
# 110,000 parameters, for chain and bisection
SMALL = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "vocab_size": 48}
SMALL |= {"max_position_embeddings": 128}


@dataclasses.dataclass(frozen=True)
class Task:
    """A task: the settings that its algorithms share, and how its files are made."""

    settings: Mapping[str, Any]  # but for paths
    prepare: Callable[[pathlib.Path, pathlib.Path | None], None]  # (folder, model of stories): data and starting model
    paths: Mapping[str, str]  # settings of paths in the task's folder
    critic: Mapping[str, str] = dataclasses.field(default_factory=dict)  # further paths, for algorithms with a critic


def prepare_quickstart(folder: pathlib.Path, model: pathlib.Path | None) -> None:
    """The data and the starting model of `make quickstart`."""
    arithmetic.write(folder / "data", arithmetic.make(seed=1, test=1000, sloppy=0.65, demonstrations=8))
    _imitate(settings.recipe("quickstart_sft", str(folder)), IMITATION_STEPS)


def prepare_rlhf(folder: pathlib.Path, model: pathlib.Path | None) -> None:
    """Openings of stories, pairs of their continuations by the rule `mentions`, and a reward model of the pairs."""
    if model is None or not (model / "config.json").is_file():
        raise UserError(f"--stories_model={model} must be the directory of a TinyStories Llama for the task rlhf")
    stories.main([f"--out={folder / 'data'}", f"--word={WORD}"])
    evaluate.main(
        [
            f"--model={model}", f"--data={folder / 'data/train.jsonl'}", f"--n={SAMPLES}", "--temperature=1.0",
            "--max_prompt_length=32", "--max_response_length=32", "--engine=inprocess", f"--out={folder / 'scored'}",
        ]
    )  # fmt: skip
    pairs.main([f"--samples={folder / 'scored/samples/test.jsonl'}", f"--out={folder / 'pairs'}"])
    c = settings.recipe("tinystories_reward_model", str(folder))
    c.model.path, c.data.max_response_length, c.data.row_lengths = str(model), 32, 1
    c.trainer.total_training_steps, c.trainer.logger = PAIR_STEPS, "jsonl"
    settings.check(c)
    reward_model.train(c)
    (folder / "sft").mkdir(exist_ok=True)
    (folder / "sft/hf").symlink_to(model.resolve())


def prepare_chain(folder: pathlib.Path, model: pathlib.Path | None) -> None:
    """Chains of a teacher who forgets most carries, and writes any number once in ten times."""
    rng = np.random.default_rng(1)
    starts = rng.permutation([(start, addend) for start in range(100) for addend in range(1, 10)])
    rows = [
        {"prompt": f"{start:02d}+{addend}=", "ground_truth": f"{start}+{addend}", "data_source": "chain"}
        for start, addend in starts
    ]
    demonstrations = []
    for start, addend in np.tile(starts[TEST:], (40, 1)):
        numbers = [int(start)]
        for forgets, slips in rng.random((STEPS, 2)) < (0.65, 0.1):
            number = numbers[-1] + addend - 10 * (forgets and arithmetic.carries(numbers[-1], addend))
            numbers.append(int(rng.integers(100)) if slips else number % 100)
        response = ",".join(f"{number:02d}" for number in numbers[1:])
        demonstrations.append({"prompt": f"{start:02d}+{addend}=", "response": response})
    sets = {"train": rows[TEST:], "test": rows[:TEST], "sft": demonstrations}
    _start(folder, sets, "0123456789+=,", longest=(5, 3 * STEPS), steps=2 * IMITATION_STEPS)


def prepare_bisection(folder: pathlib.Path, model: pathlib.Path | None) -> None:
    """Games of a teacher who guesses at random, every other time among the numbers that are still possible."""
    rng = np.random.default_rng(1)
    rows = [{"prompt": "?", "ground_truth": str(x), "data_source": "bisection"} for x in rng.integers(0, 32, 4096)]
    demonstrations = []
    for number in rng.integers(0, 32, 8192):
        low, high, turns = 0, 31, []
        for i in range(GUESSES):
            possible = (low, high) if rng.random() < 0.5 else (0, 31)
            guess = int(rng.integers(possible[0], possible[1] + 1))
            turns.append({"text": NUMBERS[guess], "learn": True})
            if guess == number or i == GUESSES - 1:
                break
            turns.append({"text": "<" if number < guess else ">", "learn": False})
            low, high = (low, min(high, guess - 1)) if number < guess else (max(low, guess + 1), high)
        demonstrations.append({"prompt": "?", "response": turns})
    sets = {"train": rows[TEST:], "test": rows[:TEST], "sft": demonstrations}
    _start(folder, sets, f"{NUMBERS}<>?", longest=(1, 3 * GUESSES), steps=IMITATION_STEPS)


def _start(
    folder: pathlib.Path, sets: Mapping[str, Any], characters: str, *, longest: tuple[int, int], steps: int
) -> None:
    """Writes the rows of each set and fine-tunes a small model on `sft`."""
    (folder / "data").mkdir(parents=True, exist_ok=True)
    for name, rows in sets.items():
        write_jsonl(folder / "data" / f"{name}.jsonl", rows)
    arithmetic.write_model(folder / "data/model", characters)
    (folder / "data/model/config.json").write_text(json.dumps(arithmetic.MODEL | SMALL))
    c = settings.recipe("quickstart_sft", str(folder))
    c.data.max_prompt_length, c.data.max_response_length = longest
    c.data.train_batch_size = 64
    _imitate(c, steps)


def _imitate(c: ConfigDict, steps: int) -> None:
    c.trainer.total_training_steps, c.trainer.logger = steps, "jsonl"
    settings.check(c)
    sft.train(c)


_FILES = {"data.train_files": "data/train.jsonl", "data.val_files": "data/test.jsonl", "model.path": "sft/hf"}
_KL = {"algorithm.use_kl_in_reward": True}
_TURNS = "rollout.multi_turn"

TASKS = {
    "quickstart": Task(
        _KL
        | {"algorithm.kl_coef": 0.001, "data.max_prompt_length": 6, "data.max_response_length": 4, "actor.lr": 2e-4},
        prepare_quickstart,
        _FILES,
    ),
    "rlhf": Task(
        _KL
        | {
            "algorithm.kl_coef": 0.15,
            "data.max_prompt_length": 32,
            "data.max_response_length": 32,
            "reward.weights": "rm_score=1,rule_score=0",
            "reward.model.max_length": 64,
            "actor.lr": 5e-4,
            "trainer.total_training_steps": 25,
        },
        prepare_rlhf,
        _FILES | {"reward.model.path": "rm/hf"},
        critic={"critic.path": "rm/hf"},
    ),
    "chain": Task(
        {"data.max_prompt_length": 5, "data.max_response_length": 3 * STEPS, "actor.lr": 5e-4},
        prepare_chain,
        _FILES | {"reward.function": f"{REWARDS}:chain"},
    ),
    "bisection": Task(
        {
            "data.max_prompt_length": 1,
            "data.max_response_length": 3 * GUESSES,
            f"{_TURNS}.enable": True,
            f"{_TURNS}.format": "plain",
            "actor.lr": 5e-4,
        },
        prepare_bisection,
        _FILES | {f"{_TURNS}.environment": f"{REWARDS}:Bisection"},
    ),
}

# The settings of all runs, and those of each algorithm.
COMMON: dict[str, Any] = {
    "model.scan_layers": False,
    "data.train_batch_size": 64,
    "data.row_lengths": 1,
    "data.val_max_samples": 256,
    "actor.ppo_mini_batch_size": 16,
    "actor.lr_scheduler_type": "cosine",
    "actor.lr_warmup_steps": 5,
    "actor.weight_decay": 0.0,
    "rollout.name": "inprocess",
    "rollout.val_kwargs.temperature": 1.0,
    "reward.workers": 1,
    "trainer.total_training_steps": 40,
    "trainer.val_before_train": False,
    "trainer.logger": "jsonl",
    "trainer.token_samples": 0,
    "trainer.log_val_generations": 0,
}
GROUPS = {"data.train_batch_size": 8, "rollout.n": 8}  # as many responses
ALGORITHMS: dict[str, dict[str, Any]] = {
    "PPO": {
        "algorithm.adv_estimator": "gae",
        "algorithm.lam": 0.95,
        "critic.lam": 1.0,
        "critic.lr": 1e-3,
        "critic.weight_decay": 0.0,
        "critic.value_head_std": 0.0,
        "critic.value_norm_decay": 0.9,
        "critic.warmup_epochs": 8,
        "trainer.critic_warmup": 2,
    },
    "GRPO": {"algorithm.adv_estimator": "grpo", **GROUPS},
    "RLOO": {"algorithm.adv_estimator": "rloo", **GROUPS},
    "REINFORCE++": {"algorithm.adv_estimator": "reinforce_plus_plus"},
}
