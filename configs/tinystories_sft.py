"""The first stage of the TinyStories example: a small story model learns to write short stories that end.

    python -m jppo.sft --config=configs/tinystories_sft.py --config.model.path=MODEL

Hardware: a CPU. MODEL is a directory with a TinyStories Llama; docs/examples/tinystories.md has the commands that make
the data, and all that follows. The argument is the run's folder: --config=configs/tinystories_sft.py:runs/other
"""

import ml_collections

from jppo import settings


def get_config(arg: str = "runs/tinystories") -> ml_collections.ConfigDict:
    """Settings for the demonstrations in `arg`/data; the model goes to `arg`/sft/hf."""
    config = settings.sft_default()
    config.model.scan_layers = False

    config.data.train_files = f"{arg}/data/demo.jsonl"
    config.data.train_batch_size = 64
    config.data.max_prompt_length = 32
    config.data.max_response_length = 128
    config.data.row_lengths = 2

    config.optim.lr = 1e-3
    config.optim.lr_scheduler_type = "cosine"
    config.optim.lr_warmup_steps = 5

    config.trainer.run_dir = f"{arg}/sft"
    config.trainer.total_training_steps = 50
    return config.lock()
