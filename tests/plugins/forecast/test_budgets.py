"""--dry_run on a described machine: refused in one line, or a whole report."""

import dataclasses
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from jppo import settings
from jppo.errors import UserError
from jppo.learner import packing
from jppo.plugins.forecast import budgets, compilers, machines, report, schedule
from jppo.plugins.forecast.account import Account
from jppo.plugins.forecast.report import exchange_lines
from jppo.preflight import checks, memory
from jppo.preflight.programs import Compilation, Estimate, ProgramMemory
from jppo.preflight.request import DryRun
from tests.make import typed

NO_GPU = not (compilers.compiler_folder("gpu") / compilers.READY).is_file()
GIB = 2**30


@pytest.mark.parametrize(
    "changes, share",
    [
        ({"rollout.name": "inprocess"}, 0.75),
        ({"rollout.gpu_memory_utilization": 0.5}, 0.42),
        ({"rollout.sleep_level": 1}, 0.92),
        ({"rollout.urls": "http://127.0.0.1:1"}, 0.75),
    ],
)
def test_a_trainers_share_of_a_gpu_is_what_its_servers_leave(changes, share):
    c = settings.default()
    c.update_from_flattened_dict(changes)
    room, why = budgets.capacity(typed(c), machines.parse_machine("H100"))
    assert room == pytest.approx(share * 84978434048) and why.startswith(f"{share:.0%}")
    assert budgets.capacity(typed(c), machines.parse_machine("v6e-8"))[0] == 31.25 * GIB


def estimate_of(peak, error=None):
    return Estimate({}, (ProgramMemory("actor gradient", 0, int(peak), compiled=Compilation(error=error)),))


def test_a_machine_that_is_too_small_names_the_moment_and_the_first_change_that_fits():
    c, tried = settings.default(), []
    c.rollout.name, c.model.remat, c.actor.max_tokens_per_device = "inprocess", "dots", 16384
    c.data.max_prompt_length, c.data.max_response_length = 1024, 1024

    def estimate(other):
        tried.append((other.model.remat, other.actor.max_tokens_per_device, other.actor.optimizer_offload))
        return estimate_of(10 * GIB if other.actor.max_tokens_per_device <= 8192 else 70 * GIB)

    said = (
        r"H100: actor gradient takes 80\.0 GiB of each device's 59\.4; --config\.model\.remat=full"
        r" --config\.actor\.max_tokens_per_device=8192 fits: 10\.0 GiB"
    )
    with pytest.raises(UserError, match=said):
        budgets.require_room(typed(c), machines.parse_machine("H100"), estimate_of(80 * GIB), estimate)
    assert tried == [("full", 16384, False), ("full", 8192, False)]
    budgets.require_room(typed(c), machines.parse_machine("H100"), estimate_of(50 * GIB), estimate)  # fits


def test_the_memory_that_lacks_most_is_named():
    """The trainer needs 61 GiB and lacks 1.6 of them; the server needs 40 and lacks 20.2: 25% of 79.1 GiB are 19.8."""
    c = settings.default()
    c.rollout.name, parts = "inprocess", {"weights": 40 * GIB}
    server = SimpleNamespace(name="vLLM", fraction=0.25, sleeps=False, cache=1, least=lambda: parts)
    found = dataclasses.replace(estimate_of(61 * GIB), server=server)
    with pytest.raises(UserError, match=r"H100: vLLM's share, 25% of a GPU: 40\.0 GiB of 19\.8; neither"):
        budgets.require_room(typed(c), machines.parse_machine("H100"), found, lambda _: None)
    parts["weights"] = 21 * GIB  # 1.2 GiB too many
    with pytest.raises(UserError, match=r"H100: actor gradient takes 61\.0 GiB of each device's 59\.4; neither"):
        budgets.require_room(typed(c), machines.parse_machine("H100"), found, lambda _: None)


def test_where_no_change_is_enough_that_is_said_too():
    c = settings.default()
    said = r"refused by the compiler: too large; neither .* take more devices with mesh\.data=1 mesh\.fsdp=-1"
    with pytest.raises(UserError, match=said):
        budgets.require_room(
            typed(c), machines.parse_machine("v5e-4"), estimate_of(0, "too large"), lambda _: estimate_of(1e12)
        )


@pytest.mark.parametrize("visible, share", [("0", 0.75), ("0,1", 0.1), (None, 0.1)])
def test_a_trainer_beside_servers_on_other_gpus_has_its_own(monkeypatch, visible, share):
    c = settings.default()
    c.rollout.devices, c.rollout.gpu_memory_utilization = "1", 0.85
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert budgets.capacity(typed(c), machines.parse_machine("H100"))[0] == pytest.approx(share * 84978434048)


@pytest.mark.slow
@pytest.mark.skipif(NO_GPU, reason="XLA's compiler for GPUs is not installed; make target-gpu")
def test_a_report_for_gpus_that_are_not_here(small_run, tmp_path):
    file, c = tmp_path / "account.json", small_run
    small = {"model.path": c.model.path, "data.train_files": c.data.train_files, "data.val_files": c.data.val_files}
    small |= {"model.init": "random", "data.train_batch_size": 8, "actor.ppo_mini_batch_size": 8}
    small |= {"data.max_prompt_length": 8, "data.max_response_length": 8, "data.row_lengths": 1}
    small |= {"mesh.data": 4, "mesh.fsdp": 2, "rollout.name": "inprocess", "rollout.logp_tolerance": 100.0}
    words = [f"--config.{name}={value}" for name, value in small.items()]
    further = ["--dry_run", "--machine=8xH100", f"--json={file}", "--rollout_tokens_per_s=100"]
    done = subprocess.run(
        [sys.executable, "-m", "jppo.train", "--config=jppo://gsm8k", *words, *further],
        env={name: value for name, value in os.environ.items() if name != "XLA_FLAGS"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    assert "machine          8xH100: 8 x NVIDIA H100 80GB HBM3" in done.stdout
    said = json.loads(file.read_text())
    assert said["machine"] == "8xH100" and said["step_s"] > said["rollout_s"] > 0
    names = {one["name"]: one for one in said["programs"]}
    assert {"log-probs", "values", "actor gradient", "actor step", "prefill", "decode, a token"} <= set(names)
    gradient = names["actor gradient"]["account"]
    assert gradient["error"] is None and gradient["flops"]["bfloat16"] > 0
    assert any(name.startswith("__cudnn$fmha") for name in gradient["kernels"])
    assert {axis for one in gradient["collectives"] for axis in one["axes"]} == {"data", "fsdp"}


def test_fine_tuning_counts_the_exchange_of_gradients_between_groups(monkeypatch):
    moments = tuple(ProgramMemory(f"sft {kind}", 0, 0, stage=kind) for kind in ("gradient", "exchange", "step"))
    asked = []

    def keep(c, request, mesh, lines, found, executions, estimate):
        asked.append(executions.by_program)
        return ""

    monkeypatch.setattr(report, "report_estimate", keep)
    monkeypatch.setattr(memory, "estimate_one_model", lambda c, task, packed, inspect: Estimate({}, moments))
    plan = packing.Plan((8,), ((4,),), share_rows=False)
    checks.dry_run_of_one_model(
        typed(settings.sft_default()),
        DryRun(machines.parse_machine("4x8xH100")),
        lambda c, request: SimpleNamespace(mesh=None, plan=plan, steps=1, scores=None),
        describe=lambda task: [],
        pack_longest=lambda task: [None] * 3,
        noun="demonstrations",
    )
    assert asked == [{"sft gradient": 3, "sft exchange": 1, "sft step": 1}]


def collective(kind, size, times):
    how = dict(axes=("fsdp", "data"), groups=((0, 1),), dtypes=("f32",), in_loop=True, source="")
    return schedule.Collective(kind, bytes=size, times=times, **how)


def test_exchanges_of_less_than_a_thousandth_of_a_gib_are_left_out():
    least = GIB // 1000
    found = (
        collective("all-gather", GIB, 1000),
        collective("all-reduce", least, 1),
        collective("permute", least - 1, 1),
    )
    some = Compilation(work=Account(collectives=found))
    none = Compilation(work=Account(collectives=found[2:]))
    moments = [ProgramMemory(name, 0, 0, compiled=one) for name, one in (("a", some), ("b", none))]
    lines = [line.split() for line in exchange_lines(Estimate({}, tuple(moments)))[1:]]
    assert lines == [
        ["a"],
        ["all-gather", "fsdp+data", "1,000", "times", "1,000.0", "GiB"],
        ["all-reduce", "fsdp+data", "1", "times", "0.0", "GiB"],
    ]
    assert exchange_lines(Estimate({}, tuple(moments[1:]))) == []
