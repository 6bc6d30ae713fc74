"""What the settings of memory may be together: dtypes of what is stepped, and what waits on the host."""

import ml_collections

from jppo.errors import UserError


def check_memory(config: ml_collections.ConfigDict) -> None:
    """UserError where an optimizer would step in less than the parameters hold, or nothing of its own would move."""
    wide = config.model.param_dtype == "float32"
    for section in ("actor", "critic", "optim"):
        if section not in config or config[section].master_dtype == "float32":
            continue
        own = config.critic.lora_rank if section == "critic" else None
        rank = config.model.lora_rank if own is None else own
        if wide or rank:
            held = f"adapters of rank {rank} are" if rank else "model.param_dtype='float32' is"
            raise UserError(
                f"{section}.master_dtype='bfloat16': {held} float32, and steps in less would lose what that holds;"
                " leave it at 'float32'" + ("" if rank else ", or set model.param_dtype=bfloat16")
            )
    if "ref" not in config or not config.ref.param_offload or config.actor.param_offload:
        return
    if config.model.lora_rank and config.ref.path == "policy":
        raise UserError(
            "ref.param_offload=True: beside adapters (model.lora_rank) the reference is the policy's own base, which"
            " actor.param_offload moves; set that, or leave ref.param_offload at False"
        )
