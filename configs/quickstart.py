"""The quickstart: PPO teaches a small model to carry, on a CPU, with a real vLLM.

    make quickstart

The starting model (configs/quickstart_sft.py) learned two-digit addition from a teacher that forgets the
carry, so it solves about four problems in ten. PPO sees which digits of an answer are right. About five
minutes on two CPU cores; greedy accuracy on 1,000 held-out problems ends above 0.90. The argument is the
run's folder:
--config=configs/quickstart.py:runs/other

    python -m jppo.sweep --config=configs/quickstart.py

trains it with three learning rates, once `make quickstart` has made data and model.
"""

import ml_collections

from jppo import settings


def get_config(arg: str = "runs/quickstart") -> ml_collections.ConfigDict:
    """Settings for the data in `arg`/data and the starting model in `arg`/sft/hf."""
    config = settings.default()
    config.model.path = f"{arg}/sft/hf"
    config.model.scan_layers = False

    config.data.train_files = f"{arg}/data/train.jsonl"
    config.data.val_files = f"{arg}/data/test.jsonl"
    config.data.train_batch_size = 512
    config.data.max_prompt_length = 6
    config.data.max_response_length = 4

    config.reward.function = __file__.rpartition("configs/")[0] + "examples/arithmetic.py:compute_score"

    config.algorithm.lam = 0.95
    config.algorithm.use_kl_in_reward = True
    config.algorithm.kl_coef = 0.001

    config.actor.lr = 2e-4
    config.actor.lr_scheduler_type = "cosine"
    config.actor.lr_warmup_steps = 5
    config.actor.ppo_mini_batch_size = 128
    config.critic.lr = 3e-4

    config.rollout.kv_cache_memory_bytes = 64 * 2**20

    config.trainer.run_dir = arg
    config.trainer.total_training_steps = 80
    config.trainer.test_freq = 20
    config.trainer.save_freq = 10
    return config.lock()


def sweep(add) -> None:
    """Half the learning rate, the rate itself, and twice as much."""
    for lr in (1e-4, 2e-4, 4e-4):
        add(**{"actor.lr": lr})
