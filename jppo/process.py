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
from jppo.settings import Common, Settings

# Shares of a GPU's memory: JAX's default, and the total of a trainer and its servers.
DEFAULT_SHARE, SHARED_BY_BOTH = 0.75, 0.92

FILES = 1 << 16  # open ones that are allowed at most: each request in flight has a connection


def correct_sums() -> None:
    """Switches off the fused sums of jaxlib 0.10.2 on CPUs, which are wrong from 32,769 rows on (jax issue 39103).

    XLA reads its flags once, when JAX starts: in a process that has used a device, this has no effect.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_cpu_experimental_ynn_fusion_type" not in flags and version.__version__ == "0.10.2":
        os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_experimental_ynn_fusion_type=-reduce".strip()


correct_sums()


def keep_programs(folder: str) -> None:
    """Keeps compiled programs in `folder` for later runs; '' disables the cache.

    JAX_COMPILATION_CACHE_DIR takes precedence.
    """
    if folder and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(expanded(folder)))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def prepare_process(c: Common, platform: str) -> None:
    """Sets what programs of these settings need on a mesh of this platform, which may be a described machine's."""
    if platform == jax.default_backend():
        keep_programs(c.trainer.compile_cache)
    if platform != "cpu" and c.model.compute_dtype == "float32":
        # By default a float32 product is TF32 on GPUs and bfloat16 on TPUs, unlike in the rollout engine.
        jax.config.update("jax_default_matmul_precision", "highest")


def share_gpu(c: Settings) -> None:
    """Leaves the servers' share of a GPU to them: JAX would preallocate three quarters of it.

    With sleeping servers, JAX frees each array's memory at once, so that the servers can wake.
    """
    if c.rollout.name != "inprocess" and c.rollout.sleep_level:
        os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")
        return
    if c.rollout.name != "inprocess" and not c.rollout.urls:
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{trainer_share(c):.2f}")


def trainer_share(c: Settings) -> float:
    """Returns the trainer's share of a GPU's memory, given servers on the same GPU."""
    if c.rollout.name == "inprocess":
        return DEFAULT_SHARE
    if c.rollout.sleep_level:
        return SHARED_BY_BOTH
    if c.rollout.urls or servers_apart(c):
        return DEFAULT_SHARE
    return max(0.1, SHARED_BY_BOTH - c.rollout.gpu_memory_utilization)


def servers_apart(c: Settings) -> bool:
    """Whether the servers' GPUs, `rollout.devices`, are disjoint from CUDA_VISIBLE_DEVICES."""

    def numbers(text: str) -> set[str]:
        return {number.strip() for number in text.split(",") if number.strip()}

    theirs, ours = numbers(c.rollout.devices), numbers(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    return bool(theirs and ours) and not theirs & ours


def take_little() -> None:
    """Keeps JAX from preallocating GPU memory, which another run may use."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def allow_files() -> int:
    """Raises the limit of open files, often 1024, as far as the system allows and up to `FILES`; returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(hard, FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return FILES if soft == resource.RLIM_INFINITY else soft
