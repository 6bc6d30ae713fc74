"""VAPO with Qwen2.5-32B: DAPO's task with a critic, number for number as published (arXiv:2504.05118).

    python -m jppo.data.dapo_math --from downloads/dapo --out data/dapo_math
    python -m jppo.data.aime --from downloads/aime --out data/aime_2024
    sbatch --nodes=16 scripts/launch/slurm.sbatch .venv/bin/python -m jppo.train --config=configs/vapo.py

Each setting has its source, §5.1 of the paper unless named. What the paper leaves open is as in configs/dapo.py: data,
lengths, warm-up steps, weight decay, test, mesh. It names neither dynamic sampling nor a length penalty, so both are
off. Its critic begins as a reward model, which is not published: --config.critic.path=DIR takes one, '' the policy.

Hardware: 16 hosts of eight GPUs of 80 GB. Memory: the trainer takes 32 GiB of each H100 by --dry_run
--machine=16x8xH100, forecast by the compiler, not measured; sleeping servers keep some more.
Time and result: not run. The paper has 60 % on AIME 2024 (avg@32) after 5,000 optimizer steps of the policy.
"""

import ml_collections

from jppo import settings


def get_config() -> ml_collections.ConfigDict:
    """VAPO for 32B parameters."""
    config = settings.recipe("dapo")

    config.algorithm.adv_estimator = "gae"
    config.algorithm.gamma = 1.0
    config.algorithm.lam_alpha = 0.05  # length-adaptive GAE, eq. 5: λ = 1 - 1/(0.05 l) for the policy
    config.algorithm.filter_groups = False
    config.algorithm.filter_groups_metric = "score"
    config.algorithm.max_num_gen_batches = 10

    config.data.train_batch_size = 512  # group-sampling: 512 prompts, 16 responses each
    config.data.gen_batch_size = None
    config.rollout.n = 16
    config.rollout.gpu_memory_utilization = 0.75  # DAPO has 0.8; the critic needs memory, too

    config.actor.lr = 1e-6  # AdamW, warm-up, then constant
    config.actor.ppo_mini_batch_size = 512
    config.actor.clip_ratio_low = 0.2
    config.actor.clip_ratio_high = 0.28  # clip-higher
    config.actor.loss_agg_mode = "token-mean"  # token-level loss
    config.actor.positive_lm_coef = 0.1  # μ of the positive-example LM loss, eq. 10

    config.critic.lr = 2e-6  # "the critic needs to update faster"
    config.critic.lr_warmup_steps = 20
    config.critic.weight_decay = 0.1
    config.critic.lam = 1.0  # decoupled GAE

    config.reward.overlong_buffer_tokens = 0

    config.trainer.run_dir = "runs/vapo"
    config.trainer.critic_warmup = 50  # value pre-training
    config.trainer.total_training_steps = 363  # 50, and 5,000 optimizer steps of the policy, 16 a step
    return config.lock()
