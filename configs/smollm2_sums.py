"""PPO with a critic teaches SmolLM2-135M-Instruct sums in words and digits, on a CPU, with a real vLLM.

    make smollm2

Hardware: two CPU cores, sized for an hour or less. docs/examples/smollm2.md explains the task and its reward, and has
the command for GRPO. The argument is the folder of model, data and runs: --config=configs/smollm2_sums.py:runs/other
"""

import ml_collections

from jppo import settings


def get_config(arg: str = "runs/smollm2") -> ml_collections.ConfigDict:
    """Settings for `arg`/model and the prompts in `arg`/data/sums; the run is in `arg`/sums/ppo."""
    config = settings.default()
    config.model.path = f"{arg}/model"
    config.model.compute_dtype = settings.cpu_dtype()
    config.model.scan_layers = False

    config.data.train_files = f"{arg}/data/sums/train.jsonl"
    config.data.val_files = f"{arg}/data/sums/test.jsonl"
    config.data.train_batch_size = 64
    config.data.max_prompt_length = 56  # the longest has 50; rows of 72 tokens
    config.data.max_response_length = 16
    config.data.row_lengths = 1

    config.reward.function = "examples/sums.py:compute_score"

    config.algorithm.lam = 0.95
    config.algorithm.use_kl_in_reward = True
    config.algorithm.kl_coef = 0.001

    config.actor.lr = 2e-5
    config.actor.entropy_coeff = 0.005  # wrong digits stay wrong once the model is sure of them
    config.actor.ppo_mini_batch_size = 16
    config.actor.max_tokens_per_device = 16 * 72  # a mini-batch
    config.critic.lr = 5e-5

    config.rollout.temperature = 0.7  # at 1.0 the model is almost never right, so that it has nothing to learn from
    config.rollout.dtype = settings.cpu_dtype()
    config.rollout.omp_threads = 2

    config.trainer.run_dir = f"{arg}/sums/ppo"
    config.trainer.total_training_steps = 60
    config.trainer.test_freq = 20
    config.trainer.save_freq = 20
    config.trainer.max_ckpt_to_keep = 1  # each has both models and their optimizers
    return config.lock()
