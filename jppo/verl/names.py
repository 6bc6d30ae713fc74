"""The table of verl's settings, with the defaults of verl 0.9.1. A `*` in a key matches anything.

`docs/verl.md` is this table. If several rows match a key, the first counts.
"""

import fnmatch

from jppo.verl.keys_engines import ENGINES
from jppo.verl.keys_learning import ACTOR, ALGORITHM, CRITIC, DATA
from jppo.verl.keys_running import MODEL, REF, ROLLOUT
from jppo.verl.keys_service import REWARD, TRAINER
from jppo.verl.name import Name, key_of

TABLE: tuple[Name, ...] = (*DATA, *MODEL, *ACTOR, *CRITIC, *REF, *ENGINES, *ROLLOUT, *ALGORITHM, *REWARD, *TRAINER)

# Aliases: keys of older verl versions, or second keys of one setting; a prefix of a key is enough.
_OLDER = {
    "A.grad_clip": "A.optim.clip_grad",
    "A.optim.grad_clip": "A.optim.clip_grad",
    **{
        f"{optim}.{old}": f"{optim}.{new}"
        for optim in ("A.optim", "critic.optim")
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
    "A.entropy_coef": "A.entropy_coeff",
    "A.use_rmpad": "M.use_rmpad",
    "A.fsdp_config.ulysses_sequence_parallel_size": "A.ulysses_sequence_parallel_size",
    "A.fsdp_config.mixed_precision.param_dtype": "A.fsdp_config.dtype",
    "A.megatron.context_parallel_size": "A.ulysses_sequence_parallel_size",
    "A.megatron.param_offload": "A.fsdp_config.param_offload",
    "A.megatron.optimizer_offload": "A.fsdp_config.optimizer_offload",
    "A.megatron.grad_offload": "A.fsdp_config.grad_offload",
    "REF.megatron.param_offload": "REF.fsdp_config.param_offload",
    "TURNS.max_turns": "TURNS.max_assistant_turns",
    "critic.grad_clip": "critic.optim.clip_grad",
    "critic.optim.grad_clip": "critic.optim.clip_grad",
    "A.fsdp_config.gradient_checkpointing": "M.enable_gradient_checkpointing",
    "critic.fsdp_config.gradient_checkpointing": "critic.model.enable_gradient_checkpointing",
    "critic.model.fsdp_config.": "critic.fsdp.",
    "critic.fsdp_config.": "critic.fsdp.",
    "A.megatron_config.": "A.megatron.",
    "critic.megatron_config.": "critic.megatron.",
    "REF.megatron_config.": "REF.megatron.",
    "R.max_new_tokens": "R.response_length",
    "data.max_new_tokens": "R.response_length",
    "critic.megatron.param_offload": "critic.fsdp.param_offload",
    "critic.megatron.optimizer_offload": "critic.fsdp.optimizer_offload",
    "custom_reward_function.overlong_buffer.": "OVERLONG.",
    "custom_reward_function.": "FUNCTION.",
    "reward_model.overlong_buffer.": "OVERLONG.",
    "reward_model.reward_kwargs.": "reward.reward_kwargs.",
    "reward_model.reward_manager": "reward.reward_manager.name",
    "reward_model.num_workers": "reward.num_workers",
    "reward_model.sandbox_fusion.": "BOX.",
    "reward_model.launch_reward_fn_async": "reward_model.launch_reward_fn_async",
    "reward_model.model.path": "RM.model_path",
    "reward_model.path": "RM.model_path",
    "reward_model.reward_loop_": "reward.reward_loop_",
    "reward_model.model.input_tokenizer": "RM.input_tokenizer",
    "reward_model.": "RM.",
    "sandbox_fusion.": "BOX.",
    "algorithm.kl_ctrl.kl_coeff": "algorithm.kl_ctrl.kl_coef",
}
OLDER = {key_of(old): key_of(new) for old, new in _OLDER.items()}


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
