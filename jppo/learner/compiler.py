"""The compiler options of the passes' programs, by platform; each for a reason that an account shows."""

from typing import Any

from jax.sharding import Mesh

from jppo.learner.sharding import platform

# Forecasts of the compilers, not measured. On GPUs a lower threshold for combining reduce-scatters gained nothing.
_TABLE: dict[str, dict[str, Any]] = {
    # XLA would write a product with a gathered kernel as a loop over its shards, whose operands go through HBM in each
    # iteration: log-probs of a 7B model on v6e-16 read and wrote 270 GiB so, and 51 GiB without.
    "tpu": {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"},
}


def options(mesh: Mesh, kind: str) -> dict[str, Any] | None:
    """The options for the mesh's platform where `kind` is 'auto'; None where there are none."""
    return _TABLE.get(platform(mesh)) if kind == "auto" else None
