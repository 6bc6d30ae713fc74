"""The doctor's findings on machines that people have, from what nvidia-smi, the driver and the kernel print there."""

import pathlib
from types import SimpleNamespace

import pytest

from jppo.learner import sharding
from jppo.preflight import accelerators, machine
from jppo.preflight.accelerators import NvidiaGpu, gpus

T4 = "Tesla T4, 550.54.15, 15360, 7.5"  # Colab
A100 = "NVIDIA A100-SXM4-40GB, 550.54.15, 40960, 8.0"
V100 = "Tesla V100-SXM2-16GB, 580.65.06, 16384, 7.0"
P100 = "Tesla P100-PCIE-16GB, 560.35.03, 16384, 6.0"  # Kaggle
LAPTOP = "NVIDIA GeForce RTX 4060 Laptop GPU, 580.65.06, 8188, 8.9"
H100 = "NVIDIA H100 80GB HBM3, 580.65.06, 81559, 9.0"


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """Puts an nvidia-smi that prints these lines first in PATH."""

    def install(*lines, knows_capability=True):
        old = "" if knows_capability else 'case "$*" in *compute_cap*) echo not a valid field; exit 2;; esac\n'
        program = tmp_path / "bin/nvidia-smi"
        program.parent.mkdir()
        program.write_text(f"#!/bin/sh\n{old}" + "".join(f"echo '{line}'\n" for line in lines))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(program.parent), prepend=":")
        return gpus(tmp_path)

    return install


def test_gpus_are_read_from_nvidia_smi(smi):
    shared = "NVIDIA GB10, 580.95.05, [N/A], 12.1"  # its memory is the host's
    assert smi(H100, shared) == [
        NvidiaGpu("NVIDIA H100 80GB HBM3", "580.65.06", 81559 << 20, (9, 0)),
        NvidiaGpu("NVIDIA GB10", "580.95.05", None, (12, 1)),
    ]


def test_an_nvidia_smi_that_knows_no_capability_gives_the_rest(smi):
    assert smi("Tesla V100-SXM2-16GB, 470.57.02, 16160", knows_capability=False) == [
        NvidiaGpu("Tesla V100-SXM2-16GB", "470.57.02", 16160 << 20, None)
    ]


@pytest.mark.parametrize(
    "module, version",
    [
        ("NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024", "550.54.15"),
        (
            "NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs-builder@U22-I3)  Sun Jul 27",
            "580.65.06",
        ),
    ],
)
def test_a_container_without_nvidia_smi_has_the_drivers_files(tmp_path, monkeypatch, module, version):
    monkeypatch.setattr(accelerators.shutil, "which", lambda _: None)
    assert gpus(tmp_path) == []
    card = tmp_path / "driver/nvidia/gpus/0000:07:00.0/information"
    card.parent.mkdir(parents=True)
    card.write_text("Model: \t\t NVIDIA A100-SXM4-40GB\nIRQ:   \t\t 246\nBus Type: \t PCIe\n")
    (tmp_path / "driver/nvidia/version").write_text(f"NVRM version: {module}\nGCC version:  gcc version 12.2.0\n")
    assert gpus(tmp_path) == [NvidiaGpu("NVIDIA A100-SXM4-40GB", version, None)]


@pytest.mark.parametrize(
    "line, fault, remedy",
    [
        (A100, "driver 550.54.15; CUDA 13 needs 580 or newer", "update the driver, or "),
        (T4, "driver 550.54.15; CUDA 13 needs 580 or newer", "update the driver, or "),
        (V100, "Tesla V100-SXM2-16GB has compute capability 7.0; CUDA 13 needs 7.5 or more", ""),
        (P100, "driver 560.35.03; CUDA 13 needs 580 or newer", "update the driver, or "),
        (LAPTOP, None, None),
    ],
)
def test_cuda_13_needs_a_driver_and_a_capability(smi, line, fault, remedy):
    """Bounds: docs.nvidia.com/deploy/cuda-compatibility, docs.jax.dev/en/latest/installation.html."""
    cards = smi(line)
    found = accelerators.check_driver(cards, 13)
    if fault is None:
        assert found.verdict == "OK" and accelerators.newest_cuda(cards) == 13
        return
    assert found.verdict == "FAIL" and found.found.endswith(f": {fault}")
    assert found.remedy.startswith(remedy) and "uninstall -y jax-cuda13-plugin jax-cuda13-pjrt && " in found.remedy
    assert found.remedy.endswith("-m pip install 'jppo[cuda12]'")
    assert accelerators.newest_cuda(cards) == 12 and accelerators.check_driver(cards, 12).verdict == "OK"


def test_no_cuda_runs_on_an_older_driver(smi):
    cards = smi("NVIDIA A100-SXM4-40GB, 470.57.02, 40536, 8.0")
    assert accelerators.newest_cuda(cards) is None
    assert accelerators.check_driver(cards, 12).remedy == "update the driver"


@pytest.mark.parametrize("needed, verdict", [(True, "FAIL"), (False, "WARN")])
def test_vllms_cuda_is_compared_with_the_driver(smi, needed, verdict):
    cards = smi(A100)
    (found,) = accelerators.check_server_cuda("vLLM", cards, 13, needed=needed)
    assert (found.about, found.verdict) == ("vLLM's CUDA", verdict)
    assert found.remedy == "update the driver, or set rollout.name=inprocess: the trainer samples by itself"
    assert not list(accelerators.check_server_cuda("vLLM", cards, 12, needed=needed))  # a build for CUDA 12.9


def test_the_doctor_compares_vllms_cuda(smi, monkeypatch):
    cards = smi(A100)
    monkeypatch.setattr(machine, "gpus", lambda: cards)
    monkeypatch.setattr(machine, "check_vllm", lambda _: "gpu")
    monkeypatch.setattr(machine, "torch_cuda", lambda _: 13)
    found = {one.about: one for one in machine.check_environment("", needed=True)}
    assert found["vLLM"].verdict == "OK" and found["vLLM's CUDA"].verdict == "FAIL"
    assert found["JAX"].remedy in ("unset JAX_PLATFORMS", "") and found["driver"].found.startswith("1 x NVIDIA A100")


@pytest.mark.parametrize("line, extra", [(A100, "cuda12"), (LAPTOP, "cuda")])
def test_a_gpu_that_jax_does_not_use_gets_the_extra_that_runs_there(smi, monkeypatch, line, extra):
    monkeypatch.setattr(
        accelerators.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=0, stdout='["cpu", ["cpu"]]')
    )
    monkeypatch.delenv("JAX_PLATFORMS")
    name, driver, mib, capability = line.split(", ")
    card = NvidiaGpu(name, driver, int(mib) << 20, tuple(map(int, capability.split("."))))
    assert accelerators.check_devices([card], False).remedy.endswith(f"-m pip install 'jppo[{extra}]'")
    assert accelerators.check_devices([], True).remedy.endswith("-m pip install 'jppo[tpu]'")


@pytest.mark.parametrize(
    "vendor, device, found", [("0x1ae0", "0x0063", True), ("0x1ae0", "0x0042", False), ("0x10de", "0x0063", False)]
)
def test_tpus_are_pci_devices(tmp_path, vendor, device, found):
    """0x0042 is Google's network card, which every VM there has."""
    assert not accelerators.has_tpu(tmp_path / "none")
    (tmp_path / "0000:00:05.0").mkdir()
    (tmp_path / "0000:00:05.0/vendor").write_text(vendor + "\n")
    (tmp_path / "0000:00:05.0/device").write_text(device + "\n")
    assert accelerators.has_tpu(tmp_path) == found


def test_the_pci_devices_are_jaxs():
    from jax._src import hardware_utils

    assert set(accelerators.TPUS) - set(hardware_utils._TPU_PCI_DEVICE_IDS) <= {"0x007c", "0x0083"}  # of JAX 0.12 on
    assert set(hardware_utils._TPU_PCI_DEVICE_IDS) <= set(accelerators.TPUS)
    setup = (pathlib.Path(__file__).resolve().parents[2] / "scripts/setup.sh").read_text()
    assert "|".join(accelerators.TPUS) in setup


BOTH = {"model.compute_dtype": "bfloat16", "rollout.dtype": "bfloat16"}


@pytest.mark.parametrize(
    "dtypes, refused, verdict, remedy",
    [
        ({}, None, "WARN", "set rollout.dtype and model.compute_dtype to float16 or float32"),
        (BOTH, None, "WARN", "set model.compute_dtype and rollout.dtype to float16 or float32"),
        (BOTH, "rollout.dtype", "FAIL", "set model.compute_dtype and rollout.dtype to float16 or float32"),
        (BOTH | {"rollout.dtype": "float16"}, "rollout.dtype", "WARN", "set model.compute_dtype to float16 or float32"),
        (dict.fromkeys(BOTH, "float32"), "rollout.dtype", "OK", ""),
    ],
)
def test_a_t4_has_no_bfloat16(smi, dtypes, refused, verdict, remedy):
    (found,) = accelerators.check_bfloat16(smi(T4), dtypes, refused)
    assert (found.verdict, found.remedy) == (verdict, remedy)
    assert found.found.startswith("Tesla T4, compute capability 7.5, has none")


def test_newer_gpus_have_bfloat16(smi):
    assert not list(accelerators.check_bfloat16(smi(A100, LAPTOP, H100), BOTH, "rollout.dtype"))


@pytest.mark.parametrize(
    "capability, dtype", [("7.5", "float16"), ("7.0", "float16"), ("8.0", "bfloat16"), ("9.0", "bfloat16")]
)
def test_the_fastest_dtype_of_a_gpu(capability, dtype):
    assert sharding.fastest_dtype(SimpleNamespace(compute_capability=capability)) == dtype


def test_the_fastest_dtype_of_a_tpu_and_of_another_vendors_gpu():
    assert sharding.fastest_dtype(SimpleNamespace(platform="tpu")) == "bfloat16"
    assert sharding.fastest_dtype(SimpleNamespace(compute_capability="gfx942")) == "bfloat16"


def test_small_gpus_have_a_recipe(smi):
    cards = smi(LAPTOP, H100)
    (found,) = accelerators.check_small(cards)
    assert found.verdict == "OK" and found.found.startswith("8.0 GiB: ") and "jppo://small_card" in found.found
    assert list(accelerators.check_small([cards[1]])) == []


WSL2 = (
    "Linux version 5.15.167.4-microsoft-standard-WSL2 (root@f9c826d3017f) (gcc (GCC) 11.2.0, GNU ld (GNU Binutils)"
    " 2.37) #1 SMP Tue Nov 5 00:21:55 UTC 2024\n"
)
UBUNTU = (
    "Linux version 6.8.0-48-generic (buildd@lcy02-amd64-010) (x86_64-linux-gnu-gcc-13 (Ubuntu 13.2.0)) #48-Ubuntu\n"
)


def test_wsl2_limits_pinned_memory(tmp_path):
    (tmp_path / "version").write_text(WSL2)
    (found,) = accelerators.check_wsl(accelerators.kernel_version(tmp_path), ())
    assert found.verdict == "OK" and "WSL2 limits pinned memory" in found.found
    (offloads,) = accelerators.check_wsl(WSL2, ["actor.optimizer_offload", "critic.param_offload"])
    assert offloads.verdict == "WARN"
    assert "set actor.optimizer_offload=False and critic.param_offload=False" in offloads.remedy
    assert not list(accelerators.check_wsl(UBUNTU, ["actor.optimizer_offload"]))
