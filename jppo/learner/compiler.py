"""Compiler options of the passes, by platform, each justified by an account of the compiled programs."""

from typing import Any

from jax.sharding import Mesh

from jppo.learner.sharding import platform

# Compilers' forecasts, not measured. On GPUs a lower threshold for combining reduce-scatters gained nothing.
_TABLE: dict[str, dict[str, Any]] = {
    # XLA would write a product with a gathered kernel as a loop over its shards, with operands read from HBM in each
    # iteration: log-probs of a 7B model on v6e-16 moved 270 GiB that way, 51 GiB without it.
    "tpu": {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"},
}


def options(mesh: Mesh, kind: str) -> dict[str, Any] | None:
    """Returns the options for the mesh's platform if `kind` is 'auto', or None."""
    return _TABLE.get(platform(mesh)) if kind == "auto" else None
