"""verl's settings of model, reference and rollout."""

from jppo.verl.name import missing, needless, same

_A, _F = "actor_rollout_ref.actor", "actor_rollout_ref.ref"
_R, _M = "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_VAL, _TURNS, _MODELS = f"{_R}.val_kwargs", f"{_R}.multi_turn", (_M, "critic.model")
_ENGINE = "it affects the engine's speed alone; rollout.engine_args takes the server's own options"


def _of(*names: str) -> tuple[str, ...]:
    """Returns the keys of the policy's model and of the critic's."""
    return tuple(f"{model}.{name}" for name in names for model in _MODELS)


MODEL = (
    same(f"{_M}.path", "model.path"),
    same(
        f"{_M}.enable_gradient_checkpointing", "model.remat", True, "remat", "full is what verl recomputes: each layer"
    ),
    same(f"{_M}.lora_rank", "model.lora_rank", 0),
    same(f"{_M}.lora_alpha", "model.lora_alpha", 16, "lora_alpha"),
    same(f"{_M}.target_modules", "model.target_modules", "all-linear", "modules"),
    same(f"{_M}.lora.rank", "model.lora_rank", convert="megatron_lora", why="Megatron's adapters"),
    same(f"{_M}.lora.alpha", "model.lora_alpha", convert="megatron_lora", why="Megatron's adapters"),
    same(f"{_M}.lora.target_modules", "model.target_modules", convert="megatron_modules", why="Megatron's adapters"),
    *needless("model.target_modules is for both models", "critic.model.target_modules"),
    *missing("every run starts new adapters", *_of("lora_adapter_path", "lora.adapter_path")),
    *missing("name the modules that have adapters, by model.target_modules", *_of("exclude_modules"), off=([],)),
    *missing("the critic's adapters are critic.lora_rank", "critic.model.lora.rank", off=(0,)),
    *missing(
        "adapters have no dropout; they start as zero changes",
        *(f"{_M}.lora.{name}" for name in ("type", "dropout", "dropout_position", "exclude_modules", "merge", "dtype")),
        *(f"{_M}.lora.lora_{name}_init_method" for name in "AB"),
        off=("lora", 0.0),
        only=f"{_M}.lora.rank",
    ),
    *needless("it is of verl's Megatron adapters", *_of("lora.*")),
    *missing(
        "dropout is not in jppo's decoder", *_of("override_config.*dropout", "override_config.*pdrop"), off=(0, 0.0)
    ),
    *needless(
        "model.attention chooses", *_of("override_config.attn_implementation", "override_config._attn_implementation")
    ),
    *missing(
        "the model is as its config.json describes it; edit that file",
        *_of("override_config*", "hf_config_path"),
        off=({},),
    ),
    *missing(
        "a model's own code is not run; the supported families need none",
        *_of("trust_remote_code", "external_lib"),
        "data.trust_remote_code",
    ),
    *missing("edit chat_template in the model's tokenizer_config.json", *_of("custom_chat_template")),
    *missing("the tokenizer is in the directory of model.path; put it there", "critic.model.tokenizer_path"),
    *missing("actor.param_offload and model.remat save memory", *_of("enable_activation_offload")),
    *missing("there is no multi-token prediction", *_of("mtp.enable*"), f"{_R}.mtp*"),
    *needless("read only with mtp.enable", *_of("mtp.*")),
    *needless("model.remat is for both models", "critic.model.enable_gradient_checkpointing"),
    *needless(
        "packing does it: no row is padded to the longest, and rows are cut by tokens",
        *_of("use_remove_padding", "use_rmpad"),
    ),
    *needless(
        "XLA compiles every program; model.attention chooses its kernels",
        *_of("use_liger", "use_fused_kernels", "fused_kernel_options*"),
    ),
    *missing("actor.max_tokens_per_device and mesh.sequence bound an MLP's memory", *_of("tiled_mlp.enabled")),
    *needless("read only with tiled_mlp.enabled", *_of("tiled_mlp.*")),
    *needless("models are read once", *_of("use_shm")),
)

REF = (
    same(f"{_F}.model.path", "ref.path"),
    *needless(
        "passes without a gradient have micro-batches of actor.max_tokens_per_device, too",
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
    ),
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
    same(f"{_R}.max_concurrent_requests", "rollout.max_concurrent_requests", convert="off"),
    same(f"{_R}.prompt_length", "data.max_prompt_length", convert="as_is"),
    same(f"{_R}.response_length", "data.max_response_length", convert="as_is"),
    same(
        f"{_R}.free_cache_engine",
        "rollout.sleep_level",
        True,
        "sleep",
        "2: weights and cache leave the GPU while it learns",
    ),
    same(f"{_R}.engine_kwargs.vllm", "rollout.engine_args", convert="vllm_args", why="KEY=VALUE is --key VALUE"),
    same(f"{_R}.engine_kwargs.sglang", "rollout.engine_args", convert="sglang_args", why="KEY=VALUE is --key VALUE"),
    same(f"{_VAL}.temperature", "rollout.val_kwargs.temperature", 0.0),
    same(f"{_VAL}.top_p", "rollout.val_kwargs.top_p", 1.0, "unless_greedy"),
    same(f"{_VAL}.top_k", "rollout.val_kwargs.top_k", -1, "top_k_unless_greedy"),
    same(f"{_VAL}.n", "rollout.val_kwargs.n", 1),
    *needless("verl 0.9.1 tests by val_kwargs.temperature, whatever this says; 0 is greedy", f"{_VAL}.do_sample"),
    same(f"{_TURNS}.enable", "rollout.multi_turn.enable", False),
    same(
        f"{_R}.agent.default_agent_loop",
        "rollout.multi_turn.enable",
        convert="agent_loop",
        why="tool_agent is True, single_turn_agent leaves it",
    ),
    same(f"{_TURNS}.max_assistant_turns", "rollout.multi_turn.max_assistant_turns", convert="turns"),
    same(f"{_TURNS}.max_user_turns", "rollout.multi_turn.max_user_turns", convert="turns"),
    same(f"{_TURNS}.max_parallel_calls", "rollout.multi_turn.max_parallel_calls", convert="of_tools"),
    same(f"{_TURNS}.max_tool_response_length", "rollout.multi_turn.max_tool_response_length", convert="of_tools"),
    same(f"{_TURNS}.tool_response_truncate_side", "rollout.multi_turn.tool_response_truncate_side", convert="of_tools"),
    same(
        f"{_TURNS}.tool_config_path",
        "rollout.multi_turn.tool_config_path",
        convert="in_turns",
        why="jppo's YAML has the same form; its class_name is a tool of jppo or PATH.py:CLASS",
    ),
    same(f"{_TURNS}.format", "rollout.multi_turn.format", convert="call_format"),
    *missing("rollout.multi_turn.interaction=PATH.py:CLASS is a simulated user", f"{_TURNS}.interaction_config_path"),
    *missing(
        "rollout.multi_turn.enable makes conversations; there is no other loop",
        f"{_R}.agent.agent_loop_config_path",
        f"{_R}.agent.custom_async_server.*",
    ),
    *needless(
        "conversations are of token ids, never encoded again",
        f"{_TURNS}.use_inference_chat_template",
        f"{_TURNS}.tokenization_sanity_check_mode",
    ),
    *missing("rollout.n is the number of samples", f"{_TURNS}.num_repeat_rollouts", off=(1,)),
    *missing("a greedy rollout has nothing to learn from; leave it at True", f"{_R}.do_sample", off=(True,)),
    *needless(
        "it is how verl calls an engine; jppo's rollout.mode is whether samples may be older than the policy",
        f"{_R}.mode",
    ),
    *needless("rollout and trainer log-probs are always compared", f"{_R}.calculate_log_probs"),
    *needless(
        _ENGINE,
        f"{_R}.max_num_batched_tokens",
        f"{_R}.enable_prefix_caching",
        f"{_R}.cudagraph_capture_sizes",
        f"{_R}.scheduling_policy",
        f"{_R}.skip_tokenizer_init",
        f"{_R}.disable_cascade_attn",
    ),
    *needless("jppo sets it for the server's platform", f"{_R}.enable_chunked_prefill", f"{_R}.multi_stage_wake_up"),
    *needless("the servers log no statistics; tokens/s are metrics", f"{_R}.disable_log_stats"),
    *missing("samples are of the policy, at rollout.temperature in every token", f"{_R}.use_fire_sampling"),
    *needless(
        "servers get whole weights, checked, after every step",
        f"{_R}.load_format",
        f"{_R}.layered_summon",
        f"{_R}.checkpoint_engine.*",
        f"{_R}.update_weights_bucket_megabytes",
    ),
    *needless("it follows from data.max_prompt_length and data.max_response_length", f"{_R}.max_model_len"),
    *needless("trainer.seed is the seed of everything", f"{_R}.seed"),
    *missing("rollout.name=inprocess samples the same tokens in every run", f"{_R}.full_determinism"),
    *missing(
        "the compared log-probs are of the sampled distribution", f"{_R}.logprobs_mode", off=("processed_logprobs",)
    ),
    *needless("every conversation has a thread", f"{_R}.agent.num_workers"),
    *missing("the engines are vllm, sglang and inprocess", f"{_R}.engine_kwargs.*", off=({},)),
    *missing(
        "rollout.servers and rollout.tensor_model_parallel_size lay out an engine",
        f"{_R}.data_parallel_size",
        f"{_R}.expert_parallel_size",
        f"{_R}.pipeline_model_parallel_size",
        off=(1,),
    ),
    *missing("rollout.devices gives servers their own GPUs", f"{_R}.nnodes", off=(0,)),
    *missing("rollout.devices gives servers their own GPUs", f"{_R}.n_gpus_per_node", only=f"{_R}.nnodes"),
    *missing("one server does prefill and decoding", f"{_R}.disaggregation.*", only=f"{_R}.disaggregation.enabled"),
    *missing("the rollout has the trainer's weights, not quantized ones", f"{_R}.quantization*"),
    *missing("training is not quantized", f"{_R}.qat*"),
    *missing("the run folder has samples and turns", f"{_R}.trace.*", only=f"{_R}.trace.backend"),
    *missing("metrics go to trainer.logger", f"{_R}.prometheus.*", only=f"{_R}.prometheus.enable"),
    *missing(
        "a step waits for all of its samples; rollout.partial continues long ones later",
        f"{_R}.over_sample_rate",
        off=(0,),
    ),
    *missing("mixtures of experts are not in jppo", f"{_R}.enable_rollout_routing_replay", f"{_R}.moe_*", off=(0,)),
    *missing("every run samples anew", f"{_R}.skip_*"),
    *missing("jppo balances the servers itself", f"{_R}.router_config_path"),
)
