"""verl's names of data, algorithm, actor and critic."""

from jppo.verl.name import missing, needless, same

_A, _M, _CORR = "actor_rollout_ref.actor", "actor_rollout_ref.model", "algorithm.rollout_correction"
_PACKED = "packing does it: no row is padded to the longest, and rows are cut by tokens"

DATA = (
    same("data.train_files", "data.train_files", convert="files"),
    same("data.val_files", "data.val_files", convert="files"),
    same("data.train_batch_size", "data.train_batch_size", 1024),
    same("data.val_batch_size", "data.val_batch_size", convert="off"),
    same("data.val_max_samples", "data.val_max_samples", convert="off"),
    same("data.max_prompt_length", "data.max_prompt_length", 512),
    same("data.max_response_length", "data.max_response_length", 512),
    same("data.filter_overlong_prompts", "data.filter_overlong_prompts", False),
    same("data.truncation", "data.truncation", "error"),
    same("data.shuffle", "data.shuffle", True),
    same("data.seed", "trainer.seed", convert="given", why="jppo has one seed, of everything that is drawn"),
    *missing(
        "jppo's column is prompt; rename it, or read the rows by data.custom_cls", "data.prompt_key", off=("prompt",)
    ),
    *missing("jppo's column is data_source; rename it", "data.reward_fn_key", off=("data_source",)),
    *missing("all rows are drawn from; cut the file", "data.train_max_samples", off=(-1,)),
    *missing(
        "verl's is a Dataset of torch; data.custom_cls=PATH.py:CLASS is one that yields rows", "data.custom_cls.*"
    ),
    *missing("every prompt that is drawn is learned from; set data.train_batch_size", "data.gen_batch_size"),
    *missing(
        "the template gets no arguments; change chat_template in the model's tokenizer_config.json",
        "data.apply_chat_template_kwargs*",
        off=({},),
    ),
    *missing(
        "the tokenizer is that of model.path; put it into that directory", "data.tokenizer", f"{_M}.tokenizer_path"
    ),
    *missing("curricula are not in jppo; data.mix weighs sources", "data.sampler.*", "data.curriculum*"),
    *needless(
        "a prompt is its messages and its tokens, always",
        "data.return_raw_chat",
        "data.return_raw_input_ids",
        "data.return_full_prompt",
        "data.return_multi_modal_inputs",
    ),
    *needless(
        "data are read and tokenised once, before the run",
        "data.dataloader_num_workers",
        "data.filter_overlong_prompts_workers",
        "data.use_shm",
        "data.validation_shuffle",
    ),
    *needless(
        "jppo's models read text",
        "data.image_key",
        "data.video_key",
        "data.audio_key",
        "data.image_patch_size",
        "data.mm_processor_kwargs*",
    ),
    *needless("tools are named by rollout.multi_turn.tool_config_path", "data.tool_config_path"),
)

ALGORITHM = (
    same("algorithm.adv_estimator", "algorithm.adv_estimator", "gae"),
    same("algorithm.gamma", "algorithm.gamma", 1.0),
    same("algorithm.lam", "algorithm.lam", 1.0),
    same("algorithm.norm_adv_by_std_in_grpo", "algorithm.norm_adv_by_std_in_grpo", True),
    same("algorithm.use_kl_in_reward", "algorithm.use_kl_in_reward", False),
    same("algorithm.kl_penalty", "algorithm.kl_penalty", "kl"),
    same("algorithm.kl_ctrl.kl_coef", "algorithm.kl_coef", 0.001),
    same("algorithm.kl_ctrl.type", "algorithm.kl_ctrl_type", "fixed", "controller"),
    same("algorithm.kl_ctrl.horizon", "algorithm.horizon", 10000),
    same("algorithm.kl_ctrl.target_kl", "algorithm.target_kl", 0.1),
    same(f"{_CORR}.rollout_is", "algorithm.rollout_is", "none", "or_none"),
    same(f"{_CORR}.rollout_is_threshold", "algorithm.rollout_is_threshold", "2.0", "text"),
    same(f"{_CORR}.rollout_is_batch_normalize", "algorithm.rollout_is_batch_normalize", False),
    same(f"{_CORR}.rollout_rs", "algorithm.rollout_rs", "", "text"),
    same(f"{_CORR}.rollout_rs_threshold", "algorithm.rollout_rs_threshold", "", "text"),
    same(f"{_CORR}.bypass_mode", "algorithm.old_logprob", False, "old_logprob"),
    *missing("bypass goes with every actor.loss_mode; leave it out", f"{_CORR}.loss_type", off=("ppo_clip",)),
    *missing(
        "rollouts are not drawn anew for groups of equal scores; under grpo these have no advantage",
        "algorithm.filter_groups.*",
        off=("acc", "seq_reward", "score", "seq_final_reward", "reward"),
    ),
    *missing("prompts are not weighed by their scores", "algorithm.use_pf_ppo", "algorithm.pf_ppo.*"),
    *missing("give the names of verl 0.9.1, algorithm.rollout_correction.*", "algorithm.rollout_is*"),
)

ACTOR = (
    same(f"{_A}.optim.lr", "actor.lr", 1e-6),
    same(f"{_A}.optim.clip_grad", "actor.grad_clip", 1.0),
    same(f"{_A}.optim.betas", "actor.betas", (0.9, 0.999), "pair"),
    same(f"{_A}.optim.weight_decay", "actor.weight_decay", 0.01),
    same(f"{_A}.optim.lr_warmup_steps", "actor.lr_warmup_steps", -1, "warmup_steps"),
    same(f"{_A}.optim.lr_warmup_steps_ratio", "actor.lr_warmup_steps_ratio", 0.0, "actor_warmup_ratio"),
    same(f"{_A}.optim.lr_scheduler_type", "actor.lr_scheduler_type", "constant"),
    same(f"{_A}.optim.min_lr_ratio", "actor.min_lr_ratio", 0.0, "or_zero"),
    same(
        f"{_A}.ppo_mini_batch_size",
        "actor.ppo_mini_batch_size",
        256,
        "times_n",
        "verl counts prompts, jppo responses: times rollout.n",
    ),
    same(
        f"{_A}.ppo_max_token_len_per_gpu",
        "actor.max_tokens_per_device",
        16384,
        "tokens",
        "with use_dynamic_bsz; else the micro-batch in tokens of the longest prompt and response",
    ),
    same(
        f"{_A}.ppo_micro_batch_size_per_gpu",
        "actor.max_tokens_per_device",
        convert="micro_tokens",
        why="sequences, times the longest prompt and response, over mesh.sequence",
    ),
    same(
        f"{_A}.ppo_micro_batch_size",
        "actor.max_tokens_per_device",
        convert="all_micro_tokens",
        why="the same, of all GPUs together",
    ),
    same(f"{_A}.ppo_epochs", "actor.ppo_epochs", 1),
    same(f"{_A}.shuffle", "actor.shuffle", False),
    same(
        f"{_A}.use_prefix_grouper",
        "data.packing",
        convert="shared_prompts",
        why="True is prefix, where rollout.n is above 1",
    ),
    same(
        f"{_A}.clip_ratio",
        "actor.clip_ratio",
        0.2,
        why="verl reads clip_ratio_low and clip_ratio_high, 0.2 each unless they are given",
    ),
    same(f"{_A}.clip_ratio_low", "actor.clip_ratio_low", 0.2, "clip_bound"),
    same(f"{_A}.clip_ratio_high", "actor.clip_ratio_high", 0.2, "clip_bound"),
    same(f"{_A}.clip_ratio_c", "actor.clip_ratio_c", 3.0),
    same(f"{_A}.policy_loss.loss_mode", "actor.loss_mode", "vanilla"),
    same(f"{_A}.tau_pos", "actor.tau_pos", 1.0),
    same(f"{_A}.tau_neg", "actor.tau_neg", 1.05),
    same(f"{_A}.loss_agg_mode", "actor.loss_agg_mode", "token-mean"),
    same(f"{_A}.loss_scale_factor", "actor.loss_scale_factor", convert="given"),
    same(f"{_A}.entropy_coeff", "actor.entropy_coeff", 0.0),
    same(f"{_A}.calculate_entropy", "actor.calculate_entropy", why="a metric; it is no part of the loss"),
    same(f"{_A}.use_kl_loss", "actor.use_kl_loss", False),
    same(f"{_A}.kl_loss_coef", "actor.kl_loss_coef", 0.001),
    same(f"{_A}.kl_loss_type", "actor.kl_loss_type", "low_var_kl"),
    same(f"{_A}.ulysses_sequence_parallel_size", "mesh.sequence", 1),
    same(
        f"{_A}.fsdp_config.fsdp_size", "mesh.fsdp", -1, why="-1 is all devices; else mesh.data has those that are left"
    ),
    same(f"{_A}.fsdp_config.param_offload", "actor.param_offload", False),
    same(f"{_A}.fsdp_config.optimizer_offload", "actor.optimizer_offload", False),
    same(f"{_A}.fsdp_config.model_dtype", "model.param_dtype", "float32", "dtype"),
    same(f"{_A}.fsdp_config.dtype", "model.compute_dtype", "bfloat16", "dtype"),
    same(f"{_A}.megatron.tensor_model_parallel_size", "mesh.tensor", 1),
    same(f"{_A}.checkpoint.save_contents", "trainer.save_contents", convert="commas"),
    *needless(_PACKED, f"{_A}.use_dynamic_bsz", f"{_A}.use_remove_padding", f"{_A}.pad_to_length*"),
    *needless("the one mesh shards everything", f"{_A}.strategy", f"{_A}.fsdp_config.strategy"),
    *needless(
        "the compiler's work, or JAX's",
        f"{_A}.use_torch_compile",
        f"{_A}.fsdp_config.use_torch_compile",
        f"{_A}.fsdp_config.wrap_policy.*",
        f"{_A}.fsdp_config.reshard_after_forward",
        f"{_A}.fsdp_config.forward_prefetch",
        f"{_A}.fsdp_config.use_orig_params",
        f"{_A}.fsdp_config.use_no_sync_for_gradient_accumulation",
        f"{_A}.fsdp_config.full_determinism",
        f"{_A}.fsdp_config.forward_only",
        f"{_A}.use_fused_kernels",
        f"{_A}.optim.optimizer_impl",
        f"{_A}.optim.zero_indexed_step",
        f"{_A}.optim.total_training_steps",
    ),
    *needless("gradients are never kept between the steps", f"{_A}.fsdp_config.grad_offload"),
    *needless(
        "log-probs and entropy are computed chunk by chunk, by model.logprob_chunk_bytes",
        f"{_A}.entropy_from_logits_with_chunking",
        f"{_A}.entropy_from_logits_chunk_size",
        f"{_A}.entropy_checkpointing",
        f"{_A}.fsdp_config.entropy_*",
    ),
    *needless("trainer.seed is the seed of all", f"{_A}.data_loader_seed", f"{_A}.fsdp_config.seed"),
    *needless(
        "a run that goes on reads all of its checkpoint", f"{_A}.checkpoint.load_contents", f"{_A}.checkpoint.strict"
    ),
    *needless("checkpoints are written while the run goes on", f"{_A}.checkpoint.async_save"),
    *needless("jppo's models read text", f"{_A}.freeze_vision_tower"),
    *needless("it is rollout.n", f"{_A}.rollout_n"),
    *missing(
        "set actor.optimizer, critic.optimizer", f"{_A}.optim.optimizer", "critic.optim.optimizer", off=("AdamW",)
    ),
    *missing("cosine has half a period", f"{_A}.optim.num_cycles", "critic.optim.num_cycles", off=(0.5,)),
    *missing("set actor.optimizer=path.py:name, a user-defined optax chain", f"{_A}.optim.override_optimizer_config*"),
    *missing("set actor.param_offload and actor.optimizer_offload", f"{_A}.fsdp_config.offload_policy"),
    *missing("of losses that jppo has not", f"{_A}.policy_loss.*", off=(0.0002, 1.0, 5.0, 0.1)),
    *missing(
        "set algorithm.rollout_correction.rollout_is=token and its threshold", f"{_A}.tis_imp_ratio_cap", off=(-1,)
    ),
    *missing("set loss_agg_mode; True is token-mean", f"{_A}.use_token_level_loss", off=(True,)),
    *missing("nothing is quantised in training", f"{_A}.qat*", f"{_A}.fsdp_config.qat*"),
    *missing("not a metric of jppo's", f"{_A}.calculate_sum_pi_squared"),
    *missing(
        "there is no pipeline and no expert axis; mesh.tensor and mesh.fsdp share a model out", f"{_A}.megatron.*"
    ),
    *missing("trainer.profile_steps writes traces of JAX's profiler", f"{_A}.profiler.*"),
    *missing("of an engine that jppo is not", f"{_A}.fsdp_config.*", f"{_A}.veomni*", f"{_A}.torchtitan*"),
)

CRITIC = (
    same("critic.model.path", "critic.path", convert="critic_path"),
    same("critic.model.lora_rank", "critic.lora_rank", 0, "critic_lora"),
    same("critic.model.lora_alpha", "critic.lora_alpha", 16, "critic_lora"),
    same("critic.optim.lr", "critic.lr", 1e-5),
    same("critic.optim.clip_grad", "critic.grad_clip", 1.0),
    same("critic.optim.betas", "critic.betas", (0.9, 0.999), "pair"),
    same("critic.optim.weight_decay", "critic.weight_decay", 0.01),
    same("critic.optim.lr_warmup_steps", "critic.lr_warmup_steps", -1, "warmup_steps"),
    same("critic.optim.lr_warmup_steps_ratio", "critic.lr_warmup_steps_ratio", 0.0, "critic_warmup_ratio"),
    same("critic.optim.lr_scheduler_type", "critic.lr_scheduler_type", "constant"),
    same("critic.optim.min_lr_ratio", "critic.min_lr_ratio", 0.0, "or_zero"),
    same(
        "critic.ppo_mini_batch_size", "critic.ppo_mini_batch_size", convert="times_n", why="the same; else the actor's"
    ),
    same("critic.ppo_epochs", "critic.ppo_epochs", f"={_A}.ppo_epochs"),
    same("critic.shuffle", "critic.shuffle", f"={_A}.shuffle"),
    same("critic.loss_agg_mode", "critic.loss_agg_mode", convert="given"),
    same("critic.loss_scale_factor", "critic.loss_scale_factor", convert="given"),
    same("critic.cliprange_value", "critic.cliprange_value", 0.5),
    same("critic.fsdp.param_offload", "critic.param_offload", False),
    same("critic.fsdp.optimizer_offload", "critic.optimizer_offload", False),
    *missing("gae alone has a critic, the other estimators none", "critic.enable", off=(True,)),
    *needless(
        "the critic's rows are the actor's, cut by actor.max_tokens_per_device",
        "critic.ppo_micro_batch_size*",
        "critic.ppo_max_token_len_per_gpu",
        "critic.forward_micro_batch_size*",
        "critic.forward_max_token_len_per_gpu",
        "critic.ppo_infer_*",
        "critic.use_dynamic_bsz",
    ),
    *needless(
        "one mesh, which is the actor's, is laid out for all models",
        "critic.ulysses_sequence_parallel_size",
        "critic.strategy",
    ),
    *needless("model.remat is of both models", "critic.model.enable_gradient_checkpointing"),
    *needless("model.* is of both models", "critic.model.*"),
    *needless("the actor's, or none, for both models", "critic.fsdp.*", "critic.checkpoint.*", "critic.megatron.*"),
    *needless("the critic is trained as the actor is", "critic.data_loader_seed", "critic.rollout_n", "critic.optim.*"),
    *missing("trainer.profile_steps writes traces of JAX's profiler", "critic.profiler.*"),
)
