"""verl's settings of reward and trainer, and all others."""

from jppo.verl.name import missing, needless, same

_RM, _KW = "reward.reward_model", "reward.reward_kwargs.overlong_buffer_cfg"
_BOX = "reward.sandbox_fusion"

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
    *needless(
        "reward.model.max_length is the longest text",
        *(f"{_RM}.rollout.{name}" for name in ("prompt_length", "response_length", "max_model_len")),
    ),
    *needless(
        "a classifier samples nothing; reward.judge.* is a model that does",
        *(f"{_RM}.rollout.{name}" for name in ("temperature", "top_k", "top_p", "do_sample", "n", "ignore_eos")),
    ),
    *needless("reward.model.engine runs it, as reward.model.* says", f"{_RM}.*"),
    *needless(
        "reward.weights adds up the parts of a reward; reward.function makes one",
        "reward.reward_manager.source",
        "reward.reward_loop*",
    ),
    *missing(
        "reward.weights adds up the parts of a reward; reward.function makes one",
        "reward.reward_manager.name",
        off=("naive", "batch", "prime", "dapo"),
    ),
    *missing("reward.function is a custom reward", "reward.reward_manager.module.*", off=("custom_reward_manager",)),
    same(f"{_KW}.len", "reward.overlong_buffer_tokens", convert="overlong"),
    *needless("without it nothing is subtracted", f"{_KW}.enable"),
    *needless("it is the weight of length_score, in reward.weights", f"{_KW}.penalty_factor"),
    *needless("reward/length_score/mean is always logged", f"{_KW}.log"),
    *needless("it is data.max_response_length", "reward.reward_kwargs.max_resp_len"),
    same(f"{_BOX}.url", "reward.sandbox_url", convert="sandbox_url", why="with reward.sandbox=container"),
    *missing(
        "reward.workers and reward.memory_bytes limit the grading", f"{_BOX}.*", off=(64, 1024), only=f"{_BOX}.url"
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
    *needless("trainer.max_ckpt_to_keep removes older checkpoints", "trainer.remove_previous_ckpt_in_save"),
    *missing("the reference is frozen", "trainer.ref_update_freq", off=(-1,)),
    *needless("policy and critic are one checkpoint", "trainer.max_critic_ckpt_to_keep"),
    same("trainer.nnodes", "trainer.nnodes", 1, why="the command is started on each of them"),
    same("trainer.node_rank", "trainer.node_rank", convert="of_hosts", why="launchers' scripts have it, verl does not"),
    same("trainer.master_addr", "trainer.coordinator_address", convert="master", why="with trainer.master_port"),
    *needless("it is part of trainer.coordinator_address", "trainer.master_port"),
    same(
        "trainer.n_gpus_per_node",
        "rollout.servers",
        8,
        "servers",
        "over rollout.tensor_model_parallel_size; the trainer takes all",
    ),
    same("trainer.v1.trainer_mode", "rollout.mode", "sync", "trainer_mode"),
    *needless(
        "rollout.max_staleness and rollout.on_update set it, with rollout.mode=async",
        "trainer.v1.colocate_async.*",
        "trainer.v1.separate_async.*",
        "trainer.v1.sampler.max_off_policy_*",
    ),
    *missing("prompts come in the order of data.shuffle", "trainer.v1.sampler.*", off=({},)),
    *needless("it has no settings", "trainer.v1.sync"),
    *needless("packing balances the devices", "trainer.balance_batch"),
    *needless("samples are in the run folder", "trainer.rollout_data_dir", "trainer.validation_data_dir"),
    *needless("JAX takes the available devices", "trainer.device"),
    *needless("there is one trainer", "trainer.use_v1", "trainer.use_legacy_worker_impl"),
    *missing("after SIGTERM a run saves a checkpoint and ends", "trainer.esi_redundant_time", off=(0,)),
    *needless(
        "it is of verl's processes",
        "ray_kwargs.*",
        "ray_init.*",
        "trainer.ray_wait_register_center_timeout",
        "transfer_queue.*",
        "hydra.*",
        "actor_rollout_ref.hybrid_engine",
        "actor_rollout_ref.nccl_timeout",
    ),
    *needless("there is one engine", "model_engine"),
    *needless("a checkpoint stays where it is", "trainer.del_local_ckpt_after_load"),
    *missing(
        "name a folder that all hosts see, by trainer.run_dir",
        "trainer.default_hdfs_dir",
        "trainer.remote_dir",
        "trainer.checkpoint_callback_class",
    ),
    *missing("there is no teacher; the policy learns from rewards", "distillation.enabled"),
    *missing("there is no teacher; the policy learns from rewards", "distillation.*", only="distillation.enabled"),
    *missing("every run samples anew", "skip.rollout.*", only="skip.rollout.enable"),
    *missing("every run samples anew", "skip.rollout_tq.*", only="skip.rollout_tq.enable"),
    *missing("every run samples anew", "skip.async_rollout.*", only="skip.async_rollout.enable"),
)
