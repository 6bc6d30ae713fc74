"""Process set-up: compilation cache, allocator, XLA flags."""

import ctypes
import os
import sys

import jax
import jaxlib

from jppo.errors import expanded

# Parameters of glibc's malloc.h, and values by which the process keeps freed memory.
_KEEP = {"M_MMAP_MAX": (-4, 0), "M_TRIM_THRESHOLD": (-1, -1), "M_ARENA_MAX": (-8, 1)}


def correct_sums() -> None:
    """Switches off the fused sums of jaxlib 0.10.2 on CPUs, which are wrong from 32,769 rows on (jax issue 39103).

    XLA reads its flags once, when JAX starts: in a process that has used a device, this has no effect.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_cpu_experimental_ynn_fusion_type" not in flags and jaxlib.__version__ == "0.10.2":
        os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_experimental_ynn_fusion_type=-reduce".strip()


correct_sums()


def keep_programs(folder: str) -> None:
    """Keeps compiled programs in `folder` for later runs; '' disables the cache.

    JAX_COMPILATION_CACHE_DIR takes precedence.
    """
    if folder and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(expanded(folder)))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def keep_memory() -> bool:
    """Keeps freed memory in the process: on a CPU, fresh pages cost a tenth of a pass.

    Returns False where the allocator is not glibc's.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(*pair) == 1 for pair in _KEEP.values())
