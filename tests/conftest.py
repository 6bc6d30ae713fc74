"""Every test runs on 8 CPU devices, with JAX's strict switches on, and without a network."""

import os
import pathlib
import re

os.environ["XLA_FLAGS"] = (
    re.sub(r"--xla_force_host_platform_device_count=\S*", "", os.environ.get("XLA_FLAGS", ""))
    + " --xla_force_host_platform_device_count=8"
)
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch and vLLM: more only disturb each other on few cores

import jax
import pytest

from jppo.data import arithmetic
from jppo.models import decoder, hf

jax.config.update("jax_platforms", "cpu")  # where a plugin imported jax before the lines above
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_debug_key_reuse", True)

SHARED = pathlib.Path(__file__).resolve().parents[2] / "shared"


def pytest_sessionstart():
    found = jax.devices()
    if [d.platform for d in found] != ["cpu"] * 8:
        pytest.exit(f"tests need 8 CPU devices, jax has {found}: something used it before conftest.py", 3)


@pytest.fixture
def shared():
    """The folder of real models and data beside the checkout; tests that use it are skipped without it."""
    if not SHARED.is_dir():
        pytest.skip(f"no {SHARED}: real models and data are not beside this checkout")
    return SHARED


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """An HF directory of the quickstart's qwen2 shape: random weights and a tokenizer; to be read only."""
    root = tmp_path_factory.mktemp("tiny_model")
    arithmetic.write_model(root / "source")
    _, cfg = hf.read_config(root / "source")
    values = decoder.init_params(cfg, jax.random.key(0), head="lm", param_dtype="float32")
    return hf.save(root / "hf", values, cfg, source=root / "source", dtype="float32")
