"""verl's settings of model, reference, rollout, reward and trainer, and all others."""

from jppo.verl.name import missing, needless, same

_F, _R, _M = "actor_rollout_ref.ref", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_VAL, _TURNS = f"{_R}.val_kwargs", f"{_R}.multi_turn"
_RM, _KW = "reward.reward_model", "reward.reward_kwargs.overlong_buffer_cfg"
_ENGINE = "of the engine's speed alone; rollout.engine_args takes the server's own options"

MODEL = (
    same(f"{_M}.path", "model.path"),
    same(
        f"{_M}.enable_gradient_checkpointing", "model.remat", True, "remat", "full is what verl recomputes: each layer"
    ),
    same(f"{_M}.lora_rank", "model.lora_rank", 0),
    same(f"{_M}.lora_alpha", "model.lora_alpha", 16),
    same(f"{_M}.target_modules", "model.target_modules", "all-linear", "commas"),
    *missing("adapters are begun anew", f"{_M}.lora_adapter_path"),
    *missing("name the modules that do have adapters, by model.target_modules", f"{_M}.exclude_modules", off=([],)),
    *missing("of verl's Megatron; set actor_rollout_ref.model.lora_rank and lora_alpha", f"{_M}.lora.*", off=(0,)),
    *missing(
        "dropout is not in jppo's decoder",
        f"{_M}.override_config.*dropout",
        f"{_M}.override_config.*pdrop",
        off=(0, 0.0),
    ),
    *needless(
        "model.attention chooses",
        f"{_M}.override_config.attn_implementation",
        f"{_M}.override_config._attn_implementation",
    ),
    *missing(
        "the model is what its config.json says; change it there",
        f"{_M}.override_config*",
        f"{_M}.hf_config_path",
        off=({},),
    ),
    *missing(
        "code of a model's own is not run; the families that jppo knows need none",
        f"{_M}.trust_remote_code",
        "data.trust_remote_code",
        f"{_M}.external_lib",
    ),
    *missing("change chat_template in the model's tokenizer_config.json", f"{_M}.custom_chat_template"),
    *missing("actor.param_offload and model.remat make room", f"{_M}.enable_activation_offload"),
    *missing("there is no multi-token prediction", f"{_M}.mtp.enable*", f"{_R}.mtp*"),
    *needless("read only with mtp.enable", f"{_M}.mtp.*"),
    *needless(
        "packing does it: no row is padded to the longest, and rows are cut by tokens",
        f"{_M}.use_remove_padding",
        f"{_M}.use_rmpad",
        "critic.model.use_rmpad",
    ),
    *needless(
        "the compiler's work",
        f"{_M}.use_liger",
        f"{_M}.use_fused_kernels",
        f"{_M}.fused_kernel_options*",
        f"{_M}.tiled_mlp.*",
    ),
    *needless("models are read once", f"{_M}.use_shm"),
)

REF = (
    same(f"{_F}.model.path", "ref.path"),
    same(f"{_F}.fsdp_config.param_offload", "ref.param_offload", False, "ref_offload"),
    *needless(
        "passes without a gradient are cut by actor.max_tokens_per_device too",
        f"{_F}.log_prob_*",
        f"{_R}.log_prob_*",
        f"{_F}.use_dynamic_bsz",
    ),
    *needless(
        "the reference is computed as the policy is, on the same mesh",
        f"{_F}.strategy",
        f"{_F}.ulysses_sequence_parallel_size",
        f"{_F}.use_torch_compile",
        f"{_F}.rollout_n",
        f"{_F}.entropy_*",
        f"{_F}.pad_to_length*",
        f"{_F}.fsdp_config.*",
        f"{_F}.megatron.*",
    ),
    *missing("trainer.profile_steps writes traces of JAX's profiler", f"{_F}.profiler.*", f"{_R}.profiler.*"),
)

ROLLOUT = (
    same(f"{_R}.name", "rollout.name", "vllm", "engine"),
    same(f"{_R}.n", "rollout.n", 1),
    same(f"{_R}.temperature", "rollout.temperature", 1.0, "drawn"),
    same(f"{_R}.top_p", "rollout.top_p", 1.0),
    same(f"{_R}.top_k", "rollout.top_k", -1, "top_k"),
    same(f"{_R}.ignore_eos", "rollout.ignore_eos", False),
    same(f"{_R}.dtype", "rollout.dtype", "bfloat16", "dtype"),
    same(f"{_R}.gpu_memory_utilization", "rollout.gpu_memory_utilization", 0.5),
    same(f"{_R}.enforce_eager", "rollout.enforce_eager", False),
    same(f"{_R}.tensor_model_parallel_size", "rollout.tensor_model_parallel_size", 2),
    same(f"{_R}.max_num_seqs", "rollout.max_num_seqs", 256),
    same(
        f"{_R}.free_cache_engine",
        "rollout.sleep_level",
        True,
        "sleep",
        "2: weights and cache leave the GPU while it learns",
    ),
    same(f"{_VAL}.temperature", "rollout.val_kwargs.temperature", 0.0),
    same(f"{_VAL}.top_p", "rollout.val_kwargs.top_p", 1.0, "unless_greedy"),
    same(f"{_VAL}.top_k", "rollout.val_kwargs.top_k", -1, "top_k_unless_greedy"),
    same(f"{_VAL}.n", "rollout.val_kwargs.n", 1),
    *needless("verl 0.9.1 tests by val_kwargs.temperature, whatever this says; 0 is greedy", f"{_VAL}.do_sample"),
    same(f"{_TURNS}.enable", "rollout.multi_turn.enable", False),
    same(f"{_TURNS}.max_assistant_turns", "rollout.multi_turn.max_assistant_turns", convert="turns"),
    same(f"{_TURNS}.max_user_turns", "rollout.multi_turn.max_user_turns", convert="turns"),
    same(f"{_TURNS}.max_parallel_calls", "rollout.multi_turn.max_parallel_calls", convert="of_tools"),
    same(f"{_TURNS}.max_tool_response_length", "rollout.multi_turn.max_tool_response_length", convert="of_tools"),
    same(f"{_TURNS}.tool_response_truncate_side", "rollout.multi_turn.tool_response_truncate_side", convert="of_tools"),
    same(
        f"{_TURNS}.tool_config_path",
        "rollout.multi_turn.tool_config_path",
        convert="in_turns",
        why="jppo's YAML has the same form; its class_name is a tool of jppo's or PATH.py:CLASS",
    ),
    same(f"{_TURNS}.format", "rollout.multi_turn.format", convert="in_turns"),
    *missing("rollout.multi_turn.interaction=PATH.py:CLASS is a simulated user", f"{_TURNS}.interaction_config_path"),
    *missing(
        "tools() of a Python file, by rollout.multi_turn.tool_config_path",
        f"{_TURNS}.function_tool_path",
        "data.function_tool_path",
    ),
    *missing(
        "rollout.multi_turn.enable makes conversations; there is no other loop",
        f"{_R}.agent.default_agent_loop",
        f"{_R}.agent.agent_loop_config_path",
        f"{_R}.agent.custom_async_server.*",
        off=("single_turn_agent", "tool_agent"),
    ),
    *needless(
        "conversations are of token ids, never encoded again",
        f"{_TURNS}.use_inference_chat_template",
        f"{_TURNS}.tokenization_sanity_check_mode",
    ),
    *missing("rollout.n is the number of samples", f"{_TURNS}.num_repeat_rollouts"),
    *missing("a greedy rollout has nothing to learn from; leave it at True", f"{_R}.do_sample", off=(True,)),
    *needless(
        "how verl calls an engine; jppo's rollout.mode is whether samples may be older than the policy", f"{_R}.mode"
    ),
    *needless("log-probs of the sampler are always compared with the trainer's", f"{_R}.calculate_log_probs"),
    *needless(
        _ENGINE,
        f"{_R}.max_num_batched_tokens",
        f"{_R}.enable_chunked_prefill",
        f"{_R}.enable_prefix_caching",
        f"{_R}.cudagraph_capture_sizes",
        f"{_R}.disable_log_stats",
        f"{_R}.scheduling_policy",
        f"{_R}.multi_stage_wake_up",
        f"{_R}.skip_tokenizer_init",
        f"{_R}.use_fire_sampling",
        f"{_R}.disable_cascade_attn",
    ),
    *needless(
        "servers get whole weights, checked, after every step",
        f"{_R}.load_format",
        f"{_R}.layered_summon",
        f"{_R}.checkpoint_engine.*",
        f"{_R}.update_weights_bucket_megabytes",
    ),
    *needless(
        "it follows from data.max_prompt_length and data.max_response_length",
        f"{_R}.max_model_len",
        f"{_R}.prompt_length",
        f"{_R}.response_length",
    ),
    *needless("trainer.seed is the seed of all", f"{_R}.seed", f"{_R}.full_determinism"),
    *needless("the log-probs compared are those of what was drawn from", f"{_R}.logprobs_mode"),
    *needless("a thread each holds a conversation", f"{_R}.agent.num_workers"),
    *missing(
        "give the server's options by rollout.engine_args", f"{_R}.engine_kwargs.*", f"{_R}.limit_images", off=({},)
    ),
    *missing(
        "rollout.servers and rollout.tensor_model_parallel_size lay an engine out",
        f"{_R}.data_parallel_size",
        f"{_R}.expert_parallel_size",
        f"{_R}.pipeline_model_parallel_size",
        off=(1,),
    ),
    *missing(
        "rollout.devices gives servers GPUs of their own",
        f"{_R}.nnodes",
        f"{_R}.n_gpus_per_node",
        f"{_R}.disaggregation.*",
        off=(0,),
    ),
    *missing("nothing is quantised", f"{_R}.quantization*", f"{_R}.qat*"),
    *missing(
        "samples are kept in the run's folder, metrics go to trainer.logger", f"{_R}.trace.*", f"{_R}.prometheus.*"
    ),
    *missing("all samples that are asked for are waited for", f"{_R}.over_sample_rate", off=(0,)),
    *missing("of mixtures of experts", f"{_R}.enable_rollout_routing_replay", f"{_R}.moe_*", off=(0,)),
    *missing("samples are drawn anew", f"{_R}.skip_*", "skip.*"),
    *missing("the server balances by itself", f"{_R}.router_config_path"),
)

REWARD = (
    same(
        "reward.custom_reward_function.path", "reward.function", convert="function", why="with its name: PATH.py:NAME"
    ),
    *needless("it is part of reward.function", "reward.custom_reward_function.name"),
    *missing("give the arguments defaults in the function", "reward.custom_reward_function.reward_kwargs*", off=({},)),
    same("reward.num_workers", "reward.workers", why="processes that run functions and rules that may hang"),
    same(f"{_RM}.model_path", "reward.model.path", convert="with_model"),
    same(f"{_RM}.rollout.dtype", "reward.model.dtype", "bfloat16", "model_dtype"),
    same(f"{_RM}.rollout.gpu_memory_utilization", "reward.model.gpu_memory_utilization", convert="with_model"),
    same(f"{_RM}.rollout.name", "reward.model.engine", convert="model_engine"),
    same(f"{_RM}.max_length", "reward.model.max_length", convert="with_model"),
    same(f"{_RM}.micro_batch_size_per_gpu", "reward.model.batch_size", convert="with_model"),
    same(f"{_RM}.micro_batch_size", "reward.model.batch_size", convert="with_model"),
    *needless("there is a reward model where reward.model.path is given", f"{_RM}.enable"),
    *needless("its own tokenizer and template are used, the text is rendered anew", f"{_RM}.input_tokenizer"),
    *needless("reward.model.engine lays it out", f"{_RM}.*"),
    *missing(
        "how parts add up is said by reward.weights, how one is made by reward.function",
        "reward.reward_manager.name",
        "reward.reward_manager.source",
        off=("naive", "batch", "prime", "dapo", "register"),
    ),
    *missing(
        "reward.function is the way to a reward of one's own",
        "reward.reward_manager.module.*",
        off=("custom_reward_manager",),
    ),
    same(f"{_KW}.len", "reward.overlong_buffer_tokens", convert="overlong"),
    *needless("without it nothing is taken off", f"{_KW}.enable"),
    *needless("it is a weight of length_score, in reward.weights", f"{_KW}.penalty_factor"),
    *needless("reward/length_score/mean is always logged", f"{_KW}.log"),
    *needless("it is data.max_response_length", "reward.reward_kwargs.max_resp_len"),
    *missing(
        "reward.grader=code runs programs here, with reward.allow_code=True, or by reward.sandbox=container and"
        " reward.sandbox_url",
        "reward.sandbox_fusion.*",
        off=(64, 1024),
    ),
    *missing("a step is graded while it is sampled, always", "reward_model.launch_reward_fn_async", off=(True,)),
)

TRAINER = (
    same("trainer.total_epochs", "trainer.total_epochs", 30),
    same("trainer.total_training_steps", "trainer.total_training_steps", convert="off"),
    same("trainer.project_name", "trainer.project_name", "verl_examples"),
    same("trainer.experiment_name", "trainer.experiment_name", "gsm8k"),
    same("trainer.logger", "trainer.logger", ["console", "wandb"], "loggers", "jsonl is always written"),
    same("trainer.log_val_generations", "trainer.log_val_generations", 0),
    same("trainer.save_freq", "trainer.save_freq", -1, "off"),
    same("trainer.test_freq", "trainer.test_freq", -1, "off"),
    same("trainer.val_before_train", "trainer.val_before_train", True),
    same("trainer.val_only", "trainer.val_only", False),
    same(
        "trainer.critic_warmup", "trainer.critic_warmup", 0, "critic_warmup", "N lasts N - 1 steps in verl, N in jppo"
    ),
    same("trainer.resume_mode", "trainer.resume_mode", "auto", "resume"),
    *needless("trainer.resume_mode takes the path", "trainer.resume_from_path"),
    same("trainer.default_local_dir", "trainer.run_dir", why="else runs/EXPERIMENT_NAME"),
    same(
        "trainer.max_actor_ckpt_to_keep",
        "trainer.max_ckpt_to_keep",
        convert="given",
        why="verl keeps all by default, jppo two",
    ),
    *needless("policy and critic are one checkpoint", "trainer.max_critic_ckpt_to_keep"),
    same("trainer.nnodes", "trainer.nnodes", 1, why="the command is started on each of them"),
    same(
        "trainer.n_gpus_per_node",
        "rollout.servers",
        8,
        "servers",
        "over rollout.tensor_model_parallel_size; the trainer takes all",
    ),
    same("trainer.v1.trainer_mode", "rollout.mode", "sync", "trainer_mode"),
    same("global_profiler.steps", "trainer.profile_steps", convert="commas"),
    *missing("trainer.profile_steps writes traces of JAX's profiler", "global_profiler.*", off=("outputs/profile", [])),
    *missing("rollout.max_staleness and rollout.on_update say it", "trainer.v1.*", off=({},)),
    *needless("packing balances the devices", "trainer.balance_batch"),
    *needless("samples are in the run's folder", "trainer.rollout_data_dir", "trainer.validation_data_dir"),
    *needless("JAX takes the devices there are", "trainer.device"),
    *needless("there is one trainer", "trainer.use_v1", "trainer.use_legacy_worker_impl"),
    *needless(
        "of verl's processes",
        "ray_kwargs.*",
        "ray_init.*",
        "trainer.ray_wait_register_center_timeout",
        "transfer_queue.*",
        "hydra.*",
        "actor_rollout_ref.hybrid_engine",
        "actor_rollout_ref.nccl_timeout",
        "trainer.esi_redundant_time",
    ),
    *needless("a checkpoint stays where it is", "trainer.del_local_ckpt_after_load"),
    *missing(
        "name a folder that all hosts see, by trainer.run_dir",
        "trainer.default_hdfs_dir",
        "trainer.remote_dir",
        "trainer.checkpoint_callback_class",
    ),
    *missing("the policy learns from rewards alone", "distillation.*", off=(0, "k3")),
)
