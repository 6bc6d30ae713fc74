"""The tasks of docs/learning.md, for comparing algorithms on a CPU: --config=jppo://learning:FOLDER

    python -m jppo.train --config=jppo://learning:runs/prove/tasks/chain --config.trainer.run_dir=runs/chain

The name of FOLDER is the task: quickstart, rlhf, chain or bisection. `jppo.prove` makes its data and starting model
and adds the settings of an algorithm; here they are the defaults, with 64 prompts a step.
"""

from typing import Any

import ml_collections

from jppo import settings
from jppo.errors import UserError

_KL = {"algorithm.use_kl_in_reward": True}
_TURNS = "rollout.multi_turn"

# The settings of all runs, then of each task, but for paths.
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
TASKS: dict[str, dict[str, Any]] = {
    "quickstart": {
        **_KL,
        "algorithm.kl_coef": 0.001,
        "data.max_prompt_length": 6,
        "data.max_response_length": 4,
        "actor.lr": 2e-4,
    },
    "rlhf": {
        **_KL,
        "algorithm.kl_coef": 0.15,
        "data.max_prompt_length": 32,
        "data.max_response_length": 32,
        "reward.weights": "rm_score=1,rule_score=0",
        "reward.model.max_length": 64,
        "actor.lr": 5e-4,
        "trainer.total_training_steps": 25,
    },
    "chain": {"data.max_prompt_length": 5, "data.max_response_length": 60, "actor.lr": 5e-4},
    "bisection": {
        "data.max_prompt_length": 1,
        "data.max_response_length": 15,
        f"{_TURNS}.enable": True,
        f"{_TURNS}.format": "plain",
        "actor.lr": 5e-4,
    },
}
# The settings of algorithms: with a critic, and with groups of as many responses.
CRITIC = {
    "algorithm.lam": 0.95,
    "critic.lam": 1.0,
    "critic.lr": 1e-3,
    "critic.weight_decay": 0.0,
    "critic.value_head_std": 0.0,
    "critic.value_norm_decay": 0.9,
    "critic.warmup_epochs": 8,
    "trainer.critic_warmup": 2,
}
CRITIC_FILES = {"rlhf": {"critic.path": "rm/hf"}}
GROUPS = {"data.train_batch_size": 8, "rollout.n": 8}


def get_config(arg: str = "runs/prove/tasks/quickstart") -> ml_collections.ConfigDict:
    """Settings of a task, the last part of the path `arg`; those of an algorithm are added to them."""
    task = arg.rstrip("/").rpartition("/")[2]
    if task not in TASKS:
        raise UserError(f"learning:{arg}: the folder must have the name of a task, one of {', '.join(TASKS)}")
    root = __file__.rpartition("configs/")[0]
    config = settings.default()
    config.update_from_flattened_dict(COMMON | TASKS[task])
    config.data.train_files, config.data.val_files = f"{arg}/data/train.jsonl", f"{arg}/data/test.jsonl"
    config.model.path = f"{arg}/sft/hf"
    if task == "rlhf":
        config.reward.model.path = f"{arg}/rm/hf"
    elif task == "chain":
        config.reward.function = f"{root}examples/chain.py:chain"
    elif task == "bisection":
        config.rollout.multi_turn.environment = f"{root}examples/bisection.py:Bisection"
    return config.lock()
