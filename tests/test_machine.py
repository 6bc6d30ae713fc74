"""Process set-up: compilation cache and XLA flags."""

import os
import subprocess
import sys

import pytest

from jppo import process

COMPILE = """
import jax, jax.numpy as jnp
from jppo import process as machine
machine.keep_programs({folder!r})
found = []
jax.monitoring.register_event_listener(lambda event, **_: found.append(event))
jax.jit(lambda x: jax.lax.fori_loop(0, 9, lambda i, y: jnp.sin(y @ y), x))(jnp.ones((64, 64)))
print(found.count("/jax/compilation_cache/cache_hits"))
"""


def run(code, **env):
    base = {"PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], env=base | env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_second_process_finds_what_the_first_compiled(tmp_path):
    folder = tmp_path / "kept"
    code = COMPILE.format(folder=str(folder)).replace("found = []", "found = []; QUICK")
    quick = "jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)"
    assert run(code.replace("QUICK", quick)) == ["0"]
    assert any(folder.iterdir())
    assert int(run(code.replace("QUICK", quick))[0]) >= 1


def test_the_environment_names_another_folder_and_nothing_is_kept_in_none(tmp_path):
    show = (
        "import jax; from jppo import process as machine; machine.keep_programs({!r});"
        " print(jax.config.jax_compilation_cache_dir)"
    )
    assert run(show.format("mine"), JAX_COMPILATION_CACHE_DIR="theirs") == ["theirs"]
    assert run(show.format("")) == ["None"]
    assert run(show.format("~/mine"), HOME="/home/me") == ["/home/me/mine"]


SUM = """
import jax, jax.numpy as jnp
import jppo.learner.make
n = 32_769
x = jnp.stack((jnp.arange(n, dtype=jnp.float32), jnp.zeros(n), jnp.zeros(n)), axis=1)
squares = jax.jit(jax.vmap(lambda row: jnp.sum((jnp.eye(3) @ row) ** 2)))(x)
print(int(squares[-1]))
"""


@pytest.mark.parametrize("flags", ["", "--xla_force_host_platform_device_count=2"])
def test_sums_of_products_are_right_on_a_cpu(flags):
    """jaxlib 0.10.2 alone computes 1065369600 (jax issue 39103)."""
    assert run(SUM, XLA_FLAGS=flags) == [str(32_768**2)]


def test_flags_that_a_user_chose_for_sums_stay(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_experimental_ynn_fusion_type=+reduce")
    process.correct_sums()
    assert os.environ["XLA_FLAGS"] == "--xla_cpu_experimental_ynn_fusion_type=+reduce"


SWITCHES = ("XLA_PYTHON_CLIENT_ALLOCATOR", "XLA_PYTHON_CLIENT_MEM_FRACTION")


@pytest.mark.parametrize(
    "servers, sleeping, share, switches",
    [
        (0.0, False, 0.75, (None, None)),  # JAX's default
        (0.4, False, 0.52, (None, "0.52")),
        (0.9, False, 0.1, (None, "0.10")),
        (0.4, True, 0.92, ("platform", None)),
    ],
)
def test_servers_on_the_trainers_gpu_get_their_share(monkeypatch, servers, sleeping, share, switches):
    for name in SWITCHES:
        monkeypatch.setenv(name, "")  # so that it is as before at the end
        del os.environ[name]
    process.share_gpu(servers, sleeping=sleeping)
    assert tuple(map(os.environ.get, SWITCHES)) == switches
    assert process.trainer_share(servers, sleeping=sleeping) == pytest.approx(share)
