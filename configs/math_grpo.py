"""GRPO on MATH and GSM8K with Qwen2-7B-Instruct: five answers per question, no critic, a KL in the loss.

    python -m jppo.data.gsm8k --out data/gsm8k
    python -m jppo.train --config=configs/math_grpo.py

`python -m jppo.data.math --from DIR --out data/math` makes data/math/train.parquet and data/math/test.parquet, as
verl's examples/data_preprocess/math_dataset.py does. The settings are from verl's run_qwen2-7b_math.sh.

Hardware: eight GPUs of 80 GB. Memory: the trainer takes 30 GiB of each H100 by --dry_run --machine=8xH100, forecast by
the compiler, not measured; sleeping servers keep some more.
Time: not measured. Expected, from verl's page of baselines (docs/algo/baseline.md): 89 % on GSM8K, trained on it
alone.
"""

import ml_collections

from jppo import settings


def get_config() -> ml_collections.ConfigDict:
    """GRPO for 7B parameters."""
    config = settings.recipe("gsm8k_7b")

    config.model.path = "Qwen/Qwen2-7B-Instruct"

    config.data.train_files = "data/gsm8k/train.parquet,data/math/train.parquet"
    config.data.val_files = "data/gsm8k/test.parquet,data/math/test.parquet"
    config.data.max_response_length = 1024

    config.algorithm.adv_estimator = "grpo"
    config.algorithm.use_kl_in_reward = False

    config.actor.entropy_coeff = 0.0
    config.actor.use_kl_loss = True
    config.actor.kl_loss_coef = 0.001
    config.actor.kl_loss_type = "low_var_kl"

    config.rollout.n = 5
    config.rollout.gpu_memory_utilization = 0.6

    config.trainer.run_dir = "runs/math_grpo"
    return config.lock()
