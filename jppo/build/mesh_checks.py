"""Whether a mesh suits a model: an axis that divides nothing of it would hold copies, and is refused."""

import math

from jax.sharding import Mesh

from jppo.build.inputs import Inputs
from jppo.models.families import ModelConfig
from jppo.settings import UserError


def require_models_fit(inputs: Inputs, mesh: Mesh) -> None:
    """`require_fit` for every model that a run trains or measures against, before a server is started."""
    for cfg in (inputs.policy, inputs.critic, inputs.reference):
        if cfg is not None:
            require_fit(cfg, mesh)


def require_fit(cfg: ModelConfig, mesh: Mesh) -> None:
    """UserError with the sizes that would do, where heads, MLP or width cannot be shared as the mesh says.

    The vocabulary gets rows that are no tokens, key/value heads are repeated.
    """
    fsdp, tensor, sequence = (mesh.shape[axis] for axis in ("fsdp", "tensor", "sequence"))
    H, F, D = cfg.num_heads, cfg.intermediate_size, cfg.hidden_size
    model = f"of the {cfg.family} model"
    if H % tensor or F % tensor:
        _refuse(f"mesh.tensor={tensor}", f"the {H} attention heads and the MLP's width of {F} {model}", math.gcd(H, F))
    if (H // tensor) % sequence:
        rest = f" that are left by mesh.tensor={tensor}" if tensor > 1 else ""
        _refuse(f"mesh.sequence={sequence}", f"the {H // tensor} attention heads {model}{rest}", H // tensor)
    if D % (fsdp * sequence):
        said = f"mesh.fsdp={fsdp}" + (f" times mesh.sequence={sequence}" if sequence > 1 else "")
        _refuse(said, f"the width of {D} {model}", D)


def _refuse(said: str, what: str, size: int) -> None:
    fitting = [str(n) for n in range(1, min(size, 64) + 1) if size % n == 0]
    raise UserError(f"{said} must divide {what}; {', '.join(fitting)} would")
