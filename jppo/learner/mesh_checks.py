"""Checks that a mesh suits a model: rejects axes that shard nothing of it and would hold copies."""

import math

from jax.sharding import Mesh

from jppo.learner.model_configs import ModelConfigs
from jppo.models.config import ModelConfig
from jppo.models.sequence_parallel import COLUMNS
from jppo.settings import UserError


def require_models_fit(inputs: ModelConfigs, mesh: Mesh) -> None:
    """Runs `require_divisible` for every model of a run, before a server starts."""
    for cfg in (inputs.policy, inputs.critic, inputs.reference):
        if cfg is not None:
            require_divisible(cfg, mesh)


def require_divisible(cfg: ModelConfig, mesh: Mesh) -> None:
    """Raises UserError with the valid sizes where the mesh cannot shard heads, MLP, experts or width.

    Padding makes the vocabulary divisible; key/value heads are repeated.
    """
    tensor, sequence, expert = (mesh.shape[axis] for axis in ("tensor", "sequence", "expert"))
    if cfg.delta is not None and sequence > 1:
        raise UserError(
            f"mesh.sequence={sequence}: the states of a {cfg.family} model's gated delta nets are not passed between"
            " the devices that share a row; use mesh.sequence=1"
        )
    H, D = cfg.num_heads, cfg.hidden_size
    model = f"of the {cfg.family} model"
    for F in cfg.mlp_widths:
        if H % tensor or F % tensor:
            said = f"the {H} attention heads and the MLP's width of {F} {model}"
            _refuse(f"mesh.tensor={tensor}", said, math.gcd(H, F))
    if (H // tensor) % sequence:
        rest = f" that are left by mesh.tensor={tensor}" if tensor > 1 else ""
        _refuse(f"mesh.sequence={sequence}", f"the {H // tensor} attention heads {model}{rest}", H // tensor)
    if cfg.experts is not None and cfg.experts.count % expert:
        _refuse(f"mesh.expert={expert}", f"the {cfg.experts.count} experts {model}", cfg.experts.count)
    if D % math.prod(mesh.shape[axis] for axis in COLUMNS):
        named = [f"mesh.{axis}={mesh.shape[axis]}" for axis in COLUMNS if axis == "fsdp" or mesh.shape[axis] > 1]
        _refuse(" times ".join(named), f"the width of {D} {model}", D)


def _refuse(said: str, what: str, size: int) -> None:
    fitting = [str(n) for n in range(1, min(size, 64) + 1) if size % n == 0]
    raise UserError(f"{said} must divide {what}; {', '.join(fitting)} would")
