"""Several processes on this machine as the hosts of one run: equal to one process, and ended together."""

import json
import math
import os
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file

from jppo import settings, train
from jppo.distributed.hosts import Hosts
from jppo.errors import UserError
from jppo.rollout.servers.make import host_urls
from jppo.run import start
from jppo.run.start import require_shareable
from jppo.settings import table
from tests import xla_flags
from tests.make import ROOT, changed, read_lines, typed, write_lines

STEPS = 3


@pytest.fixture
def run_of_groups(small_run):
    """Three steps of groups of two, sampled by the trainer."""
    c = small_run
    c.rollout.name, c.rollout.logp_tolerance, c.rollout.n = "inprocess", 1e-3, 2
    c.algorithm.adv_estimator, c.actor.lr = "grpo", 1e-3
    c.reward.format_regex = ".*[0-4].*"  # rewards that differ, of a model that knows nothing
    c.trainer.total_training_steps, c.trainer.max_ckpt_to_keep = STEPS, STEPS
    c.trainer.host_timeout_s, c.trainer.stop_timeout_s, c.trainer.logger = 15.0, 60.0, "console,jsonl"
    settings.check(c)
    return c


def in_folder(config, folder):
    """The same run in another folder."""
    return changed(config, {"trainer.run_dir": str(folder)})


def launch(config, count=2, how="whole"):
    """The run as `count` processes of one device each, by the script that users have: the exit code, what was said."""
    usual, mine = table.by_name(settings.default()), table.by_name(config)
    lines = [f"    c.{name} = {value!r}" for name, value in mine.items() if value != usual[name]]
    file = pathlib.Path(config.trainer.run_dir).with_suffix(".py")
    text = ["from jppo.settings import default", "def get_config():", "    c = default()", *lines, "    return c"]
    file.write_text("\n".join(text) + "\n")
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    env["XLA_FLAGS"] = xla_flags.QUICK
    command = [sys.executable, "tests/hosts_program.py", how, f"--config={file}"]
    done = subprocess.run(
        ["scripts/launch/local.sh", str(count), *command],
        cwd=ROOT, env=env, timeout=500, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return done.returncode, done.stdout


def metrics(folder):
    own = ("timing_s/", "perf/", "step", "rollout_corr/", "rollout/")  # of the machine, or rounding and nothing else
    return {
        one["step"]: {k: v for k, v in one.items() if not k.startswith(own)}
        for one in read_lines(folder / "metrics.jsonl")
    }


def assert_equal_runs(folder, reference, steps=STEPS):
    """The same samples, metrics and weights."""
    for n in range(1, steps + 1):
        for name in (f"step_{n}.jsonl", f"test_{n}.jsonl"):
            assert (folder / "samples" / name).read_text() == (reference / "samples" / name).read_text(), name
    ours, theirs = metrics(folder), metrics(reference)
    assert len({row["critic/score/mean"] for row in theirs.values() if "critic/score/mean" in row}) > 1
    for n in range(1, steps + 1):
        assert ours[n].keys() == theirs[n].keys()
        for name, value in theirs[n].items():
            assert math.isclose(ours[n][name], value, rel_tol=1e-4, abs_tol=1e-5), (n, name, ours[n][name], value)
    if steps == STEPS:
        ours, theirs = (load_file(path / "hf/model.safetensors") for path in (folder, reference))
        assert ours.keys() == theirs.keys()
        for name, array in theirs.items():
            np.testing.assert_allclose(ours[name], array, atol=1e-5, rtol=0, err_msg=name)


@pytest.fixture
def reference(run_of_groups):
    """The folder of the run as one process."""
    train.train(run_of_groups)
    return pathlib.Path(run_of_groups.trainer.run_dir)


def test_two_hosts_are_one_process_which_resumes_when_a_host_is_killed(run_of_groups, reference, tmp_path):
    """Host 1 is killed after two steps."""
    broken = in_folder(run_of_groups, tmp_path / "broken")
    code, said = launch(broken, how="kill@1")
    assert code == 1 and "error: host 1 is lost: no sign of it within trainer.host_timeout_s=15" in said, said
    assert_equal_runs(tmp_path / "broken", reference, steps=2)
    assert said.count("step 2/3") == 1  # only one host prints
    assert (tmp_path / "broken/checkpoints/1").is_dir()
    train.train(broken)
    assert_equal_runs(tmp_path / "broken", reference)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_two_hosts_have_the_memory_of_one_process(run_of_groups, tmp_path, mode):
    c = run_of_groups
    c.algorithm.extension, c.rollout.mode = f"{ROOT}/examples/algorithms/spo.py:spo", mode
    settings.check(c)
    train.train(c)
    code, said = launch(in_folder(c, tmp_path / "two"))
    assert code == 0, said
    reference = pathlib.Path(c.trainer.run_dir)
    assert_equal_runs(tmp_path / "two", reference)
    memories = [
        json.loads((folder / f"checkpoints/{STEPS}/about/metadata").read_text())["meta"]["cursor"]["curriculum"]
        for folder in (tmp_path / "two", reference)
    ]
    assert memories[0] == memories[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("update", "said"),
    [
        ("memory + os.getpid()", "its functions of the memory return other values on host"),
        (
            "memory / 0 if os.environ['NODE_RANK'] == '1' else memory",
            "update raises ZeroDivisionError: division by zero",
        ),
    ],
)
def test_a_memory_that_differs_between_hosts_ends_all(run_of_groups, tmp_path, update, said):
    (tmp_path / "mine.py").write_text(
        "import os\nfrom jppo.learner.algorithm import Algorithm\n"
        f"def mine():\n    return Algorithm(init=lambda prompts: 0, update=lambda memory, step: {update})\n"
    )
    run_of_groups.algorithm.extension = f"{tmp_path}/mine.py:mine"
    code, output = launch(run_of_groups)
    assert code == 2 and said in output and "Traceback" not in output, output


@pytest.mark.slow
def test_two_hosts_resume_from_the_checkpoint_of_one_process(run_of_groups, reference, tmp_path):
    shutil.copytree(reference, tmp_path / "continued")
    for gone in ("checkpoints/2", "checkpoints/3", "hf"):
        shutil.rmtree(tmp_path / "continued" / gone)
    code, said = launch(in_folder(run_of_groups, tmp_path / "continued"))
    assert code == 0 and "resuming from the checkpoint of step 1" in said, said
    assert_equal_runs(tmp_path / "continued", reference)


@pytest.mark.slow
def test_four_hosts_with_critic_and_draws_ahead_are_one_process(run_of_groups, tmp_path):
    c = run_of_groups
    c.algorithm.adv_estimator, c.rollout.mode, c.rollout.max_staleness = "gae", "async", 1
    c.mesh.fsdp = 4
    reference = pathlib.Path(c.trainer.run_dir)
    train.train(c)
    code, said = launch(in_folder(c, tmp_path / "four"), count=4)
    assert code == 0, said
    assert_equal_runs(tmp_path / "four", reference)


@pytest.mark.slow
def test_two_hosts_with_given_responses_are_one_process(run_of_groups, tmp_path):
    """Each host gives those of its own prompts, some of which have none; asynchronous."""
    c = run_of_groups
    file = pathlib.Path(c.data.train_files)
    rows = [row | {"demonstrations": ["12"] * (i % 2)} for i, row in enumerate(read_lines(file))]
    write_lines(file, rows)
    c.algorithm.extension = f"{ROOT}/examples/algorithms/luffy.py:luffy"
    c.rollout.mode, c.rollout.max_staleness = "async", 1
    reference = pathlib.Path(c.trainer.run_dir)
    train.train(c)
    assert sum(one.get("given/count", 0) for one in metrics(reference).values()) > 1
    code, said = launch(in_folder(c, tmp_path / "two"))
    assert code == 0, said
    assert_equal_runs(tmp_path / "two", reference)


@pytest.mark.slow
@pytest.mark.parametrize(
    "how, code, said, saved",
    [
        ("kill@0", 137, "error: host 0 is lost, which coordinates the run", None),
        ("crash@1", 1, "error: host 1 failed: 'nobody expects this'", None),
        ("rollout@1", 1, "error: host 1: the server is gone for good", 2),
        ("terminate@1", 143, "host 1: stopped by SIGTERM", 3),
        ("user@1", 2, "error: host 1: this host has no such file", None),
    ],
)
def test_what_ends_one_host_ends_all(run_of_groups, tmp_path, how, code, said, saved):
    found, out = launch(in_folder(run_of_groups, tmp_path / "broken"), how=how)
    assert found == code and said in out, out
    if saved is not None:
        assert (tmp_path / "broken/checkpoints" / str(saved)).is_dir()


@pytest.mark.slow
def test_hosts_that_draw_ahead_save_what_each_has_where_one_is_behind(run_of_groups, tmp_path):
    """Host 1 breaks off before it has asked for what host 0 has asked for already."""
    c = run_of_groups
    c.rollout.mode, c.rollout.max_staleness, c.trainer.save_freq = "async", 1, -1
    reference = pathlib.Path(c.trainer.run_dir)
    train.train(c)
    broken = in_folder(c, tmp_path / "broken")
    code, said = launch(broken, how="behind@1")
    assert code == 1 and "error: host 1: the server is gone for good" in said and "Traceback" not in said, said
    assert (tmp_path / "broken/checkpoints/1").is_dir(), said
    train.train(broken)
    assert_equal_runs(tmp_path / "broken", reference)


@pytest.mark.slow
def test_an_export_that_fails_on_one_host_costs_that_checkpoint_alone(run_of_groups, tmp_path):
    run_of_groups.trainer.save_contents = "model,optimizer,extra,hf_model"
    code, said = launch(in_folder(run_of_groups, tmp_path / "full"), how="export@0")
    assert code == 0 and "checkpoint 2 could not be written" in said, said
    there = sorted(path.name for path in (tmp_path / "full/checkpoints").iterdir() if path.is_dir())
    assert there == ["1", "3"] and (tmp_path / "full/checkpoints/3/hf").is_dir()


def test_hosts_must_agree_on_what_cannot_be_shared(config):
    config.rollout.mode, config.rollout.partial = "async", True
    with pytest.raises(UserError, match=r"rollout.partial=True takes .* trainer.nnodes=2"):
        require_shareable(typed(config), Hosts(0, 2))
    config.rollout.partial, config.rollout.publish_via = False, "nccl"
    with pytest.raises(UserError, match=r"publish_via='nccl' is for one host, and this run has 2; set it to tcp"):
        require_shareable(typed(config), Hosts(0, 2))
    require_shareable(typed(config), Hosts(0, 1))


def test_servers_that_are_named_are_shared_out():
    urls = ["a", "b", "c", "d", "e"]
    assert [host_urls(Hosts(rank, 2), urls) for rank in (0, 1)] == [["a", "b"], ["c", "d", "e"]]
    assert host_urls(Hosts(1, 2), []) == []
    with pytest.raises(UserError, match=r"rollout.urls names 1 .* each of 2 hosts"):
        host_urls(Hosts(0, 2), ["a"])


def test_the_mark_of_a_shared_folder_is_new_in_one_that_is_there(tmp_path):
    marks = [start._create_mark(tmp_path / "runs/a") for _ in range(2)]
    assert len({*marks}) == 2 and {file.name for file in (tmp_path / "runs/a").iterdir()} == {*marks}
