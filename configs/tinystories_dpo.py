"""DPO on the pairs of the TinyStories example, in place of its reward model and its PPO.

    python -m jppo.dpo --config=configs/tinystories_dpo.py

Hardware: a CPU. It starts from the fine-tuned model; docs/examples/tinystories.md has the commands that make the pairs.
The argument is the run's folder: --config=configs/tinystories_dpo.py:runs/other
"""

import ml_collections

from jppo import settings


def get_config(arg: str = "runs/tinystories") -> ml_collections.ConfigDict:
    """Settings for the pairs in `arg`/pairs and the model in `arg`/sft/hf; the policy goes to `arg`/dpo/hf."""
    config = settings.dpo_default()
    config.model.path = f"{arg}/sft/hf"
    config.model.scan_layers = False

    config.data.train_files = f"{arg}/pairs/train.jsonl"
    config.data.val_files = f"{arg}/pairs/test.jsonl"
    config.data.train_batch_size = 32
    config.data.max_prompt_length = 32
    config.data.max_response_length = 128
    config.data.row_lengths = 2

    config.dpo.beta = 0.1

    config.optim.lr = 1e-4
    config.optim.lr_scheduler_type = "cosine"
    config.optim.lr_warmup_steps = 10

    config.trainer.run_dir = f"{arg}/dpo"
    config.trainer.total_training_steps = 60
    config.trainer.test_freq = 20
    return config.lock()
