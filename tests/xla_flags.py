"""XLA's flags for the programs of tests; imports no JAX, which reads flags when it starts."""

import importlib.metadata

from packaging.version import Version

# Without the emitters of fusions XLA compiles three times as fast; jaxlib 0.11 and newer end a process that names them.
QUICK = "--xla_cpu_use_fusion_emitters=false" if Version(importlib.metadata.version("jaxlib")) < Version("0.11") else ""


def quick(devices: int = 1) -> str:
    """Returns XLA_FLAGS of a process with so many CPU devices."""
    return f"--xla_force_host_platform_device_count={devices} {QUICK}".strip()
