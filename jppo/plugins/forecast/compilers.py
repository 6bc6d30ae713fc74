"""XLA's compilers for absent devices: their packages, installed in a separate folder, and device descriptions.

The folder is `.targets/gpu` or `.targets/tpu` of a checkout, else `jppo/compilers/gpu` or `jppo/compilers/tpu` of the
user's cache. Only a process that compiles for such a machine sees it; JAX computes on the CPU there.
"""

import importlib.metadata
import os
import pathlib
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import jax

from jppo.errors import UserError
from jppo.plugins.forecast.machines import Gpu, Machine, Tpu, target_config

READY = ".ready"
CUDNN = "9.20.0.48"  # which an installation with vLLM 0.32 gets: torch 2.13 pins it; JAX alone takes the newest
# Only what compiling needs: of CUDA's packages only cuDNN is read, for its attention plans.
PACKAGES = {
    "gpu": ("jax-cuda13-plugin=={jax}", "jax-cuda13-pjrt=={jax}", f"nvidia-cudnn-cu13=={CUDNN}"),
    "tpu": ("libtpu",),
}
_EFFORT = "JAX_EXEC_TIME_OPTIMIZATION_EFFORT"  # JAX's; the TPU's compiler is known to crash at -1
_CRASHES = (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGTRAP, -signal.SIGILL)  # exit codes of a failed check in XLA
PLATFORM_VARIABLE = "JPPO_COMPILES_FOR"  # environment variable of such a process: its platform


def compiler_folder(platform: str) -> pathlib.Path:
    """Returns the folder in which a platform's compiler is installed."""
    root = pathlib.Path(__file__).resolve().parents[3]
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache"))
    return (root / ".targets" if (root / "pyproject.toml").is_file() else cache / "jppo/compilers") / platform


def requirements(platform: str) -> list[str]:
    """Returns pip's requirements of a platform's compiler for this version of JAX."""
    bounds = {}
    for line in importlib.metadata.requires("jax") or ():
        name, _, rest = line.partition(";")[0].strip().partition("=")
        if name == "libtpu":
            bounds[name] = f"{name}={rest}"
    return [bounds.get(package, package.format(jax=jax.__version__)) for package in PACKAGES[platform]]


def install_compiler(platform: str) -> None:
    """Installs the compiler with pip, without its dependencies: the driver and the kernels. Replaces another one."""
    folder = compiler_folder(platform)
    new_folder = folder.with_name(f"{platform}.new")
    shutil.rmtree(new_folder, ignore_errors=True)
    new_folder.mkdir(parents=True)
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(new_folder)]
    subprocess.run([*command, *requirements(platform)], check=True)
    shutil.rmtree(folder, ignore_errors=True)
    new_folder.rename(folder)
    (folder / READY).write_text(_version_text(platform))
    print(f"the compiler is in {folder}")


def _version_text(platform: str) -> str:
    """Returns the versions of an installed compiler, as its folder states them."""
    return f"{jax.__version__}\n" + (f"cuDNN {CUDNN}\n" if platform == "gpu" else "")


def require_compiler(machine: Machine) -> dict[str, str]:
    """Returns the environment of a process that compiles for the machine; raises UserError with the install command."""
    platform, folder = machine.chip.platform, compiler_folder(machine.chip.platform)
    ready = folder / READY
    if not ready.is_file() or ready.read_text() != _version_text(platform):
        versions = " and ".join(["JAX " + jax.__version__, *([f"cuDNN {CUDNN}"] if platform == "gpu" else [])])
        raise UserError(
            f"--machine={machine.name}: XLA's compiler for {platform.upper()}s with {versions} is not"
            f" installed in {folder}; run: make target-{platform} (without a checkout: python -m"
            f" jppo.plugins.forecast.compilers {platform})"
        )
    python_paths = [str(folder), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, python_paths)),
        "JAX_PLATFORMS": "cpu",
        PLATFORM_VARIABLE: platform,
    }
    if isinstance(machine.chip, Tpu):
        kind = {"v5e": "v5litepod"}.get(machine.chip.topology, machine.chip.topology)
        environment |= {
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_ACCELERATOR_TYPE": f"{kind}-{machine.each * machine.chip.cores}",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "TPU_WORKER_ID": "0",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        }
    return environment


def is_present(machine: Machine) -> bool:
    """Whether this process has the environment of `require_compiler`."""
    return os.environ.get(PLATFORM_VARIABLE) == machine.chip.platform


def rerun_if_absent(machine: Machine, command: str, argv: Sequence[str]) -> None:
    """Unless this process can compile for the machine, reruns the command in one that can; exits with its code.

    JAX looks for the compiler only at import, so this process cannot use it.
    """
    if is_present(machine):
        return
    env = require_compiler(machine)
    code = subprocess.run([sys.executable, "-m", command, *argv], env=env, check=False).returncode
    if code in _CRASHES and machine.chip.platform == "tpu" and _EFFORT not in env:
        print("the compiler crashed; trying again with its whole search for fast code, in more time", file=sys.stderr)
        env = env | {_EFFORT: "0.0"}
        code = subprocess.run([sys.executable, "-m", command, *argv], env=env, check=False).returncode
    if code == -signal.SIGKILL:
        raise UserError(
            f"--machine={machine.name}: the process of XLA's compiler was killed, as the kernel does where memory runs"
            " out; end other programs on this machine, or run it on a larger one"
        )
    if code < 0:
        log = "; its log is in /tmp/tpu_logs" if machine.chip.platform == "tpu" else ""
        raise UserError(
            f"--machine={machine.name}: XLA's compiler crashed ({signal.Signals(-code).name}); try another mesh, such"
            f" as mesh.data=1 mesh.fsdp=-1, or another number of devices{log}"
        )
    sys.exit(code)


def devices_of(machine: Machine) -> list[Any]:
    """Returns the machine's devices, which hold no arrays; UserError if its compiler does not know the machine."""
    from jax.experimental import topologies

    jax.config.update("jax_enable_compilation_cache", False)  # reads no program without its device
    chip = machine.chip
    options: dict[str, Any]
    if isinstance(chip, Gpu):
        name, platform = "", "cuda"
        _describe_capability(chip)
        options = dict(target_config=target_config(chip, CUDNN), topology=f"1x{machine.groups}x{machine.each}")
    else:
        assert isinstance(chip, Tpu)
        # Most TPU compile time is a search for fast code, which changes neither memory nor exchanges. JAX 0.12 has no
        # such setting: its optimization level changes both.
        if _EFFORT not in os.environ and hasattr(jax.config, _EFFORT.lower()):
            jax.config.update(_EFFORT.lower(), -1.0)
        name, platform = f"{chip.topology}:{'x'.join(map(str, machine.shape))}", "tpu"
        options = {"num_slices": machine.groups} if machine.groups > 1 else {}
        if chip.kind == "TPU v4":  # two cores are one device, as on real ones
            options["chip_config_name"] = "megacore"
        if machine.each < 4:
            options["chips_per_host_bounds"] = (1, 1, 1)
    try:
        return list(topologies.get_topology_desc(name, platform, **options).devices)
    except jax.errors.JaxRuntimeError as e:
        raise UserError(f"--machine={machine.name}: its compiler says: {' '.join(str(e).split())[:300]}") from e


def _describe_capability(gpu: Gpu) -> None:
    """Tells JAX's attention by cuDNN the capability, for which it asks the first GPU of the machine."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    cudnn.check_compute_capability = lambda least: gpu.capability >= tuple(map(int, least.split(".")))


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in PACKAGES:
        print("usage: python -m jppo.plugins.forecast.compilers gpu|tpu", file=sys.stderr)
        sys.exit(2)
    install_compiler(sys.argv[1])
