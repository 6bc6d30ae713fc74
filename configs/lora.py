"""GRPO on GSM8K with adapters of rank 64 on Qwen2.5-3B-Instruct, on one GPU.

    python -m jppo.data.gsm8k --out data/gsm8k
    python -m jppo.train --config=configs/lora.py

The settings are from verl's run_qwen2_5-3b_gsm8k_grpo_lora.sh, with one server on one GPU. vLLM gets only the
adapters (`rollout.lora_sync=adapter`).

Hardware: one GPU of 80 GB. Memory: the trainer takes 12 GiB of an H100 by --dry_run --machine=H100, forecast by the
compiler, not measured, plus vLLM's share.
Time: not measured. Expected, from verl's page of baselines (docs/algo/baseline.md): 86.1 % with adapters of rank 32.
"""

import ml_collections

from jppo import settings


def get_config() -> ml_collections.ConfigDict:
    """Adapters, five answers a question."""
    config = settings.recipe("gsm8k")

    config.model.path = "Qwen/Qwen2.5-3B-Instruct"
    config.model.param_dtype = "bfloat16"  # the frozen base
    config.model.remat = "full"
    config.model.lora_rank = 64
    config.model.lora_alpha = 32

    config.data.train_batch_size = 16
    config.data.max_prompt_length = 512
    config.data.max_response_length = 1024

    config.algorithm.adv_estimator = "grpo"
    config.algorithm.use_kl_in_reward = False

    config.actor.lr = 3e-06
    config.actor.ppo_mini_batch_size = 80  # the whole step
    config.actor.entropy_coeff = 0.0
    config.actor.use_kl_loss = True
    config.actor.kl_loss_coef = 0.001

    config.rollout.n = 5
    config.rollout.lora_sync = "adapter"

    config.trainer.run_dir = "runs/lora"
    return config.lock()
