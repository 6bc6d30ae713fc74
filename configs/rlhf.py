"""RLHF for your own chat model: PPO against a reward model, with an adaptive KL in the reward.

    python -m jppo.reward_model --config=configs/rlhf_reward_model.py
    python -m jppo.train --config=configs/rlhf.py

The policy is Qwen2.5-0.5B-Instruct, or yours: `--config.model.path=DIR` in both commands. data/rlhf/ holds prompts,
text or chat messages: `python -m jppo.data.hh_rlhf --from DIR --out data/rlhf` makes them of Anthropic's data, and
`--config.data.train_files=FILE --config.data.val_files=FILE` selects other files. The critic starts from the reward
model, whose scores it predicts. docs/examples/tinystories.md shows all stages on a small model.

Hardware: one GPU of 80 GB, shared by the trainer, the reward model and vLLM. Memory: the trainer takes 27 GiB of an
H100 by --dry_run --machine=H100, forecast by the compiler, not measured; the reward model needs 1 GiB more for its
weights. Not run on a GPU: time and result are unknown. Expected: `reward/rm_score/mean` rises while
`actor/reward_kl_penalty` stays near `algorithm.target_kl`. If the reward rises but the answers in samples/ get worse,
the target is too high for this reward model. The argument is the run's folder, in which the reward model is:
--config=configs/rlhf.py:runs/other
"""

import ml_collections

from jppo import settings


def get_config(arg: str = "runs/rlhf") -> ml_collections.ConfigDict:
    """Settings for the prompts in data/rlhf and the reward model in `arg`/reward_model/hf."""
    config = settings.default()
    config.model.path = "Qwen/Qwen2.5-0.5B-Instruct"
    config.model.compute_dtype = "bfloat16"
    config.model.remat = "dots"

    config.data.train_files = "data/rlhf/prompts/train.parquet"
    config.data.val_files = "data/rlhf/prompts/test.parquet"
    config.data.train_batch_size = 256
    config.data.max_prompt_length = 512
    config.data.max_response_length = 512

    config.reward.model.path = f"{arg}/reward_model/hf"
    config.reward.model.dtype = "bfloat16"
    config.reward.model.max_length = 1088  # prompt, response and the template's suffix
    config.reward.model.normalize = True
    config.reward.model.clip = 5.0
    config.reward.weights = "rm_score=1"

    config.algorithm.adv_estimator = "gae"
    config.algorithm.lam = 0.95
    config.algorithm.use_kl_in_reward = True
    config.algorithm.kl_penalty = "kl"
    config.algorithm.kl_coef = 0.05
    config.algorithm.kl_ctrl_type = "adaptive"
    config.algorithm.target_kl = 0.03  # per token: 6 nats for a response of 200
    config.algorithm.horizon = 10000

    config.actor.lr = 1e-6
    config.actor.ppo_mini_batch_size = 64
    config.critic.path = f"{arg}/reward_model/hf"
    config.critic.lr = 5e-6

    config.rollout.dtype = "bfloat16"
    config.rollout.gpu_memory_utilization = 0.3

    config.trainer.run_dir = f"{arg}/ppo"
    config.trainer.total_epochs = 1
    config.trainer.test_freq = 20
    config.trainer.save_freq = 50
    return config.lock()
