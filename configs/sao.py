"""SAO with Qwen2.5-7B-Instruct: asynchronous PPO for an agent with a Python tool, one rollout a prompt.

    python -m jppo.data.dapo_math --from downloads/dapo --out data/dapo_math
    python -m jppo.data.aime --from downloads/aime --out data/aime_2024
    CUDA_VISIBLE_DEVICES=0,1,2,3 python -m jppo.train --config=configs/sao.py --config.rollout.devices=4,5,6,7

Each setting with a source is Single-rollout Asynchronous Optimization's (arXiv:2607.07508, §4.1 unless named), by
notes on it; the paper trains Qwen3-30B-A3B-Thinking-2507 with 128k tokens on data that are not published.
docs/ppo-for-agents.md compares implementations. The critic's ten steps of warm-up are read as both: its rate rises, and
the policy waits.
The argument is an agent program in place of the tool, --config='configs/sao.py:bash agent.sh'; one that summarises its
history and goes on (compaction) is trained by branches.

Hardware: eight GPUs of 80 GB, four for the trainer and four for vLLM. Memory, time and result: not run, no forecast.
"""

import ml_collections

from jppo import settings


def get_config(agent: str = "") -> ml_collections.ConfigDict:
    """SAO for 7B parameters; `agent` is a program, '' the Python tool."""
    config = settings.recipe("gsm8k_7b")

    config.data.train_files = "data/dapo_math/train.parquet"
    config.data.val_files = "data/aime_2024/test.parquet"
    config.data.train_batch_size = 128  # one rollout each
    config.data.max_prompt_length = 2048
    config.data.max_response_length = 22528

    config.algorithm.gamma = 1.0
    config.algorithm.lam_alpha = 1.5  # λ = 1 - 1/(1.5 l) for the policy; `gae` skips observations (eq. 4, 5)
    config.algorithm.use_kl_in_reward = False
    config.algorithm.old_logprob = "bypass"  # §3.1: the engine's log-probs are the old ones
    config.algorithm.rollout_is = "token"  # eq. 1: the current policy's ratio to the engine's,
    config.algorithm.rollout_is_threshold = "0.2_4.0"  # and 0 outside of it: code; math with Python 0.7_6.0

    config.actor.loss_mode = "gpg"  # eq. 3: -f(ratio) A log π
    config.actor.ppo_mini_batch_size = 128  # one update a step, and more if episodes have several contexts
    config.actor.lr = 1e-6
    config.actor.entropy_coeff = 0.0

    config.critic.freeze = "*.self_attn.*"  # §3.2: frozen attention
    config.critic.ppo_epochs = 2  # §3.2: two updates for one of the policy
    config.critic.lam = 1.0
    config.critic.lr = 5e-6
    config.critic.lr_warmup_steps = 10

    config.rollout.mode = "async"
    config.rollout.max_staleness = 4
    config.rollout.on_update = "keep"  # a response may have tokens of several versions
    config.rollout.servers = 4
    config.rollout.tensor_model_parallel_size = 1
    config.rollout.sleep_level = 0
    config.rollout.gpu_memory_utilization = 0.85  # vLLM has its own GPUs
    config.rollout.val_kwargs.temperature = 1.0
    if agent:
        config.rollout.agent = agent
        config.rollout.agent_branches = 8  # contexts of an episode that are trained
    else:
        config.rollout.multi_turn.enable = True
        config.rollout.multi_turn.tool_config_path = __file__.removesuffix(".py") + ".yaml"
        config.rollout.multi_turn.allow_code = True
        config.rollout.multi_turn.max_assistant_turns = 50

    config.trainer.run_dir = "runs/sao"
    config.trainer.critic_warmup = 10
    config.trainer.total_training_steps = 1010
    return config.lock()
