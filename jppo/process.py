"""Process-wide switches of a run: XLA's flags, the compilation cache, GPU memory, precision of products, open files.

`prepare_process` and `share_gpu` are called once, where a command starts, `allow_files` before many connections are
opened. Importing this module corrects XLA's sums.
"""

import contextlib
import os
import resource

import jax
from jaxlib import version

from jppo.errors import expanded

# Shares of a GPU's memory: JAX's default, and the total of a trainer and its servers.
DEFAULT_SHARE, SHARED_BY_BOTH = 0.75, 0.92

FILES = 1 << 16  # open ones that are allowed at most: each request in flight has a connection


def correct_sums() -> None:
    """Switches off fused sums of jaxlib 0.10.2 on CPUs, which are wrong from 32,769 rows on (jax issue 39103).

    XLA reads its flags once, when JAX starts: in a process that has used a device, this has no effect.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_cpu_experimental_ynn_fusion_type" not in flags and version.__version__ == "0.10.2":
        os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_experimental_ynn_fusion_type=-reduce".strip()


correct_sums()


def keep_programs(folder: str) -> None:
    """Caches compiled programs in `folder`, '' for none, unless JAX_COMPILATION_CACHE_DIR names another one."""
    if folder and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(expanded(folder)))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def prepare_process(platform: str, compile_cache: str, compute_dtype: str) -> None:
    """Sets the compilation cache and the precision of products, for a mesh of this platform."""
    if platform == jax.default_backend():
        keep_programs(compile_cache)
    if platform != "cpu" and compute_dtype == "float32":
        # By default a float32 product is TF32 on GPUs and bfloat16 on TPUs, unlike in the rollout engine.
        jax.config.update("jax_default_matmul_precision", "highest")


def share_gpu(servers_share: float, *, sleeping: bool) -> None:
    """Sets JAX's share of a GPU's memory, so that servers get theirs: JAX would preallocate three quarters of it.

    With sleeping servers, JAX frees each array's memory at once, so that the servers can wake.
    """
    if sleeping:
        os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")
    elif servers_share:
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{trainer_share(servers_share, sleeping=False):.2f}")


def trainer_share(servers_share: float, *, sleeping: bool) -> float:
    """Returns the trainer's share of a GPU's memory, given the servers' or that they sleep while it learns."""
    if sleeping:
        return SHARED_BY_BOTH
    return max(0.1, SHARED_BY_BOTH - servers_share) if servers_share else DEFAULT_SHARE


def servers_apart(devices: str) -> bool:
    """Whether these GPUs, the servers', are disjoint from CUDA_VISIBLE_DEVICES."""

    def split_numbers(text: str) -> set[str]:
        return {number.strip() for number in text.split(",") if number.strip()}

    server_gpus, trainer_gpus = split_numbers(devices), split_numbers(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    return bool(server_gpus and trainer_gpus) and not server_gpus & trainer_gpus


def take_little() -> None:
    """Keeps JAX from preallocating GPU memory, which another run may use."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def allow_files() -> int:
    """Raises the limit of open files, often 1024, as far as the system allows and up to `FILES`; returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = FILES if hard == resource.RLIM_INFINITY else min(hard, FILES)
    if soft != resource.RLIM_INFINITY and soft < target:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return FILES if soft == resource.RLIM_INFINITY else soft
