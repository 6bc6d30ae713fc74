"""GRPO on GSM8K with adapters of rank 32 on Qwen2.5-0.5B-Instruct, on a card of 8 to 16 GB or one TPU chip.

    python -m jppo.data.gsm8k --out data/gsm8k
    python -m jppo.train --config=configs/small_card.py

The trainer samples by itself, so vLLM is not needed. A T4 or V100 has no bfloat16: add
`--config.model.compute_dtype=float16 --config.rollout.dtype=float16`.

Hardware: a GPU of 8 GB. Memory by --dry_run --machine=NAME, forecast by the compiler, not measured: 3.5 GiB of the 6.0
that JAX takes of an RTX-4060, 3.8 of 11.2 of a T4, 4.3 of 15.8 of a v5e-1. Qwen2.5-1.5B-Instruct (`model.path`) takes
10.9 GiB of a T4's 11.2.
Time: not measured.
"""

import ml_collections

from jppo import settings


def get_config() -> ml_collections.ConfigDict:
    """The recipe of lora.py with a smaller model, one copy of it, and small batches."""
    config = settings.recipe("lora")

    config.model.path = "Qwen/Qwen2.5-0.5B-Instruct"
    config.model.lora_rank = 32

    config.data.max_prompt_length = 256
    config.data.max_response_length = 512

    config.actor.lr = 1e-05  # ten times gsm8k.py's, for adapters
    config.actor.max_tokens_per_device = 4096

    config.rollout.name = "inprocess"
    config.rollout.lora_sync = "merge"
    config.rollout.max_num_seqs = 80  # the whole step

    config.trainer.run_dir = "runs/small_card"
    return config.lock()
