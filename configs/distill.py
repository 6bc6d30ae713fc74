"""On-policy distillation on GSM8K: Qwen2.5-0.5B-Instruct learns from Qwen2.5-3B-Instruct on its own samples.

    python -m jppo.data.gsm8k --out data/gsm8k
    python -m jppo.train --config=configs/distill.py

The loss is the exact KL(student ‖ teacher) of every sampled token. There is no critic, and scores are metrics only.
Both models have a vocab_size of 151,936; Qwen2.5-7B and larger ones have 152,064 and are refused.

Hardware: one GPU of 80 GB, shared by the trainer and vLLM. Memory: the trainer takes 31 GiB of an H100 by --dry_run
--machine=H100, forecast by the compiler, not measured.
Time and result: not run by jppo. docs/distillation.md has a measured run of the quickstart's task.
"""

import ml_collections

from jppo import settings


def get_config() -> ml_collections.ConfigDict:
    """The GSM8K recipe with a teacher in place of the reward and the critic."""
    config = settings.recipe("gsm8k")
    config.ref.path = "Qwen/Qwen2.5-3B-Instruct"

    config.algorithm.adv_estimator = "distill"
    config.algorithm.gamma = 0.0
    config.algorithm.use_kl_in_reward = False

    config.actor.entropy_coeff = 0.0
    config.actor.use_kl_loss = True
    config.actor.kl_loss_type = "full"
    config.actor.kl_loss_coef = 1.0

    config.trainer.run_dir = "runs/distill"
    return config.lock()
