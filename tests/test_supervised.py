"""Fine-tuning and reward models resume to the bit: real commands, broken off by signals and by damage."""

import dataclasses
import itertools
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from examples import arithmetic
from jppo import reward_model, settings, sft
from jppo.errors import UserError
from jppo.learner import loss_scale
from jppo.learner.trainable import Trainable
from jppo.run import pairs, supervised
from jppo.run.loop import Diverged
from jppo.runlog.logger import read_metrics
from jppo.runlog.watchdog import Stopped
from tests import xla_flags

ROOT = pathlib.Path(__file__).resolve().parents[1]
SHAPE = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "pad_token_id": None}
STEPS = 6  # of runs in this process
LONG = 24  # of commands, so that a signal comes in time
COMMANDS = {"sft": sft, "reward_model": reward_model}
COMPILED = {  # of all commands: they must agree to the bit
    "XLA_FLAGS": xla_flags.quick(),
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
}


class Lab:
    """A small run of one of the two commands, undisturbed and broken."""

    def __init__(self, name, folder):
        self.name, self.folder, self.command = name, folder, COMMANDS[name]
        sums = [(f"{a}+{b}=", str(a + b), str(a + b + 1)) for a in range(1, 8) for b in range(1, 8)]
        rows = [{"prompt": p, "response": right, "chosen": right, "rejected": wrong} for p, right, wrong in sums]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        arithmetic.write_model(folder / "model")
        (folder / "model/config.json").write_text(json.dumps(arithmetic.MODEL | SHAPE))

    def config(self, run, **changes):
        c = settings.sft_default() if self.name == "sft" else settings.reward_model_default()
        c.model.path, c.model.init = str(self.folder / "model"), "random"
        c.data.train_files, c.data.train_batch_size, c.data.row_lengths = str(self.folder / "rows.jsonl"), 16, 1
        c.data.max_prompt_length, c.data.max_response_length = 6, 4
        c.trainer.run_dir, c.trainer.logger, c.trainer.save_freq = str(self.folder / run), "console,jsonl", 1
        c.trainer.total_training_steps, c.optim.lr, c.optim.lr_scheduler_type = STEPS, 3e-3, "cosine"
        c.trainer.compile_cache = ""
        if self.name == "reward_model":
            c.data.val_files, c.trainer.test_freq = c.data.train_files, 2
        c.update_from_flattened_dict({name.replace("__", "."): value for name, value in changes.items()})
        settings.check(c)
        return c

    def train(self, run, **changes):
        """In this process; what the run came to."""
        self.command.train(self.config(run, **changes))
        return self.outcome(run)

    def start(self, run, **changes):
        """As a command of its own, on one device."""
        c = settings.by_name(self.config(run, **changes))
        file = self.folder / f"{run}.py"
        file.write_text(
            "from jppo import settings\n\n\ndef get_config():\n"
            f"    c = settings.{self.name}_default()\n    c.update_from_flattened_dict({c!r})\n    return c\n"
        )
        environment = os.environ | COMPILED
        return subprocess.Popen(
            [sys.executable, "-m", f"jppo.{self.name}", f"--config={file}"],
            cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def to_the_end(self, run, **changes):
        """The command until it ends well; what it printed."""
        process = self.start(run, **changes)
        said = process.communicate(timeout=300)[0]
        assert process.returncode == 0, said
        return said

    def await_steps(self, run, count, process):
        """Returns once the run has logged so many steps."""
        file = self.folder / run / "metrics.jsonl"
        for _ in range(60_000):
            if file.exists() and file.read_bytes().count(b"\n") >= count:
                return
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.002)
        raise AssertionError(f"{file} has no {count} lines after two minutes")

    def outcome(self, run):
        """Metrics but for the time they took, and the model."""
        return self.outcome_of_metrics(run), (self.folder / run / "hf/model.safetensors").read_bytes()

    def outcome_of_metrics(self, run):
        return [
            {k: v for k, v in line.items() if not k.startswith(("timing_s/", "perf/"))}
            for line in read_metrics(self.folder / run)
        ]

    def checkpoints(self, run):
        return sorted(path.name for path in (self.folder / run / "checkpoints").iterdir() if path.name != "best.json")


# Both commands are objectives of jppo/run/supervised.py; the reward model's adds tests.
@pytest.fixture(scope="module", params=["reward_model", pytest.param("sft", marks=pytest.mark.slow)])
def lab(request, tmp_path_factory):
    return Lab(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def undisturbed(lab):
    """What a command comes to that nothing disturbs."""
    lab.to_the_end("undisturbed", trainer__total_training_steps=LONG)
    return lab.outcome("undisturbed")


@pytest.fixture
def small(lab, quick_compilation):
    """What a run in this process comes to that nothing disturbs."""
    if not (lab.folder / "small/hf").is_dir():
        lab.train("small")
    return lab.outcome("small")


def broken_off(lab, run, monkeypatch, *, at, error=None, **changes):
    """A run in this process that a stop breaks off in the step number `at`."""
    real, calls = supervised.take_step, []

    def failing(*args):
        calls.append(1)
        if len(calls) == at:
            raise error or Stopped(143, "asked")
        return real(*args)

    with monkeypatch.context() as patch, pytest.raises(type(error) if error else Stopped):
        patch.setattr(supervised, "take_step", failing)
        lab.train(run, **changes)


@pytest.mark.parametrize(
    "error", [MemoryError("of the host"), pytest.param(UserError("custom code"), marks=pytest.mark.slow)]
)
def test_any_error_leaves_a_checkpoint(lab, small, monkeypatch, error):
    run = f"error-{type(error).__name__}"
    broken_off(lab, run, monkeypatch, at=4, error=error, trainer__save_freq=-1)
    assert lab.checkpoints(run) == ["3"]
    assert lab.train(run, trainer__save_freq=-1) == small


def test_an_overflow_of_the_loss_scale_ends_nothing_and_a_resume_has_the_scale(lab, monkeypatch, quick_compilation):
    """From a scale that overflows: steps are lost until it is low enough; a scale that began anew would do so again."""
    monkeypatch.setattr(loss_scale, "BEGIN", 2.0**20)
    whole, prefix = lab.train("half", model__compute_dtype="float16"), "sft" if lab.name == "sft" else "rm"
    scales = [line[f"{prefix}/loss_scale"] for line in whole[0]]
    overflowed = [line[f"{prefix}/overflowed"] for line in whole[0]]
    assert scales[0] == 2.0**20 and {*overflowed} == {0.0, 1.0}
    assert [b / a for a, b in itertools.pairwise(scales)] == [0.5 if x else 1.0 for x in overflowed[:-1]]
    assert all(line[f"{prefix}/skipped"] == 0 for line in whole[0])
    broken_off(lab, "half-resumed", monkeypatch, at=STEPS, model__compute_dtype="float16")
    assert lab.train("half-resumed", model__compute_dtype="float16") == whole
    rule = "model.compute_dtype='bfloat16' was 'float16' when the checkpoint was written, and in float16 alone"
    with pytest.raises(UserError, match=rule):
        lab.train("half", model__compute_dtype="bfloat16", trainer__total_training_steps=STEPS + 1)


def test_a_step_that_was_skipped_leaves_the_state_before_it(lab, small, monkeypatch):
    """Its loss is NaN: the update changes nothing, and the weights are in new buffers."""
    real, calls = Trainable.learn, []

    def nan(how, *rest, **named):
        calls.append(1)
        if len(calls) == 4:
            exchange = how.exchange or (lambda carry: carry)

            def poisoned(carry):
                grads, loss = exchange(carry)
                return grads, loss * np.float32(np.nan)

            how = dataclasses.replace(how, exchange=poisoned)
        return real(how, *rest, **named)

    with monkeypatch.context() as patch, pytest.raises(Diverged, match=r"step 4: .* must be finite numbers"):
        patch.setattr(Trainable, "learn", nan)
        lab.train("nan", trainer__save_freq=-1)
    assert lab.checkpoints("nan") == ["3"]
    assert lab.train("nan", trainer__save_freq=-1) == small


@pytest.mark.slow
def test_killed_at_a_random_moment_it_resumes_to_the_bit(lab, undisturbed):
    rng = random.Random(f"a moment of {lab.name}")
    process = lab.start("killed", trainer__total_training_steps=LONG)
    lab.await_steps("killed", rng.randrange(2, LONG - 10), process)
    time.sleep(rng.uniform(0, 0.1))
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    said = lab.to_the_end("killed", trainer__total_training_steps=LONG)
    assert "resuming from the checkpoint of step" in said
    assert lab.outcome("killed") == undisturbed
    assert len(lab.checkpoints("killed")) == 2 and lab.checkpoints("killed")[-1] == str(LONG)


@pytest.mark.slow
def test_a_stopped_command_leaves_a_checkpoint_and_its_exit_code(lab, undisturbed):
    how = dict(trainer__total_training_steps=LONG, trainer__save_freq=-1)
    process = lab.start("stopped", **how)
    lab.await_steps("stopped", 1, process)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 143 and "stopped by SIGTERM; the same command continues; " in said, said
    [step] = lab.checkpoints("stopped")
    assert 1 <= int(step) < LONG
    assert f"resuming from the checkpoint of step {step}" in lab.to_the_end("stopped", **how)
    assert lab.outcome("stopped") == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("lab", ["sft", "reward_model"], indirect=True)
@pytest.mark.parametrize(
    "changes", [{}, {"model__lora_rank": 2}, {"mesh__tensor": 2, "model__param_dtype": "bfloat16"}]
)
def test_any_state_resumes_to_the_bit(lab, changes, monkeypatch, tmp_path):
    name = tmp_path.name
    whole = lab.train(f"{name}-whole", **changes)
    broken_off(lab, name, monkeypatch, at=4, trainer__save_freq=-1, **changes)
    assert lab.checkpoints(name) == ["3"]
    assert lab.train(name, **changes) == whole
    assert [line["step"] for line in whole[0]] == list(range(1, STEPS + 1))


def test_a_step_whose_test_was_broken_off_is_tested_and_logged_once(lab, small, monkeypatch):
    if lab.name == "sft":
        pytest.skip("fine-tuning has no test")

    def stop(*_):
        raise Stopped(143, "asked")

    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(pairs, "pair_blocks", stop)  # of held-out pairs
        lab.train("tested", trainer__save_freq=-1)
    assert lab.checkpoints("tested") == ["2"] and [m["step"] for m in lab.outcome_of_metrics("tested")] == [1]
    assert lab.train("tested") == small


def test_disable_begins_anew_and_a_run_at_its_end_trains_no_more(lab, small, capsys):
    shutil.copytree(lab.folder / "small", lab.folder / "again")
    before = (lab.folder / "again/hf/model.safetensors").stat().st_mtime_ns
    assert lab.train("again") == small
    assert "all 6 steps are done: nothing is left to train" in capsys.readouterr().out
    assert (lab.folder / "again/hf/model.safetensors").stat().st_mtime_ns == before
    other = lab.train("again", trainer__resume_mode="disable", optim__lr=1e-3)
    assert other[0][0]["step"] == 1 and other != small
    assert lab.train("again", trainer__resume_mode="disable") == small


def test_a_state_that_has_diverged_is_not_saved(lab, small):
    with pytest.raises(Diverged, match=r"step 1: .*not.* finite.*lower optim\.lr=1e\+30"):
        lab.train("wild", optim__lr=1e30, optim__lr_scheduler_type="constant")
    assert lab.checkpoints("wild") == []
    assert lab.train("wild") == small


def test_other_examples_are_refused(lab, monkeypatch):
    broken_off(lab, "other", monkeypatch, at=3)
    rows = (lab.folder / "rows.jsonl").read_text().splitlines(keepends=True)
    (lab.folder / "others.jsonl").write_text("".join(rows[1:] + rows[:1]))
    with pytest.raises(UserError, match=r"data\.train_files: source 'train' has changed since the checkpoint"):
        lab.train("other", data__train_files=str(lab.folder / "others.jsonl"))
    with pytest.raises(UserError, match=r"trainer\.seed=2 was 1 when the checkpoint was written"):
        lab.train("other", trainer__seed=2)
    with pytest.raises(UserError, match=r"trainer\.resume_mode=nowhere: no such checkpoint"):
        lab.train("other", trainer__resume_mode="nowhere")
