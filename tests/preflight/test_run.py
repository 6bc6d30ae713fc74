"""All checks of a run together, and the command; once with a real vLLM."""

import contextlib
import importlib.util
import json
import re
import shutil
import socket
from types import SimpleNamespace

import pytest

from jppo import doctor, settings, train
from jppo.plugins.forecast.account import Account
from jppo.plugins.sandbox import choice
from jppo.preflight import accelerators, machine, memory, memory_budget
from jppo.preflight import checks as run
from jppo.preflight.accelerators import NvidiaGpu
from jppo.preflight.finding import GIB, Finding, examine
from jppo.preflight.memory_budget import MemoryBudget
from jppo.preflight.programs import Compilation, Estimate, ProgramMemory
from jppo.rollout.protocol import RolloutError
from jppo.rollout.servers import make as rollout
from tests.make import typed

COMPILED = Compilation(work=Account())
ESTIMATE = Estimate(parts={"all": 1}, moments=(ProgramMemory("log-probs", 0, 0, compiled=COMPILED),))
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make setup")


@pytest.fixture(autouse=True)
def ample(monkeypatch):
    """A machine with room, whatever else it runs."""
    monkeypatch.setattr(memory_budget, "host_room", lambda: 2**40)


@pytest.fixture
def unmeasured(monkeypatch):
    """No estimate of memory, which takes a compiler's time."""
    monkeypatch.setattr(run.preview, "look_up_sizes", lambda *_: ([], ESTIMATE, [MemoryBudget("here", {"all": 1}, 2)]))


def all_of(c, *, server):
    with contextlib.ExitStack() as stack:
        return list(examine(run.doctor_checks(typed(c), stack, server=server)))


def test_a_small_run_is_fit_and_its_folder_is_left_alone(small_run, quick_compilation, tmp_path):
    found = all_of(small_run, server=True)
    assert {one.verdict for one in found} <= {"OK", "WARN"}, found
    for about in ("clock", "permission", "model files", "tokenizer", "train data", "test data", "reward", "parity"):
        assert about in [one.about for one in found]
    last = [one.about for one in found][-8:]
    assert last == ["memory", "publish room", "disk", "parity", "server", "publish", "log-probs", "programs"]
    assert "engine and trainer agree" in found[-2].found
    # one row shape: two scoring passes, advantages, and for each model zeros, a gradient, an exchange and a step
    assert found[-1].found.startswith("11 compiled and run on empty rows") and "attention is XLA's" in found[-1].found
    assert not (tmp_path / "run").exists()


def test_programs_are_those_that_memory_chooses(small_run, unmeasured, quick_compilation):
    small_run.model.remat, small_run.actor.max_tokens_per_device = "auto", -1
    found = {one.about: one for one in all_of(small_run, server=True)}
    assert {found[about].verdict for about in ("log-probs", "programs")} == {"OK"}, found


def test_a_program_that_fails_where_it_runs_fails_the_doctor(small_run, unmeasured, quick_compilation, monkeypatch):
    """Such as a kernel's backward pass on a GPU, which the comparison of log-probs does not run."""

    def breaks(*_, **__):
        raise RuntimeError("CUDNN_STATUS_EXECUTION_FAILED")

    monkeypatch.setattr("jppo.learner.programs.Program.run", breaks)
    found = {one.about: one for one in all_of(small_run, server=True)}
    assert found["log-probs"].verdict == "OK"
    assert found["programs"].verdict == "FAIL" and "CUDNN_STATUS_EXECUTION_FAILED" in found["programs"].found


def test_what_depends_on_a_fault_is_skipped_and_the_rest_is_looked_at(small_run, tmp_path):
    (tmp_path / "model/config.json").unlink()
    (tmp_path / "file").write_text("")
    small_run.trainer.run_dir = str(tmp_path / "file/run")
    found = {one.about: one for one in all_of(small_run, server=True)}
    assert {about for about, one in found.items() if one.verdict == "FAIL"} == {"permission", "model files"}
    skipped = {about for about, one in found.items() if one.found.startswith("skipped: because")}
    assert skipped == {
        *("tokenizer", "data", "reward", "parity", "memory", "publish room", "disk"),
        *("server", "publish", "log-probs", "programs"),
    }
    assert found["clock"].verdict == "OK"


def test_too_little_memory_keeps_the_server_from_being_started(small_run, quick_compilation, monkeypatch):
    monkeypatch.setattr(memory_budget, "host_room", lambda: -GIB)
    found = {one.about: one for one in all_of(small_run, server=True)}
    assert found["memory"].verdict == "FAIL" and "model.remat" in found["memory"].remedy
    assert found["server"].found == "skipped: because of memory"


def test_a_server_that_does_not_come_and_a_gap(small_run, quick_compilation, unmeasured, engine, monkeypatch):
    small_run.rollout.logp_tolerance = 1e-9
    found = {one.about: one for one in all_of(small_run, server=True)}
    assert found["log-probs"].verdict == "FAIL" and "logp_tolerance" in found["log-probs"].found

    def ready(**_):
        raise RolloutError("the vLLM server did not start")

    monkeypatch.setattr(engine, "ready", ready)
    found = {one.about: one for one in all_of(small_run, server=True)}
    assert found["server"].verdict == "FAIL" and "did not start" in found["server"].found
    assert found["log-probs"].found == "skipped: because of server"


def as_file(c, tmp_path):
    """A config file of those settings."""
    (tmp_path / "settings.json").write_text(settings.dump(c))
    file = tmp_path / "settings.py"
    file.write_text(
        "import json, pathlib\n"
        "from jppo import settings\n"
        "def get_config(arg=''):\n"
        "    c = settings.default()\n"
        f"    said = json.loads(pathlib.Path({str(tmp_path / 'settings.json')!r}).read_text())\n"
        "    for section in said:\n"
        "        for name, value in said[section].items():\n"
        "            if not isinstance(value, dict) and value is not None:\n"
        "                c[section][name] = tuple(value) if isinstance(value, list) else value\n"
        "    return c.lock()\n"
    )
    return f"--config={file}"


def test_the_command_ends_with_1_on_a_failure_and_2_on_settings(small_run, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(machine, "check_environment", lambda python, engine: [])
    file = as_file(small_run, tmp_path)
    with pytest.raises(SystemExit) as e:
        doctor.main([file, "--no_server", "--config.data.train_files=none.jsonl"])
    out = capsys.readouterr().out
    assert e.value.code == 1 and re.search(r"^FAIL +data +.*none\.jsonl", out, re.M), out
    assert "1 to fix before training" in out and not re.search(r"^\w+ +server  ", out, re.M)
    for argument, said in (
        ("--config.actor.ppo_mini_batch_size=3", "must divide"),
        ("--python=x", "rollout.python"),
        ("--config.actor.lrr=1", "there is no setting"),
    ):
        with pytest.raises(SystemExit) as e:
            doctor.main([file, argument])
        err = capsys.readouterr().err
        assert e.value.code == 2 and said in err and err.count("\n") == 1


def unwritable(c, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    c.trainer.run_dir = str(tmp_path / "file/run")
    return "permission"


def old_clock(c, tmp_path, monkeypatch):
    monkeypatch.setattr(run.machine, "package_time", lambda: 1e11)
    return "clock"


def other_settings(c, tmp_path, monkeypatch):
    (tmp_path / "run/checkpoints/3").mkdir(parents=True)
    (tmp_path / "run/config.json").write_text('{"actor": {"lr": 0.5}}')
    return "run folder"


def no_publish_dir(c, tmp_path, monkeypatch):
    c.rollout.publish_dir = str(tmp_path / "none")
    return "publish room"


def full_disk(c, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    return "disk"


def small_memory(c, tmp_path, monkeypatch):
    monkeypatch.setattr(
        run.preview, "look_up_sizes", lambda *_: ([], ESTIMATE, [MemoryBudget("here", {"all": 2**31}, 1)])
    )
    return "memory"


def useless_reward(c, tmp_path, monkeypatch):
    (tmp_path / "zero.py").write_text("def zero(data_source, solution_str, ground_truth, extra_info=None): return 0.0")
    c.reward.function = f"{tmp_path / 'zero.py'}:zero"
    return "reward"


def no_protections(c, tmp_path, monkeypatch):
    monkeypatch.setattr(choice, "lacks", lambda _: "no seccomp")
    return "sandbox"


def no_vllm(c, tmp_path, monkeypatch):
    monkeypatch.setattr(
        machine, "check_environment", lambda *_: [Finding("vLLM", "FAIL", "cannot be used", "install it")]
    )
    return "vLLM"


def no_tokenizer(c, tmp_path, monkeypatch):
    (tmp_path / "model/tokenizer.json").write_text("{")
    return "tokenizer"


def no_data(c, tmp_path, monkeypatch):
    c.data.train_files = str(tmp_path / "none.jsonl")
    return "data"


def taken_port(c, tmp_path, monkeypatch):
    server = socket.create_server(("127.0.0.1", 0))
    monkeypatch.setattr(run, "_server_of_the_test", server, raising=False)  # kept open
    c.rollout.port = server.getsockname()[1]
    return "server ports"


BREAKS = (
    *(unwritable, old_clock, other_settings, no_publish_dir, full_disk, small_memory, useless_reward),
    *(no_protections, no_vllm, no_tokenizer, no_data, taken_port),
)


def test_dtypes_and_offload_are_compared_with_the_gpu_and_the_kernel(small_run, monkeypatch):
    monkeypatch.setattr(machine, "check_environment", lambda *_: [])
    monkeypatch.setattr(accelerators, "gpus", lambda: [NvidiaGpu("Tesla T4", "580.65.06", 15 << 30, (7, 5))])
    monkeypatch.setattr(accelerators, "kernel_version", lambda: "Linux version 5.15.167.4-microsoft-standard-WSL2")
    small_run.rollout.dtype, small_run.actor.optimizer_offload = "bfloat16", True
    found = {one.about: one for one in run.machine_findings(typed(small_run))}
    assert found["bfloat16"].verdict == "FAIL" and found["bfloat16"].remedy.startswith("set rollout.dtype to")
    assert found["WSL2"].verdict == "WARN" and "actor.optimizer_offload=False" in found["WSL2"].remedy
    small_run.rollout.name = "inprocess"
    assert {one.about: one.verdict for one in run.machine_findings(typed(small_run))}["bfloat16"] == "WARN"


@pytest.mark.parametrize("breaks", BREAKS, ids=lambda breaks: breaks.__name__)
def test_what_the_doctor_finds_the_dry_run_finds(small_run, unmeasured, monkeypatch, tmp_path, capsys, breaks):
    monkeypatch.setattr(machine, "check_environment", lambda *_: [])
    monkeypatch.setattr(memory, "stored_models", lambda *_: 2**20)
    about = breaks(small_run, tmp_path, monkeypatch)
    file = as_file(small_run, tmp_path)
    found = [one for one in run.doctor(typed(small_run), server=False) if one.about == about and one.verdict != "OK"]
    assert found, about
    try:
        train.main([file, "--dry_run"])
    except SystemExit as e:
        assert e.code == 2
    out = capsys.readouterr()
    for one in found:
        assert one.found in out.out + out.err


def test_a_config_of_fine_tuning_is_refused(tmp_path, capsys):
    file = tmp_path / "tune.py"
    file.write_text("from jppo import settings as config\ndef get_config(arg=''):\n    return config.sft_default()\n")
    with pytest.raises(SystemExit) as e:
        doctor.main([f"--config={file}"])
    assert e.value.code == 2 and "jppo.sft" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.vllm
@needs_vllm
def test_a_real_server_is_started_gets_the_weights_and_agrees(
    small_run, quick_compilation, unmeasured, tiny_model, monkeypatch, tmp_path
):
    monkeypatch.setattr(rollout, "start_vllm", START_VLLM)
    small_run.model.path, small_run.model.init = str(tiny_model), "pretrained"
    small_run.rollout.logp_tolerance, small_run.rollout.kv_cache_memory_bytes = 1e-3, 2**26
    found = {one.about: one for one in all_of(small_run, server=True)}
    assert [found[about].verdict for about in ("server", "publish", "log-probs")] == ["OK"] * 3, found
    assert json.loads((tiny_model / "config.json").read_text())
    assert not (tmp_path / "run").exists()


START_VLLM = rollout.start_vllm  # before a fixture puts another in its place


def test_the_trainers_own_engine_needs_no_server(small_run, unmeasured, monkeypatch):
    """No vLLM, no port and no room for published weights is looked at; what is looked at says so."""
    monkeypatch.setattr(machine, "check_server", lambda *_: pytest.fail("no vLLM is asked for"))
    monkeypatch.setattr(machine, "check_devices", lambda *_: Finding("JAX", "OK", "8 x cpu"))
    small_run.rollout.name = "inprocess"
    found = {f.about: f for f in run.doctor(typed(small_run), server=False)}
    assert not {"vLLM", "server ports", "publish room"} & found.keys()
    assert {"model files", "memory", "disk", "reward"} <= found.keys()
