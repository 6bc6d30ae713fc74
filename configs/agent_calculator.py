"""Agents: PPO teaches a small model to use its calculator, on a CPU, with the in-process engine.

    python -m examples.multiplication --out runs/agent/data
    python -m jppo.sft --config=configs/agent_calculator_sft.py
    python -m jppo.train --config=configs/agent_calculator.py

The starting model (configs/agent_calculator_sft.py) multiplies four-digit numbers with a calculator, or
estimates. PPO sees only whether an answer is right. The argument is the run's folder:
--config=configs/agent_calculator.py:runs/other
"""

import ml_collections

from jppo import settings


def get_config(arg: str = "runs/agent") -> ml_collections.ConfigDict:
    """Settings for the data in `arg`/data and the starting model in `arg`/sft/hf."""
    config = settings.default()
    config.model.path = f"{arg}/sft/hf"
    config.model.scan_layers = False

    config.data.train_files = f"{arg}/data/train.jsonl"
    config.data.val_files = f"{arg}/data/test.jsonl"
    config.data.train_batch_size = 256
    config.data.max_prompt_length = 10
    config.data.max_response_length = 38
    config.data.row_lengths = 2

    config.algorithm.lam = 0.95
    config.algorithm.use_kl_in_reward = True
    config.algorithm.kl_coef = 0.001

    config.actor.lr = 1e-4
    config.actor.lr_scheduler_type = "cosine"
    config.actor.lr_warmup_steps = 5
    config.actor.ppo_mini_batch_size = 64
    config.critic.lr = 3e-4

    config.rollout.name = "inprocess"
    config.rollout.multi_turn.enable = True
    config.rollout.multi_turn.tool_config_path = __file__.removesuffix(".py") + ".yaml"
    config.rollout.multi_turn.format = "plain"
    config.rollout.multi_turn.max_assistant_turns = 2
    config.rollout.multi_turn.max_tool_response_length = 12
    config.rollout.multi_turn.tool_response_truncate_side = "right"

    config.trainer.run_dir = arg
    config.trainer.total_training_steps = 40
    config.trainer.test_freq = 10
    config.trainer.save_freq = 20
    return config.lock()
