"""PPO with a model of 32B parameters on four hosts of eight GPUs: verl's example of this size, number for number.

    python -m jppo.data.gsm8k --out data/gsm8k
    sbatch --nodes=4 scripts/launch/slurm.sbatch .venv/bin/python -m jppo.train --config=configs/multi_host.py

or scripts/launch/ssh.sh, or scripts/launch/kubernetes.yaml. One process per host joins the mesh. Each host has two
servers of four GPUs, and samples and grades its share of the questions. runs/, data/ and the model are
the same files on all hosts.

Hardware: four hosts of eight GPUs of 80 GB. Memory: the trainer takes 50 GiB of each H100 by --dry_run
--machine=4x8xH100, forecast by the compiler, not measured; sleeping servers keep some more.
Time and result: not run. Several hosts were tried as processes of one machine only (docs/scaling.md).
"""

import ml_collections

from jppo import settings


def get_config() -> ml_collections.ConfigDict:
    """32B parameters on four hosts."""
    config = settings.recipe("gsm8k_7b")

    config.model.path = "Qwen/Qwen2.5-32B-Instruct"

    config.data.max_response_length = 1024

    config.algorithm.kl_coef = 0.0001

    config.actor.entropy_coeff = 0.0
    config.actor.max_tokens_per_device = 16384

    config.rollout.servers = 2  # on each host
    config.rollout.tensor_model_parallel_size = 4

    config.trainer.run_dir = "runs/multi_host"
    config.trainer.nnodes = 4
    return config.lock()
