"""The second stage of the TinyStories example: a reward model from pairs of stories.

    python -m jppo.reward_model --config=configs/tinystories_reward_model.py

Hardware: a CPU. It starts from the fine-tuned model; docs/examples/tinystories.md has the commands that make the pairs,
and all that follows. The argument is the run's folder: --config=configs/tinystories_reward_model.py:runs/other
"""

import ml_collections

from jppo import settings


def get_config(arg: str = "runs/tinystories") -> ml_collections.ConfigDict:
    """Settings for the pairs in `arg`/pairs and the model in `arg`/sft/hf; the reward model goes to `arg`/rm/hf."""
    config = settings.reward_model_default()
    config.model.path = f"{arg}/sft/hf"
    config.model.scan_layers = False

    config.data.train_files = f"{arg}/pairs/train.jsonl"
    config.data.val_files = f"{arg}/pairs/test.jsonl"
    config.data.train_batch_size = 32
    config.data.max_prompt_length = 32
    config.data.max_response_length = 128
    config.data.row_lengths = 2

    config.loss.center_rewards_coefficient = 0.01

    config.optim.lr = 1e-3
    config.optim.lr_scheduler_type = "cosine"
    config.optim.lr_warmup_steps = 20

    config.trainer.run_dir = f"{arg}/rm"
    config.trainer.total_training_steps = 150
    config.trainer.test_freq = 50
    return config.lock()
