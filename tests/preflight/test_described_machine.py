"""--dry_run on a described machine: what is refused in one line, and where its compiler is there, a whole report."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from jppo import settings
from jppo.forecast import compilers, machines
from jppo.forecast.account import Account
from jppo.preflight import checks, described_machine, preview
from jppo.preflight.programs import Estimate, ProgramMemory
from jppo.settings import UserError
from tests.make import typed

NO_GPU = not (compilers.compiler_folder("gpu") / compilers.READY).is_file()
GIB = 2**30


@pytest.mark.parametrize(
    "switches, said",
    [
        ({"machine": "8xH100"}, "--machine belongs to --dry_run"),
        ({"json": "x.json"}, "--json belongs to --dry_run"),
        ({"dry_run": True, "rollout_tokens_per_s": 5.0}, "is for a described machine; add --machine"),
        ({"dry_run": True, "machine": "H100", "rollout_tokens_per_s": -1.0}, "must be above 0"),
        ({"dry_run": True, "machine": "8xB300"}, "no such machine"),
        ({"dry_run": True, "machine": ""}, "no such machine"),
    ],
)
def test_what_cannot_be_is_said(switches, said):
    with pytest.raises(UserError, match=said):
        described_machine.read_request(switches, "jppo.train", [])


def test_nothing_is_asked_for_by_default():
    assert described_machine.read_request({}, "jppo.train", []) == described_machine.DryRun()


def test_a_file_that_cannot_be_written_is_said(tmp_path):
    with pytest.raises(UserError, match="cannot be written: Is a directory; name another file"):
        described_machine.DryRun(json=str(tmp_path)).write({})


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
    room, why = described_machine.capacity(typed(c), machines.parse_machine("H100"))
    assert room == pytest.approx(share * 84978434048) and why.startswith(f"{share:.0%}")
    assert described_machine.capacity(typed(c), machines.parse_machine("v6e-8"))[0] == 31.25 * GIB


def estimate_of(peak, error=None):
    return Estimate({}, (ProgramMemory("actor gradient", 0, int(peak), account=Account(error=error)),))


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
        described_machine.require_room(typed(c), machines.parse_machine("H100"), estimate_of(80 * GIB), estimate)
    assert tried == [("full", 16384, False), ("full", 8192, False)]
    described_machine.require_room(typed(c), machines.parse_machine("H100"), estimate_of(50 * GIB), estimate)  # fits


def test_where_no_change_is_enough_that_is_said_too():
    c = settings.default()
    said = r"actor gradient is refused by the compiler: too large; neither .* take more devices with mesh\.fsdp=-1"
    with pytest.raises(UserError, match=said):
        described_machine.require_room(
            typed(c), machines.parse_machine("v5e-4"), estimate_of(0, "too large"), lambda _: estimate_of(1e12)
        )


def test_changes_come_in_order_and_add_up():
    c = settings.default()
    c.model.remat, c.actor.max_tokens_per_device = "full", 4096
    c.data.max_prompt_length, c.data.max_response_length = 512, 512
    found = list(described_machine.remedies(typed(c)))
    assert found[0] == {"actor.max_tokens_per_device": 2048}
    assert found[1] == found[0] | {"actor.optimizer_offload": True, "critic.optimizer_offload": True}
    assert found[2] == found[1] | dict.fromkeys(
        ("actor.param_offload", "critic.param_offload", "ref.param_offload"), True
    )


@pytest.mark.parametrize("visible, share", [("0", 0.75), ("0,1", 0.1), (None, 0.1)])
def test_a_trainer_beside_servers_on_other_gpus_has_its_own(monkeypatch, visible, share):
    c = settings.default()
    c.rollout.devices, c.rollout.gpu_memory_utilization = "1", 0.85
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert described_machine.capacity(typed(c), machines.parse_machine("H100"))[0] == pytest.approx(share * 84978434048)


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
    moments = tuple(ProgramMemory(f"sft {kind}", 0, 0) for kind in ("gradient", "exchange", "step"))
    asked = []

    def report(c, request, mesh, lines, found, executions, estimate):
        asked.append(executions.by_program)
        return ""

    monkeypatch.setattr(preview, "of_estimate", report)
    checks.dry_run_of_one_model(
        typed(settings.sft_default()),
        described_machine.DryRun(machines.parse_machine("4x8xH100")),
        lambda c, request: SimpleNamespace(mesh=None),
        lambda c, task: (Estimate({}, moments), 3),
        lambda task, micro_batches: ([], {"sft gradient": micro_batches, "sft step": 1}),
        head="lm",
    )
    assert asked == [{"sft gradient": 3, "sft exchange": 1, "sft step": 1}]
