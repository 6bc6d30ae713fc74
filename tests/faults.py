"""A small run, and what may disturb a long one: kills, signals, damaged files, a second owner, NaN, a hang.

Each function breaks a run of six steps and gives the same command until it ends. Metrics, samples and the exported
weights must be those of the undisturbed run to the bit: a critic, an adaptive KL in the reward, a normalised reward
model beside the rules.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from safetensors.numpy import load_file, save_file

from examples import arithmetic
from jppo.models import decoder, hf, params
from tests.make import ROOT

STEPS = 6
SHAPE = {"num_hidden_layers": 1}
SETTINGS = {
    "model.init": "random",
    "data.train_batch_size": 16,
    "data.row_lengths": 1,
    "actor.ppo_mini_batch_size": 8,
    "actor.shuffle": True,
    "algorithm.kl_ctrl_type": "adaptive",
    "algorithm.target_kl": 0.01,
    "algorithm.horizon": 100,
    "rollout.logp_tolerance": 1e-2,
    "reward.workers": 1,
    "reward.model.max_length": 16,
    "reward.model.normalize": True,
    "reward.weights": "function_score=1,rm_score=0.1",
    "trainer.total_training_steps": STEPS,
    "trainer.test_freq": 2,
    "trainer.save_freq": 1,
    "trainer.log_val_generations": 0,
}
STARTS = 4  # of one run at most, each of which may take so many seconds:
LIMIT_S = 400.0
# What a program does to itself, once: STEP is the step that is under way, steps count from 1.
DRIVER = """
import dataclasses, os, pathlib, signal, sys, threading, time
from jppo import train
from jppo.learner.trainable import Trainable
from jppo.runlog.checkpoint import Checkpoints
from jppo.samples.queue import SampleQueue
mark = pathlib.Path({mark!r})
def die():
    mark.touch()
    os.kill(os.getpid(), signal.SIGKILL)
if not mark.exists():
{patch}
train.main(sys.argv[1:])
"""
IN_GENERATION = """
    take = SampleQueue.take
    def broken(self, step):
        if step == 3:
            threading.Timer(0.005, die).start()
        return take(self, step)
    SampleQueue.take = broken
"""
BETWEEN_UPDATES = """
    learn = Trainable.learn
    def broken(how, params, opt, step, *rest, **named):
        if how.name == "critic" and int(step) == 3:
            die()
        return learn(how, params, opt, step, *rest, **named)
    Trainable.learn = broken
"""
IN_A_SAVE = """
    save = Checkpoints.save
    def broken(self, step, *a, **k):
        save(self, step, *a, **k)  # returns while it is being written
        if step == 4:
            die()
    Checkpoints.save = broken
"""
NAN_GRADIENT = """
    learn = train.ppo.learn
    def broken(learner, now, data, *rest, **named):
        if int(now.step) == 3:
            mark.touch()
            data = data.with_arrays(advantage=data["advantage"] * float("nan"))
        return learn(learner, now, data, *rest, **named)
    train.ppo.learn = broken
"""
STUCK_STAGE = """
    take = SampleQueue.take
    def broken(self, step):
        if step == 3:
            mark.touch()
            time.sleep(600)
        return take(self, step)
    SampleQueue.take = broken
"""
WORST_MOMENTS = {
    "kill -9 in generation": IN_GENERATION,
    "kill -9 between actor and critic update": BETWEEN_UPDATES,
    "kill -9 in a save": IN_A_SAVE,
}


@dataclasses.dataclass(frozen=True)
class Row:
    """A fault, what happened, and whether nothing was lost."""

    fault: str
    happened: str
    kept: bool


@dataclasses.dataclass(frozen=True)
class Lab:
    """The task and what it comes to undisturbed."""

    folder: pathlib.Path
    settings: dict[str, Any]
    expected: dict[str, Any]
    seconds: float  # of the undisturbed run


def make_task(folder: pathlib.Path) -> dict[str, Any]:
    """Data, a policy's directory and a reward model's in `folder`; their settings."""
    splits = arithmetic.make(seed=0, test=8, sloppy=0.5, demonstrations=1)
    (folder / "data").mkdir(parents=True)
    for name in ("train", "test"):
        lines = "".join(json.dumps(row) + "\n" for row in splits[name][:64])
        (folder / f"data/{name}.jsonl").write_text(lines)
    for name, more in (("model", {}), ("judge", {"architectures": ["Qwen2ForSequenceClassification"]})):
        arithmetic.write_model(folder / name)
        config = arithmetic.MODEL | SHAPE | more | ({"id2label": {"0": "score"}} if more else {})
        (folder / name / "config.json").write_text(json.dumps(config))
    cfg = dataclasses.replace(hf.read_config(folder / "judge")[1], value_head_std=0.1)
    values = decoder.init_params(cfg, jax.random.key(7), head="value", param_dtype="float32")
    tensors = {}
    for entry in params.table(cfg, head="value"):
        array = np.asarray(params.to_hf(entry, params.leaf_at(values, entry.path)))
        tensors |= dict(zip(entry.hf_names, array if entry.stacked else [array], strict=True))
    save_file({name: np.ascontiguousarray(x) for name, x in tensors.items()}, folder / "judge/model.safetensors")
    return SETTINGS | {
        "model.path": str(folder / "model"),
        "data.train_files": str(folder / "data/train.jsonl"),
        "data.val_files": str(folder / "data/test.jsonl"),
        "reward.model.path": str(folder / "judge"),
    }


def start(
    settings: dict[str, Any], run: pathlib.Path, *, patch: str = "", more: Sequence[str] = ()
) -> subprocess.Popen[str]:
    """The training command as a user gives it, or broken by a `patch` until that has happened."""
    mark = run.parent / f"{run.name}.happened"
    program = ["-c", DRIVER.format(mark=str(mark), patch=patch)] if patch else ["-m", "jppo.train"]
    given = [f"--config.{name}={value}" for name, value in (settings | {"trainer.run_dir": run}).items()]
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {
        "JAX_COMPILATION_CACHE_DIR": str(run.parent / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    return subprocess.Popen(
        [sys.executable, *program, f"--config={ROOT / 'configs/quickstart.py'}:{run}", *given, *more],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def to_the_end(settings: dict[str, Any], run: pathlib.Path, **options: Any) -> str:
    """Gives the command until it ends well; returns all the output."""
    output = ""
    for _ in range(STARTS):
        process = start(settings, run, **options)
        output += process.communicate(timeout=LIMIT_S)[0]
        if process.returncode == 0 and (run / "hf").is_dir():
            return output
    raise SystemExit(f"{run} did not end in {STARTS} starts; the last lines:\n{output[-3000:]}")


def outcome(run: pathlib.Path) -> dict[str, Any]:
    """What a run came to, without how long it took: metrics, samples, weights."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    metrics = [{k: v for k, v in line.items() if not k.startswith(("timing_s/", "perf/"))} for line in lines]
    files = [*(run / "samples").glob("*.jsonl"), *(run / "hf").glob("*.safetensors")]
    hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    return {"metrics": metrics, "files": hashes}


def difference(actual: dict[str, Any], expected: dict[str, Any]) -> str:
    """Where two outcomes differ first; '' where they do not."""
    steps = [line["step"] for line in actual["metrics"]]
    if steps != [line["step"] for line in expected["metrics"]]:
        return f"the steps of metrics.jsonl are {steps}"
    for one, other in zip(actual["metrics"], expected["metrics"], strict=True):
        for name in sorted(one.keys() | other.keys()):
            if one.get(name) != other.get(name):
                return f"step {one['step']}: {name} is {one.get(name)}, undisturbed {other.get(name)}"
    for name in sorted(actual["files"].keys() | expected["files"].keys()):
        if actual["files"].get(name) != expected["files"].get(name):
            return f"{name} differs"
    return ""


def verdict(lab: Lab, fault: str, run: pathlib.Path, happened: str) -> Row:
    """The row of a run that must have come to the same."""
    lost = difference(outcome(run), lab.expected)
    return Row(fault, happened + (f"; LOST: {lost}" if lost else "; all the same"), not lost)


def telling(output: str, *words: str) -> str:
    """The first line of the output with one of the words."""
    first = next((line for line in output.splitlines() if any(word in line for word in words)), "")
    return first.strip()[:160]


def killed_at_random(lab: Lab, *, moments: int, seed: int) -> Iterator[Row]:
    """kill -9 of the trainer, somewhere between its start and its end."""
    rng = random.Random(seed)
    for number in range(moments):
        run, after = lab.folder / f"killed-{number}", rng.uniform(0.0, lab.seconds)
        process = start(lab.settings, run)
        time.sleep(after)
        over = process.poll() is not None
        process.kill()
        process.wait()
        steps = [int(p.name) for p in (run / "checkpoints").glob("*") if p.name.isdecimal()]
        to_the_end(lab.settings, run)
        happened = "it had ended" if over else f"went on from checkpoint {max(steps)}" if steps else "began anew"
        yield verdict(lab, f"kill -9 after {after:.1f} s", run, happened)


def broken_inside(lab: Lab, patches: dict[str, str] | None = None) -> Iterator[Row]:
    """kill -9 in the worst moments."""
    for fault, patch in (WORST_MOMENTS if patches is None else patches).items():
        run = lab.folder / fault.replace(" ", "-")
        output = to_the_end(lab.settings, run, patch=patch)
        yield verdict(lab, fault, run, telling(output, "resuming from"))


def killed_after_three(lab: Lab, name: str = "kill -9 after step 3") -> Iterator[Row]:
    """kill -9 once half of the steps are done and saved."""
    run = lab.folder / name.replace(" ", "-").replace(",", "")
    process = start(lab.settings, run)
    wait_until(lambda: (run / "checkpoints/3").is_dir(), process)
    process.kill()
    process.wait()
    output = to_the_end(lab.settings, run)
    yield verdict(lab, name, run, telling(output, "resuming from"))


def stuck_stage(lab: Lab) -> Iterator[Row]:
    """The generation of step 4 does not end."""
    run = lab.folder / "stuck"
    limit = "--config.trainer.stage_timeout_s=90"  # the start is a stage, too, which a busy machine takes long for
    process = start(lab.settings, run, patch=STUCK_STAGE, more=[limit])
    output = process.communicate(timeout=LIMIT_S)[0]
    code, stacks = process.returncode, run / "stacks.txt"
    to_the_end(lab.settings, run)
    row = verdict(lab, "a stage that hangs", run, f"{telling(output, 'has not ended')}; exit code {code}")
    yield dataclasses.replace(row, kept=row.kept and code == 1 and "in broken" in stacks.read_text())


def stopped_by_signals(lab: Lab) -> Iterator[Row]:
    """SIGTERM and SIGHUP in mid-run."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        run = lab.folder / number.name
        before = signal.signal(number, signal.SIG_DFL)  # a run that nohup started ignores SIGHUP
        process = start(lab.settings, run)
        signal.signal(number, before)
        wait_until(lambda run=run: (run / "checkpoints/2").is_dir(), process)
        process.send_signal(number)
        began = time.monotonic()
        process.communicate(timeout=LIMIT_S)
        took, code = time.monotonic() - began, process.returncode
        to_the_end(lab.settings, run)
        row = verdict(lab, number.name, run, f"exit code {code} after {took:.1f} s")
        yield dataclasses.replace(row, kept=row.kept and code == 143)


def killed_after_step_3(lab: Lab, name: str) -> pathlib.Path:
    """Starts a run and kills it once its third checkpoint is there; returns its folder."""
    run = lab.folder / name
    process = start(lab.settings, run)
    wait_until(lambda: (run / "checkpoints/3").is_dir(), process)
    process.kill()
    process.wait()
    return run


def cut_checkpoint(lab: Lab) -> Iterator[Row]:
    """The last checkpoint's largest file loses its second half."""
    run = killed_after_step_3(lab, "cut")
    last = max((p for p in (run / "checkpoints").iterdir() if p.name.isdecimal()), key=lambda p: int(p.name))
    file = max((p for p in last.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    os.truncate(file, file.stat().st_size // 2)
    output = to_the_end(lab.settings, run)
    yield verdict(lab, "a truncated checkpoint file", run, telling(output, "is damaged and skipped"))


def power_cut(lab: Lab) -> Iterator[Row]:
    """Whatever the last checkpoint does not count on has lost its end, or has NULs there."""
    run = killed_after_step_3(lab, "power")
    for file in (path for path in run.rglob("*") if path.is_file()):
        if file.name == "metrics.jsonl":
            with file.open("ab") as lines:
                lines.write(b'{"step": 9, "actor/pg' + bytes(4096))
        elif file.parent.name != "samples" and "checkpoints" not in file.parts:  # those are forced to the disk
            os.truncate(file, max(0, file.stat().st_size - 20))
    output = to_the_end(lab.settings, run)
    yield verdict(lab, "a power cut: the end of every file", run, telling(output, "cannot be read"))


def two_owners(lab: Lab) -> Iterator[Row]:
    """The same command is given once more while the run is under way."""
    run = lab.folder / "owners"
    process = start(lab.settings, run)
    wait_until(lambda: (run / "checkpoints/2").is_dir(), process)
    process.send_signal(signal.SIGSTOP)  # it may not end before the second has begun
    second = start(lab.settings, run)
    output = second.communicate(timeout=LIMIT_S)[0]
    process.send_signal(signal.SIGCONT)
    process.communicate(timeout=LIMIT_S)
    named = f"belongs to process {process.pid} on" in output
    happened = (
        f"{telling(output, 'belongs to process')}; exit code {second.returncode}, the first: {process.returncode}"
    )
    row = verdict(lab, "a second command on the folder", run, happened)
    yield dataclasses.replace(row, kept=row.kept and named and (second.returncode, process.returncode) == (2, 0))


def nan_parameters(lab: Lab) -> Iterator[Row]:
    """From step 4 on the rate is such that the policy is destroyed; then the command is given without that."""
    run = lab.folder / "diverged"
    process = start(lab.settings, run)
    wait_until(lambda: (run / "checkpoints/3").is_dir(), process)
    process.kill()
    process.wait()
    process = start(lab.settings, run, more=["--config.actor.lr=1e30"])
    output = process.communicate(timeout=LIMIT_S)[0]
    to_the_end(lab.settings, run)
    happened = f"{telling(output, 'not finite numbers')}; exit code {process.returncode}"
    row = verdict(lab, "parameters that are no numbers", run, happened)
    yield dataclasses.replace(row, kept=row.kept and process.returncode == 1)


def full_disk(lab: Lab) -> Iterator[Row]:
    """The run's disk is full from the second checkpoint on, until the command is given again."""
    disk = lab.folder / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        yield Row("a full disk", f"not tried: {mounted.stderr.decode().strip()}", True)
        return
    try:
        run, filler = disk / "run", disk / "filler"
        filler.touch()  # now: a checkpoint that is being written may leave no room for a name
        process = start(lab.settings, run)
        wait_until(lambda: (run / "checkpoints/2").is_dir(), process)
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:  # until the disk is full
            while True:
                file.write(bytes(1 << 16))
        output = process.communicate(timeout=LIMIT_S)[0]
        code = process.returncode
        filler.unlink()
        to_the_end(lab.settings, run)
        happened = f"{telling(output, 'could not be written')}; the end: exit code {code}"
        yield verdict(lab, "a full disk", run, happened)
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def nan_gradient(lab: Lab) -> Iterator[Row]:
    """All advantages of step 4 are NaN."""
    run = lab.folder / "nan"
    to_the_end(lab.settings, run, patch=NAN_GRADIENT)
    lines = outcome(run)["metrics"]
    skipped = [line["step"] for line in lines if line.get("actor/skipped")]
    finite = all(np.isfinite(x).all() for x in load_file(run / "hf/model.safetensors").values())
    same = lines[:4] == lab.expected["metrics"][:4] and [line["step"] for line in lines] == list(range(STEPS + 1))
    kept = skipped == [4] and finite and same and (run / "bad_steps/step_4.npz").is_file()
    happened = f"updates skipped in step {skipped}, its batch kept, weights finite: {finite}; the run went on"
    yield Row("a NaN gradient", happened, kept)


def with_vllm(lab: Lab) -> Iterator[Row]:
    """The trainer is killed, with vLLM as the engine; and the engine, so often that the run gives up."""
    settings = lab.settings | {"rollout.name": "vllm"}
    calm = lab.folder / "vllm"
    to_the_end(settings, calm)
    lab = dataclasses.replace(lab, settings=settings, expected=outcome(calm))
    yield from killed_after_three(lab, "kill -9 after step 3, vLLM")
    run = lab.folder / "given-up"
    process = start(lab.settings, run, more=["--config.rollout.max_restarts=0"])
    wait_until(lambda: (run / "checkpoints/2").is_dir(), process)
    for pid in servers_of(lab.folder):
        os.kill(pid, signal.SIGKILL)
    output = process.communicate(timeout=LIMIT_S)[0]
    code = process.returncode
    left = servers_of(lab.folder)
    to_the_end(lab.settings, run)
    happened = f"{telling(output, 'error:')}; exit code {code}, {len(left)} servers left"
    row = verdict(lab, "kill -9 of vLLM with rollout.max_restarts=0", run, happened)
    yield dataclasses.replace(row, kept=row.kept and code == 1 and not left)


def servers_of(folder: pathlib.Path) -> list[int]:
    """The vLLM servers of the models in the folder."""
    pids = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:  # it has ended
            continue
        serves = "vllm.entrypoints.openai.api_server" in words and "jppo.rollout.servers.launch" not in words
        if serves and any(word.startswith(str(folder)) for word in words):
            pids.append(int(path.parent.name))
    return pids


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Returns when the condition holds; an error where the process ends before."""
    end = time.monotonic() + LIMIT_S
    while not condition():
        if process.poll() is not None or time.monotonic() > end:
            process.kill()
            raise SystemExit(f"the run ended or took too long:\n{process.communicate()[0][-3000:]}")
        time.sleep(0.02)
