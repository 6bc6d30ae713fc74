"""Models that vLLM 0.32 cannot serve on a CPU: one line before a server starts."""

import subprocess

from jppo import interpreter
from jppo.rollout.vllm.arguments import LATENT_SIZES, ServerSettings
from jppo.settings import UserError


def require_latent(settings: ServerSettings, build: str) -> None:
    """Raises UserError for latent attention that this vLLM cannot compute."""
    sizes = settings.latent
    if build == "cpu" and sizes is not None and sizes != LATENT_SIZES:
        raise UserError(
            f"vLLM's latent attention on a CPU takes kv_lora_rank={LATENT_SIZES[0]} and qk_rope_head_dim="
            f"{LATENT_SIZES[1]}, and this model has {sizes[0]} and {sizes[1]}; set rollout.name=inprocess or"
            " serve it on a GPU"
        )


def require_delta_nets(settings: ServerSettings, build: str) -> None:
    """Raises UserError where vLLM on a CPU cannot serve the model's gated delta nets."""
    if settings.delta is None or build != "cpu":
        return
    family, joined = settings.delta
    if settings.dtype != "bfloat16":
        raise UserError(
            f"rollout.dtype={settings.dtype}: vLLM on a CPU computes the gated delta nets of a {family} model in"
            " bfloat16 only; use rollout.dtype=bfloat16 or rollout.name=inprocess"
        )
    executable = interpreter.executable(settings.python)
    sought = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torchvision') is None)"
    if not joined and subprocess.run([executable, "-c", sought], check=False, timeout=120).returncode:
        raise UserError(
            f"vLLM's module of {family} models imports torchvision, which {executable} lacks; install that of"
            " its torch, or use rollout.name=inprocess"
        )
