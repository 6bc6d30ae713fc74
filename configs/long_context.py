"""PPO with answers of up to 30,720 tokens: each row's positions are sharded over devices.

    python -m jppo.train --config=configs/long_context.py --config.data.train_files=FILE --config.data.val_files=FILE

FILE is jsonl or parquet of rows {prompt, ground_truth, data_source}. A row of 32,768 tokens is sharded over four
devices, which exchange positions for heads in attention (docs/scaling.md, long rows). Answers near the length limit
are penalised (`reward.overlong_buffer_tokens`).

Hardware: eight GPUs of 80 GB. Memory: the trainer takes 34 GiB of each H100 by --dry_run --machine=8xH100, forecast by
the compiler, not measured; sleeping servers keep some more.
Time and result: not run.
"""

import ml_collections

from jppo import settings


def get_config() -> ml_collections.ConfigDict:
    """Long answers, divided rows."""
    config = settings.recipe("gsm8k_7b")

    config.data.train_files = "data/long/train.jsonl"
    config.data.val_files = "data/long/test.jsonl"
    config.data.train_batch_size = 128
    config.data.max_prompt_length = 2048
    config.data.max_response_length = 30720
    config.data.row_lengths = 8

    config.actor.ppo_mini_batch_size = 32
    config.actor.max_tokens_per_device = 8192  # a quarter of the longest row

    config.mesh.sequence = 4

    config.reward.overlong_buffer_tokens = 4096
    config.rollout.max_num_seqs = 64

    config.trainer.run_dir = "runs/long_context"
    config.trainer.stage_timeout_s = 14400.0
    return config.lock()
