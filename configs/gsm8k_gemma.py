"""PPO on GSM8K with Gemma 2 2B as policy and critic: verl's example for it.

    python -m jppo.data.gsm8k --out data/gsm8k
    python -m jppo.train --config=configs/gsm8k_gemma.py --config.model.path=DIR

DIR is gemma-2-2b-it fine-tuned on GSM8K's solutions (python -m jppo.sft), as for verl's figure. Without the option
the run starts from the published model.

Hardware: two GPUs of 80 GB. Memory: the trainer takes 44 GiB of each H100 by --dry_run --machine=2xH100, forecast by
the compiler, not measured; sleeping servers keep some more. Attention is XLA's: no fused kernel on GPUs has a soft cap.
Time: not measured. Expected, from verl's page of baselines (docs/algo/baseline.md): 52.06 % after fine-tuning, 64.02 %
after PPO.
"""

import ml_collections

from jppo import settings


def get_config() -> ml_collections.ConfigDict:
    """verl's settings for Gemma."""
    config = settings.recipe("gsm8k")

    config.model.path = "google/gemma-2-2b-it"
    config.model.remat = "full"

    config.data.train_batch_size = 512

    config.actor.ppo_mini_batch_size = 128
    config.actor.max_tokens_per_device = 8192
    config.ref.param_offload = True

    config.mesh.data = 1
    config.mesh.fsdp = -1  # all devices

    config.rollout.tensor_model_parallel_size = 2
    config.rollout.sleep_level = 2

    config.trainer.run_dir = "runs/gsm8k_gemma"
    return config.lock()
