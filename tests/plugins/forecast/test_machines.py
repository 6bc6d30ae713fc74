"""Machines by name, their rates, and what a collective takes on them; against arithmetic by hand."""

import os
from types import SimpleNamespace

import numpy as np
import pytest

from jppo.errors import UserError
from jppo.plugins.forecast import account as forecast
from jppo.plugins.forecast import compilers, machines
from jppo.plugins.forecast.account import Account
from jppo.plugins.forecast.machines import SHARES
from jppo.plugins.forecast.schedule import Collective, CollectiveStart, Kernel, Loop, Wait


@pytest.mark.parametrize(
    "name, groups, each, shape, kind",
    [
        ("H100", 1, 1, (), "NVIDIA H100 80GB HBM3"),
        ("8xH100", 1, 8, (), "NVIDIA H100 80GB HBM3"),
        ("4x8xh200", 4, 8, (), "NVIDIA H200"),
        ("8xB200", 1, 8, (), "NVIDIA B200"),
        ("2xA100-40GB", 1, 2, (), "NVIDIA A100-SXM4-40GB"),
        ("RTX-4090", 1, 1, (), "NVIDIA GeForce RTX 4090"),
        ("RTX-4060", 1, 1, (), "NVIDIA GeForce RTX 4060"),
        ("2xT4", 1, 2, (), "Tesla T4"),
        ("v5e-16", 1, 16, (4, 4), "TPU v5 lite"),
        ("v5litepod-8", 1, 8, (2, 4), "TPU v5 lite"),
        ("v5p-8", 1, 4, (2, 2, 1), "TPU v5"),  # counted by cores, two a chip
        ("v5p-64", 1, 32, (2, 4, 4), "TPU v5"),
        ("v6e-8", 1, 8, (2, 4), "TPU v6 lite"),
        ("v5e-32", 1, 32, (4, 8), "TPU v5 lite"),
        ("v6e-64", 1, 64, (8, 8), "TPU v6 lite"),
        ("v5e-128", 1, 128, (8, 16), "TPU v5 lite"),
        ("2xv6e-256", 2, 256, (16, 16), "TPU v6 lite"),
    ],
)
def test_names_as_people_say_them(name, groups, each, shape, kind):
    found = machines.parse_machine(name)
    assert (found.groups, found.each, found.shape, found.chip.kind) == (groups, each, shape, kind)
    assert found.devices == groups * each and found.chip.peak("bfloat16") > 8e12


@pytest.mark.parametrize("name", ["8xB300", "0xH100", "H100x8", "", "2x2x2xH100", "v9-8", "2x2xv5e-8"])
def test_an_unknown_machine_lists_the_known_ones(name):
    with pytest.raises(UserError, match=r"no such machine; known are H100, H200, B200, A100-40GB, .*v5e-16, v5p-64"):
        machines.parse_machine(name)


def test_a_slice_of_another_size_lists_the_sizes():
    with pytest.raises(UserError, match="v6e-7: no slice has that size; there are v6e-1, v6e-4, v6e-8, v6e-16"):
        machines.parse_machine("v6e-7")


@pytest.mark.parametrize("name", [*machines.GPUS, *(f"{tpu}-8" for tpu in machines.TPUS)])
def test_every_figure_is_there_and_plausible(name):
    chip = machines.parse_machine(name).chip
    has_bfloat16 = name != "T4"  # XLA computes its products in float32 there
    assert (chip.peak("float32") < chip.peak("bfloat16")) == has_bfloat16 and 7.9 * 2**30 < chip.memory < 180 * 2**30
    assert chip.network < chip.link < chip.hbm and chip.source
    if isinstance(chip, machines.Gpu):
        described = machines.target_config(chip, compilers.CUDNN)
        assert f"device_memory_size: {chip.memory}" in described
        assert "dnn_version_info { major: 9 minor: 20 patch: 0 }" in described


def devices(machine):
    """Stand-ins for the machine's devices, in the order in which JAX has them."""
    if machine.shape:
        places = list(np.ndindex(*machine.shape[::-1]))
        one = [SimpleNamespace(coords=place[::-1], process_index=i // 4) for i, place in enumerate(places)]
        return [SimpleNamespace(**vars(d), slice_index=s) for s in range(machine.groups) for d in one]
    return [SimpleNamespace(process_index=i // machine.each) for i in range(machine.devices)]


def collective(kind, groups, size):
    return Collective(kind, ("fsdp",), groups, 1, size, ("bf16",), True, "")


@pytest.mark.parametrize(
    "name, kind, groups, seconds",
    [
        # seven eighths of 9 GB come to each GPU by 450 GB/s
        ("8xH100", "all-gather", [range(8)], 9 * 7 / 8 / 450),
        ("8xH100", "reduce-scatter", [range(8)], 9 * 7 / 8 / 450),
        ("8xH100", "all-reduce", [range(8)], 2 * 9 * 7 / 8 / 450),
        ("8xH100", "all-to-all", [range(8)], 9 * 7 / 8 / 450),
        ("8xH100", "collective-permute", [(0, 1)], 9 / 450),
        # three quarters come to each host by the network of its eight GPUs: sooner than all are exchanged inside
        ("4x8xH100", "all-gather", [range(32)], 9 * 7 / 8 / 450),
        ("4x4xA100-80GB", "all-gather", [range(16)], 9 * 3 / 4 / 4 / 25),
        # one GPU of each host: its network alone
        ("4x8xH100", "all-gather", [(0, 8, 16, 24)], 9 * 3 / 4 / 50),
        ("4x8xH100", "collective-permute", [(0, 8)], 9 / 50),
        # an axis of four chips is a line, one of sixteen a ring
        ("v5e-16", "all-gather", [range(4)], 9 * 3 / 4 / 45),
        ("v5e-16", "all-gather", [range(16)], 9 * 15 / 16 / 90),
        ("v6e-256", "all-gather", [range(16)], 9 * 15 / 16 / 180),
        ("2xv6e-256", "all-gather", [(0, 256)], 9 / 2 / 12.5),
    ],
)
def test_the_time_of_a_collective(name, kind, groups, seconds):
    machine = machines.parse_machine(name)
    one = collective(kind, tuple(tuple(g) for g in groups), 9e9)
    assert forecast.seconds_of(one, machine, devices(machine)) == pytest.approx(seconds)


BF16 = int(989.4e12)  # FLOP of a second on an H100, at the vendor's rate


def h100s():
    machine = machines.parse_machine("8xH100")
    return machine, SimpleNamespace(devices=np.array(devices(machine), object)), machine.chip.shares


def test_kernels_run_one_after_another_each_bound_by_products_or_memory():
    machine, mesh, shares = h100s()
    product = Kernel("product", (("bfloat16", BF16),), int(3.35e12) // 4)
    attention = Kernel("attention", (("bfloat16", BF16 // 2),), 0)
    stream = Kernel("memory", (), int(3.35e12) // 2)
    account = Account(
        flops={"bfloat16": BF16 + BF16 // 2},
        hbm=3 * int(3.35e12) // 4,
        schedule=(product, Loop(3, (attention,)), stream),
    )
    found = forecast.forecast_account(account, machine, mesh, useful=int(6 * 989.4e12))
    compute = 1 / shares["product"].value + 1.5 / shares["attention"].value
    assert found.compute == pytest.approx(compute / shares["program"].value)
    assert found.hbm == pytest.approx(0.5 / shares["memory"].value / shares["program"].value)
    assert found.bound == "compute" and found.links == 0
    assert found.seconds == pytest.approx(found.compute + found.hbm)
    assert found.mfu == pytest.approx(0.5)  # six of the twelve seconds that all devices spend at the vendor's rates
    wide = forecast.forecast_account(
        Account(schedule=(Kernel("product", (("float32", int(67e12)),), 0),)), machine, mesh
    )
    assert wide.compute == pytest.approx(1 / shares["product"].value / shares["program"].value)  # by float32's rate


@pytest.mark.parametrize("waits, waited", [(False, 0.5), (True, 2.0)])
def test_only_the_part_of_a_collective_that_outlasts_the_kernels_counts(waits, waited):
    machine, mesh, shares = h100s()
    whole = 2.0 * 450e9 * shares["link"].value * 8 / 7
    gather = CollectiveStart((collective("all-gather", (tuple(range(8)),), whole),), "all-gather-start", waits)
    kernel = Kernel("product", (("bfloat16", int(1.5 * BF16 * shares["product"].value * shares["program"].value)),), 0)
    found = forecast.forecast_account(Account(schedule=(gather, kernel, Wait("all-gather-start"))), machine, mesh)
    assert found.compute == pytest.approx(1.5) and found.links == pytest.approx(waited)
    twice = forecast.forecast_account(
        Account(schedule=(Loop(2, (gather, kernel, Wait("all-gather-start"))),)), machine, mesh
    )
    assert twice.seconds == pytest.approx(2 * found.seconds)


def test_copies_beside_the_kernels_are_bound_by_memory():
    machine, mesh, shares = h100s()
    found = forecast.forecast_account(Account(hbm=int(3.35e12)), machine, mesh)
    assert found.hbm == pytest.approx(1 / shares["memory"].value) and found.bound == "hbm"


@pytest.mark.parametrize("generation", SHARES)
def test_every_share_has_a_source_and_is_below_one(generation):
    kinds = {"product", "attention", "memory", "link", "network", "program"}
    assert set(SHARES[generation]) == kinds
    assert all(0.3 < one.value < 1 and one.source for one in SHARES[generation].values())


def test_a_missing_compiler_names_its_command(tmp_path, monkeypatch):
    monkeypatch.setattr(compilers, "compiler_folder", lambda platform: tmp_path / platform)
    for name, target in (("8xH100", "gpu"), ("v5e-16", "tpu")):
        with pytest.raises(UserError, match=f"not installed in .*{target}; run: make target-{target} "):
            compilers.require_compiler(machines.parse_machine(name))
        (tmp_path / target).mkdir()
        (tmp_path / target / compilers.READY).write_text("0.0.1")  # of another JAX
        with pytest.raises(UserError, match="is not installed"):
            compilers.require_compiler(machines.parse_machine(name))


def test_the_packages_are_of_this_jax():
    import jax

    assert f"jax-cuda13-plugin=={jax.__version__}" in compilers.requirements("gpu")
    assert f"nvidia-cudnn-cu13=={compilers.CUDNN}" in compilers.requirements("gpu")
    (libtpu,) = compilers.requirements("tpu")
    assert libtpu.startswith("libtpu==")


def test_a_compiler_with_another_cudnn_is_refused(tmp_path, monkeypatch):
    import jax

    folder, ran = tmp_path / "gpu", []
    monkeypatch.setattr(compilers, "compiler_folder", lambda platform: folder)
    monkeypatch.setattr(compilers.subprocess, "run", lambda command, check: ran.append(command))
    folder.mkdir()
    (folder / "of_an_older_one").touch()
    compilers.install_compiler("gpu")
    assert (
        list(folder.iterdir()) == [folder / compilers.READY] and ran[0][-1] == f"nvidia-cudnn-cu13=={compilers.CUDNN}"
    )
    machine = machines.parse_machine("8xH100")
    assert compilers.require_compiler(machine)["JAX_PLATFORMS"] == "cpu"
    (folder / compilers.READY).write_text(f"{jax.__version__}\n")  # as installed before cuDNN had a version
    with pytest.raises(UserError, match=rf"JAX .* and cuDNN {compilers.CUDNN} is not installed in .*target-gpu"):
        compilers.require_compiler(machine)


@pytest.mark.parametrize(
    ("name", "topology", "more"),
    [
        ("v5e-16", "v5e:4x4", {}),
        ("2xv5e-16", "v5e:4x4", {"num_slices": 2}),
        ("v5e-1", "v5e:1x1", {"chips_per_host_bounds": (1, 1, 1)}),
        ("v5e-4", "v5e:2x2", {}),
        ("v5p-8", "v5p:2x2x1", {}),
        ("v4-16", "v4:2x2x2", {"chip_config_name": "megacore"}),
    ],
)
def test_a_compiler_is_asked_for_the_slices_of_the_machine(monkeypatch, name, topology, more):
    import jax
    from jax.experimental import topologies

    asked, changed = [], {}

    def update(option, value):
        assert hasattr(jax.config, option)
        changed[option] = value

    monkeypatch.setattr(jax.config, "update", update)
    described = lambda *given, **named: asked.append((*given, named)) or SimpleNamespace(devices=("a", "b"))  # noqa: E731
    monkeypatch.setattr(topologies, "get_topology_desc", described)
    assert compilers.devices_of(machines.parse_machine(name)) == ["a", "b"]
    assert asked == [(topology, "tpu", more)]
    effort = "jax_exec_time_optimization_effort"  # JAX 0.12 has none
    low = {effort: -1.0} if hasattr(jax.config, effort) else {}
    assert changed == {"jax_enable_compilation_cache": False} | low


@pytest.mark.parametrize("crash", ["SIGABRT", "SIGTRAP"])
def test_a_compiler_that_crashes_is_tried_again_and_is_one_line(tmp_path, monkeypatch, crash):
    end = f"os.kill(os.getpid(), signal.{crash})"
    (tmp_path / "crashes.py").write_text(f"import os, signal; {end}")
    monkeypatch.setattr(compilers, "require_compiler", lambda machine: os.environ | {"PYTHONPATH": str(tmp_path)})
    said = r"--machine=v5p-8: XLA's compiler crashed \(\w+\); try another mesh, such as mesh\.data=1 mesh\.fsdp=-1,"
    with pytest.raises(UserError, match=said):
        compilers.rerun_if_absent(machines.parse_machine("v5p-8"), "crashes", [])
    again = "os.environ.get('JAX_EXEC_TIME_OPTIMIZATION_EFFORT')"
    (tmp_path / "crashes.py").write_text(f"import os, signal; {again} or {end}")
    with pytest.raises(SystemExit, match="0"):  # the second try, with all of its search
        compilers.rerun_if_absent(machines.parse_machine("v5p-8"), "crashes", [])
    (tmp_path / "crashes.py").write_text("import os; os.kill(os.getpid(), 9)")
    with pytest.raises(UserError, match=r"v5p-8: the process of XLA's compiler was killed, .* memory .*; end other"):
        compilers.rerun_if_absent(machines.parse_machine("v5p-8"), "crashes", [])
