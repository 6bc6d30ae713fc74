"""Every test runs on 8 CPU devices, with JAX's strict switches on, and without a network."""

import os
import pathlib

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ["HF_HUB_OFFLINE"] = "1"

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_debug_key_reuse", True)

SHARED = pathlib.Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture
def shared():
    """The folder of real models and data beside the checkout; tests that use it are skipped where it is missing."""
    if not SHARED.is_dir():
        pytest.skip(f"no {SHARED}: real models and data are not beside this checkout")
    return SHARED
