"""Asynchronous PPO on GSM8K: vLLM on one GPU samples the next step while the trainer learns on another.

    python -m jppo.data.gsm8k --out data/gsm8k
    CUDA_VISIBLE_DEVICES=0 python -m jppo.train --config=configs/async.py --config.rollout.devices=1

Samples come from weights at most one update old; importance weights per token correct the log-prob mismatch
(`algorithm.old_logprob=correction`). On a CPU: configs/quickstart.py with --config.rollout.mode=async.

Hardware: two GPUs of 80 GB, one for the trainer and one for vLLM; the memory of configs/gsm8k.py. Time: not measured
on GPUs; on a CPU the quickstart waited 3.5 s of 245 s of sampling. Expected: the score of configs/gsm8k.py, sooner.
"""

import ml_collections

from jppo import settings


def get_config() -> ml_collections.ConfigDict:
    """The recipe, a step ahead."""
    config = settings.recipe("gsm8k")

    config.algorithm.old_logprob = "correction"
    config.algorithm.rollout_is = "token"

    config.rollout.mode = "async"
    config.rollout.max_staleness = 1
    config.rollout.gpu_memory_utilization = 0.85  # vLLM has its own GPU

    config.trainer.run_dir = "runs/async"
    return config.lock()
