"""Checks of the machine: programs, ports, sandbox protections; and of a run: its folder, disk, memory, ports."""

import http.server
import importlib.metadata
import json
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import httpx
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import jppo
from jppo import plugins, settings
from jppo.child_process import executable
from jppo.errors import UserError, expanded
from jppo.preflight.accelerators import (
    DRIVERS,
    check_devices,
    check_driver,
    check_libraries,
    check_server_cuda,
    gpus,
    has_tpu,
)
from jppo.preflight.finding import GIB, Finding, Verdict
from jppo.preflight.memory_budget import CHOSEN, MemoryBudget
from jppo.rollout.servers.member import HOST, require_free_ports
from jppo.rollout.vllm.arguments import check_vllm, install_for_cpu, torch_cuda
from jppo.run.resume import require_own, require_resumable
from jppo.runlog import durable_files
from jppo.runlog.checkpoint import steps_in
from jppo.runlog.make import require_loggers
from jppo.settings import Settings, Training

_HEADER = "import sysconfig; print(sysconfig.get_paths()['include'] + '/Python.h')"
LOOPBACK_TIMEOUT_S = 5.0


def check_python(version: str, required: str) -> Finding:
    """Compares the interpreter with the package's `requires-python`."""
    if version in SpecifierSet(required):
        return Finding("Python", "OK", version)
    return Finding("Python", "FAIL", f"{version}, not {required}", "make the environment with a newer Python")


def check_packages(requirements: Iterable[str], version: Callable[[str], str | None]) -> Iterator[Finding]:
    """Compares installed versions with the tested bounds; an extra counts if all of its packages are installed."""
    core: list[Requirement] = []
    extras: dict[str, list[Requirement]] = {}
    for requirement in map(Requirement, requirements):
        extra = _extra(requirement)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra or ""}):
            continue  # of another Python
        (core if extra is None else extras.setdefault(extra, [])).append(requirement)
    present = [r for group in extras.values() if all(version(r.name) for r in group) for r in group]
    checked = {r.name: r for r in (*present, *core)}
    good_count = 0
    for name, requirement in checked.items():
        installed, remedy = version(name), f"{sys.executable} -m pip install '{name}{requirement.specifier}'"
        if installed is None:
            yield Finding(name, "FAIL", "is not installed", remedy)
        elif not requirement.specifier.contains(installed, prereleases=True):
            yield Finding(name, "WARN", f"{installed} is outside {requirement.specifier}, which is tested", remedy)
        else:
            good_count += 1
    if good_count:
        yield Finding("packages", "OK", f"{good_count} within the tested bounds")


def check_triton(python: str) -> Finding:
    """Checks what Triton compiles its launchers with: a C compiler, and Python.h of the server's interpreter."""
    compiler = os.environ.get("CC") or next(filter(shutil.which, ("gcc", "clang", "cc")), None)
    result = subprocess.run([executable(python), "-c", _HEADER], capture_output=True, text=True, check=False)
    header = result.stdout.strip()
    missing = [] if compiler and shutil.which(compiler) else ["a C compiler"]
    missing += [] if header and os.path.isfile(header) else [f"{header or 'Python.h'}"]
    if not missing:
        return Finding("Triton", "OK", f"{compiler} and {header}")
    remedy = "install gcc and the headers of this Python, as by: apt install gcc python3-dev"
    return Finding("Triton", "FAIL", f"vLLM's kernels need {' and '.join(missing)}, which are not here", remedy)


def check_server(engine: str, python: str, has_gpu: bool, *, needed: bool = True) -> Finding:
    """Checks the engine of the server's interpreter; a missing one fails if it is `needed`, else warns."""
    name, check = "vLLM", check_vllm
    if engine == "sglang":
        name, check = "SGLang", plugins.load("sglang.client").check_sglang
    try:
        build = check(python)
    except UserError as e:
        if needed:
            return Finding(name, "FAIL", "cannot be used", str(e))
        message = "cannot be used; the trainer samples by itself with rollout.name=inprocess, as jppo init sets it"
        return Finding(name, "WARN", message, str(e))
    except subprocess.TimeoutExpired as e:
        return Finding(name, "FAIL", f"no answer in {e.timeout:.0f} s", "run it again on a quieter machine")
    if engine == "sglang":
        if has_gpu:
            return Finding(name, "OK", build)
        remedy = "take rollout.name=vllm or inprocess on a machine without a GPU"
        return Finding(name, "WARN", f"{build} is for GPUs, and nvidia-smi finds none", remedy)
    if build == "gpu" and not has_gpu:
        return Finding(name, "WARN", "built for GPUs, and nvidia-smi finds none", install_for_cpu(executable(python)))
    if build == "cpu" and has_gpu:
        return Finding(name, "WARN", "built for the CPU, though there is a GPU", "pip install 'jppo[vllm]'")
    return Finding(name, "OK", f"built for the {build.upper()}")


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
    """Reports which protections the sandbox for programs of the model has here."""
    choice = plugins.load("sandbox.choice")
    guards = choice.probe()
    if reason := choice.lacks(guards):
        remedy = "grade programs by reward.sandbox=container, or on a newer kernel; docs/security.md has the table"
        return Finding("sandbox", "WARN", f"{choice.summary(guards)}; reward.sandbox=strict refuses: {reason}", remedy)
    return Finding("sandbox", "OK", choice.summary(guards))


class _Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Keeps the request out of the report."""


def check_environment(python: str | None, engine: str = "vllm", *, needed: bool = True) -> Iterator[Finding]:
    """Checks packages, driver and devices; `python` is the interpreter of `engine`, None if no server starts."""
    try:
        metadata = importlib.metadata.distribution("jppo")
    except importlib.metadata.PackageNotFoundError:
        yield Finding("jppo", "FAIL", "is not installed", f"make setup, or {sys.executable} -m pip install -e .")
    else:
        yield check_python(platform.python_version(), metadata.metadata["Requires-Python"])
        yield from check_packages(metadata.requires or (), _installed_version)
    cards = gpus()
    if cards:
        yield check_driver(cards, next((n for n in DRIVERS if _installed_version(f"jax-cuda{n}-plugin")), None))
        yield from check_libraries(cards, _installed_version)
    yield check_devices(cards, has_tpu())
    if python is not None:
        server = check_server(engine, python, bool(cards), needed=needed)
        yield server
        if cards and server.verdict == "OK":
            yield from check_server_cuda(server.about, cards, torch_cuda(python), needed=needed)
            yield check_triton(python)


def _installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _extra(requirement: Requirement) -> str | None:
    """Returns the extra of a requirement, by its marker; None for the core."""
    marker = str(requirement.marker)
    return marker.split('extra == "')[1].split('"')[0] if 'extra == "' in marker else None


DAY_S = 86_400
LAST_YEAR = 2100
LOGS = GIB // 4  # metrics, samples, TensorBoard and the servers' logs
SHOWN = 3  # settings that differ
RUN_CHOOSES = ("rollout.servers", *CHOSEN)  # which a run may choose
REMEDY = (
    "lower actor.max_tokens_per_device, set model.remat=full, spread the models by mesh.fsdp, train adapters by"
    " model.lora_rank, or use a larger machine"
)


def nearest_existing(folder: pathlib.Path) -> pathlib.Path:
    return next(path for path in (folder, *folder.parents) if path.exists())


def check_writable(about: str, folder: pathlib.Path) -> Iterator[Finding]:
    """Checks that a file can be written to the folder; what it creates is removed."""
    folder = folder.absolute()
    missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".jppo-doctor-") as file:
            file.write(b"written")
            file.flush()
            os.fsync(file.fileno())
    except OSError as e:
        remedy = "set trainer.run_dir to a folder that this user may write to"
        yield Finding(about, "FAIL", f"{folder} is not writable: {e.strerror}", remedy)
    else:
        yield Finding(about, "OK", f"{folder} is writable")
    finally:
        for path in missing:
            if path.is_dir():
                path.rmdir()


def check_disk(folder: pathlib.Path, *, checkpoint: int, keep: int, export: int) -> Iterator[Finding]:
    """Compares the disk of the run folder with its checkpoints, one more than kept, and the exported model."""
    free = shutil.disk_usage(nearest_existing(folder.absolute())).free
    needed = (keep + 1) * checkpoint + export + LOGS
    message = (
        f"{free / GIB:.1f} GiB free; {keep + 1} checkpoints of {checkpoint / GIB:.2f} GiB, the model and logs take"
        f" {needed / GIB:.1f}"
    )
    remedy = "make room, use another disk for trainer.run_dir, or lower trainer.max_ckpt_to_keep"
    verdict: Verdict = "FAIL" if free < needed else "WARN" if free < 1.5 * needed else "OK"
    yield Finding("disk", verdict, message, "" if verdict == "OK" else remedy)


def check_publish_room(publish_dir: str, *, in_dev_shm: bool, weights: int) -> Iterator[Finding]:
    """Checks the room for published weights: a folder, or unnamed memory, which counts as memory."""
    folder = publish_dir if publish_dir else "/dev/shm" if in_dev_shm else ""
    if not folder:
        message = f"two copies of the weights, {2 * weights / GIB:.2f} GiB, in unnamed files: part of the memory above"
        yield Finding("publish room", "OK", message)
        return
    if not os.path.isdir(folder):
        remedy = "create it, or leave rollout.publish_dir empty"
        yield Finding("publish room", "FAIL", f"{folder} is not a folder", remedy)
        return
    free = shutil.disk_usage(folder).free
    message = f"{folder} has {free / GIB:.2f} GiB free for two copies of the weights, {2 * weights / GIB:.2f}"
    fits = free >= 2 * weights
    remedy = "empty it, or give the container more (docker run --shm-size)"
    yield Finding("publish room", "OK" if fits else "FAIL", message, "" if fits else remedy)


def check_memory(budgets: Sequence[MemoryBudget]) -> Iterator[Finding]:
    """Compares the memory estimate with the memory of devices and host."""
    for budget in budgets:
        largest = sorted(budget.parts.items(), key=lambda part: -part[1])[:3]
        capacity = "unknown room" if budget.has is None else f"{budget.has / GIB:.1f}"
        parts = ", ".join(f"{about} {count / GIB:.2f}" for about, count in largest)
        message = f"{budget.where}: {budget.needs / GIB:.1f} GiB of {capacity}; most of it {parts}"
        yield Finding("memory", budget.verdict, message, "" if budget.verdict == "OK" else REMEDY)


def check_server_ports(c: Settings) -> Iterator[Finding]:
    """Checks that the ports of the run's servers are free; UserError, a FAIL in the report, if not."""
    if c.rollout.urls:
        yield Finding("server ports", "OK", "none: rollout.urls lists running servers")
        return
    count = c.rollout.least_servers
    require_free_ports(c.rollout.port, count)
    port_list = ", ".join(str(c.rollout.port + i) for i in range(count))
    yield Finding("server ports", "OK", f"{port_list} can be used" if c.rollout.port else "any that is free")


def check_clock(now: float, *, newest: float) -> Iterator[Finding]:
    """Checks the clock against the package's files, and that the monotonic clock advances."""
    begin = time.monotonic()
    time.sleep(0.01)
    if not time.monotonic() > begin:
        yield Finding("clock", "FAIL", "the monotonic clock does not advance", "time limits need it: fix the machine")
        return
    date = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(now))
    if now < newest - DAY_S or time.gmtime(now).tm_year > LAST_YEAR:
        remedy = "set the clock: certificates and logs depend on it"
        yield Finding("clock", "WARN", f"{date} is wrong: jppo's own files are newer or much older", remedy)
    else:
        yield Finding("clock", "OK", date)


def package_time() -> float:
    folder = pathlib.Path(jppo.__file__).parent
    return max(file.stat().st_mtime for file in folder.rglob("*.py"))


def check_folder(c: Training) -> Iterator[Finding]:
    """Checks what a run with these settings would write, and what it would do with an earlier run of its folder."""
    require_loggers(c)
    require_resumable(c)
    run = expanded(c.trainer.run_dir)
    steps = steps_in(run / "checkpoints")
    if not steps:
        yield Finding("run folder", "OK", f"{run}: a new run")
        return
    if c.trainer.resume_mode == "disable":
        remedy = "use another trainer.run_dir to keep them"
        yield Finding("run folder", "WARN", f"{run}: trainer.resume_mode=disable removes its checkpoints", remedy)
        return
    require_own(c)
    changed = changed_settings(run / "config.json", c)
    if changed:
        more = f" and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
        message = (
            f"{run} has a run with other settings, which resumes at step {steps[-1]}: {', '.join(changed[:SHOWN])}"
        )
        yield Finding("run folder", "WARN", message + more, "use another trainer.run_dir, or ignore this if intended")
        return
    yield Finding("run folder", "OK", f"{run}: resumes after step {steps[-1]}")


def changed_settings(file: pathlib.Path, c: Training) -> list[str]:
    """Returns the settings in a run's config.json that differ from `c`, as NAME=SAVED."""
    saved = settings.by_name(durable_files.read_json(file))
    if not saved:
        return [f"{file.name} cannot be read"]
    current = settings.by_name(json.loads(settings.dump(c)))
    names = dict.fromkeys([*current, *saved])
    compared = [name for name in names if name not in RUN_CHOOSES or current.get(name) not in (-1, "auto")]
    return [f"{name}={saved.get(name)}" for name in compared if saved.get(name) != current.get(name)]
