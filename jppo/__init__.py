"""jppo: PPO for language models in JAX, with rollouts by an external vLLM. See docs/architecture.md."""

import importlib.metadata
import os

__version__ = "0.1.0"


def correct_sums() -> None:
    """Switches off the fused sums of jaxlib 0.10.2 on CPUs, which are wrong from 32,769 rows on (jax issue 39103).

    XLA reads its flags once, when JAX starts: a process that has used a device before it imports jppo keeps them.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_cpu_experimental_ynn_fusion_type" not in flags and importlib.metadata.version("jaxlib") == "0.10.2":
        os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_experimental_ynn_fusion_type=-reduce".strip()


correct_sums()
