"""PPO on GSM8K with Qwen2.5-7B-Instruct as policy and critic, on one machine of eight GPUs.

    python -m jppo.data.gsm8k --out data/gsm8k
    python -m jppo.train --config=configs/gsm8k_7b.py

Batch sizes and learning rates are from verl's examples of this size, the rest from configs/gsm8k.py. The trainer
and four vLLM servers on two GPUs each alternate: the servers sleep while the trainer learns.

Hardware: eight GPUs of 80 GB. Memory: the trainer takes 40 GiB of each H100 by --dry_run --machine=8xH100, forecast by
the compiler, not measured; sleeping servers keep some more.
Time and result: not run by jppo. For comparison, verl's page of baselines (docs/algo/baseline.md) has 89 % on this
test for Qwen2-7B-Instruct with GRPO.
"""

import ml_collections

from jppo import settings


def get_config() -> ml_collections.ConfigDict:
    """The recipe for 7B parameters."""
    config = settings.recipe("gsm8k")

    config.model.path = "Qwen/Qwen2.5-7B-Instruct"
    config.model.remat = "full"

    config.data.train_batch_size = 1024

    config.actor.ppo_mini_batch_size = 256
    config.actor.max_tokens_per_device = 24576
    config.ref.param_offload = True

    config.mesh.data = 1
    config.mesh.fsdp = -1  # all devices

    config.rollout.servers = 4
    config.rollout.tensor_model_parallel_size = 2
    config.rollout.gpu_memory_utilization = 0.5
    config.rollout.sleep_level = 2

    config.trainer.run_dir = "runs/gsm8k_7b"
    config.trainer.test_freq = 5
    config.trainer.save_freq = 20
    return config.lock()
