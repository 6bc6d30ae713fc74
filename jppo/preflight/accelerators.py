"""This machine's accelerators: GPUs by their driver, TPUs by PCI, and the CUDA, dtypes and pinned memory for them."""

import dataclasses
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

from packaging.version import Version

from jppo import plugins
from jppo.learner.sharding import BFLOAT16_FROM
from jppo.preflight.finding import GIB, Finding

# Runs in a separate process: a broken jaxlib ends it, and a device may be slow or in use.
_DEVICES = """
import json, jax
print(json.dumps([jax.default_backend(), [d.device_kind for d in jax.devices()]]))
"""
# Of each CUDA version: its least driver (docs.nvidia.com/deploy/cuda-compatibility), and the least compute capability
# of its JAX (docs.jax.dev/en/latest/installation.html).
DRIVERS = {12: 525, 13: 580}
CAPABILITIES = {12: (5, 2), 13: (7, 5)}
EXTRAS = {12: "cuda12", 13: "cuda"}  # jppo's, with JAX for this CUDA
# GPUs of the architectures sm_100 and sm_103, for which JAX's CUDA plugin warns of cuBLAS 12.8 to 13.1: kernels free
# tensor memory several times.
BLACKWELL = ("B200", "B300")
# PCI devices of Google's that are TPUs, as in the hardware_utils.py of JAX 0.12 and scripts/setup.sh.
TPUS = ("0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076", "0x007c", "0x0083")
DEVICES_TIMEOUT_S = 120
SMALL = 16 * GIB  # of GPUs for which there is a recipe


@dataclasses.dataclass(frozen=True)
class NvidiaGpu:
    """One GPU."""

    name: str
    driver: str  # version
    memory: int | None  # bytes in all; None: unknown, or shared with the host
    capability: tuple[int, int] | None = None  # compute capability; None: unknown


def gpus(proc: pathlib.Path = pathlib.Path("/proc")) -> list[NvidiaGpu]:
    """Lists this machine's GPUs by nvidia-smi, without it by the driver's files; [] without a driver."""
    if shutil.which("nvidia-smi") is not None:
        for capability in (",compute_cap", ""):  # drivers of 2021 do not know it
            query = f"--query-gpu=name,driver_version,memory.total{capability}"
            command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            if result.returncode == 0:
                return [_parse_gpu(*map(str.strip, line.split(","))) for line in result.stdout.splitlines()]
    version = proc / "driver/nvidia/version"
    text = version.read_text() if version.is_file() else ""
    found = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)\s", text)
    files = sorted((proc / "driver/nvidia/gpus").glob("*/information"))
    names = [re.search(r"^Model:\s*(.*\S)", file.read_text(), re.MULTILINE) for file in files]
    return [NvidiaGpu(name[1] if name else "GPU", found[1], None) for name in names] if found else []


def _parse_gpu(name: str, driver: str, mib: str, capability: str = "") -> NvidiaGpu:
    version = re.fullmatch(r"(\d+)\.(\d+)", capability)
    memory = int(mib) * 2**20 if mib.isdigit() else None
    return NvidiaGpu(name, driver, memory, (int(version[1]), int(version[2])) if version else None)


def has_tpu(devices: pathlib.Path = pathlib.Path("/sys/bus/pci/devices")) -> bool:
    """Whether a TPU is attached by PCI, as on TPU VMs, Colab and Kaggle."""
    google = [file.parent for file in devices.glob("*/vendor") if file.read_text().strip() == "0x1ae0"]
    return any((folder / "device").read_text().strip() in TPUS for folder in google)


def check_devices(cards: Sequence[NvidiaGpu], tpu: bool) -> Finding:
    """Checks in a separate process which devices JAX finds, and that a GPU or TPU is used."""
    env = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # leaves the memory to a run under way
    command = [sys.executable, "-c", _DEVICES]
    try:
        probe = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=DEVICES_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        remedy = "end the process that holds the device, or set JAX_PLATFORMS=cpu"
        return Finding("JAX", "FAIL", f"no device in {DEVICES_TIMEOUT_S} s", remedy)
    if probe.returncode != 0:
        message = (probe.stderr.strip().splitlines() or [f"exit code {probe.returncode}"])[-1]
        return Finding("JAX", "FAIL", message[-300:], "reinstall jax, or set JAX_PLATFORMS=cpu")
    backend, kinds = json.loads(probe.stdout.splitlines()[-1])
    devices = f"{len(kinds)} x {kinds[0]} ({backend})"
    if backend != "cpu" or not (cards or tpu):
        return Finding("JAX", "OK", devices)
    extra = EXTRAS[newest_cuda(cards) or 12] if cards else "tpu"
    platforms = os.environ.get("JAX_PLATFORMS")
    remedy = "unset JAX_PLATFORMS" if platforms else f"{sys.executable} -m pip install 'jppo[{extra}]'"
    return Finding("JAX", "WARN", f"{devices}, though there is a {'GPU' if cards else 'TPU'}", remedy)


def cuda_fault(cards: Sequence[NvidiaGpu], cuda: int) -> str | None:
    """Returns why programs for this CUDA version do not run on the GPUs; None if they do."""
    for card in cards:
        major = card.driver.split(".")[0]
        if major.isdecimal() and int(major) < DRIVERS[cuda]:
            return f"driver {card.driver}; CUDA {cuda} needs {DRIVERS[cuda]} or newer"
        if card.capability is not None and card.capability < CAPABILITIES[cuda]:
            least = _dotted(CAPABILITIES[cuda])
            return f"{card.name} has compute capability {_dotted(card.capability)}; CUDA {cuda} needs {least} or more"
    return None


def newest_cuda(cards: Sequence[NvidiaGpu]) -> int | None:
    """Returns the newest CUDA version whose programs run on the GPUs; None without one."""
    return max((cuda for cuda in DRIVERS if cuda_fault(cards, cuda) is None), default=None)


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def check_driver(cards: Sequence[NvidiaGpu], cuda: int | None) -> Finding:
    """Compares the GPUs and their driver with the CUDA of JAX's plugin; None: JAX has none."""
    summary = f"{len(cards)} x {cards[0].name}, driver {cards[0].driver}"
    fault = None if cuda is None else cuda_fault(cards, cuda)
    if fault is None:
        return Finding("driver", "OK", summary)
    remedies = ["update the driver"] if fault.startswith("driver") else []
    if (older := newest_cuda(cards)) is not None:
        pip = f"{sys.executable} -m pip"
        removed = f"{pip} uninstall -y jax-cuda{cuda}-plugin jax-cuda{cuda}-pjrt"
        remedies.append(f"{removed} && {pip} install 'jppo[{EXTRAS[older]}]'")
    return Finding("driver", "FAIL", f"{summary}: {fault}", ", or ".join(remedies) or "use a newer GPU")


def check_server_cuda(name: str, cards: Sequence[NvidiaGpu], cuda: int, *, needed: bool) -> Iterator[Finding]:
    """Compares the GPUs with the CUDA of a server's torch; a fault fails if the server is `needed`, else warns."""
    if (fault := cuda_fault(cards, cuda)) is not None:
        update = "update the driver, or " if fault.startswith("driver") else ""
        remedy = f"{update}set rollout.name=inprocess: the trainer samples by itself"
        yield Finding(f"{name}'s CUDA", "FAIL" if needed else "WARN", fault, remedy)


def check_bfloat16(cards: Sequence[NvidiaGpu], dtypes: Mapping[str, str], refused: str | None) -> Iterator[Finding]:
    """Reports GPUs without bfloat16, such as T4 and V100; `dtypes` are a run's, of which servers refuse `refused`."""
    old = [card for card in cards if card.capability is not None and card.capability < BFLOAT16_FROM]
    if not old:
        return
    message = f"{old[0].name}, compute capability {_dotted(old[0].capability or (0, 0))}, has none"
    asking = [name for name, dtype in dtypes.items() if dtype == "bfloat16"]
    if dtypes and not asking:
        yield Finding("bfloat16", "OK", f"{message}, and the run needs none")
        return
    remedy = f"set {' and '.join(asking or ('rollout.dtype', 'model.compute_dtype'))} to float16 or float32"
    slow = f"{message}: XLA computes its products in float32, and vLLM refuses it"
    yield Finding("bfloat16", "FAIL" if refused in asking else "WARN", slow, remedy)


def check_small(cards: Sequence[NvidiaGpu]) -> Iterator[Finding]:
    """Names the recipe for GPUs of 8 to 16 GB."""
    memory = min((card.memory for card in cards if card.memory is not None), default=None)
    if memory is not None and memory <= SMALL:
        recipe = "adapters and the trainer's own engine fit, as in --config=jppo://small_card"
        yield Finding("GPU memory", "OK", f"{memory / GIB:.1f} GiB: {recipe}")


def kernel_version(proc: pathlib.Path = pathlib.Path("/proc")) -> str:
    """Returns the text of /proc/version; '' without one."""
    file = proc / "version"
    return file.read_text() if file.is_file() else ""


def check_wsl(version: str, offloaded: Sequence[str]) -> Iterator[Finding]:
    """Reports WSL2 by the text of /proc/version: its pinned memory, to which parts are `offloaded`, is limited."""
    if "microsoft" not in version.lower():
        return
    limit = "WSL2 limits pinned memory (docs.nvidia.com/cuda/wsl-user-guide)"
    if not offloaded:
        yield Finding("WSL2", "OK", f"{limit}: a run that offloads may run out of it")
        return
    names = " and ".join(f"{name}=False" for name in offloaded)
    remedy = f"set {names} and save memory by model.remat=full or model.lora_rank, or use Linux without Windows"
    yield Finding("WSL2", "WARN", f"{limit}, and the run offloads to it", remedy)


def check_libraries(cards: Sequence[NvidiaGpu], version: Callable[[str], str | None]) -> Iterator[Finding]:
    """Compares cuBLAS with the GPU's generation, and cuDNN with the one that forecasts are compiled with."""
    name = next((name for name in ("nvidia-cublas", "nvidia-cublas-cu12") if version(name)), None)
    kind = next((gpu.name for gpu in cards if any(word in gpu.name for word in BLACKWELL)), None)
    if name is not None and kind is not None:
        installed = version(name) or ""
        summary = f"{installed} on {kind}"
        hint = "vLLM's and SGLang's torch pins 13.1, so give it an environment of its own by rollout.python"
        remedy = f"{sys.executable} -m pip install 'nvidia-cublas>=13.2'; {hint}"
        if Version(installed) < Version("12.8"):
            yield Finding("cuBLAS", "FAIL", f"{summary}, whose kernels came with 12.8", remedy)
        elif Version(installed) < Version("13.2"):
            risk = "below 13.2 a kernel beside another, as on a second stream, may silently corrupt results"
            yield Finding("cuBLAS", "WARN", f"{summary}: {risk}", remedy)
        else:
            yield Finding("cuBLAS", "OK", summary)
    cudnn = plugins.load("forecast.compilers").CUDNN
    if (installed := version("nvidia-cudnn-cu13") or "") and installed != cudnn:
        yield Finding("cuDNN", "OK", f"{installed}; --dry_run --machine compiles attention with {cudnn}")
    elif installed:
        yield Finding("cuDNN", "OK", f"{installed}, as in --dry_run --machine")
