"""The quickstart's starting model: a small transformer imitates a teacher that forgets to carry.

    python -m examples.arithmetic --out runs/quickstart/data
    python -m jppo.sft --config=configs/quickstart_sft.py

About two minutes on two CPU cores. The argument is the run's folder:
--config=configs/quickstart_sft.py:runs/other
"""

import ml_collections

from jppo import settings


def get_config(arg: str = "runs/quickstart") -> ml_collections.ConfigDict:
    """Settings for the data in the folder `arg`/data; the model goes to `arg`/sft/hf."""
    config = settings.sft_default()
    config.model.path = f"{arg}/data/model"
    config.model.init = "random"
    config.model.scan_layers = False

    config.data.train_files = f"{arg}/data/sft.jsonl"
    config.data.train_batch_size = 256
    config.data.max_prompt_length = 6
    config.data.max_response_length = 4

    config.optim.lr = 3e-3
    config.optim.betas = (0.9, 0.95)
    config.optim.lr_scheduler_type = "cosine"
    config.optim.lr_warmup_steps = 20

    config.trainer.run_dir = f"{arg}/sft"
    config.trainer.total_training_steps = 400
    return config.lock()
