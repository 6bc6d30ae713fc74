"""GRPO on GSM8K with Qwen3-30B-A3B, a mixture of 128 experts, with adapters on one machine of eight GPUs.

    python -m jppo.data.gsm8k --out data/gsm8k
    python -m jppo.train --config=configs/gsm8k_moe.py
    sbatch --nodes=4 scripts/launch/slurm.sbatch .venv/bin/python -m jppo.train --config=configs/gsm8k_moe.py:all

The second trains all weights on four machines. Experts are sharded over the eight GPUs of a machine, to which tokens
are sent (`mesh.expert`); everything else is sharded as in configs/gsm8k_7b.py. Adapters are on attention.

Hardware: eight GPUs of 80 GB, or four such machines. Memory: the trainer takes 17 GiB of each H100 by --dry_run
--machine=8xH100, and 29 GiB with all weights on 4x8xH100, forecast by the compiler, not measured; plus vLLM.
Time and result: not run.
"""

import ml_collections

from jppo import settings
from jppo.errors import UserError


def get_config(arg: str = "adapters") -> ml_collections.ConfigDict:
    """The recipe; `arg` is `adapters` or `all`, the weights that are trained."""
    if arg not in ("adapters", "all"):
        raise UserError(f"configs/gsm8k_moe.py:{arg}: must be adapters or all, the weights that are trained")
    config = settings.recipe("gsm8k_7b")

    config.model.path = "Qwen/Qwen3-30B-A3B"

    config.data.train_batch_size = 256

    config.algorithm.adv_estimator = "grpo"
    config.algorithm.use_kl_in_reward = False

    config.actor.entropy_coeff = 0.0
    config.actor.ppo_mini_batch_size = 256

    config.mesh.expert = 8
    config.mesh.fsdp = -1  # machines

    config.rollout.n = 4

    config.trainer.run_dir = "runs/gsm8k_moe"
    if arg == "adapters":
        config.model.param_dtype = "bfloat16"  # the frozen base
        config.model.lora_rank = 32
        config.model.lora_alpha = 32
        config.model.target_modules = "q_proj,k_proj,v_proj,o_proj"
        config.ref.param_offload = False  # the reference is the base
        config.actor.lr = 3e-06
    else:
        config.trainer.nnodes = 4
    return config.lock()
