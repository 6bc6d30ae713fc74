"""Settings that follow from memory, and --dry_run on a described machine: refused in one line, or a whole report."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from jppo import settings, train
from jppo.errors import UserError
from jppo.forecast import compilers, machines, schedule
from jppo.forecast.account import Account
from jppo.learner import packing
from jppo.learner.make import make_mesh
from jppo.preflight import checks, memory, memory_budget, preview, programs
from jppo.preflight.programs import Estimate, ProgramMemory, exchange_lines
from jppo.preflight.request import DryRun, read_request
from jppo.run.inputs import read_inputs
from tests.make import typed
from tests.test_resume import again, untimed

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
        read_request(switches, "jppo.train", [])


def test_nothing_is_asked_for_by_default():
    assert read_request({}, "jppo.train", []) == DryRun()


def test_a_file_that_cannot_be_written_is_said(tmp_path):
    with pytest.raises(UserError, match="cannot be written: Is a directory; name another file"):
        DryRun(json=str(tmp_path)).write({})


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
    room, why = memory_budget.capacity(typed(c), machines.parse_machine("H100"))
    assert room == pytest.approx(share * 84978434048) and why.startswith(f"{share:.0%}")
    assert memory_budget.capacity(typed(c), machines.parse_machine("v6e-8"))[0] == 31.25 * GIB


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
        memory_budget.require_room(typed(c), machines.parse_machine("H100"), estimate_of(80 * GIB), estimate)
    assert tried == [("full", 16384, False), ("full", 8192, False)]
    memory_budget.require_room(typed(c), machines.parse_machine("H100"), estimate_of(50 * GIB), estimate)  # fits


def test_the_memory_that_lacks_most_is_named():
    """The trainer needs 61 GiB and lacks 1.6 of them; the server needs 40 and lacks 20.2: 25% of 79.1 GiB are 19.8."""
    c = settings.default()
    c.rollout.name, parts = "inprocess", {"weights": 40 * GIB}
    server = SimpleNamespace(name="vLLM", fraction=0.25, sleeps=False, cache=1, least=lambda: parts)
    found = dataclasses.replace(estimate_of(61 * GIB), server=server)
    with pytest.raises(UserError, match=r"H100: vLLM's share, 25% of a GPU: 40\.0 GiB of 19\.8; neither"):
        memory_budget.require_room(typed(c), machines.parse_machine("H100"), found, lambda _: None)
    parts["weights"] = 21 * GIB  # 1.2 GiB too many
    with pytest.raises(UserError, match=r"H100: actor gradient takes 61\.0 GiB of each device's 59\.4; neither"):
        memory_budget.require_room(typed(c), machines.parse_machine("H100"), found, lambda _: None)


def test_programs_are_announced_only_where_a_command_asks_for_it(capsys):
    programs.announce("compiling one")
    with programs.programs_announced():
        programs.announce("compiling two")
    programs.announce("compiling three")
    assert capsys.readouterr() == ("", "compiling two\n")


def test_where_no_change_is_enough_that_is_said_too():
    c = settings.default()
    said = r"actor gradient is refused by the compiler: too large; neither .* take more devices with mesh\.fsdp=-1"
    with pytest.raises(UserError, match=said):
        memory_budget.require_room(
            typed(c), machines.parse_machine("v5e-4"), estimate_of(0, "too large"), lambda _: estimate_of(1e12)
        )


def test_changes_come_in_order_and_add_up():
    c = settings.default()
    c.model.remat, c.actor.max_tokens_per_device = "full", 4096
    c.data.max_prompt_length, c.data.max_response_length = 512, 512
    found = list(memory_budget.remedies(typed(c)))
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
    assert memory_budget.capacity(typed(c), machines.parse_machine("H100"))[0] == pytest.approx(share * 84978434048)


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

    def report(c, request, mesh, lines, found, executions, estimate):
        asked.append(executions.by_program)
        return ""

    monkeypatch.setattr(preview, "report_estimate", report)
    monkeypatch.setattr(memory, "estimate_one_model", lambda c, task, packed: Estimate({}, moments))
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


def asking(config, remat="auto", tokens=-1):
    return settings.changed(typed(config), {"model.remat": remat, "actor.max_tokens_per_device": tokens})


def pairs(config):
    return [tuple(changes.values()) for changes in memory_budget.candidates(typed(config))]


def test_candidates_recompute_as_little_as_can_be_with_large_micro_batches_first():
    c = asking(settings.default())  # rows of 1,536
    many = [24576, 12288, 6144]
    expected = [(remat, tokens) for remat in ("none", "dots", "attention", "full") for tokens in many]
    assert pairs(c) == [*expected, ("full", 3072), ("full", 1536)]
    assert pairs(asking(c, "dots", 8192)) == [("dots", 8192)]
    assert pairs(asking(c, "auto", 8192)) == [(remat, 8192) for remat in ("none", "dots", "attention", "full")]


def test_the_first_that_fits_is_chosen_and_none_is_an_error():
    config, tried = settings.default(), []
    config.model.path, config.data.train_files, config.data.val_files = "m", "d.parquet", "d.parquet"
    c = asking(config)

    def fits(other):
        tried.append((other.model.remat, other.actor.max_tokens_per_device))
        return other.model.remat == "attention" and other.actor.max_tokens_per_device <= 12288

    assert memory_budget.first_fitting(typed(c), fits) == {
        "model.remat": "attention",
        "actor.max_tokens_per_device": 12288,
    }
    assert tried == pairs(c)[: len(tried)] and len(tried) == 8
    with pytest.raises(UserError, match=r"model\.remat=auto .*none of 14 candidates fits.*model\.lora_rank"):
        memory_budget.first_fitting(typed(c), lambda other: False)


def test_a_choice_is_kept_until_its_conditions_change(config_of_a_run, tmp_path):
    device = SimpleNamespace(device_kind="cpu")
    mesh, tried = SimpleNamespace(devices=np.array([device], object), shape={"fsdp": 1}), []

    def settle(c, mesh, fits):
        tried.clear()
        return memory_budget.settle(c, mesh, tmp_path, lambda other: bool(tried.append(1)) or fits)[0]

    c = asking(config_of_a_run)
    assert settle(c, mesh, True).model.remat == "none" and len(tried) == 1
    assert settle(c, mesh, False).model.remat == "none" and not tried
    wider = SimpleNamespace(devices=mesh.devices, shape={"fsdp": 2})
    assert settle(c, wider, True).model.remat == "none" and len(tried) == 1
    (tmp_path / "auto.json").write_text("{}")
    assert settle(asking(config_of_a_run, "auto", 8192), mesh, True).actor.max_tokens_per_device == 8192
    assert len(tried) == 1


@pytest.fixture
def config_of_a_run():
    c = settings.default()
    c.model.path, c.data.train_files, c.data.val_files = "m", "d.parquet", "d.parquet"
    return c


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
    some = Account(collectives=found)
    none = Account(collectives=found[2:])
    moments = [ProgramMemory(name, 0, 0, account=a) for name, a in (("a", some), ("b", none), ("c", None))]
    lines = [line.split() for line in exchange_lines(Estimate({}, tuple(moments)))[1:]]
    assert lines == [
        ["a"],
        ["all-gather", "fsdp+data", "1,000", "times", "1,000.0", "GiB"],
        ["all-reduce", "fsdp+data", "1", "times", "0.0", "GiB"],
    ]
    assert exchange_lines(Estimate({}, tuple(moments[1:]))) == []


def test_a_run_takes_what_fits_records_it_and_a_resumed_one_keeps_it(small_run, quick_compilation, monkeypatch, capsys):
    c = small_run
    c.model.remat, c.actor.max_tokens_per_device = "auto", -1
    c.trainer.total_training_steps, c.trainer.save_freq = 1, 1
    asked = []
    monkeypatch.setattr(preview, "fits", lambda other, inputs, mesh: asked.append(other.model.remat) or len(asked) > 1)
    train.train(c)
    run = pathlib.Path(c.trainer.run_dir)
    written = json.loads((run / "config.json").read_text())
    chosen = json.loads((run / "auto.json").read_text())["chosen"]
    assert written["model"]["remat"] == chosen["model.remat"]
    assert written["actor"]["max_tokens_per_device"] == chosen["actor.max_tokens_per_device"] > 0
    assert "chosen by the memory of cpu: model.remat=" in capsys.readouterr().out
    count = len(asked)
    train.train(again(c, trainer__total_training_steps=2))
    assert len(asked) == count, "a resumed run compiles no candidates"
    assert [m["step"] for m in untimed(run)] == [0, 1, 2]


def test_a_dry_run_chooses_by_this_machine(small_run):
    c, chosen = preview.resolve_auto(asking(small_run), read_inputs(typed(small_run)), make_mesh(typed(small_run)))
    assert c.model.remat == "none" and chosen == [
        f"chosen by memory model.remat=none, actor.max_tokens_per_device={c.actor.max_tokens_per_device}"
    ]


def test_fine_tuning_refuses_it():
    c = settings.sft_default()
    c.model.path, c.data.train_files, c.model.remat = "m", "d.jsonl", "auto"
    with pytest.raises(UserError, match=r"model\.remat='auto' is decided by jppo\.train alone"):
        settings.check(c)
