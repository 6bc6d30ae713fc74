"""The training command as a user runs it, with a real vLLM: trained, killed, started again; and what it refuses."""

import dataclasses
import importlib.util
import os
import pathlib
import signal
import subprocess
import sys

import numpy as np
import pytest

from examples import arithmetic
from jppo import train
from jppo.run.sample_log import sample_metrics, source_means
from jppo.types import Reward
from tests import xla_flags
from tests.make import ROOT, one_line, read_lines, trajectory, until, write_lines

STEPS = 3
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make setup")


def command(run, *more, begin=(sys.executable, "-m", "jppo.train")):
    return [
        *begin, f"--config={ROOT / 'configs/quickstart.py'}:{run}",
        "--config.data.train_batch_size=32", "--config.actor.ppo_mini_batch_size=16",
        "--config.data.val_max_samples=8", "--config.model.scan_layers=True", "--config.trainer.test_freq=-1",
        "--config.trainer.save_freq=1", f"--config.trainer.total_training_steps={STEPS}", *more,
    ]  # fmt: skip


def start(run, *more, **how):
    quick = {"XLA_FLAGS": xla_flags.QUICK, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    environment = os.environ | quick  # on one device
    return subprocess.Popen(
        command(run, *more, **how), cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    )  # fmt: skip


def servers_of(run):
    """Processes whose command line names the run's folder."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it has ended
            continue
        if str(run) in line and ("vllm" in line or "jppo.rollout.servers.launch" in line):
            found.append(line)
    return found


@pytest.fixture
def run(tmp_path, tiny_model):
    """A run's folder with data and a starting model of random weights."""
    folder = tmp_path / "run"
    made = arithmetic.make(seed=1, test=64, sloppy=0.5, demonstrations=1)
    (folder / "data").mkdir(parents=True)
    for name in ("train", "test"):
        write_lines(folder / f"data/{name}.jsonl", made[name])
    (folder / "sft").mkdir()
    (folder / "sft/hf").symlink_to(tiny_model)
    return folder


@needs_vllm
@pytest.mark.vllm
def test_a_killed_run_goes_on_and_leaves_no_server(run):
    first = start(run)
    checkpoints = run / "checkpoints"
    until(lambda: (checkpoints / "1").is_dir() or first.poll() is not None, "the first step", 300)
    first.send_signal(signal.SIGKILL)
    first.wait()
    until(lambda: not servers_of(run), "the end of the killed run's server")
    left = max(int(path.name) for path in checkpoints.iterdir() if path.name.isdecimal())
    assert left < STEPS  # else nothing was left to do

    second = start(run)
    said, _ = second.communicate(timeout=300)
    assert second.returncode == 0, said
    assert f"resuming from the checkpoint of step {left}" in said or left == 0
    assert "engine and trainer agree" in said
    assert not servers_of(run)
    lines = read_lines(run / "metrics.jsonl")
    assert [m["step"] for m in lines] == list(range(STEPS + 1))  # none missing, none twice
    assert all(m["rollout/logp_gap_max"] < 1e-3 for m in lines[1:])
    assert f"report            {run / 'report.html'}" in said and (run / "report.html").is_file()
    assert {path.name for path in (run / "hf").iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    uids = {row["uid"] for step in range(STEPS) for row in read_lines(run / f"samples/step_{step + 1}.jsonl")}
    assert len(uids) == 32 * STEPS  # within an epoch no prompt is drawn again, also over the kill


@needs_vllm
@pytest.mark.slow
@pytest.mark.vllm
def test_a_worker_that_corrupts_a_tensor_is_seen_at_its_publish(run):
    code = (
        "from jppo import train; from jppo.rollout.vllm import arguments;"
        "arguments.EXTENSION = 'tests.rollout.corrupting.CorruptingLoader'; train.main()"
    )
    process = start(run, begin=[sys.executable, "-c", code])
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 1, said
    assert "after the publish of version 2, the log-probs of http://127.0.0.1:" in said
    assert "logp_tolerance allows 0.00025 and 0.001: it does not sample from the published weights" in said
    assert (run / "checkpoints/2").is_dir() and not (run / "samples/step_3.jsonl").exists()


@needs_vllm
def test_a_term_signal_ends_the_run_and_its_server(run):
    process = start(run)
    until(lambda: servers_of(run) or process.poll() is not None, "the server's start", 60)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 143 and "stopped by SIGTERM; the same command continues; " in said
    until(lambda: not servers_of(run), "the server's end")


@pytest.mark.parametrize(
    "more,said",
    [
        (["--config.model.path=/no/such/model"], "/no/such/model"),
        (["--config.data.val_files=missing.jsonl"], "missing.jsonl"),
        (["--config.actor.ppo_mini_batch_size=5"], "must divide data.train_batch_size*rollout.n=32; try 4"),
    ],
)
def test_a_fault_of_the_user_is_one_line_and_code_2(run, more, said, capsys):
    line = one_line(capsys, train.main, *command(run, *more)[3:])
    assert line.startswith("error: ") and said in line
    assert not (run / "server-0.log").exists()


FAILED = Reward(float("nan"), {}, "boom", unusable="not graded: boom")


def response(length, finish="stop"):
    return trajectory(np.zeros(3 + length), np.repeat([False, True], [3, length]), finish=finish)


def test_describe_counts_responses_and_errors():
    rewards = [Reward(1.0, {}, None), FAILED]
    found = sample_metrics([response(2), response(4, "length")], rewards)
    assert found["critic/score/mean"] == 1.0 and found["reward/errors"] == 1.0
    assert found["response_length/mean"] == 3.0 and found["response_length/clip_ratio"] == 0.5
    assert (found["response_length/min"], found["response_length/max"]) == (2.0, 4.0)
    assert found["prompt_length/mean"] == 3.0 and found["perf/total_num_tokens"] == 12.0


def test_given_responses_are_no_samples():
    """Lengths and scores are those without them; tokens and failed grades are counted."""
    shown = [dataclasses.replace(response(k, "length"), version=np.full(3 + k, -1, np.int32)) for k in (9, 5, 7)]
    rewards = [Reward(score, {"style": score}, None) for score in (1.0, 0.0, 0.5)]
    some = [response(2), response(4)]
    alone = sample_metrics(some, rewards[:2])
    found = sample_metrics([some[0], shown[0], some[1], *shown[1:]], [rewards[0], FAILED, rewards[1], *rewards[1:]])
    assert found == alone | {
        "given/count": 3.0,
        "given/score/mean": 0.25,
        "reward/errors": 1.0,
        "perf/total_num_tokens": 12.0 + 9 + 21,
    }
    nothing = sample_metrics(shown, [FAILED, *rewards[:2]])
    assert nothing == {
        "given/count": 3.0, "given/score/mean": 0.5, "reward/errors": 1.0, "perf/total_num_tokens": 30.0
    }  # fmt: skip


def test_describe_has_the_mean_score_of_greedy_responses():
    rewards = [Reward(1.0, {}, None)]
    failed = Reward(0.0, {}, "no grade", unusable="not graded")
    greedy = [Reward(score, {}, None) for score in (1.0, 0.0, 0.5)] + [failed]
    assert sample_metrics([response(2)], rewards, greedy)["critic/greedy/mean"] == 0.5
    without = sample_metrics([response(2)], rewards) | sample_metrics([response(2)], rewards, [failed])
    assert "critic/greedy/mean" not in without


def test_scores_by_data_source():
    rewards = [Reward(score, {}, None) for score in (1.0, 0.0, 1.0, 1.0)]
    assert source_means([*rewards, FAILED], [*"aabb", "a"]) == {"train/a/score": 0.5, "train/b/score": 1.0}
    assert source_means(rewards, [*"aaaa"]) == {}


def test_a_step_whose_graders_all_fail_ends_the_run():
    with pytest.raises(train.Diverged, match="boom"):
        train.require_graded([FAILED])


def test_due():
    for step, every, now in ((10, 5, True), (11, 5, False), (10, -1, False), (0, 5, True)):
        assert train.loop.due(step, every) is now
