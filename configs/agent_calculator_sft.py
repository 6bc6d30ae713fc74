"""The starting model of configs/agent_calculator.py: a small transformer imitates a teacher that calls or estimates.

    python -m examples.multiplication --out runs/agent/data
    python -m jppo.sft --config=configs/agent_calculator_sft.py

The calculator's output is read, not imitated. Hardware: a CPU. The argument is the run's folder:
--config=configs/agent_calculator_sft.py:runs/other
"""

import ml_collections

from jppo import settings


def get_config(arg: str = "runs/agent") -> ml_collections.ConfigDict:
    """Settings for the data in the folder `arg`/data; the model goes to `arg`/sft/hf."""
    config = settings.sft_default()
    config.model.path = f"{arg}/data/model"
    config.model.init = "random"
    config.model.scan_layers = False

    config.data.train_files = f"{arg}/data/sft.jsonl"
    config.data.train_batch_size = 128
    config.data.max_prompt_length = 10
    config.data.max_response_length = 38
    config.data.row_lengths = 2

    config.optim.lr = 3e-3
    config.optim.betas = (0.9, 0.95)
    config.optim.lr_scheduler_type = "cosine"
    config.optim.lr_warmup_steps = 20

    config.trainer.run_dir = f"{arg}/sft"
    config.trainer.total_training_steps = 500
    return config.lock()
