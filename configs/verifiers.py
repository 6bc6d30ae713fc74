"""Environments of the package `verifiers`: GRPO on the tasks of any of them, with its own agents, tools and scores.

    pip install verifiers uv
    python -m examples.verifiers_env --out runs/verifiers/data taskset.id=NAME
    python -m jppo.train --config=configs/verifiers.py --config.model.path=MODEL

docs/agents.md explains what runs. The argument is the run's folder: --config=configs/verifiers.py:runs/other

Hardware: as for MODEL; an H100 for one of 1.5B parameters. Memory: the trainer takes 31 GiB of it by --dry_run
--machine=H100, forecast by the compiler, not measured. A CPU without instructions for bfloat16 wants
--config.model.compute_dtype=float32 --config.rollout.dtype=float32.
"""

import ml_collections

from jppo import settings


def get_config(arg: str = "runs/verifiers") -> ml_collections.ConfigDict:
    """Settings for the tasks in `arg`/data; the model is yours."""
    config = settings.default()
    config.model.compute_dtype = "bfloat16"
    config.model.remat = "full"

    config.data.train_files = f"{arg}/data/train.jsonl"
    config.data.val_files = f"{arg}/data/test.jsonl"
    config.data.train_batch_size = 16
    config.data.max_prompt_length = 1024
    config.data.max_response_length = 1024  # all turns of an episode

    config.algorithm.adv_estimator = "grpo"
    config.actor.ppo_mini_batch_size = 16
    config.actor.lr = 1e-6

    config.rollout.n = 8
    config.rollout.dtype = "bfloat16"
    config.rollout.agent = "examples/verifiers_env.py:play"
    config.rollout.agent_reward = "reported"

    config.trainer.run_dir = arg
    config.trainer.total_training_steps = 100
    config.trainer.test_freq = 20
    config.trainer.save_freq = 20
    return config.lock()
