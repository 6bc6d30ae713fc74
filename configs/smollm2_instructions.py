"""PPO with a critic teaches SmolLM2-135M-Instruct to follow instructions, on a CPU, with a real vLLM.

    make smollm2 TASK=instructions

Hardware: two CPU cores, sized for about an hour. docs/examples/smollm2.md explains the task and its reward, and has
the command for GRPO. The argument is the folder of model, data and runs:
--config=configs/smollm2_instructions.py:runs/other
"""

import ml_collections

from jppo import settings


def get_config(arg: str = "runs/smollm2") -> ml_collections.ConfigDict:
    """Settings for `arg`/model and the prompts in `arg`/data/instructions; the run is in `arg`/instructions/ppo."""
    config = settings.default()
    config.model.path = f"{arg}/model"
    config.model.compute_dtype = settings.cpu_dtype()
    config.model.scan_layers = False

    config.data.train_files = f"{arg}/data/instructions/train.jsonl"
    config.data.val_files = f"{arg}/data/instructions/test.jsonl"
    config.data.train_batch_size = 16  # with 4 responses each
    config.data.max_prompt_length = 64
    config.data.max_response_length = 48
    config.data.row_lengths = 1

    config.reward.function = "examples/instruction_checks.py:compute_score"

    config.algorithm.lam = 0.95
    config.algorithm.use_kl_in_reward = True
    config.algorithm.kl_coef = 0.001

    config.actor.lr = 3e-5
    config.actor.lr_warmup_steps = 3
    config.actor.ppo_mini_batch_size = 16
    config.actor.max_tokens_per_device = 2 * 256  # half of a mini-batch at a time, for less memory
    config.critic.lr = 1e-4

    config.rollout.n = 4
    config.rollout.temperature = 0.7  # at 1.0 the model often writes nonsense
    config.rollout.dtype = settings.cpu_dtype()
    config.rollout.omp_threads = 2

    config.trainer.run_dir = f"{arg}/instructions/ppo"
    config.trainer.total_training_steps = 45
    config.trainer.test_freq = 15
    config.trainer.save_freq = 15
    config.trainer.max_ckpt_to_keep = 1  # each has both models and their optimizers
    return config.lock()
