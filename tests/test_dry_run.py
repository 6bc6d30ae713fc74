"""--dry_run: settings, sizes and memory of a run, before any weight is read; against runs that are made."""

import dataclasses
import json
import math
import pathlib
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jppo import settings, sft, train
from jppo.errors import UserError
from jppo.learner import packing
from jppo.learner.make import make_mesh
from jppo.models import decoder
from jppo.plugins.forecast import machines, report
from jppo.plugins.forecast.account import Account
from jppo.plugins.forecast.machines import GIB
from jppo.preflight import memory, memory_budget, preview, programs, servers
from jppo.preflight.request import DryRun
from jppo.run.inputs import read_inputs
from jppo.run.make import list_run_programs, make_learner, plan_of_run, prepare_programs
from tests.make import changed, typed, write_lines

KEY = jax.random.key(0)


def held(tree):
    """Bytes on the first device."""
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"model.lora_rank": 2, "algorithm.use_kl_in_reward": True}, marks=pytest.mark.slow),
        {"mesh.data": 1, "mesh.sequence": 2, "model.lora_rank": 2, "critic.lora_rank": 0},
    ],
)
def test_parts_are_the_arrays_of_a_run(small_run, quick_compilation, changes):
    c = small_run
    c.update_from_flattened_dict({"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2, **changes})
    inputs, mesh = read_inputs(typed(c)), make_mesh(typed(c))
    _, found, (room,) = preview.look_up_sizes(typed(c), inputs, mesh)
    learner, now = make_learner(typed(c), inputs, mesh)
    parts = found.parts
    assert parts["policy"] == held((now.policy, learner.actor.base))
    assert parts["policy's optimizer"] == held(now.policy_opt)
    assert parts["critic"] == held(now.value) and parts["critic's optimizer"] == held(now.value_opt)
    assert "reference" not in parts  # no KL is asked for, or it is the base
    gradients = {moment.name: moment.gradients for moment in found.moments}
    assert gradients["actor gradient"] == held(learner.actor.zeros())
    assert gradients["critic gradient"] == held(learner.critic.zeros())
    learned = (now.policy, now.policy_opt, now.value, now.value_opt)
    assert memory.stored_models(typed(c), inputs, mesh) == sum(x.nbytes for x in jax.tree.leaves(learned))
    assert found.peak == sum(parts.values()) + found.worst.gradients + found.worst.temporaries
    assert room.parts["policy"] == 8 * parts["policy"]  # the processor's devices are the machine


def test_programs_are_those_that_a_run_compiles(small_run, quick_compilation):
    c, counted = small_run, 0
    inputs, mesh = read_inputs(typed(c)), make_mesh(typed(c))
    lines, _, _ = preview.derive_sizes(typed(c), inputs, mesh)
    learner, now = make_learner(typed(c), inputs, mesh)
    jax.clear_caches()  # some passes are functions that other learners have compiled, too
    listed = list_run_programs(typed(c), learner, now)
    for program in listed:
        program.run()
    for field in dataclasses.fields(learner.passes):
        if (fn := getattr(learner.passes, field.name)) is not None:
            counted += getattr(fn, "accumulate", fn)._cache_size()
    assert mesh.shape["data"] > 1
    # the optimizers' steps, empty sums of gradients and their exchange are beside the passes
    assert len(listed) == counted + 6
    assert f"to compile       {len(listed)} programs for {len(learner.plan.shapes)} shape(s)" in lines


def test_a_run_has_the_layout_that_its_dry_run_names(small_run, monkeypatch):
    monkeypatch.setattr(memory, "estimate_memory", lambda *_, **__: SimpleNamespace(programs=0))  # which compiles
    changes = {"algorithm.adv_estimator": "grpo", "rollout.n": 8, "actor.ppo_mini_batch_size": 16}
    c = typed(changed(small_run, changes | {"data.max_response_length": 2}))
    inputs, mesh = read_inputs(c), make_mesh(c, jax.devices()[:1])
    lines, _, _ = preview.derive_sizes(c, inputs, mesh)
    learner, _ = make_learner(c, inputs, mesh, sketch=True)
    assert any(line.strip().startswith("data.packing=prefix, by cost: ") for line in lines)
    assert learner.plan.prices is not None and learner.plan == plan_of_run(c, mesh, inputs)
    shapes = preview.describe_shapes(learner.plan)
    assert f"rows             {shapes}" in lines and "a prompt once" in shapes


def modules(folder):
    """The programs that JAX compiled, by name and without locations: operations, dtypes, shardings, donation."""
    found = set()
    for file in folder.rglob("*.mlir"):
        text = re.sub(r"#loc.*", "", file.read_text())
        while text != (text := re.sub(r" ?loc\([^()]*(\([^()]*\)[^()]*)*\)", "", text)):
            pass
        found.add("\n".join(line.rstrip() for line in text.splitlines() if line.strip()))
    return found


@pytest.mark.slow
def test_the_largest_programs_of_a_run_are_compiled_as_the_run_compiles_them(small_run, quick_compilation, tmp_path):
    c = small_run
    c.update_from_flattened_dict({"mesh.data": 1, "mesh.fsdp": 4, "mesh.tensor": 2})
    c = typed(c)
    inputs, mesh = read_inputs(c), make_mesh(c)
    jax.clear_caches()
    try:
        jax.config.update("jax_dump_ir_to", str(tmp_path / "estimate"))
        preview.look_up_sizes(c, inputs, mesh)
        jax.clear_caches()
        jax.config.update("jax_dump_ir_to", str(tmp_path / "run"))
        prepare_programs(list_run_programs(c, *make_learner(c, inputs, mesh)))
    finally:
        jax.config.update("jax_dump_ir_to", "")
    ours, runs = modules(tmp_path / "estimate"), modules(tmp_path / "run")
    assert len(ours) >= 6 and ours <= runs, [text[:80] for text in ours - runs]


@pytest.mark.parametrize(
    "shapes, expected",
    [
        (((16, 64), (8, 128)), [(8, 128)]),  # as many tokens, more pairs
        (((3, 4500), (1, 9000)), [(1, 9000), (3, 4500)]),
    ],
)
def test_the_largest_shapes_by_pairs_and_by_tokens(shapes, expected):
    plan = packing.Plan(tuple(t for _, t in shapes), tuple((r,) for r, _ in shapes), share_rows=False)
    assert memory.largest_shapes(plan) == expected


def test_full_length_batches_are_cut_as_the_packer_cuts_them(small_run):
    inputs, mesh = read_inputs(typed(small_run)), make_mesh(typed(small_run))
    step = programs.full_length(inputs.train.prompts, 12, 6)
    assert [len(t.tokens) for t in step[:8]] == [len(p.ids) + 6 for p in inputs.train.prompts]
    step_of_two = programs.full_length(inputs.train.prompts, 12, 6, samples=2)
    assert [t.uid for t in step_of_two[:4]] == ["0", "0", "1", "1"]
    assert len({id(t.tokens) for t in step_of_two}) == len({len(t.tokens) for t in step_of_two}), "arrays are shared"
    # 12 samples in minis of 4; the packer has rows for 8 devices, so that each mini is one micro-batch
    plan = plan_of_run(typed(small_run), mesh, inputs)
    assert programs.count_descents(step, plan, epochs=3, size=4) == programs.Descents(3, 3, 4, 1)
    narrow = packing.Plan((13,), ((2, 1),), share_rows=False)
    assert programs.count_descents(step, narrow, epochs=1, size=5) == programs.Descents(1, 3, 5, 3)  # 2 + 2 + 1 rows


@pytest.mark.parametrize("has, verdict", [(None, "OK"), (1000, "OK"), (999, "WARN"), (900, "WARN"), (899, "FAIL")])
def test_room_is_ok_tight_or_too_little(has, verdict):
    room = memory_budget.MemoryBudget("here", {"a": 600, "b": 300}, has)
    assert (room.needs, room.verdict) == (900, verdict)


COMPILED = programs.Compilation(work=Account())
ESTIMATE = programs.Estimate(
    {"policy": 600, "batch": 0},
    (
        programs.ProgramMemory("values", 0, 500, compiled=COMPILED),
        programs.ProgramMemory("actor gradient", 300, 250, compiled=COMPILED),
    ),
)


def test_the_peak_is_at_the_worst_moment():
    assert ESTIMATE.worst.name == "actor gradient" and ESTIMATE.peak == 600 + 300 + 250


def test_the_peak_of_a_program_is_beside_all_that_is_permanent():
    moment = programs.ProgramMemory("actor gradient", 3 * GIB, GIB, compiled=COMPILED)
    gib = programs.Estimate({"policy": 4 * GIB}, (moment,))
    assert report.program_lines(gib, None)[-1].split() == [
        "actor",
        "gradient",
        "0.0",
        "s",
        "8.0",
        "1.0",
        "0",
        "0",
        "0.0",
        "-",
    ]


@pytest.mark.parametrize("platform, count", [("cpu", 1), ("cpu", 2), ("gpu", 2)])
def test_devices_of_a_processor_share_the_host(monkeypatch, platform, count):
    devices = [SimpleNamespace(platform=platform, process_index=0, device_kind="H") for _ in range(count)]
    mesh = SimpleNamespace(devices=np.array(devices, object))
    monkeypatch.setattr("jppo.learner.sharding.resident", lambda: 50)
    monkeypatch.setattr(memory_budget, "host_room", lambda: 1000)
    monkeypatch.setattr(memory_budget, "device_room", lambda mesh: 1200)
    found = memory_budget.machine_budgets(ESTIMATE, mesh, host={"vLLM: cache": 7})
    if platform == "cpu":
        assert [(room.needs, room.has) for room in found] == [(count * 1150 + 57, 1050)]
    else:
        assert [(room.needs, room.has, room.verdict) for room in found] == [(1150, 1200, "WARN"), (57, 1050, "OK")]
    text = report.format_report(["steps 3"], ESTIMATE, found)
    assert text.startswith("steps 3\n\n") and "\n  sum of gradients " in text and "batch" not in text


def budgets_beside(server, total):
    return {one.where: one for one in memory_budget.device_budgets(replace(ESTIMATE, server=server), "a GPU", 0, total)}


def test_a_gpu_has_a_share_for_its_server(small_run):
    inputs = read_inputs(typed(small_run))
    cpu, gpu = (
        SimpleNamespace(devices=np.array([SimpleNamespace(platform=name, process_index=0)], object))
        for name in ("cpu", "gpu")
    )
    values = jax.eval_shape(lambda key: decoder.init_params(inputs.policy, key, head="lm", param_dtype="float32"), KEY)
    count = sum(math.prod(x.shape) for x in jax.tree.leaves(values))
    assert [memory.engine_bytes(inputs.policy, dtype) for dtype in ("float32", "bfloat16")] == [4 * count, 2 * count]
    assert servers.server_memory(typed(small_run), inputs.policy, 4 * count, cpu) is None  # it is the host's
    small_run.rollout.enforce_eager = True
    server = servers.server_memory(typed(small_run), inputs.policy, 4 * count, gpu)
    assert (server.weights, server.fraction, server.cache, server.graphs) == (4 * count, 0.4, 0, 0)
    small_run.rollout.enforce_eager = False
    captured = servers.server_memory(typed(small_run), inputs.policy, 4 * count, gpu)
    assert captured.graphs == pytest.approx(1_503_657_984, rel=0.01), "of vllm-project/vllm issue 47654"
    assert server.response == 14 * (2 * 2 * 8) * 4, "positions, of keys and values of two heads, in float32"
    assert list(budgets_beside(server, 10**9)) == ["a GPU", "vLLM's share, 40% of a GPU"]
    assert set(memory_budget.host_parts(typed(small_run), inputs, gpu)) == {"published weights"}


def test_servers_that_sleep_have_a_budget_awake_and_one_asleep():
    server = servers.ServerMemory("vLLM", True, 0.5, 0, weights=100, working=20, graphs=7, response=3)
    share, awake, asleep = budgets_beside(server, 4 * GIB).values()
    assert (share.needs, share.has) == (130, 2 * GIB)
    assert (awake.needs, awake.verdict) == (600 + memory_budget.CONTEXT + 2 * GIB, "OK")
    assert asleep.needs == 1150 + memory_budget.CONTEXT + servers.ASLEEP + 7
    scored = replace(ESTIMATE, server=server, moments=(*ESTIMATE.moments, programs.ProgramMemory("log-probs", 0, 400)))
    assert memory_budget.device_budgets(scored, "a GPU", 0, 4 * GIB)[1].needs == awake.needs + 400
    given = replace(server, cache=50)
    assert budgets_beside(given, 4 * GIB)["a GPU, while the servers are awake"].needs == (
        600 + memory_budget.CONTEXT + servers.ASLEEP + 100 + 20 + 7 + 50
    )


def command(main, monkeypatch, c, **switches):
    """Runs a command's main with the config in place of a file."""
    monkeypatch.setattr(settings, "parse", lambda *_, **__: (c, {"dry_run": True} | switches))
    main([])


def test_the_command_prints_settings_sizes_and_memory_and_starts_nothing(
    small_run, quick_compilation, monkeypatch, capsys, tmp_path
):
    small_run.algorithm.use_kl_in_reward = True
    command(train.main, monkeypatch, small_run)
    out, err = capsys.readouterr()
    said, end = json.JSONDecoder().raw_decode(out)
    assert said == json.loads(settings.dump(small_run))
    report = out[end:]
    assert "steps            2, each of 4 prompts x 1 = 4 samples" in report
    assert "actor            1 epoch(s) x 1 mini-batches of 4 = 1 optimizer steps a step; up to 1 micro" in report
    for part in ("policy's optimizer", "critic", "reference", "sum of gradients", "vLLM: cache", "published weights"):
        assert f"\n  {part} " in report, part
    compiled = [line.removeprefix("compiling ") for line in err.splitlines() if line.startswith("compiling ")]
    assert compiled[0] == "log-probs" and "critic step" in compiled
    assert all(f"\n  {name} " in report for name in compiled), "each program, before it is compiled"
    assert not (tmp_path / "run").exists()


def test_a_missing_model_is_one_line_after_the_settings(small_run, monkeypatch, capsys):
    small_run.model.path = "/no/such/model"
    with pytest.raises(SystemExit) as e:
        command(train.main, monkeypatch, small_run)
    said = capsys.readouterr()
    assert e.value.code == 2 and json.loads(said.out)["model"]["path"] == "/no/such/model"
    assert said.err.startswith("error: ") and said.err.count("\n") == 1


@pytest.fixture
def tuning(small_run, tmp_path):
    """The config of fine-tuning on two demonstrations."""
    c = settings.sft_default()
    c.model = small_run.model
    rows = [{"prompt": "12+34=", "response": "46"}, {"prompt": "1+2=", "response": "3"}]
    c.data.train_files = str(write_lines(tmp_path / "demonstrations.jsonl", rows))
    c.data.train_batch_size, c.data.max_prompt_length, c.data.max_response_length = 2, 8, 6
    c.trainer.run_dir, c.trainer.total_epochs, c.data.row_lengths = str(tmp_path / "run"), 5, 1
    settings.check(c)
    return c


def test_fine_tuning_has_its_own(tuning, quick_compilation, monkeypatch, capsys, tmp_path):
    c = tuning
    command(sft.main, monkeypatch, c)
    out = capsys.readouterr().out
    report = out[json.JSONDecoder().raw_decode(out)[1] :]
    assert "demonstrations   2 (0 over-long" in report and "steps            5, each of 2" in report
    assert "its optimizer" in report and "temporaries: sft" in report and "vLLM" not in report
    assert "checks of this machine, as by jppo.doctor: " in report and not (tmp_path / "run").exists()
    c.data.train_files = "none.jsonl"
    with pytest.raises(UserError, match=r"none\.jsonl"):
        sft.dry_run(typed(c))


def test_a_forecast_for_another_machine_needs_no_weights(small_run, tuning, monkeypatch):
    class Compiles(Exception):
        """All files were read."""

    def mesh(self, c):
        raise Compiles

    monkeypatch.setattr(DryRun, "mesh", mesh)
    there = DryRun(machines.parse_machine("H100"))
    small_run.model.init = tuning.model.init = "pretrained"
    for dry_run, c in ((report.preview_run, small_run), (sft.dry_run, tuning)):
        with pytest.raises(Compiles):
            dry_run(typed(c), there)
        with pytest.raises(UserError, match="safetensors"):
            dry_run(typed(c))


@pytest.mark.parametrize("fault", ["permission", "run folder", "disk", "resume", "weights"])
def test_fine_tuning_previews_what_would_end_its_run(tuning, quick_compilation, monkeypatch, tmp_path, fault):
    """Each fault is found before the run starts, as the doctor finds those of a PPO run."""
    c, run = tuning, tmp_path / "run"
    expected = f"FAIL {fault}: "
    if fault == "permission":
        run.write_text("a file")
        expected += f"{run} is not writable"
    elif fault == "run folder":
        (run / "checkpoints/3").mkdir(parents=True)
        (run / "config.json").write_text(json.dumps({"data": {}, "rollout": {}}))
        expected += f"trainer.run_dir={run} has a run of jppo.train, and this is jppo.sft"
    elif fault == "disk":
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**20))
        expected += "0.0 GiB free; "
    elif fault == "resume":
        c.trainer.resume_mode = "nowhere"
        expected = "FAIL run folder: trainer.resume_mode=nowhere: no such checkpoint"
    else:
        c.model.init = "pretrained"
        (tmp_path / "empty").mkdir()
        for file in pathlib.Path(c.model.path).glob("*.json"):
            shutil.copy(file, tmp_path / "empty")
        c.model.path = str(tmp_path / "empty")
        with pytest.raises(UserError, match="safetensors"):
            sft.dry_run(typed(c))
        return
    assert expected in sft.dry_run(typed(c))
