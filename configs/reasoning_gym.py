"""PPO with a critic teaches SmolLM2-135M-Instruct two tasks of the package `reasoning-gym`, with a real vLLM.

    pip install reasoning-gym
    python -m examples.smollm2 --out runs/smollm2/model
    python -m examples.reasoning_tasks --out runs/smollm2/data/reasoning_gym
    python -m jppo.train --config=configs/reasoning_gym.py

Hardware: two CPU cores. docs/examples/smollm2.md has the tasks and their reward. The argument is the folder of model,
data and runs: --config=configs/reasoning_gym.py:runs/other
"""

import ml_collections

from jppo import settings


def get_config(arg: str = "runs/smollm2") -> ml_collections.ConfigDict:
    """Settings of configs/smollm2_sums.py for the prompts in `arg`/data/reasoning_gym."""
    config = settings.recipe("smollm2_sums", arg)
    config.data.train_files = f"{arg}/data/reasoning_gym/train.jsonl"
    config.data.val_files = f"{arg}/data/reasoning_gym/test.jsonl"
    config.data.max_prompt_length = 72
    config.actor.max_tokens_per_device = 16 * 88  # a mini-batch

    config.reward.function = "examples/reasoning_tasks.py:compute_score"
    config.trainer.run_dir = f"{arg}/reasoning_gym/ppo"
    return config.lock()
