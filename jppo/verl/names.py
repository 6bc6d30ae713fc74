"""The table of verl's settings, with the defaults of verl 0.9.1. A `*` in a key matches anything.

`docs/verl.md` is this table. If several rows match a key, the first counts.
"""

import fnmatch

from jppo.verl.name import Name
from jppo.verl.of_engines import ENGINES
from jppo.verl.of_learning import ACTOR, ALGORITHM, CRITIC, DATA
from jppo.verl.of_running import MODEL, REF, ROLLOUT
from jppo.verl.of_service import REWARD, TRAINER

_A, _R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
TABLE: tuple[Name, ...] = (*DATA, *MODEL, *ACTOR, *CRITIC, *REF, *ENGINES, *ROLLOUT, *ALGORITHM, *REWARD, *TRAINER)

# Aliases: keys of older verl versions, or second keys of one setting; a prefix of a key is enough.
OLDER = {
    "actor_rollout_ref.actor.grad_clip": "actor_rollout_ref.actor.optim.clip_grad",
    "actor_rollout_ref.actor.optim.grad_clip": "actor_rollout_ref.actor.optim.clip_grad",
    **{
        f"{optim}.{old}": f"{optim}.{new}"
        for optim in (f"{_A}.optim", "critic.optim")
        for old, new in (
            ("warmup_style", "lr_scheduler_type"),
            ("lr_decay_style", "lr_scheduler_type"),
            ("warmup_steps", "lr_warmup_steps"),
            ("warmup_steps_ratio", "lr_warmup_steps_ratio"),
            ("min_lr_factor", "min_lr_ratio"),
            ("lr_min", "min_lr"),
            ("name", "optimizer"),
        )
    },
    "actor_rollout_ref.actor.entropy_coef": "actor_rollout_ref.actor.entropy_coeff",
    "actor_rollout_ref.actor.use_rmpad": "actor_rollout_ref.model.use_rmpad",
    f"{_A}.fsdp_config.ulysses_sequence_parallel_size": f"{_A}.ulysses_sequence_parallel_size",
    "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype": "actor_rollout_ref.actor.fsdp_config.dtype",
    "actor_rollout_ref.actor.megatron.context_parallel_size": "actor_rollout_ref.actor.ulysses_sequence_parallel_size",
    "actor_rollout_ref.actor.megatron.param_offload": "actor_rollout_ref.actor.fsdp_config.param_offload",
    "actor_rollout_ref.actor.megatron.optimizer_offload": "actor_rollout_ref.actor.fsdp_config.optimizer_offload",
    "actor_rollout_ref.actor.megatron.grad_offload": "actor_rollout_ref.actor.fsdp_config.grad_offload",
    "actor_rollout_ref.ref.megatron.param_offload": "actor_rollout_ref.ref.fsdp_config.param_offload",
    "actor_rollout_ref.rollout.multi_turn.max_turns": "actor_rollout_ref.rollout.multi_turn.max_assistant_turns",
    "critic.grad_clip": "critic.optim.clip_grad",
    "critic.optim.grad_clip": "critic.optim.clip_grad",
    f"{_A}.fsdp_config.gradient_checkpointing": "actor_rollout_ref.model.enable_gradient_checkpointing",
    "critic.fsdp_config.gradient_checkpointing": "critic.model.enable_gradient_checkpointing",
    "critic.model.fsdp_config.": "critic.fsdp.",
    "critic.fsdp_config.": "critic.fsdp.",
    f"{_A}.megatron_config.": f"{_A}.megatron.",
    "critic.megatron_config.": "critic.megatron.",
    "actor_rollout_ref.ref.megatron_config.": "actor_rollout_ref.ref.megatron.",
    f"{_R}.max_new_tokens": f"{_R}.response_length",
    "data.max_new_tokens": f"{_R}.response_length",
    "critic.megatron.param_offload": "critic.fsdp.param_offload",
    "critic.megatron.optimizer_offload": "critic.fsdp.optimizer_offload",
    "custom_reward_function.overlong_buffer.": "reward.reward_kwargs.overlong_buffer_cfg.",
    "custom_reward_function.": "reward.custom_reward_function.",
    "reward_model.overlong_buffer.": "reward.reward_kwargs.overlong_buffer_cfg.",
    "reward_model.reward_kwargs.": "reward.reward_kwargs.",
    "reward_model.reward_manager": "reward.reward_manager.name",
    "reward_model.num_workers": "reward.num_workers",
    "reward_model.sandbox_fusion.": "reward.sandbox_fusion.",
    "reward_model.launch_reward_fn_async": "reward_model.launch_reward_fn_async",
    "reward_model.model.path": "reward.reward_model.model_path",
    "reward_model.path": "reward.reward_model.model_path",
    "reward_model.reward_loop_": "reward.reward_loop_",
    "reward_model.model.input_tokenizer": "reward.reward_model.input_tokenizer",
    "reward_model.": "reward.reward_model.",
    "sandbox_fusion.": "reward.sandbox_fusion.",
    "algorithm.kl_ctrl.kl_coeff": "algorithm.kl_ctrl.kl_coef",
}


def today(key: str) -> str:
    """Returns the key as verl 0.9.1 spells it."""
    for old, new in OLDER.items():
        if key == old or (old.endswith((".", "_")) and key.startswith(old)):
            named = new + key[len(old) :]
            return named if named == key else today(named)
    return key


def find(key: str) -> Name | None:
    """Returns the row of a verl 0.9.1 key."""
    return next((name for name in TABLE if fnmatch.fnmatchcase(key, name.key)), None)
