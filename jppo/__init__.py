"""jppo: PPO for language models in JAX, with rollouts by an external vLLM. See docs/architecture.md."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jppo.run.api.model import Model

__version__ = "0.1.0"


def open(
    path: str,
    *,
    mesh: Mapping[str, int] | None = None,
    lora: int | Mapping[str, Any] | None = None,
    critic: bool | str | Mapping[str, Any] | None = None,
    engine: str | Mapping[str, Any] | None = None,
    **settings: Any,
) -> "Model":
    """Opens a model for your own training loop: its learner, and a rollout engine. See docs/your-own-loop.md.

    path        an HF directory or hub name
    mesh        devices by axis, as in dict(fsdp=4); None: as jppo.train's default
    lora        rank of adapters, or dict(rank=8, alpha=16); None: all weights are trained
    critic      True for a critic on the same model, the path of another, or settings of it; None: no critic
    engine      'inprocess', 'vllm', 'sglang', addresses of servers, or settings of `rollout`; None: no engine
    settings    of jppo.train by section: actor=dict(lr=1e-6), data=dict(max_response_length=256)
    """
    from jppo.run.api.model import open_model

    return open_model(path, mesh=mesh, lora=lora, critic=critic, engine=engine, **settings)
