"""What a process asks of its machine before anything is compiled: programs that are kept, and memory that is."""

import ctypes
import os
import pathlib
import sys

import jax
import jaxlib

# Of glibc's malloc.h: the parameter, and a value by which memory that was given back stays the process's own.
_KEEP = {"M_MMAP_MAX": (-4, 0), "M_TRIM_THRESHOLD": (-1, -1), "M_ARENA_MAX": (-8, 1)}


def correct_sums() -> None:
    """Switches off the fused sums of jaxlib 0.10.2 on CPUs, which are wrong from 32,769 rows on (jax issue 39103).

    XLA reads its flags once, when JAX starts: a process that has used a device before keeps those it had.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_cpu_experimental_ynn_fusion_type" not in flags and jaxlib.__version__ == "0.10.2":
        os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_experimental_ynn_fusion_type=-reduce".strip()


correct_sums()


def keep_programs(folder: str) -> None:
    """What XLA compiles is kept in `folder` and found there by later runs; '' keeps nothing.

    A folder that the environment names by JAX_COMPILATION_CACHE_DIR goes first.
    """
    if folder and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(pathlib.Path(folder).expanduser()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def keep_memory() -> bool:
    """On a CPU: memory that XLA gives back is not returned to the system, whose fresh pages cost a tenth of a pass.

    False where that is not to be had: the memory is not glibc's.
    """
    if jax.default_backend() != "cpu" or not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(*pair) == 1 for pair in _KEEP.values())
