"""Names that TRL, OpenRLHF and Hugging Face's trainers have for jppo's settings, for errors about unknown names."""

from collections.abc import Collection, Iterable

from jppo.registry import did_you_mean

# By jppo's setting: the others' names. A name may stand at a setting of PPO and at one of the other commands.
_OTHERS = {
    "model.path": "model model_name model_name_or_path pretrain policy_model actor_model",
    "model.compute_dtype": "bf16 fp16 torch_dtype mixed_precision precision",
    "model.remat": "gradient_checkpointing",
    "model.lora_rank": "lora_r",
    "data.train_files": "data dataset dataset_name train_dataset train_data prompt_data train_file",
    "data.val_files": "eval_dataset val_data eval_data test_data",
    "data.prompt_key": "input_key",
    "data.train_batch_size": "batch_size rollout_batch_size generation_batch_size",
    "data.max_prompt_length": "prompt_max_len",
    "data.max_response_length": "max_completion_length response_length generate_max_len max_new_tokens max_tokens",
    "algorithm.adv_estimator": "advantage_estimator estimator algo",
    "algorithm.lam": "lambd gae_lambda",
    "algorithm.kl_coef": "init_kl_coef init_kl kl_penalty_coef",
    "algorithm.norm_adv_by_std_in_grpo": "scale_rewards",
    "algorithm.filter_groups": "dynamic_filtering",
    "actor.lr": "learning_rate lr actor_learning_rate actor_lr",
    "actor.ppo_mini_batch_size": "mini_batch_size minibatch_size num_mini_batches",
    "actor.max_tokens_per_device": "per_device_train_batch_size micro_batch_size micro_train_batch_size"
    " gradient_accumulation_steps",
    "actor.ppo_epochs": "num_ppo_epochs num_iterations max_epochs",
    "actor.clip_ratio": "epsilon cliprange clip_range eps_clip",
    "actor.clip_ratio_high": "epsilon_high eps_clip_high",
    "actor.kl_loss_coef": "beta",
    "actor.grad_clip": "max_grad_norm max_norm",
    "actor.lr_warmup_steps": "warmup_steps",
    "actor.lr_warmup_steps_ratio": "warmup_ratio lr_warmup_ratio",
    "actor.betas": "adam_beta1 adam_beta2 adam_betas",
    "actor.entropy_coeff": "entropy_coef ent_coef entropy_loss_coef",
    "critic.lr": "critic_learning_rate critic_lr value_lr",
    "critic.cliprange_value": "value_clip clip_range_vf",
    "rollout.n": "num_generations n_samples_per_prompt num_samples group_size",
    "rollout.name": "use_vllm",
    "rollout.servers": "vllm_num_engines",
    "rollout.gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "rollout.tensor_model_parallel_size": "vllm_tensor_parallel_size tensor_parallel_size",
    "rollout.sleep_level": "vllm_enable_sleep colocate_all_models",
    "reward.function": "reward_funcs reward_function reward_fn remote_rm_url",
    "reward.model.path": "reward_pretrain reward_model reward_model_path",
    "mesh.fsdp": "zero_stage fsdp",
    "trainer.run_dir": "output_dir save_path ckpt_path out_dir",
    "trainer.total_epochs": "num_epochs epochs num_train_epochs num_episodes n_epochs",
    "trainer.total_training_steps": "max_steps steps num_steps total_steps",
    "trainer.save_freq": "save_steps",
    "trainer.test_freq": "eval_steps",
    "trainer.max_ckpt_to_keep": "save_total_limit max_ckpt_num",
    "trainer.logger": "report_to use_wandb",
    "trainer.experiment_name": "run_name exp_name",
    "trainer.resume_mode": "resume_from_checkpoint load_checkpoint",
    "optim.lr": "learning_rate lr",
    "optim.grad_clip": "max_grad_norm max_norm",
    "optim.lr_warmup_steps": "warmup_steps",
    "optim.lr_warmup_steps_ratio": "warmup_ratio lr_warmup_ratio",
    "optim.max_tokens_per_device": "per_device_train_batch_size micro_batch_size gradient_accumulation_steps",
    "dpo.beta": "beta",
}
OTHER_NAMES: dict[str, list[str]] = {}
for _setting, _names in _OTHERS.items():
    for _name in _names.split():
        OTHER_NAMES.setdefault(_name, []).append(_setting)

OTHER_VALUES = {
    "algorithm.adv_estimator": {
        "ppo": "gae",
        "reinforce": "reinforce_plus_plus",
        "reinforce++": "reinforce_plus_plus",
        "group_norm": "grpo",
        "dr_grpo": "grpo",
    },
    "rollout.name": {"hf": "inprocess", "transformers": "inprocess"},
}


def settings_meant(name: str, known: Collection[str]) -> list[str]:
    """Returns the settings that a name of another library, or one without its section, means."""
    leaf = name.rpartition(".")[2]
    others = [setting for setting in OTHER_NAMES.get(leaf, []) if setting in known]
    same = [setting for setting in known if setting.rpartition(".")[2] == leaf]
    return others or [one for one in same if one.count(".") == min(other.count(".") for other in same)]


def no_setting(name: str, siblings: Iterable[str], known: Collection[str]) -> str:
    """Makes the error about an unknown name; `siblings` are the names at its place, `known` all settings."""
    siblings, meant = {*siblings} - {name}, settings_meant(name, known)
    beside = [setting.rpartition(".")[2] for setting in meant if setting.rpartition(".")[2] in siblings]
    if beside or not meant:
        near = f"; did you mean {beside[0]!r}?" if beside else did_you_mean(name, siblings)
    else:
        near = f"; did you mean {' or '.join(meant[:3])}?"
    return f"there is no setting {name!r}{near or '; python -m jppo.train --help lists them all'}"
