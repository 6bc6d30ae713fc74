"""The third stage of the TinyStories example: PPO against the reward model, on a CPU, with a real vLLM.

    python -m jppo.train --config=configs/tinystories_ppo.py

The policy starts from the fine-tuned model and stays near it by a KL in the reward. The true rule is logged with
weight 0. docs/examples/tinystories.md has the earlier stages and results.
The argument is the run's folder: --config=configs/tinystories_ppo.py:runs/other
"""

import ml_collections

from jppo import settings


def get_config(arg: str = "runs/tinystories") -> ml_collections.ConfigDict:
    """Settings for the openings in `arg`/data and the models in `arg`/sft/hf and `arg`/rm/hf."""
    config = settings.default()
    config.model.path = f"{arg}/sft/hf"
    config.model.scan_layers = False

    config.data.train_files = f"{arg}/data/train.jsonl"
    config.data.val_files = f"{arg}/data/test.jsonl"
    config.data.train_batch_size = 128
    config.data.max_prompt_length = 32
    config.data.max_response_length = 128
    config.data.row_lengths = 2

    config.reward.model.path = f"{arg}/rm/hf"
    config.reward.model.max_length = 192
    config.reward.weights = "rm_score=1,rule_score=0"

    config.algorithm.lam = 0.95
    config.algorithm.use_kl_in_reward = True
    config.algorithm.kl_coef = 0.15  # per nat; a cat changes the reward model's score by about 4

    config.actor.lr = 5e-4
    config.actor.lr_scheduler_type = "cosine"
    config.actor.lr_warmup_steps = 5
    config.actor.ppo_mini_batch_size = 32
    config.actor.weight_decay = 0.0
    config.critic.path = f"{arg}/rm/hf"
    config.critic.lr = 1e-3
    config.critic.weight_decay = 0.0

    config.rollout.kv_cache_memory_bytes = 128 * 2**20
    config.rollout.val_kwargs.temperature = 1.0
    config.rollout.val_kwargs.n = 4

    config.trainer.run_dir = f"{arg}/ppo"
    config.trainer.total_training_steps = 40
    config.trainer.test_freq = 20
    return config.lock()
