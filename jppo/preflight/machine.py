"""Checks that do not depend on settings: programs, devices and sandbox protections of this machine."""

import http.server
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

import httpx
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from jppo.forecast.compilers import CUDNN
from jppo.interpreter import executable
from jppo.preflight.finding import Finding
from jppo.preflight.gpus import Gpu, gpus
from jppo.rollout.servers.process import HOST
from jppo.rollout.sglang.arguments import check_sglang
from jppo.rollout.vllm.arguments import check_vllm, install_for_cpu
from jppo.sandbox import choice
from jppo.settings import UserError

# Runs in a separate process: a broken jaxlib ends it, and a device may be slow or in use.
_DEVICES = """
import json, jax
print(json.dumps([jax.default_backend(), [d.device_kind for d in jax.devices()]]))
"""
_HEADER = "import sysconfig; print(sysconfig.get_paths()['include'] + '/Python.h')"
DRIVERS = {12: 525, 13: 580}  # least driver version of each CUDA version; NVIDIA's release notes
# GPUs of the architectures sm_100 and sm_103, for which JAX's CUDA plugin warns of cuBLAS 12.8 to 13.1: kernels free
# tensor memory several times.
BLACKWELL = ("B200", "B300")
DEVICES_TIMEOUT_S = 120
LOOPBACK_TIMEOUT_S = 5.0


def check_python(version: str, wanted: str) -> Finding:
    """Compares the interpreter with the package's `requires-python`."""
    if version in SpecifierSet(wanted):
        return Finding("Python", "OK", version)
    return Finding("Python", "FAIL", f"{version}, not {wanted}", "make the environment with a newer Python")


def check_packages(requirements: Iterable[str], version: Callable[[str], str | None]) -> Iterator[Finding]:
    """Compares installed versions with the tested bounds; an extra counts if all of its packages are installed."""
    core: list[Requirement] = []
    extras: dict[str, list[Requirement]] = {}
    for requirement in map(Requirement, requirements):
        extra = _extra(requirement)
        (core if extra is None else extras.setdefault(extra, [])).append(requirement)
    present = [r for group in extras.values() if all(version(r.name) for r in group) for r in group]
    checked = {r.name: r for r in (*present, *core)}
    good = 0
    for name, requirement in checked.items():
        found, remedy = version(name), f"{sys.executable} -m pip install '{name}{requirement.specifier}'"
        if found is None:
            yield Finding(name, "FAIL", "is not installed", remedy)
        elif not requirement.specifier.contains(found, prereleases=True):
            yield Finding(name, "WARN", f"{found} is outside {requirement.specifier}, which is tested", remedy)
        else:
            good += 1
    if good:
        yield Finding("packages", "OK", f"{good} within the tested bounds")


def check_devices(has_gpu: bool) -> Finding:
    """Lists the devices that JAX will train on."""
    env = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # leaves the memory to a run under way
    command = [sys.executable, "-c", _DEVICES]
    try:
        probe = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=DEVICES_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        remedy = "end the process that holds the device, or set JAX_PLATFORMS=cpu"
        return Finding("JAX", "FAIL", f"no device in {DEVICES_TIMEOUT_S} s", remedy)
    if probe.returncode != 0:
        said = (probe.stderr.strip().splitlines() or [f"exit code {probe.returncode}"])[-1]
        return Finding("JAX", "FAIL", said[-300:], "reinstall jax, or set JAX_PLATFORMS=cpu")
    backend, kinds = json.loads(probe.stdout.splitlines()[-1])
    found = f"{len(kinds)} x {kinds[0]} ({backend})"
    if backend != "cpu" or not has_gpu:
        return Finding("JAX", "OK", found)
    chosen = os.environ.get("JAX_PLATFORMS")
    remedy = "unset JAX_PLATFORMS" if chosen else f"{sys.executable} -m pip install 'jppo[cuda]'"
    return Finding("JAX", "WARN", f"{found}, though there is a GPU", remedy)


def check_driver(found: Sequence[Gpu], cuda: int | None) -> Finding:
    """Compares the driver with the CUDA of JAX's plugin; None: JAX has none."""
    driver = found[0].driver
    said = f"{len(found)} x {found[0].name}, driver {driver}"
    least = DRIVERS.get(cuda or 0)
    if least is None or not driver.split(".")[0].isdecimal() or int(driver.split(".")[0]) >= least:
        return Finding("driver", "OK", said)
    older = max((known for known, needs in DRIVERS.items() if int(driver.split(".")[0]) >= needs), default=None)
    other = f", or {sys.executable} -m pip install 'jax[cuda{older}]' in place of JAX's CUDA {cuda}" if older else ""
    return Finding("driver", "FAIL", f"{said}; CUDA {cuda} needs {least} or newer", f"update the driver{other}")


def check_libraries(found: Sequence[Gpu], version: Callable[[str], str | None]) -> Iterator[Finding]:
    """Compares cuBLAS with the GPU's generation, and cuDNN with the one that forecasts are compiled with."""
    name = next((name for name in ("nvidia-cublas", "nvidia-cublas-cu12") if version(name)), None)
    kind = next((gpu.name for gpu in found if any(word in gpu.name for word in BLACKWELL)), None)
    if name is not None and kind is not None:
        installed = version(name) or ""
        said = f"{installed} on {kind}"
        apart = "vLLM's and SGLang's torch pins 13.1, so give it an environment of its own by rollout.python"
        remedy = f"{sys.executable} -m pip install 'nvidia-cublas>=13.2'; {apart}"
        if Version(installed) < Version("12.8"):
            yield Finding("cuBLAS", "FAIL", f"{said}, whose kernels came with 12.8", remedy)
        elif Version(installed) < Version("13.2"):
            why = "below 13.2 a kernel beside another, as on a second stream, may silently corrupt results"
            yield Finding("cuBLAS", "WARN", f"{said}: {why}", remedy)
        else:
            yield Finding("cuBLAS", "OK", said)
    if (installed := version("nvidia-cudnn-cu13") or "") and installed != CUDNN:
        yield Finding("cuDNN", "OK", f"{installed}; --dry_run --machine compiles attention with {CUDNN}")
    elif installed:
        yield Finding("cuDNN", "OK", f"{installed}, as in --dry_run --machine")


def check_triton(python: str) -> Finding:
    """Checks what Triton compiles its launchers with: a C compiler, and Python.h of the server's interpreter."""
    compiler = os.environ.get("CC") or next(filter(shutil.which, ("gcc", "clang", "cc")), None)
    done = subprocess.run([executable(python), "-c", _HEADER], capture_output=True, text=True, check=False)
    header = done.stdout.strip()
    lacks = [] if compiler and shutil.which(compiler) else ["a C compiler"]
    lacks += [] if header and os.path.isfile(header) else [f"{header or 'Python.h'}"]
    if not lacks:
        return Finding("Triton", "OK", f"{compiler} and {header}")
    remedy = "install gcc and the headers of this Python, as by: apt install gcc python3-dev"
    return Finding("Triton", "FAIL", f"vLLM's kernels need {' and '.join(lacks)}, which are not here", remedy)


def check_server(engine: str, python: str, has_gpu: bool) -> Finding:
    """Checks the engine of the server's interpreter, and packages that break it."""
    name, check = ("SGLang", check_sglang) if engine == "sglang" else ("vLLM", check_vllm)
    try:
        found = check(python)
    except UserError as e:
        return Finding(name, "FAIL", "cannot be used", str(e))
    except subprocess.TimeoutExpired as e:
        return Finding(name, "FAIL", f"no answer in {e.timeout:.0f} s", "run it again on a quieter machine")
    if engine == "sglang":
        if has_gpu:
            return Finding(name, "OK", found)
        remedy = "take rollout.name=vllm or inprocess on a machine without a GPU"
        return Finding(name, "WARN", f"{found} is for GPUs, and nvidia-smi finds none", remedy)
    if found == "gpu" and not has_gpu:
        return Finding(name, "WARN", "built for GPUs, and nvidia-smi finds none", install_for_cpu(executable(python)))
    if found == "cpu" and has_gpu:
        return Finding(name, "WARN", "built for the CPU, though there is a GPU", "pip install 'jppo[vllm]'")
    return Finding(name, "OK", f"built for the {found.upper()}")


def check_loopback() -> Finding:
    """Sends a request to a free port of this host without a proxy, as the trainer does to its servers."""
    try:
        with http.server.HTTPServer((HOST, 0), _Answer) as server:
            threading.Thread(target=server.handle_request, daemon=True).start()
            url = f"http://{HOST}:{server.server_port}"
            httpx.get(url, timeout=LOOPBACK_TIMEOUT_S, trust_env=False).raise_for_status()
    except (OSError, httpx.HTTPError) as e:
        return Finding("ports", "FAIL", f"{HOST} cannot be reached: {e}", "let programs here talk to each other")
    return Finding("ports", "OK", f"{HOST} can be reached")


def check_sandbox() -> Finding:
    """Reports the sandbox protections, if the run executes programs of the model."""
    guards = choice.probe()
    if why := choice.lacks(guards):
        remedy = "grade programs by reward.sandbox=container, or on a newer kernel; docs/security.md has the table"
        return Finding("sandbox", "WARN", f"{choice.summary(guards)}; reward.sandbox=strict refuses: {why}", remedy)
    return Finding("sandbox", "OK", choice.summary(guards))


class _Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Keeps the request out of the report."""


def environment(python: str | None, engine: str = "vllm") -> Iterator[Finding]:
    """Checks programs and devices; `python` is the interpreter of `engine`, None if no server will be started."""
    try:
        metadata = importlib.metadata.distribution("jppo")
    except importlib.metadata.PackageNotFoundError:
        yield Finding("jppo", "FAIL", "is not installed", f"make setup, or {sys.executable} -m pip install -e .")
    else:
        yield check_python(platform.python_version(), metadata.metadata["Requires-Python"])
        yield from check_packages(metadata.requires or (), _version)
    found = gpus()
    if found:
        yield check_driver(found, next((n for n in DRIVERS if _version(f"jax-cuda{n}-plugin")), None))
        yield from check_libraries(found, _version)
    yield check_devices(bool(found))
    if python is not None:
        server = check_server(engine, python, bool(found))
        yield server
        if found and server.verdict == "OK":
            yield check_triton(python)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _extra(requirement: Requirement) -> str | None:
    """Returns the extra of a requirement, by its marker; None for the core."""
    marker = str(requirement.marker)
    return marker.split('extra == "')[1].split('"')[0] if 'extra == "' in marker else None
