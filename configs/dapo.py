"""DAPO with Qwen2.5-32B on DAPO-Math-17k, number for number as published (arXiv:2503.14476).

    python -m jppo.data.dapo_math --from downloads/dapo --out data/dapo_math
    python -m jppo.data.aime --from downloads/aime --out data/aime_2024
    sbatch --nodes=16 scripts/launch/slurm.sbatch .venv/bin/python -m jppo.train --config=configs/dapo.py

Each setting has its source: the paper (§4.1 unless named), or verl's recipe/dapo/run_dapo_qwen2.5_32b.sh where the
paper is silent. The paper's over-long filtering, an ablation before the length penalty, is not in that script and off
here (algorithm.filter_truncated).

Hardware: 16 hosts of eight GPUs of 80 GB. Memory: the trainer takes 29 GiB of each H100 by --dry_run
--machine=16x8xH100, forecast by the compiler, not measured; sleeping servers keep some more.
Time and result: not run. The paper has 50 % on AIME 2024 (avg@32) after 10,000 optimizer steps.
"""

import ml_collections

from jppo import settings


def get_config() -> ml_collections.ConfigDict:
    """DAPO for 32B parameters."""
    config = settings.recipe("multi_host")

    config.model.path = "Qwen/Qwen2.5-32B"  # §4.2: the base model

    config.data.train_files = "data/dapo_math/train.parquet"  # §3.5
    config.data.val_files = "data/aime_2024/test.parquet"
    config.data.train_batch_size = 512  # prompts
    config.data.gen_batch_size = 1536  # verl: 3 * 512
    config.data.max_prompt_length = 2048  # verl
    config.data.max_response_length = 20480  # 16,384 expected + 4,096 of the soft punish cache
    config.data.filter_overlong_prompts = False  # verl's default
    config.data.truncation = "left"  # verl

    config.algorithm.adv_estimator = "grpo"  # group reward normalization
    config.algorithm.use_kl_in_reward = False  # §2.3: no KL
    config.algorithm.filter_groups = True  # §3.2: dynamic sampling
    config.algorithm.filter_groups_metric = "rule_score"  # eq. 11: right and wrong answers; verl: acc
    config.algorithm.max_num_gen_batches = 10  # verl

    config.actor.use_kl_loss = False  # §2.3
    config.actor.lr = 1e-6  # AdamW, constant
    config.actor.lr_warmup_steps = 20  # rollout steps; verl: 10
    config.actor.weight_decay = 0.1  # verl
    config.actor.grad_clip = 1.0  # verl
    config.actor.ppo_mini_batch_size = 512  # responses: 16 updates per step
    config.actor.clip_ratio_low = 0.2
    config.actor.clip_ratio_high = 0.28
    config.actor.loss_agg_mode = "token-mean"  # §3.3: token-level loss
    config.actor.entropy_coeff = 0.0  # verl
    config.actor.max_tokens_per_device = 22528  # verl

    config.mesh.sequence = 8  # verl: ulysses_sequence_parallel_size

    config.reward.overlong_buffer_tokens = 4096  # eq. 13, with verl's penalty factor 1.0

    config.rollout.n = 16
    config.rollout.temperature = 1.0  # verl, as is top_p=1.0
    config.rollout.gpu_memory_utilization = 0.8  # verl, as is tensor_model_parallel_size=4
    config.rollout.val_kwargs.n = 32  # avg@32
    config.rollout.val_kwargs.temperature = 1.0
    config.rollout.val_kwargs.top_p = 0.7

    config.trainer.run_dir = "runs/dapo"
    config.trainer.nnodes = 16  # verl
    config.trainer.total_training_steps = 625  # figure 1: 10,000 optimizer steps
    config.trainer.test_freq = 5  # verl
    config.trainer.save_freq = 5  # verl
    config.trainer.stage_timeout_s = 14400.0
    return config.lock()
