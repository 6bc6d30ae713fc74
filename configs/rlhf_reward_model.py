"""The reward model of configs/rlhf.py, from pairs of answers with a human preference.

    python -m jppo.reward_model --config=configs/rlhf_reward_model.py

The files hold pairs as docs/reward-models.md describes them: `prompt` with `chosen` and `rejected`, or only these two
as whole chats; `python -m jppo.data.hh_rlhf --from DIR --out data/rlhf` makes them of Anthropic's data. It starts from
the policy's chat model, so both have one tokenizer.

Hardware: one GPU of 80 GB. Memory: 19 GiB of an H100 by --dry_run --machine=H100, forecast by the compiler, not
measured. Not run on a GPU: time and accuracy are unknown. The argument is the run's folder:
--config=configs/rlhf_reward_model.py:runs/other
"""

import ml_collections

from jppo import settings


def get_config(arg: str = "runs/rlhf") -> ml_collections.ConfigDict:
    """Settings for the pairs in data/rlhf; the reward model goes to `arg`/reward_model/hf."""
    config = settings.reward_model_default()
    config.model.path = "Qwen/Qwen2.5-0.5B-Instruct"
    config.model.compute_dtype = "bfloat16"
    config.model.remat = "dots"

    config.data.train_files = "data/rlhf/pairs/train.parquet"
    config.data.val_files = "data/rlhf/pairs/test.parquet"
    config.data.train_batch_size = 64
    config.data.max_prompt_length = 512
    config.data.max_response_length = 512

    config.loss.center_rewards_coefficient = 0.01

    config.optim.lr = 1e-5
    config.optim.lr_scheduler_type = "cosine"
    config.optim.lr_warmup_steps_ratio = 0.03

    config.trainer.run_dir = f"{arg}/reward_model"
    config.trainer.total_epochs = 1
    config.trainer.test_freq = 50
    return config.lock()
