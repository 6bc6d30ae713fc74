"""Command lines of verl's: what its quickstart and examples ask for, in the ways in which their scripts say it."""

# ruff: noqa: E501

GSM8K = "data.train_files=$HOME/data/gsm8k/train.parquet data.val_files=$HOME/data/gsm8k/test.parquet"
ENDS = "trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.save_freq=-1 trainer.test_freq=5 trainer.total_epochs=15 $@"
BOTH = """
gsm8k_train_path=$HOME/data/gsm8k/train.parquet
math_train_path=$HOME/data/math/train.parquet
train_files="['$gsm8k_train_path', '$math_train_path']"
test_files="['$HOME/data/gsm8k/test.parquet', '$HOME/data/math/test.parquet']"
"""
FILES = 'data.train_files="$train_files" data.val_files="$test_files" data.train_batch_size=1024'
NO_OFFLOAD = "actor_rollout_ref.actor.fsdp_config.param_offload=False actor_rollout_ref.actor.fsdp_config.optimizer_offload=False"

SCRIPTS = {
    "sao": f"""
python3 -m verl.trainer.main_ppo {GSM8K} data.train_batch_size=128 data.max_prompt_length=512 data.max_response_length=512 \\
 algorithm.adv_estimator=gae algorithm.lam_critic=1.0 algorithm.length_adaptive_lam_alpha=1.5 \\
 algorithm.gae_whiten_advantages=True algorithm.rollout_correction.bypass_mode=True \\
 algorithm.rollout_correction.loss_type=reinforce algorithm.rollout_correction.rollout_is=token \\
 algorithm.rollout_correction.rollout_is_threshold=0.2_4.0 actor_rollout_ref.actor.policy_loss.loss_mode=bypass_mode \\
 actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct actor_rollout_ref.rollout.n=1 actor_rollout_ref.rollout.name=vllm \\
 actor_rollout_ref.actor.ppo_mini_batch_size=128 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \\
 critic.model.path=Qwen/Qwen2.5-0.5B-Instruct critic.optim.lr=5e-6 critic.optim.lr_warmup_steps=10 critic.ppo_epochs=2 \\
 critic.fsdp.freeze_param_patterns="['.*\\.self_attn\\..*']" critic.ppo_micro_batch_size_per_gpu=4 \\
 trainer.logger=console trainer.n_gpus_per_node=1 trainer.nnodes=1 trainer.critic_warmup=10 trainer.total_epochs=15
""",
    "quickstart": f"""
PYTHONUNBUFFERED=1 python3 -m verl.trainer.main_ppo \\
 {GSM8K} data.train_batch_size=256 data.max_prompt_length=512 data.max_response_length=512 \\
 actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct \\
 actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.ppo_mini_batch_size=64 \\
 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 actor_rollout_ref.rollout.name=vllm \\
 actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8 actor_rollout_ref.rollout.tensor_model_parallel_size=1 \\
 actor_rollout_ref.rollout.gpu_memory_utilization=0.4 actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4 \\
 critic.optim.lr=1e-5 critic.model.path=Qwen/Qwen2.5-0.5B-Instruct critic.ppo_micro_batch_size_per_gpu=4 \\
 algorithm.kl_ctrl.kl_coef=0.001 trainer.logger=console trainer.val_before_train=False \\
 trainer.n_gpus_per_node=1 trainer.nnodes=1 trainer.save_freq=10 trainer.test_freq=10 \\
 trainer.total_epochs=15 2>&1 | tee verl_demo.log
""",
    "ppo with a reward model": f"""set -x
{BOTH}
python3 -m verl.trainer.main_ppo {FILES} data.max_prompt_length=1024 data.max_response_length=512 \\
    data.return_raw_chat=True actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct \\
    actor_rollout_ref.model.use_rmpad=True actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 \\
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.01 \\
    actor_rollout_ref.actor.kl_loss_type=low_var_kl critic.optim.lr=1e-5 critic.optim.lr_warmup_steps_ratio=0.05 \\
    critic.model.path=Qwen/Qwen2-7B-Instruct critic.ppo_micro_batch_size_per_gpu=32 \\
    reward_model.enable=True reward_model.model.path=sfairXC/FsfairX-LLaMA3-RM-v0.1 \\
    reward_model.model.use_remove_padding=True reward_model.model.fsdp_config.param_offload=True \\
    reward_model.micro_batch_size_per_gpu=32 algorithm.use_kl_in_reward=False {ENDS}
""",
    "dapo 32b": """#!/usr/bin/env bash
set -euxo pipefail
project_name='DAPO'
exp_name='DAPO-Qwen2.5-32B'
clip_ratio_low=0.2
clip_ratio_high=0.28
max_prompt_length=$((1024 * 2))
max_response_length=$((1024 * 20))
overlong_buffer_len=$((1024 * 4))
offload=True
sp_size=8
NNODES=${NNODES:-16}
RUNTIME_ENV=${RUNTIME_ENV:-verl/runtime_env.yaml}
RAY_DATA_HOME=${RAY_DATA_HOME:-"${HOME}/verl"}
MODEL_PATH=${MODEL_PATH:-"${RAY_DATA_HOME}/models/Qwen2.5-32B"}
TRAIN_FILE=${TRAIN_FILE:-"${RAY_DATA_HOME}/data/dapo-math-17k.parquet"}
max_tokens=$((max_prompt_length + max_response_length))

ray job submit --no-wait --runtime-env="${RUNTIME_ENV}" -- python3 -m recipe.dapo.main_dapo \\
    data.train_files="${TRAIN_FILE}" data.val_files="${RAY_DATA_HOME}/data/aime-2024.parquet" data.prompt_key=prompt \\
    data.truncation='left' data.max_prompt_length=${max_prompt_length} data.max_response_length=${max_response_length} \\
    data.gen_batch_size=1536 data.train_batch_size=512 actor_rollout_ref.rollout.n=16 algorithm.adv_estimator=grpo \\
    algorithm.use_kl_in_reward=False algorithm.kl_ctrl.kl_coef=0.0 actor_rollout_ref.actor.use_kl_loss=False \\
    actor_rollout_ref.actor.clip_ratio_low=${clip_ratio_low} actor_rollout_ref.actor.clip_ratio_high=${clip_ratio_high} \\
    actor_rollout_ref.actor.clip_ratio_c=10.0 algorithm.filter_groups.enable=True algorithm.filter_groups.metric=acc \\
    algorithm.filter_groups.max_num_gen_batches=10 actor_rollout_ref.actor.use_dynamic_bsz=True \\
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=${max_tokens} \\
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=${max_tokens} \\
    actor_rollout_ref.model.path="${MODEL_PATH}" +actor_rollout_ref.model.override_config.attention_dropout=0. \\
    actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.optim.lr_warmup_steps=10 \\
    actor_rollout_ref.actor.optim.weight_decay=0.1 actor_rollout_ref.actor.ppo_mini_batch_size=32 \\
    actor_rollout_ref.actor.fsdp_config.param_offload=${offload} actor_rollout_ref.actor.grad_clip=1.0 \\
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=${offload} actor_rollout_ref.actor.entropy_coeff=0 \\
    actor_rollout_ref.actor.loss_agg_mode=token-mean actor_rollout_ref.actor.ulysses_sequence_parallel_size=${sp_size} \\
    actor_rollout_ref.rollout.gpu_memory_utilization=0.80 actor_rollout_ref.rollout.tensor_model_parallel_size=4 \\
    actor_rollout_ref.rollout.enable_chunked_prefill=True actor_rollout_ref.rollout.max_num_batched_tokens=${max_tokens} \\
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0 actor_rollout_ref.rollout.val_kwargs.top_p=0.7 \\
    actor_rollout_ref.rollout.val_kwargs.top_k=-1 actor_rollout_ref.rollout.val_kwargs.do_sample=True \\
    actor_rollout_ref.rollout.val_kwargs.n=1 actor_rollout_ref.ref.fsdp_config.param_offload=${offload} \\
    actor_rollout_ref.ref.ulysses_sequence_parallel_size=${sp_size} reward_model.reward_manager=dapo \\
    reward_model.overlong_buffer.enable=True reward_model.overlong_buffer.len=${overlong_buffer_len} \\
    reward_model.overlong_buffer.penalty_factor=1.0 trainer.logger='["console","wandb"]' \\
    trainer.project_name="${project_name}" trainer.experiment_name="${exp_name}" trainer.n_gpus_per_node=8 \\
    trainer.nnodes="${NNODES}" trainer.val_before_train=True trainer.total_epochs=1 trainer.resume_mode=auto
""",
    "72b by sglang": f"""
ARGS=(
    algorithm.adv_estimator=grpo   # by groups
    {GSM8K}
    data.max_prompt_length=1024
    actor_rollout_ref.model.path=Qwen/Qwen2.5-72B-Instruct
    actor_rollout_ref.rollout.name=sglang
)
ARGS+=(actor_rollout_ref.rollout.n=8 actor_rollout_ref.rollout.tensor_model_parallel_size=8)
python3 -m verl.trainer.main_ppo "${{ARGS[@]}}" actor_rollout_ref.actor.strategy=fsdp2 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 actor_rollout_ref.actor.fsdp_config.fsdp_size=16 \\
    actor_rollout_ref.actor.use_torch_compile=False trainer.nnodes=8 trainer.default_local_dir=/ckpts/72b
""",
}  # fmt: skip
