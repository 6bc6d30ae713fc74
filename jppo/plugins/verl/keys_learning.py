"""verl's settings of data, algorithm, actor and critic, their optimizers, training engines and profilers."""

from jppo.plugins.verl.name import KeyRow, alike, missing, needless, same, within

_PACKED = "packing does it: no row is padded to the longest, and rows are cut by tokens"
_OTHERS = "it is of another engine of verl; jppo has one"
_MOMENTS = "actor.moments_dtype and critic.moments_dtype set the optimizer's precision"
_FUSED = "transformer_engine.pytorch.optimizers.fused_adam"
_PROFILER = "trainer.profile_steps writes traces of JAX's profiler"
_ONE_MESH = "one mesh shards everything"
_GDPO = "algorithm.adv_estimator=gdpo"
_NO_REPLAY = "the policy alone replays experts, and those of the rollout engine"

DATA = (
    *needless("it is a class of verl's", "*._target_"),
    same("data.train_files", "data.train_files", convert="commas"),
    same("data.val_files", "data.val_files", convert="commas"),
    same("data.train_batch_size", "data.train_batch_size", 1024, "batch", "prompts between two publishes"),
    same("data.val_batch_size", "data.val_batch_size", convert="off"),
    same("data.val_max_samples", "data.val_max_samples", convert="off"),
    *alike("data", "data", max_prompt_length=512, max_response_length=512, filter_overlong_prompts=False, shuffle=True,
      prompt_key=None, reward_fn_key=None),
    same("data.truncation", "data.truncation", "error", "cut_prompts"),
    same("data.seed", "trainer.seed", why="jppo has one seed for everything"),
    same("data.train_max_samples", "data.train_max_samples", convert="off", why="the first rows; verl samples them"),
    same("data.apply_chat_template_kwargs", "data.apply_chat_template_kwargs", convert="arguments"),
    *missing("verl's is a torch Dataset; data.custom_cls=PATH.py:CLASS names a class that yields rows",
      "data.custom_cls.*"),
    same("data.gen_batch_size", "data.gen_batch_size", convert="gen_batch",
      why="with algorithm.filter_groups.enable; else the step's prompts in verl's older trainers"),
    *missing("the tokenizer is in the directory of model.path; put it there", "data.tokenizer M.tokenizer_path"),
    *missing("verl's is a torch Sampler; data.sampler=PATH.py:NAME is a function with the order of an epoch, or a class"
      " with batch and update",
      "data.sampler.* data.curriculum*"),
    *missing("tests read the prompts in the order of the files", "data.validation_shuffle"),
    *missing("name them by rollout.multi_turn.tool_config_path, a Python file with tools()",
      "data.function_tool_path TURNS.function_tool_path"),
    *needless("a prompt always has its messages and its tokens",
      "data.return_raw_chat data.return_raw_input_ids data.return_full_prompt"),
    *needless("data are read and tokenised once, before the first step",
      "data.dataloader_num_workers data.filter_overlong_prompts_workers data.use_shm"),
    *needless("verl does not read it", "data.min_response_length M.torch_dtype"),
    *needless("jppo's models read text",
      "data.image_key data.video_key data.audio_key data.image_patch_size data.mm_processor_kwargs*"
      " data.return_multi_modal_inputs A.freeze_vision_tower R.limit_images"),
    *needless("it is of verl's asynchronous trainers",
      "async_training.concurrent* async_training.dynamic* async_training.checkpoint_engine.*"
      " async_training.use_trainer_do_validate async_training.use_rollout_log_probs A.use_rollout_log_probs"),
    *needless("rollout.mode, rollout.max_staleness and rollout.on_update follow from it",
      "async_training.staleness_threshold async_training.trigger_parameter_sync_step async_training.require_batches"
      " async_training.partial_rollout async_training.compute_prox_log_prob"),
    *needless("the devices that sample follow from it: rollout.servers and rollout.devices",
      "rollout.nnodes rollout.n_gpus_per_node"),
    *needless("trainer.total_training_steps follows from it", "rollout.total_rollout_steps"),
    *missing("trainer and servers keep their devices", "async_training.use_dynamic_resource_scheduling"),
    *needless("tools are named by rollout.multi_turn.tool_config_path", "data.tool_config_path"),
)  # fmt: skip

TUNING = (  # of fine-tuning: its data.*
    *needless("data.max_prompt_length and data.max_response_length are a half each", "tuning.max_length"),
    *needless("jppo.sft tests nothing", "tuning.val_files tuning.val_max_samples tuning.test_freq"),
    *needless("rows are packed", "tuning.pad_mode tuning.balance_dp_token"),
    *needless("data are read once", "tuning.num_workers tuning.use_shm"),
    *needless("verl's trainers read micro_batch_size_per_gpu", "tuning.micro_batch_size"),
    *needless("data.messages_key or data.prompt_key follows from it", "tuning.multiturn.enable"),
    same("tuning.messages_key", "data.messages_key"),
    same("tuning.multiturn.messages_key", "data.messages_key", convert="as_is", only="tuning.multiturn.enable"),
    same("tuning.prompt_key", "data.prompt_key", convert="prompt_column",
      why="COLUMN.ENTRY with prompt_dict_keys"),
    same("tuning.response_key", "data.response_key", convert="response_column",
      why="COLUMN.ENTRY with response_dict_keys"),
    *needless("it is part of data.prompt_key or data.response_key",
      "tuning.prompt_dict_keys tuning.response_dict_keys"),
    *needless("the chat template renders tools of a row", "tuning.tools_key tuning.multiturn.tools_key"),
    *missing("the chat template decides", "tuning.enable_thinking* tuning.multiturn.enable_thinking*",
      off=("none", "enable_thinking")),
    *needless("the whole conversation is rendered at once", "tuning.ignore_input_ids_mismatch"),
    *missing("longer demonstrations are left out, not cut", "tuning.truncation", off=("error",)),
    *missing("name a class by data.custom_cls=PATH.py:CLASS", "tuning.custom_cls.*"),
    *missing("it is no setting of jppo.sft", "tuning.*", off=({}, -1)),
)  # fmt: skip

ALGORITHM = (
    same("algorithm.adv_estimator", "algorithm.adv_estimator", "gae", "adv_estimator"),
    *alike("algorithm", "algorithm", gamma=1.0, lam=1.0, norm_adv_by_std_in_grpo=True, use_kl_in_reward=False,
      kl_penalty="kl"),
    same("algorithm.lam_critic", "critic.lam", why="of verl's SAO branch"),
    same("algorithm.length_adaptive_lam_alpha", "algorithm.lam_alpha", why="of verl's SAO branch"),
    *missing("advantages of gae are always whitened", "algorithm.gae_whiten_advantages", off=(True,)),
    same("algorithm.gdpo_reward_keys", "algorithm.gdpo_reward_keys", convert="reward_parts", only=_GDPO,
      why="KEY of a reward function's dict is function_score/KEY, of a rule rule_score/KEY"),
    same("algorithm.gdpo_reward_weights", "algorithm.gdpo_reward_weights", convert="commas", only=_GDPO),
    same("algorithm.rollout_correction", "algorithm.rollout_correction",
      why="a preset of RolloutCorrectionConfig by its name, which verl itself has only in Python"),
    same("algorithm.kl_ctrl.kl_coef", "algorithm.kl_coef", 0.001),
    same("algorithm.kl_ctrl.type", "algorithm.kl_ctrl_type", "fixed", "controller"),
    same("algorithm.kl_ctrl.horizon", "algorithm.horizon", 10000),
    same("algorithm.kl_ctrl.target_kl", "algorithm.target_kl", 0.1),
    same("CORRECTION.rollout_is", "algorithm.rollout_is", "none", "rollout_is"),
    same("CORRECTION.rollout_is_threshold", "algorithm.rollout_is_threshold", "2.0", "with_weights"),
    same("CORRECTION.rollout_is_batch_normalize", "algorithm.rollout_is_batch_normalize", False, "batch_normalize"),
    same("CORRECTION.rollout_rs", "algorithm.rollout_rs", "", "rejection"),
    same("CORRECTION.rollout_rs_threshold", "algorithm.rollout_rs_threshold", "", "rejected",
      "token, sequence and geometric of older verl are token_k1, seq_sum_k1 and seq_mean_k1"),
    *needless("it is the LOW of rollout_rs_threshold's LOW_HIGH, of verl's older rules",
      "CORRECTION.rollout_rs_threshold_lower"),
    *missing("rejection rules have one threshold, or a band LOW_HIGH", "CORRECTION.rollout_token_veto_threshold"),
    same("CORRECTION.bypass_mode", "algorithm.old_logprob", False, "old_logprob"),
    *needless("with bypass_mode, reinforce is actor.loss_mode=gpg", "CORRECTION.loss_type"),
    same("algorithm.filter_groups.enable", "algorithm.filter_groups", False, "filter_groups"),
    same("algorithm.filter_groups.metric", "algorithm.filter_groups_metric", convert="filter_metric",
      why="reward is score; acc and score are rule_score, or of the custom function"),
    same("algorithm.filter_groups.max_num_gen_batches", "algorithm.max_num_gen_batches", 0, "filtering",
      "at the bound the step has fewer prompts; verl's DAPO recipe ends, verl 0.9.1 ignores it"),
    *needless("gen batches follow one another, each of data.gen_batch_size prompts",
      "algorithm.filter_groups.max_inflight_gen_batches"),
    *missing("prompts are not weighted by their scores", "algorithm.use_pf_ppo algorithm.pf_ppo.*",
      only="algorithm.use_pf_ppo"),
    *missing("give the names of verl 0.9.1, algorithm.rollout_correction.*", "algorithm.rollout_is*",
      only="algorithm.rollout_is_threshold"),
)  # fmt: skip

ACTOR = (
    same("A.ppo_mini_batch_size", "actor.ppo_mini_batch_size", 256, "minis",
      "verl counts prompts, jppo responses: times rollout.n, at most a whole batch"),
    same("A.ppo_max_token_len_per_gpu", "actor.max_tokens_per_device", 16384, "dynamic_tokens",
      "with use_dynamic_bsz; else the micro-batch in tokens of the longest prompt and response"),
    same("A.ppo_micro_batch_size_per_gpu", "actor.max_tokens_per_device", convert="micro_tokens",
      why="sequences, times the longest prompt and response, over mesh.sequence"),
    same("A.ppo_micro_batch_size", "actor.max_tokens_per_device", convert="all_micro_tokens",
      why="the same, of all GPUs together"),
    *alike("A", "actor", ppo_epochs=1, shuffle=False, clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=3.0,
      tau_pos=1.0, tau_neg=1.05, loss_agg_mode="token-mean", loss_scale_factor=None, entropy_coeff=0.0,
      use_kl_loss=False, kl_loss_coef=0.001, kl_loss_type="low_var_kl"),
    same("A.use_prefix_grouper", "data.packing", convert="shared_prompts", why="True is prefix, with rollout.n above 1",
      only="R.n!=1"),
    same("A.clip_ratio", "actor.clip_ratio", 0.2,
      why="verl reads clip_ratio_low and clip_ratio_high, 0.2 each unless they are given"),
    same("A.policy_loss.loss_mode", "actor.loss_mode", "vanilla", "loss_mode",
      "bypass_mode is vanilla, or gpg with loss_type=reinforce"),
    *(same(f"A.policy_loss.{name}", f"actor.{name}", only="A.policy_loss.loss_mode=clip_cov")
      for name in ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub")),
    *(same(f"A.policy_loss.{name}", f"actor.{name}", only="A.policy_loss.loss_mode=kl_cov")
      for name in ("kl_cov_ratio", "ppo_kl_coef")),
    same("A.policy_loss.dro_beta", "actor.dro_beta", only="A.policy_loss.loss_mode=dro"),
    same("A.calculate_entropy", "actor.calculate_entropy", why="a metric; it is no part of the loss"),
    same("A.ulysses_sequence_parallel_size", "mesh.sequence", 1),
    same("A.checkpoint.save_contents", "trainer.save_contents", convert="contents", why="with model and extra"),
    *needless(_PACKED, "A.use_dynamic_bsz A.use_remove_padding A.pad_to_length*"),
    *needless(_ONE_MESH, "A.strategy"),
    *needless("XLA compiles every program", "A.use_torch_compile A.use_fused_kernels"),
    *needless("log-probs and entropy are computed chunk by chunk, by model.logprob_chunk_bytes",
      "A.entropy_from_logits_with_chunking A.entropy_from_logits_chunk_size A.entropy_checkpointing"),
    *needless("trainer.seed is the seed of everything",
      "A.data_loader_seed critic.data_loader_seed R.seed A.fsdp_config.seed REF.fsdp_config.seed critic.fsdp.seed"),
    *missing("a resume reads the whole checkpoint; model.path starts from a model alone", "A.checkpoint.load_contents",
      off=(["model", "optimizer", "extra"],)),
    *needless("a resume reads the whole checkpoint, and checks it", "A.checkpoint.strict"),
    *needless("checkpoints are written in the background", "A.checkpoint.async_save"),
    *needless("it is of verl's Megatron", "A.checkpoint.mbridge_config*"),
    *needless("it is rollout.n", "A.rollout_n critic.rollout_n"),
    *missing("set algorithm.rollout_correction.rollout_is=token and its threshold", "A.tis_imp_ratio_cap", off=(-1,)),
    same("A.use_token_level_loss", "actor.loss_agg_mode", convert="token_level", why="of verl's branch before 0.4"),
    *needless("the estimators that read it compute it", "A.calculate_sum_pi_squared"),
)  # fmt: skip

CRITIC = (
    same("critic.model.path", "critic.path", convert="critic_model"),
    same("critic.model.lora_rank", "critic.lora_rank", 0, "critic_lora"),
    same("critic.model.lora_alpha", "critic.lora_alpha", 16, "critic_lora"),
    same("critic.ppo_mini_batch_size", "critic.ppo_mini_batch_size", convert="minis",
      why="the same; else the actor's"),
    *alike("critic", "critic", ppo_epochs="=A.ppo_epochs", shuffle="=A.shuffle", loss_agg_mode=None,
      loss_scale_factor=None, cliprange_value=0.5),
    *(same(f"critic.{engine}.freeze_param_patterns", "critic.freeze", convert="frozen",
        why="of verl's SAO branch; parts of names and .* become patterns with *")
      for engine in ("fsdp", "veomni")),
    *missing("gae has a critic, the other estimators have none", "critic.enable", off=(True,)),
    *needless("the critic's micro-batches are the actor's, of actor.max_tokens_per_device",
      "critic.ppo_micro_batch_size* critic.ppo_max_token_len_per_gpu critic.forward_micro_batch_size*"
      " critic.forward_max_token_len_per_gpu critic.ppo_infer_* critic.use_dynamic_bsz"),
    *needless("verl until 0.7 clips by it with FSDP; newer ones and other engines by optim.clip_grad",
      "A.grad_clip critic.grad_clip"),
    *needless("the critic is on the actor's mesh", "critic.ulysses_sequence_parallel_size critic.strategy"),
    *needless("policy and critic are one checkpoint", "critic.checkpoint.*"),
)  # fmt: skip


def _optimizer(optim: str, section: str, lr: float) -> tuple[KeyRow, ...]:
    """Returns the rows of the actor's or critic's optimizer."""
    override, of_rate = f"{optim}.override_optimizer_config", f"of_{section}_lr"
    return (
      same(f"{optim}.lr", f"{section}.lr", lr),
      same(f"{optim}.clip_grad", f"{section}.grad_clip", 1.0, "clip"),
      same(f"{optim}.betas", f"{section}.betas", (0.9, 0.999), "pair"),
      same(f"{optim}.weight_decay", f"{section}.weight_decay", 0.01),
      same(f"{optim}.lr_warmup_steps", f"{section}.lr_warmup_steps", -1, "warmup_steps", "in steps of jppo"),
      same(f"{optim}.lr_warmup_steps_ratio", f"{section}.lr_warmup_steps_ratio", 0.0, f"{section}_warmup_ratio"),
      same(f"{optim}.lr_scheduler_type", f"{section}.lr_scheduler_type", "constant", "schedule",
        "cosine by default with VeOmni, linear with TorchTitan"),
      same(f"{optim}.min_lr_ratio", f"{section}.min_lr_ratio", 0.0, "or_zero"),
      same(f"{optim}.min_lr", f"{section}.min_lr_ratio", convert=of_rate, why="over the learning rate"),
      same(f"{optim}.optimizer", f"{section}.optimizer", convert="optimizer", why="AdamW, SGD and Muon, in lower case"),
      same(f"{optim}.init_lr_ratio", f"{section}.init_lr_ratio", convert="or_zero"),
      *(same(f"{optim}.{name}", f"{section}.init_lr_ratio", convert=of_rate, why="over the learning rate")
        for name in ("lr_warmup_init", "lr_start")),
      same(f"{optim}.exp_avg_dtype", f"{section}.moments_dtype", convert="dtype", why="both moments'"),
      *missing("optax has the optimizers; actor.moments_dtype=bfloat16 makes their state smaller",
        f"{optim}.optimizer_impl", off=("torch.optim", _FUSED)),
      *missing("cosine has half a period", f"{optim}.num_cycles", off=(0.5,)),
      *missing("a warm-up starts at 0 in step 1", f"{optim}.zero_indexed_step", off=(True,)),
      *missing("the schedule ends with the run", within(optim, "lr_decay_steps lr_decay_ratio"), off=(1.0,),
        only=f"{optim}.lr_scheduler_type!=constant"),
      *missing("the weight decay is constant", f"{optim}.weight_decay_incr_style", off=("constant",)),
      *missing(_MOMENTS, within(optim, "use_precision_aware_optimizer main_grads_dtype"), off=("fp32",)),
      *missing("eps is optax's default", f"{optim}.eps", off=(1e-8,)),
      *needless("it is trainer.total_training_steps, in verl too", f"{optim}.total_training_steps"),
      *needless("it is of a schedule that jppo does not have", f"{optim}.lr_wsd_decay_*"),
      *needless("a resume restores the schedule", f"{optim}.use_checkpoint_opt_param_scheduler"),
      *needless(f"{section}.master_dtype is the dtype of the weights that it steps",
        within(optim, "master_weights master_weight_dtype store_param_remainders")),
      *needless(f"{section}.moments_dtype is both moments'", f"{optim}.exp_avg_sq_dtype"),
      *needless(_ONE_MESH, f"{optim}.use_layer_wise_distributed_optimizer"),
      *needless(f"{section}.optimizer=muon has optax's defaults", f"{optim}.muon_*"),
      *needless("it is of verl's offload of the optimizer",
        within(override, "*offload* overlap_cpu_* use_precision_aware_optimizer")),
      *missing(f"set {section}.optimizer=PATH.py:NAME, a custom optax chain", f"{override}*", off=({},)),
    )  # fmt: skip


def _mesh_and_dtypes(model: str, fsdp: str, megatron: str) -> tuple[KeyRow, ...]:
    """Returns the rows of the engine's mesh and dtypes, which hold for all models."""
    transformer = f"{megatron}.override_transformer_config"
    return (
      same(f"{fsdp}.fsdp_size", "mesh.fsdp", -1, "fsdp"),
      same(f"{model}.torchtitan.data_parallel_shard_size", "mesh.fsdp", convert="titan"),
      same(f"{fsdp}.model_dtype", "model.param_dtype", "float32", "param_dtype"),
      same(f"{fsdp}.dtype", "model.compute_dtype", "bfloat16", "dtype"),
      same(f"{megatron}.tensor_model_parallel_size", "mesh.tensor", 1),
      same(f"{megatron}.expert_model_parallel_size", "mesh.expert", 1, "expert"),
      same(f"{transformer}.moe_aux_loss_coeff", "actor.router_aux_loss_coef", convert="balance"),
      same(f"{transformer}.moe_z_loss_coeff", "actor.router_z_loss_coef"),
      *needless("the devices of all stages share the parameters, by mesh.fsdp", within(megatron,
        "pipeline_model_parallel_size virtual_pipeline_model_parallel_size override_transformer_config.*pipeline*")),
      *needless("experts' widths follow mesh.tensor", f"{megatron}.expert_tensor_parallel_size"),
    )  # fmt: skip


_KERNELS = (  # of Megatron
    "*fusion *fused* *grouped_gemm* *dispatcher* *deepep* *overlap* *backend *flash* *softmax_in_fp32 *parallel*"
    " persist* use_naive* moe_router_dtype moe_router_load_balancing_type use_distributed_optimizer swiglu *padding*"
    " normalization multi_latent_attention bias_* deallocate* account* calculate_per_token_loss* moe_permute* use_te*"
)
_COMPILED = "wrap_policy.* reshard_after_forward forward_prefetch use_orig_params use_torch_compile forward_only"
_COMPILED += " use_no_sync_for_gradient_accumulation"


def _engine(model: str, section: str) -> tuple[KeyRow, ...]:
    """Returns the rows of the engines of the actor, the critic or the reference."""
    fsdp, megatron = "critic.fsdp" if section == "critic" else f"{model}.fsdp_config", f"{model}.megatron"
    transformer = f"{megatron}.override_transformer_config"
    replay = ("disabled", "R3") if section == "actor" else ("disabled",)  # R3 needs R.enable_rollout_routing_replay
    mesh = _mesh_and_dtypes(model, fsdp, megatron)
    if section != "actor":
        mesh = (
          *needless("all models share the actor's mesh", f"{fsdp}.fsdp_size {megatron}.*_parallel_size"),
          *needless("all models have the dtypes of model.*", within(fsdp, "model_dtype dtype")),
        )  # fmt: skip
    offloads = alike(fsdp, section, param_offload=False, optimizer_offload=False)
    if section == "ref":
        offloads = (
          same(f"{fsdp}.param_offload", "ref.param_offload", convert="ref_offload"),
          *needless("the reference has no optimizer", f"{fsdp}.optimizer_offload {model}.optim.*"),
        )  # fmt: skip
    return (
      *mesh,
      *offloads,
      *needless("gradients are not kept between steps", f"{fsdp}.grad_offload"),
      *needless("it is param_offload and optimizer_offload", f"{fsdp}.offload_policy"),
      *needless(_ONE_MESH, within(fsdp, "strategy ulysses_sequence_parallel_size")),
      *missing("on a GPU, set XLA_FLAGS=--xla_gpu_deterministic_ops=true", f"{fsdp}.full_determinism"),
      *needless("XLA compiles every program, and schedules its communication", within(fsdp, _COMPILED)),
      *needless("model.param_dtype and model.compute_dtype are the dtypes", f"{fsdp}.mixed_precision*"),
      *needless("model.logprob_chunk_bytes is the size of a chunk", f"{fsdp}.entropy_*"),
      *needless("packing does it: no row is padded to the longest", f"{fsdp}.pad_to_length*"),
      *(row for place in (fsdp, model, megatron)
        for row in missing("training is not quantized", f"{place}.qat.*", only=f"{place}.qat.enable")),
      *needless(_OTHERS, f"{fsdp}.turbo_config.* {model}.veomni* {model}.torchtitan* {model}.automodel*"),
      *needless("model.remat sets what is recomputed", f"{transformer}.recompute_*"),
      *needless("XLA chooses kernels and communication; the model is as its config.json describes it",
        within(transformer, _KERNELS)),
      *missing("the model is as its config.json describes it", f"{megatron}.override_*", off=({},)),
      *missing(_NO_REPLAY, f"{megatron}.router_replay.* {model}.router_replay.*", off=replay),
      *needless(_OTHERS, f"{megatron}.*"),
      *needless(_PROFILER, f"{model}.profiler.*"),
    )  # fmt: skip


TRAINING = (
    *_optimizer("A.optim", "actor", 1e-6),
    *_optimizer("critic.optim", "critic", 1e-5),
    *_engine("A", "actor"),
    *_engine("critic", "critic"),
    *_engine("REF", "ref"),
    *needless(_PROFILER, "R.profiler.*"),
    same("global_profiler.steps", "trainer.profile_steps", convert="commas", only="global_profiler.tool"),
    *needless(_PROFILER, "global_profiler.*"),
)
