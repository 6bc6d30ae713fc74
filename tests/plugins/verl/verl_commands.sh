# Commands in the forms of verl's PPO pages and scripts, for tests/plugins/verl/test_verl_commands.py. Each block is a script of its
# own behind the variables at the top. "### " names it, "## not supported: " lists the keys that jppo lacks,
# "## refused: " is the beginning of jppo's refusal, "## SETTING=VALUE" is in the command that it becomes.
HOME=/home/me
GSM8K=(data.train_files=$HOME/data/gsm8k/train.parquet data.val_files=$HOME/data/gsm8k/test.parquet)
MATH=("data.train_files=['$HOME/data/gsm8k/train.parquet', '$HOME/data/math/train.parquet']" "data.val_files=['$HOME/data/math/test.parquet']")
SIZES=(data.train_batch_size=1024 data.max_prompt_length=512 data.max_response_length=1024 data.filter_overlong_prompts=True data.truncation='error')
MICRO=(actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16 actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=16)
DYNAMIC=(actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24000 actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=24000)
QWEN=(actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct actor_rollout_ref.model.use_remove_padding=True actor_rollout_ref.model.enable_gradient_checkpointing=True actor_rollout_ref.actor.optim.lr=1e-6)
CRITIC=(critic.optim.lr=1e-5 critic.model.use_remove_padding=True critic.model.path=Qwen/Qwen2.5-7B-Instruct critic.model.enable_gradient_checkpointing=True critic.ppo_micro_batch_size_per_gpu=32 critic.fsdp.param_offload=False critic.fsdp.optimizer_offload=False)
VLLM=(actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.rollout.gpu_memory_utilization=0.6)
GRPO=(algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=5 actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001 actor_rollout_ref.actor.kl_loss_type=low_var_kl actor_rollout_ref.actor.entropy_coeff=0 algorithm.use_kl_in_reward=False)
RUN=(trainer.critic_warmup=0 trainer.logger='["console","wandb"]' trainer.project_name=verl_example trainer.experiment_name=run trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.save_freq=20 trainer.test_freq=5 trainer.total_epochs=15)
PPO="python3 -m verl.trainer.main_ppo"

### quickstart
## trainer.total_epochs=15
PYTHONUNBUFFERED=1 $PPO "${GSM8K[@]}" data.train_batch_size=256 data.max_prompt_length=512 data.max_response_length=256 \
 actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.ppo_mini_batch_size=64 \
 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8 \
 actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.gpu_memory_utilization=0.4 actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4 \
 critic.optim.lr=1e-5 critic.model.path=Qwen/Qwen2.5-0.5B-Instruct critic.ppo_micro_batch_size_per_gpu=4 algorithm.kl_ctrl.kl_coef=0.001 \
 trainer.logger=console trainer.val_before_train=False trainer.n_gpus_per_node=1 trainer.nnodes=1 trainer.save_freq=10 trainer.test_freq=10 trainer.total_epochs=15 2>&1 | tee verl_demo.log

### quickstart, for a GPU with little memory
## actor.max_tokens_per_device=1024
$PPO "${GSM8K[@]}" data.max_prompt_length=512 data.max_response_length=512 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 critic.ppo_micro_batch_size_per_gpu=1 \
 trainer.logger='["console","wandb"]' trainer.project_name=mine trainer.experiment_name=first

### quickstart, as before verl 0.3
## trainer.val_before_train=False
$PPO "${GSM8K[@]}" data.val_batch_size=1312 actor_rollout_ref.actor.ppo_micro_batch_size=8 actor_rollout_ref.rollout.log_prob_micro_batch_size=8 critic.ppo_micro_batch_size=8 \
 trainer.logger=['console'] +trainer.val_before_train=False trainer.default_hdfs_dir=null trainer.n_gpus_per_node=1 trainer.nnodes=1

### gsm8k example
## ref.param_offload=True
$PPO "${GSM8K[@]}" "${SIZES[@]}" "${QWEN[@]}" "${MICRO[@]}" actor_rollout_ref.actor.fsdp_config.param_offload=False actor_rollout_ref.actor.fsdp_config.optimizer_offload=False \
 "${VLLM[@]}" actor_rollout_ref.ref.fsdp_config.param_offload=True "${CRITIC[@]}" critic.model.fsdp_config.param_offload=False algorithm.kl_ctrl.kl_coef=0.001 "${RUN[@]}" $@

### ppo, two data sets
## actor.max_tokens_per_device=24576
## data.train_files=/home/me/data/gsm8k/train.parquet,/home/me/data/math/train.parquet
## model.remat=full
## rollout.servers=4
## trainer.logger=console,wandb,jsonl
## trainer.run_dir=runs/run
## mesh.fsdp=-1
## mesh.data=1
$PPO algorithm.adv_estimator=gae "${MATH[@]}" "${SIZES[@]}" "${QWEN[@]}" "${MICRO[@]}" "${VLLM[@]}" "${CRITIC[@]}" algorithm.use_kl_in_reward=False "${RUN[@]}"

### ppo, dynamic batch size
## actor.max_tokens_per_device=24000
$PPO algorithm.adv_estimator=gae "${MATH[@]}" "${SIZES[@]}" "${QWEN[@]}" "${DYNAMIC[@]}" "${VLLM[@]}" "${CRITIC[@]}" critic.use_dynamic_bsz=True critic.ppo_max_token_len_per_gpu=98304 critic.forward_max_token_len_per_gpu=98304 "${RUN[@]}"

### ppo, critic warm-up, gamma and lambda
## algorithm.lam=0.95
## trainer.critic_warmup=19
$PPO "${GSM8K[@]}" "${SIZES[@]}" "${QWEN[@]}" "${MICRO[@]}" "${VLLM[@]}" "${CRITIC[@]}" algorithm.gamma=0.99 algorithm.lam=0.95 "${RUN[@]}" trainer.critic_warmup=20

### ppo, KL in the reward with a controller
## algorithm.kl_ctrl_type=adaptive
$PPO "${GSM8K[@]}" "${SIZES[@]}" "${QWEN[@]}" "${MICRO[@]}" "${CRITIC[@]}" algorithm.use_kl_in_reward=True algorithm.kl_penalty=kl algorithm.kl_ctrl.type=adaptive algorithm.kl_ctrl.kl_coef=0.001 algorithm.kl_ctrl.horizon=10000 algorithm.kl_ctrl.target_kl=0.1 "${RUN[@]}"

### ppo, several epochs and clips
## critic.ppo_epochs=4
## actor.clip_ratio_high=0.28
$PPO "${GSM8K[@]}" "${SIZES[@]}" "${QWEN[@]}" "${MICRO[@]}" "${CRITIC[@]}" actor_rollout_ref.actor.ppo_epochs=4 actor_rollout_ref.actor.shuffle=True actor_rollout_ref.actor.clip_ratio=0.2 actor_rollout_ref.actor.clip_ratio_low=0.2 actor_rollout_ref.actor.clip_ratio_high=0.28 critic.cliprange_value=0.2 "${RUN[@]}"

### ppo, schedules and clipping of the gradient
## actor.grad_clip=0.5
## critic.grad_clip=1.0
## actor.lr_scheduler_type=cosine
## actor.lr_warmup_steps=10
$PPO "${GSM8K[@]}" "${SIZES[@]}" "${QWEN[@]}" "${MICRO[@]}" "${CRITIC[@]}" actor_rollout_ref.actor.optim.clip_grad=0.5 critic.grad_clip=0.5 actor_rollout_ref.actor.optim.warmup_style=cosine actor_rollout_ref.actor.optim.lr_warmup_steps=10 actor_rollout_ref.actor.optim.min_lr_ratio=0.1 critic.optim.lr_warmup_steps_ratio=0.05 actor_rollout_ref.actor.optim.weight_decay=0.1 "${RUN[@]}"

### ppo, a reward model
## reward.weights=rm_score=1
## reward.model.max_length=1536
$PPO "${MATH[@]}" "${SIZES[@]}" "${QWEN[@]}" "${MICRO[@]}" "${VLLM[@]}" "${CRITIC[@]}" data.return_raw_chat=True reward_model.enable=True reward_model.model.path=sfairXC/FsfairX-LLaMA3-RM-v0.1 reward_model.model.use_remove_padding=True reward_model.model.fsdp_config.param_offload=True reward_model.micro_batch_size_per_gpu=32 "${RUN[@]}"

### ppo, a reward model of verl 0.9
## reward.model.path=sfairXC/FsfairX-LLaMA3-RM-v0.1
$PPO "${MATH[@]}" "${SIZES[@]}" "${QWEN[@]}" "${MICRO[@]}" "${CRITIC[@]}" reward.num_workers=8 reward.reward_model.enable=True reward.reward_model.model_path=sfairXC/FsfairX-LLaMA3-RM-v0.1 reward.reward_model.rollout.name=vllm reward.reward_model.rollout.gpu_memory_utilization=0.8 reward.reward_model.rollout.tensor_model_parallel_size=1 reward.reward_model.rollout.prompt_length=4096 reward.reward_model.rollout.response_length=4096 "${RUN[@]}"

### ppo, a reward model by its short name
## reward.model.path=some/rm
$PPO "${GSM8K[@]}" "${QWEN[@]}" "${CRITIC[@]}" reward_model.enable=True reward_model.path=some/rm "${RUN[@]}"

### ppo on hh-rlhf
## reward.model.max_length=640
$PPO data.train_files="$HOME/data/full_hh_rlhf/rl/train.parquet" data.val_files="$HOME/data/full_hh_rlhf/rl/train.parquet" data.train_batch_size=512 data.max_prompt_length=128 data.max_response_length=512 \
 actor_rollout_ref.model.path=deepseek-ai/deepseek-llm-7b-chat actor_rollout_ref.actor.ppo_mini_batch_size=128 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 "${CRITIC[@]}" reward_model.enable=True reward_model.megatron.tensor_model_parallel_size=4 reward_model.model.path=deepseek-ai/deepseek-llm-7b-chat reward_model.micro_batch_size_per_gpu=4 reward_model.param_offload=False "${RUN[@]}"

### ppo, a function as the reward
## reward.function=my_reward.py:my_score
$PPO "${GSM8K[@]}" "${SIZES[@]}" "${QWEN[@]}" "${MICRO[@]}" "${CRITIC[@]}" custom_reward_function.path=my_reward.py custom_reward_function.name=my_score "${RUN[@]}"

### ppo, a function with arguments
## not supported: reward.custom_reward_function.reward_kwargs.scale
$PPO "${GSM8K[@]}" "${QWEN[@]}" "${CRITIC[@]}" reward.custom_reward_function.path=my_reward.py +reward.custom_reward_function.reward_kwargs.scale=2 "${RUN[@]}"

### ppo, a reward manager of one's own
## not supported: reward_model.reward_manager
$PPO "${GSM8K[@]}" "${QWEN[@]}" "${CRITIC[@]}" reward_model.reward_manager=mine "${RUN[@]}"

### ppo, programs in a sandbox
## reward.sandbox=container
## reward.sandbox_url=http://127.0.0.1:8080/run_code
$PPO data.train_files=$HOME/data/Eurus-2-RL-Data/train.parquet data.val_files=$HOME/data/Eurus-2-RL-Data/validation.parquet "${QWEN[@]}" "${CRITIC[@]}" reward_model.sandbox_fusion.url=http://127.0.0.1:8080/run_code reward_model.sandbox_fusion.max_concurrent=128 reward_model.reward_manager=prime "${RUN[@]}"

### ppo, sequence parallel
## mesh.sequence=2
$PPO "${GSM8K[@]}" "${SIZES[@]}" "${QWEN[@]}" "${MICRO[@]}" "${CRITIC[@]}" actor_rollout_ref.actor.ulysses_sequence_parallel_size=2 critic.ulysses_sequence_parallel_size=2 actor_rollout_ref.actor.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap=["Qwen2DecoderLayer"] "${RUN[@]}"

### ppo, fused kernels
$PPO "${GSM8K[@]}" "${SIZES[@]}" "${QWEN[@]}" "${DYNAMIC[@]}" "${CRITIC[@]}" actor_rollout_ref.model.use_fused_kernels=True actor_rollout_ref.model.fused_kernel_options.impl_backend=torch actor_rollout_ref.model.use_liger=True actor_rollout_ref.actor.use_torch_compile=False "${RUN[@]}"

### ppo, fsdp2 with offloading
## actor.param_offload=True
## actor.optimizer_offload=True
$PPO "${GSM8K[@]}" "${SIZES[@]}" "${QWEN[@]}" "${MICRO[@]}" "${CRITIC[@]}" actor_rollout_ref.actor.strategy=fsdp2 critic.strategy=fsdp2 actor_rollout_ref.actor.fsdp_config.offload_policy=True actor_rollout_ref.actor.fsdp_config.forward_prefetch=True actor_rollout_ref.actor.fsdp_config.reshard_after_forward=False "${RUN[@]}"

### ppo, host memory and dtypes
## actor.optimizer_offload=True
## critic.param_offload=True
## model.param_dtype=bfloat16
$PPO "${GSM8K[@]}" "${SIZES[@]}" "${QWEN[@]}" "${MICRO[@]}" "${CRITIC[@]}" actor_rollout_ref.actor.fsdp_config.param_offload=True actor_rollout_ref.actor.fsdp_config.optimizer_offload=True actor_rollout_ref.actor.fsdp_config.model_dtype=bf16 critic.fsdp.param_offload=True critic.fsdp.optimizer_offload=True "${RUN[@]}"

### ppo with Megatron
## mesh.tensor=4
## mesh.fsdp=-1
## mesh.data=1
$PPO --config-path=config --config-name='ppo_megatron_trainer.yaml' "${GSM8K[@]}" "${SIZES[@]}" "${QWEN[@]}" "${MICRO[@]}" "${CRITIC[@]}" actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2 actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4 actor_rollout_ref.ref.megatron.pipeline_model_parallel_size=2 actor_rollout_ref.ref.megatron.tensor_model_parallel_size=4 critic.megatron.pipeline_model_parallel_size=2 critic.megatron.tensor_model_parallel_size=4 actor_rollout_ref.actor.megatron.use_dist_checkpointing=False "${RUN[@]}"

### ppo with Megatron, in the long form of older scripts
## mesh.tensor=2
## actor.param_offload=True
$PPO --config-name=ppo_megatron_trainer "${GSM8K[@]}" "${QWEN[@]}" "${CRITIC[@]}" actor_rollout_ref.actor.megatron_config.tensor_model_parallel_size=2 actor_rollout_ref.actor.megatron_config.param_offload=True critic.megatron_config.optimizer_offload=True actor_rollout_ref.actor.optim.lr_decay_style=constant actor_rollout_ref.actor.optim.lr_warmup_init=0 "${RUN[@]}"

### ppo, traces of a profiler
## trainer.profile_steps=1,2,5
$PPO "${GSM8K[@]}" "${QWEN[@]}" "${CRITIC[@]}" global_profiler.tool=nsys global_profiler.steps=[1,2,5] actor_rollout_ref.actor.profiler.enable=True actor_rollout_ref.actor.profiler.all_ranks=True critic.profiler.enable=True global_profiler.global_tool_config.nsys.discrete=True "${RUN[@]}"

### ppo on several hosts by Ray
## trainer.nnodes=4
ray job submit --address=http://127.0.0.1:8265 --runtime-env=verl/trainer/runtime_env.yaml --no-wait -- $PPO "${GSM8K[@]}" "${QWEN[@]}" "${CRITIC[@]}" "${RUN[@]}" trainer.nnodes=4

### ppo on several hosts, by a launcher
## trainer.coordinator_address=10.0.0.1:29500
## trainer.node_rank=1
NNODES=2 NODE_RANK=1 MASTER_ADDR=10.0.0.1
$PPO "${GSM8K[@]}" "${QWEN[@]}" "${CRITIC[@]}" "${RUN[@]}" trainer.nnodes=$NNODES trainer.node_rank=$NODE_RANK trainer.master_addr=$MASTER_ADDR trainer.master_port=${MASTER_PORT:-29500}

### ppo, checkpoints
## trainer.save_contents=model,extra,hf_model
## trainer.max_ckpt_to_keep=3
## trainer.run_dir=checkpoints/verl_example/run
$PPO "${GSM8K[@]}" "${QWEN[@]}" "${CRITIC[@]}" "${RUN[@]}" actor_rollout_ref.actor.checkpoint.save_contents=['hf_model'] trainer.max_actor_ckpt_to_keep=3 trainer.max_critic_ckpt_to_keep=3 'trainer.default_local_dir=checkpoints/${trainer.project_name}/${trainer.experiment_name}'

### ppo, resumed from a path
## trainer.resume_mode=/ckpt/global_step_100
$PPO "${GSM8K[@]}" "${QWEN[@]}" "${CRITIC[@]}" "${RUN[@]}" trainer.resume_mode=resume_path trainer.resume_from_path=/ckpt/global_step_100 trainer.del_local_ckpt_after_load=True

### ppo, a test alone
## trainer.val_only=True
## rollout.val_kwargs.n=8
$PPO "${GSM8K[@]}" "${QWEN[@]}" "${CRITIC[@]}" "${RUN[@]}" trainer.val_only=True trainer.val_before_train=True actor_rollout_ref.rollout.val_kwargs.n=8 actor_rollout_ref.rollout.val_kwargs.do_sample=True actor_rollout_ref.rollout.val_kwargs.temperature=0.6 actor_rollout_ref.rollout.val_kwargs.top_p=0.95 trainer.log_val_generations=10 trainer.validation_data_dir=val

### ppo, PF-PPO
## not supported: algorithm.use_pf_ppo algorithm.pf_ppo.reweight_method algorithm.pf_ppo.weight_pow
$PPO "${GSM8K[@]}" "${QWEN[@]}" "${CRITIC[@]}" algorithm.use_pf_ppo=True algorithm.pf_ppo.reweight_method=pow algorithm.pf_ppo.weight_pow=2.0 actor_rollout_ref.rollout.n=5 "${RUN[@]}"

### ppo, adapters
## model.lora_rank=32
## model.lora_alpha=32
## model.target_modules=all-linear
## mesh.fsdp=-1
$PPO "${GSM8K[@]}" data.train_batch_size=64 "${QWEN[@]}" "${CRITIC[@]}" actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.model.use_shm=True actor_rollout_ref.model.lora_rank=32 actor_rollout_ref.model.lora_alpha=32 actor_rollout_ref.model.target_modules=all-linear actor_rollout_ref.actor.fsdp_config.fsdp_size=8 actor_rollout_ref.actor.fsdp_config.param_offload=True actor_rollout_ref.rollout.load_format=safetensors actor_rollout_ref.rollout.layered_summon=True actor_rollout_ref.rollout.max_num_seqs=64 actor_rollout_ref.rollout.max_model_len=1536 actor_rollout_ref.rollout.max_num_batched_tokens=1536 "${RUN[@]}"

### ppo, adapters for policy and critic
## critic.lora_rank=8
$PPO "${GSM8K[@]}" "${QWEN[@]}" "${CRITIC[@]}" actor_rollout_ref.model.lora_rank=16 actor_rollout_ref.model.lora_alpha=32 "actor_rollout_ref.model.target_modules=[q_proj,k_proj,v_proj,o_proj]" critic.model.lora_rank=8 critic.model.lora_alpha=16 "${RUN[@]}"

### grpo, adapters that exist already
## model.lora_adapter_path=/adapters/first
$PPO "${GRPO[@]}" "${GSM8K[@]}" "${QWEN[@]}" "${DYNAMIC[@]}" actor_rollout_ref.model.lora_rank=64 actor_rollout_ref.model.lora_adapter_path=/adapters/first "${RUN[@]}"

### grpo, adapters by Megatron
## model.lora_rank=16
## model.lora_alpha=32
## model.target_modules=q_proj,k_proj,v_proj,o_proj
$PPO --config-name=ppo_megatron_trainer "${GRPO[@]}" "${GSM8K[@]}" "${QWEN[@]}" "${DYNAMIC[@]}" actor_rollout_ref.model.lora.rank=16 actor_rollout_ref.model.lora.target_modules=['linear_qkv','linear_proj'] "${RUN[@]}"

### grpo
## rollout.n=5
## actor.ppo_mini_batch_size=1280
## actor.kl_loss_type=low_var_kl
$PPO "${GRPO[@]}" "${GSM8K[@]}" "${SIZES[@]}" "${QWEN[@]}" "${MICRO[@]}" "${VLLM[@]}" "${RUN[@]}" $@

### grpo, dynamic batch size
$PPO "${GRPO[@]}" "${MATH[@]}" "${SIZES[@]}" "${QWEN[@]}" "${DYNAMIC[@]}" "${VLLM[@]}" "${RUN[@]}" trainer.balance_batch=True

### grpo, Dr. GRPO
## actor.loss_agg_mode=seq-mean-token-sum-norm
## algorithm.norm_adv_by_std_in_grpo=False
$PPO "${GRPO[@]}" "${GSM8K[@]}" "${SIZES[@]}" "${QWEN[@]}" "${MICRO[@]}" actor_rollout_ref.actor.use_kl_loss=False actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm algorithm.norm_adv_by_std_in_grpo=False "${RUN[@]}"

### grpo, one sample of a prompt
## algorithm.adv_estimator=reinforce_no_baseline
$PPO "${GRPO[@]}" "${GSM8K[@]}" "${QWEN[@]}" actor_rollout_ref.rollout.n=1 "${RUN[@]}"

### grpo, pass at k
## algorithm.adv_estimator=grpo_passk
$PPO "${GRPO[@]}" "${GSM8K[@]}" "${QWEN[@]}" "${MICRO[@]}" algorithm.adv_estimator=grpo_passk "${RUN[@]}"

### grpo by SGLang
## rollout.name=sglang
## rollout.engine_args=--attention-backend fa3
$PPO "${GRPO[@]}" "${GSM8K[@]}" "${QWEN[@]}" "${DYNAMIC[@]}" actor_rollout_ref.rollout.name=sglang actor_rollout_ref.rollout.multi_stage_wake_up=True +actor_rollout_ref.rollout.engine_kwargs.sglang.attention_backend=fa3 "${RUN[@]}"

### grpo by TensorRT-LLM
## not supported: actor_rollout_ref.rollout.name
$PPO "${GRPO[@]}" "${GSM8K[@]}" "${QWEN[@]}" "${DYNAMIC[@]}" actor_rollout_ref.rollout.name=trtllm "${RUN[@]}"

### grpo, options of vLLM
## rollout.enforce_eager=False
## rollout.engine_args=--swap-space 8 --no-enable-prefix-caching
$PPO "${GRPO[@]}" "${GSM8K[@]}" "${QWEN[@]}" "${DYNAMIC[@]}" "${VLLM[@]}" actor_rollout_ref.rollout.enforce_eager=False actor_rollout_ref.rollout.free_cache_engine=True actor_rollout_ref.rollout.enable_chunked_prefill=True actor_rollout_ref.rollout.engine_kwargs.vllm.swap_space=8 +actor_rollout_ref.rollout.engine_kwargs.vllm.enable_prefix_caching=False "${RUN[@]}"

### grpo, thinking off
## data.apply_chat_template_kwargs=enable_thinking=False
$PPO "${GRPO[@]}" "${GSM8K[@]}" actor_rollout_ref.model.path=Qwen/Qwen3-8B "${DYNAMIC[@]}" +data.apply_chat_template_kwargs.enable_thinking=False "${RUN[@]}"

### grpo, columns and part of the data
## data.prompt_key=question
## data.train_max_samples=2000
$PPO "${GRPO[@]}" "${GSM8K[@]}" "${QWEN[@]}" "${DYNAMIC[@]}" data.prompt_key=question data.reward_fn_key=source data.train_max_samples=2000 data.val_max_samples=200 data.seed=7 data.shuffle=False "${RUN[@]}"

### grpo, a prefix for its samples
## data.packing=prefix
$PPO "${GRPO[@]}" "${GSM8K[@]}" actor_rollout_ref.model.path=Qwen/Qwen3-4B "${MICRO[@]}" actor_rollout_ref.actor.use_prefix_grouper=True "${RUN[@]}"

### grpo, a run's name with a date
## trainer.experiment_name=
## trainer.run_dir=runs/run
$PPO "${GRPO[@]}" "${GSM8K[@]}" "${QWEN[@]}" "${MICRO[@]}" "${RUN[@]}" trainer.project_name=grpo-lora-$(date +%Y%m%d) trainer.experiment_name=$(now)

### grpo, a curriculum
## not supported: data.sampler.class_path data.sampler.class_name
$PPO "${GRPO[@]}" "${GSM8K[@]}" "${QWEN[@]}" "${MICRO[@]}" data.sampler.class_path=my_sampler.py data.sampler.class_name=Curriculum data.dataloader_num_workers=0 "${RUN[@]}"

### grpo, a data set of one's own
## not supported: data.custom_cls.path data.custom_cls.name
$PPO "${GRPO[@]}" "${GSM8K[@]}" "${QWEN[@]}" "${MICRO[@]}" data.custom_cls.path=my_data.py data.custom_cls.name=MyDataset "${RUN[@]}"

### grpo, tools
## rollout.name=sglang
## rollout.multi_turn.tool_config_path=configs/agent_calculator.yaml
## rollout.multi_turn.enable=True
## rollout.multi_turn.max_assistant_turns=5
$PPO --config-path="config" --config-name='ppo_trainer' "${GRPO[@]}" "${GSM8K[@]}" "${QWEN[@]}" "${MICRO[@]}" actor_rollout_ref.rollout.name=sglang actor_rollout_ref.rollout.mode=async actor_rollout_ref.rollout.multi_turn.enable=True actor_rollout_ref.rollout.multi_turn.max_assistant_turns=5 actor_rollout_ref.rollout.multi_turn.tool_config_path=configs/agent_calculator.yaml "${RUN[@]}"

### grpo, tools by the agent loop
## rollout.multi_turn.enable=True
## rollout.multi_turn.format=openai
$PPO "${GRPO[@]}" "${GSM8K[@]}" "${QWEN[@]}" "${MICRO[@]}" "${VLLM[@]}" data.return_raw_chat=True data.tool_config_path=configs/agent_calculator.yaml actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent actor_rollout_ref.rollout.agent.num_workers=8 actor_rollout_ref.rollout.multi_turn.tool_config_path=configs/agent_calculator.yaml actor_rollout_ref.rollout.multi_turn.format=openai actor_rollout_ref.rollout.multi_turn.max_parallel_calls=2 actor_rollout_ref.rollout.multi_turn.max_tool_response_length=512 "${RUN[@]}"

### grpo, a simulated user
## not supported: actor_rollout_ref.rollout.multi_turn.interaction_config_path
## rollout.multi_turn.enable=False
$PPO "${GRPO[@]}" "${GSM8K[@]}" "${QWEN[@]}" "${MICRO[@]}" actor_rollout_ref.rollout.multi_turn.enable=True actor_rollout_ref.rollout.multi_turn.max_user_turns=1 actor_rollout_ref.rollout.multi_turn.interaction_config_path=interaction.yaml "${RUN[@]}"

### grpo, samples of other steps
## rollout.mode=async
## rollout.max_staleness=1
## rollout.on_update=abort
## data.train_batch_size=1024
$PPO "${GRPO[@]}" "${GSM8K[@]}" "${QWEN[@]}" "${MICRO[@]}" trainer.v1.trainer_mode=separate_async trainer.v1.separate_async.parameter_sync_step=4 trainer.v1.sampler.max_off_policy_threshold=4 "${RUN[@]}"

### grpo, images
## refused: data.image_key=images: not supported: jppo's models read text
$PPO "${GRPO[@]}" "${GSM8K[@]}" "${QWEN[@]}" "${MICRO[@]}" data.image_key=images actor_rollout_ref.actor.freeze_vision_tower=True +actor_rollout_ref.rollout.limit_images=5 "${RUN[@]}"

### grpo, mixtures of experts by Megatron
## mesh.expert=8
$PPO --config-name=ppo_megatron_trainer "${GRPO[@]}" "${GSM8K[@]}" "${QWEN[@]}" "${DYNAMIC[@]}" actor_rollout_ref.actor.megatron.expert_model_parallel_size=8 +actor_rollout_ref.actor.megatron.override_transformer_config.moe_router_dtype=fp32 +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full "${RUN[@]}"

### dapo
## actor.clip_ratio_high=0.28
## reward.overlong_buffer_tokens=4096
## actor.max_tokens_per_device=22528
## algorithm.filter_groups=True
## algorithm.filter_groups_metric=rule_score
## algorithm.max_num_gen_batches=10
## data.gen_batch_size=1536
max_prompt_length=$((1024 * 2))
max_response_length=$((1024 * 20))
python3 -m recipe.dapo.main_dapo data.train_files="${TRAIN_FILE:-$HOME/data/dapo-math-17k.parquet}" data.val_files=$HOME/data/aime-2024.parquet data.prompt_key=prompt data.truncation='left' data.max_prompt_length=${max_prompt_length} data.max_response_length=${max_response_length} data.gen_batch_size=1536 data.train_batch_size=512 "${GRPO[@]}" actor_rollout_ref.actor.use_kl_loss=False actor_rollout_ref.rollout.n=16 "${QWEN[@]}" actor_rollout_ref.actor.clip_ratio_low=0.2 actor_rollout_ref.actor.clip_ratio_high=0.28 actor_rollout_ref.actor.clip_ratio_c=10.0 actor_rollout_ref.actor.loss_agg_mode=token-mean algorithm.filter_groups.enable=True algorithm.filter_groups.metric=acc algorithm.filter_groups.max_num_gen_batches=10 actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$((max_prompt_length + max_response_length)) actor_rollout_ref.actor.ppo_mini_batch_size=32 reward_model.reward_manager=dapo +reward_model.reward_kwargs.overlong_buffer_cfg.enable=True +reward_model.reward_kwargs.overlong_buffer_cfg.len=4096 +reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0 +reward_model.reward_kwargs.max_resp_len=${max_response_length} "${RUN[@]}"

### gspo
## actor.loss_mode=gspo
## actor.loss_agg_mode=seq-mean-token-mean
$PPO "${GRPO[@]}" "${GSM8K[@]}" "${QWEN[@]}" "${DYNAMIC[@]}" actor_rollout_ref.actor.policy_loss.loss_mode=gspo actor_rollout_ref.actor.clip_ratio_low=3e-4 actor_rollout_ref.actor.clip_ratio_high=4e-4 actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean "${RUN[@]}"

### sapo
## actor.tau_neg=1.05
$PPO "${GRPO[@]}" "${GSM8K[@]}" "${QWEN[@]}" "${DYNAMIC[@]}" actor_rollout_ref.actor.policy_loss.loss_mode=sapo actor_rollout_ref.actor.tau_pos=1.0 actor_rollout_ref.actor.tau_neg=1.05 "${RUN[@]}"

### cispo
## actor.loss_mode=cispo
$PPO "${GRPO[@]}" "${GSM8K[@]}" "${QWEN[@]}" "${DYNAMIC[@]}" actor_rollout_ref.actor.policy_loss.loss_mode=cispo actor_rollout_ref.actor.clip_ratio_low=10 actor_rollout_ref.actor.clip_ratio_high=0.2 "${RUN[@]}"

### geo_mean
## actor.loss_mode=geo_mean
$PPO "${GRPO[@]}" "${GSM8K[@]}" "${QWEN[@]}" "${DYNAMIC[@]}" actor_rollout_ref.actor.policy_loss.loss_mode=geo_mean actor_rollout_ref.actor.clip_ratio_low=0.4 actor_rollout_ref.actor.clip_ratio_high=0.4 "${RUN[@]}"

### clip_cov
## actor.loss_mode=clip_cov
## actor.clip_cov_ratio=0.0002
$PPO "${GRPO[@]}" "${GSM8K[@]}" "${QWEN[@]}" "${DYNAMIC[@]}" actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov actor_rollout_ref.actor.policy_loss.clip_cov_ratio=0.0002 "${RUN[@]}"

### gpg
## algorithm.adv_estimator=gpg
## actor.loss_mode=gpg
$PPO algorithm.adv_estimator=gpg "${GSM8K[@]}" "${QWEN[@]}" "${DYNAMIC[@]}" actor_rollout_ref.actor.policy_loss.loss_mode=gpg actor_rollout_ref.rollout.n=5 "${RUN[@]}"

### optimal token baseline
## algorithm.adv_estimator=optimal_token_baseline
$PPO algorithm.adv_estimator=optimal_token_baseline actor_rollout_ref.actor.calculate_sum_pi_squared=True "${GSM8K[@]}" "${QWEN[@]}" "${DYNAMIC[@]}" actor_rollout_ref.rollout.n=5 "${RUN[@]}"

### reinforce++
## algorithm.adv_estimator=reinforce_plus_plus
$PPO algorithm.adv_estimator=reinforce_plus_plus "${MATH[@]}" "${SIZES[@]}" "${QWEN[@]}" "${MICRO[@]}" actor_rollout_ref.rollout.n=8 actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_type=mse actor_rollout_ref.actor.kl_loss_coef=0.001 "${RUN[@]}"

### reinforce++ with a baseline
## algorithm.adv_estimator=reinforce_plus_plus_baseline
$PPO algorithm.adv_estimator=reinforce_plus_plus_baseline "${MATH[@]}" "${SIZES[@]}" "${QWEN[@]}" "${MICRO[@]}" actor_rollout_ref.rollout.n=8 "${RUN[@]}"

### rloo
## rollout.n=5
## algorithm.use_kl_in_reward=True
$PPO algorithm.adv_estimator=rloo "${GSM8K[@]}" "${SIZES[@]}" "${QWEN[@]}" "${MICRO[@]}" actor_rollout_ref.rollout.n=5 algorithm.use_kl_in_reward=True algorithm.kl_penalty=kl algorithm.kl_ctrl.kl_coef=0.001 "${RUN[@]}"

### remax
## actor.max_tokens_per_device=24000
## algorithm.adv_estimator=remax
$PPO algorithm.adv_estimator=remax "${MATH[@]}" "${SIZES[@]}" "${QWEN[@]}" "${DYNAMIC[@]}" actor_rollout_ref.rollout.n=4 algorithm.use_kl_in_reward=True algorithm.kl_penalty=kl algorithm.kl_ctrl.kl_coef=0.001 "${RUN[@]}"

### opo
## algorithm.adv_estimator=opo
$PPO algorithm.adv_estimator=opo "${MATH[@]}" "${SIZES[@]}" "${QWEN[@]}" "${DYNAMIC[@]}" actor_rollout_ref.rollout.n=4 "${RUN[@]}"

### rollout correction
## algorithm.old_logprob=correction
## algorithm.rollout_is=token
$PPO "${GRPO[@]}" "${GSM8K[@]}" "${QWEN[@]}" "${DYNAMIC[@]}" actor_rollout_ref.rollout.calculate_log_probs=True algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.rollout_is_threshold=2.0 algorithm.rollout_correction.rollout_rs=seq_mean_k1 "algorithm.rollout_correction.rollout_rs_threshold='0.999_1.001'" "${RUN[@]}"

### bypass
## algorithm.old_logprob=bypass
$PPO "${GRPO[@]}" "${GSM8K[@]}" "${QWEN[@]}" "${DYNAMIC[@]}" algorithm.rollout_correction.bypass_mode=True algorithm.rollout_correction.loss_type=ppo_clip "${RUN[@]}"

### bypass with rejection
## algorithm.old_logprob=bypass
## actor.loss_mode=vanilla
## algorithm.rollout_is=none
## algorithm.rollout_rs=seq_mean_k3
$PPO "${GRPO[@]}" "${GSM8K[@]}" "${QWEN[@]}" "${DYNAMIC[@]}" algorithm.rollout_correction.bypass_mode=True algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.rollout_rs=seq_mean_k3 algorithm.rollout_correction.rollout_rs_threshold=0.01 "${RUN[@]}"

### bypass by policy gradient
## algorithm.old_logprob=bypass
## actor.loss_mode=gpg
## algorithm.rollout_is=sequence
## algorithm.rollout_is_threshold=2.0
$PPO "${GRPO[@]}" "${GSM8K[@]}" "${QWEN[@]}" "${DYNAMIC[@]}" algorithm.rollout_correction.bypass_mode=True algorithm.rollout_correction.loss_type=reinforce algorithm.rollout_correction.rollout_is=sequence algorithm.rollout_correction.rollout_is_threshold=2.0 "${RUN[@]}"

### kl_cov
## actor.loss_mode=kl_cov
## actor.kl_cov_ratio=0.002
## actor.ppo_kl_coef=1.0
$PPO "${GRPO[@]}" "${GSM8K[@]}" "${QWEN[@]}" "${DYNAMIC[@]}" actor_rollout_ref.actor.policy_loss.loss_mode=kl_cov actor_rollout_ref.actor.policy_loss.kl_cov_ratio=0.002 actor_rollout_ref.actor.policy_loss.ppo_kl_coef=1.0 "${RUN[@]}"

### gdpo
## algorithm.adv_estimator=gdpo
## algorithm.gdpo_reward_keys=function_score/format_reward,function_score/accuracy_reward
## algorithm.gdpo_reward_weights=0.5,1.0
$PPO "${GSM8K[@]}" "${QWEN[@]}" "${DYNAMIC[@]}" algorithm.adv_estimator=gdpo "algorithm.gdpo_reward_keys=[format_reward,accuracy_reward]" "algorithm.gdpo_reward_weights=[0.5,1.0]" custom_reward_function.path=mine.py actor_rollout_ref.rollout.n=5 "${RUN[@]}"

### distillation beside the score, by the teacher's likeliest tokens
## algorithm.adv_estimator=grpo
## ref.path=Qwen/Qwen2.5-32B-Instruct
## actor.use_kl_loss=True
## actor.kl_loss_coef=0.5
## actor.kl_loss_type=forward_kl_topk
## actor.kl_topk=64
## actor.kl_log_prob_min_clamp=-10.0
## actor.kl_loss_max_clamp=10.0
$PPO "${GRPO[@]}" "${GSM8K[@]}" "${QWEN[@]}" "${DYNAMIC[@]}" distillation.enabled=True distillation.teacher_models.teacher_model.model_path=Qwen/Qwen2.5-32B-Instruct distillation.distillation_loss.loss_mode=forward_kl_topk distillation.distillation_loss.topk=64 distillation.distillation_loss.log_prob_min_clamp=-10.0 distillation.distillation_loss.loss_max_clamp=10.0 distillation.distillation_loss.distillation_loss_coef=0.5 "${RUN[@]}"

### distillation in the reward
## algorithm.adv_estimator=distill
## algorithm.use_kl_in_reward=True
## algorithm.kl_penalty=kl
## algorithm.gamma=0.0
$PPO "${GSM8K[@]}" "${QWEN[@]}" "${DYNAMIC[@]}" algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=5 distillation.enabled=True distillation.teacher_models.teacher_model.model_path=Qwen/Qwen2.5-32B-Instruct distillation.distillation_loss.loss_mode=k1 distillation.distillation_loss.use_policy_gradient=True distillation.distillation_loss.use_task_rewards=False "${RUN[@]}"

### distillation in the reward beside the score
## refused: distillation.distillation_loss.use_policy_gradient=True: not supported: the teacher in the reward together with a score
$PPO "${GRPO[@]}" "${GSM8K[@]}" "${QWEN[@]}" "${DYNAMIC[@]}" distillation.enabled=True distillation.teacher_models.teacher_model.model_path=Qwen/Qwen2.5-32B-Instruct distillation.distillation_loss.loss_mode=k1 distillation.distillation_loss.use_policy_gradient=True "${RUN[@]}"

### distillation
## algorithm.adv_estimator=distill
## ref.path=Qwen/Qwen2.5-32B-Instruct
## actor.use_kl_loss=True
## actor.kl_loss_type=low_var_kl
$PPO "${GRPO[@]}" "${GSM8K[@]}" "${QWEN[@]}" "${DYNAMIC[@]}" distillation.enabled=True distillation.distillation_loss.use_task_rewards=False distillation.teacher_models.teacher_model.model_path=Qwen/Qwen2.5-32B-Instruct "${RUN[@]}"

### a variable that the script does not set
## data.train_files=/train.parquet
$PPO data.train_files=$DATA/train.parquet "${QWEN[@]}" "${RUN[@]}"

### fine-tuning
## optim.lr=1e-05
## optim.betas=(0.9, 0.95)
## optim.max_tokens_per_device=4096
torchrun --standalone -m verl.trainer.fsdp_sft_trainer data.train_files=$HOME/data/gsm8k/train.parquet
