"""Sweeps: the runs that a file asks for, side by side, ended and gone on with; the table; and two real runs."""

import csv
import json
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys

import numpy as np
import pytest

from examples import arithmetic
from jppo import sweep
from jppo.errors import UserError
from jppo.settings import plan
from tests.make import ROOT, one_line, until, write_lines

HEAD = """
from jppo import settings

def get_config(arg="some/model"):
    c = settings.default()
    c.model.path, c.data.train_files, c.data.val_files = arg, "train.jsonl", "val.jsonl"
    return c.lock()
"""


@pytest.fixture
def asked(tmp_path):
    """Lines of sweep(add), and more arguments -> the runs."""

    def asked(*lines, more=(), out=tmp_path / "out"):
        file = tmp_path / "mine.py"
        body = "".join(f"    {line}\n" for line in lines)
        file.write_text(f"{HEAD}\ndef sweep(add):\n{body}" if lines else HEAD)
        return plan.plan([f"--config={file}", *more], out)

    return asked


def test_a_run_has_what_is_added_and_what_all_have(asked, tmp_path):
    runs, out = asked(
        "for lr in (1e-5, 2e-5):",
        "    add(**{'trainer.seed': 2, 'actor.lr': lr})",
        "add()",
        more=["--config.data.train_batch_size=64"],
    )
    assert out == tmp_path / "out"
    assert [run.name for run in runs] == ["actor.lr=1e-05_trainer.seed=2", "actor.lr=2e-05_trainer.seed=2", "base"]
    first = runs[0]
    assert first.folder == out / first.name and first.arguments == (
        f"--config={tmp_path / 'mine.py'}", "--config.data.train_batch_size=64", "--config.actor.lr=1e-05",
        "--config.trainer.seed=2", f"--config.trainer.run_dir={first.folder}",
    )  # fmt: skip
    assert first.values["actor.lr"] == 1e-5 and first.values["data.train_batch_size"] == 64
    assert plan.find_differing(runs) == ["actor.lr", "trainer.seed"]
    assert plan.find_differing(runs[:2]) == ["actor.lr"]


def test_lists_on_the_command_line_are_combined_in_place_of_the_files_sweep(asked):
    words = ["--config.actor.lr=1e-5,2e-5", "--config.actor.shuffle=True,False", "--config.actor.betas=0.9,0.95"]
    runs, _ = asked("add(**{'actor.lr': 0.5})", more=[*words, "--config.trainer.save_contents=model,extra"])
    assert [(run.values["actor.lr"], run.values["actor.shuffle"]) for run in runs] == [
        (1e-5, True), (1e-5, False), (2e-5, True), (2e-5, False),
    ]  # fmt: skip
    assert runs[0].name == "actor.lr=1e-05_actor.shuffle=True" and runs[0].values["actor.betas"] == (0.9, 0.95)
    assert {run.values["trainer.save_contents"] for run in runs} == {"model,extra"}
    runs, _ = asked(more=["--config.actor.loss_agg_mode=token-mean,seq-mean-token-sum"])
    assert [run.values["actor.loss_agg_mode"] for run in runs] == ["token-mean", "seq-mean-token-sum"]


def test_the_folder_is_named_after_the_file_and_the_argument_is_passed_on(asked, tmp_path):
    asked("add(**{'actor.lr': 0.0})")
    (run,), out = plan.plan([f"--config={tmp_path / 'mine.py'}:other/model"], None)
    assert out == pathlib.Path("runs/sweep-mine") and run.values["model.path"] == "other/model"
    assert run.values["actor.lr"] == 0.0 and run.name == "actor.lr=0.0"


def test_values_of_every_kind_arrive_as_they_are(asked):
    runs, _ = asked(
        "import numpy as np",
        "add(**{'actor.betas': [0.9, 0.95], 'actor.shuffle': True, 'actor.loss_agg_mode': 'seq-mean-token-sum'})",
        "for lr in np.asarray([1e-5, 1e-4]):",
        "    add(**{'actor.lr': lr, 'actor.clip_ratio_low': np.float64(0.0), 'critic.ppo_mini_batch_size': 32})",
        "add(**{'actor.lr': 1, 'data.system_prompt': 'be \"good\" & | $HOME\\n'})",
    )
    values = [run.values for run in runs]
    assert values[0]["actor.betas"] == (0.9, 0.95) and values[0]["actor.shuffle"] is True
    assert values[1]["actor.lr"] == 1e-5 and values[1]["actor.clip_ratio_low"] == 0.0
    assert values[2]["critic.ppo_mini_batch_size"] == 32
    assert values[3]["actor.lr"] == 1.0 and values[3]["data.system_prompt"] == 'be "good" & | $HOME\n'


def test_names_are_stable_unique_and_can_be_folders():
    name = plan.run_name({"model.path": "/a/b c"})
    assert name.startswith("model.path=-a-b-c-") and name != plan.run_name({"model.path": "/a/b-c"})
    assert name == plan.run_name({"model.path": "/a/b c"})
    assert plan.run_name({"b.c": 1, "a.b": 2}) == plan.run_name({"a.b": 2, "b.c": 1}) == "a.b=2_b.c=1"
    long = [plan.run_name({"data.system_prompt": "x" * 500 + end}) for end in "ab"]
    assert len(set(long)) == 2 and all(len(name) < 200 for name in long)
    assert plan.run_name({"a.b": "1_c.d=2"}) != plan.run_name({"a.b": 1, "c.d": 2})


@pytest.mark.parametrize(
    "lines,more,said",
    [
        ([], [], "has no sweep(add)"),
        ([], ["--config.actor.lr=1e-5,fast"], "--config.actor.lr=fast must be of type float"),
        ([], ["--config.actor.lr=1e-5,1e-5"], "have the same settings"),
        (["pass"], [], "adds no run"),
        (["add({'actor.lr': 1e-5})"], [], "gives no names"),
        (["add(lr=1e-5)"], [], "there is no setting 'lr'"),
        (["add()", "add(**{'actor.lrr': 1e-5})"], [], "there is no setting 'actor.lrr'; did you mean 'actor.lr'?"),
        (["add(**{'actor': 1})"], [], "there is no setting 'actor'"),
        (["add(**{'actor.lr': 'fast'})"], [], "must be of type float"),
        (["add(**{'actor.lr': '1e-5'})"], [], "actor.lr='1e-5' must be of type float"),
        (["add(**{'actor.ppo_epochs': 1.5})"], [], "must be of type int"),
        (["add(**{'actor.ppo_epochs': True})"], [], "must be of type int"),
        (["add(**{'algorithm.rollout_is_threshold': 2.0})"], [], "must be of type str"),
        (["add()", "add(**{'actor.ppo_mini_batch_size': 5})"], [], "must divide"),
        (["add(**{'actor.lr': -1.0})"], [], "run actor.lr=-1.0: actor.lr=-1.0 must be at least"),
        (["add()", "add(**{'actor.lr': 1e-6})"], [], "base and actor.lr=1e-06 have the same settings"),
        (["add(**{'actor.lr': 1e-5})", "add(**{'actor.lr': 0.00001})"], [], "have the same settings"),
        (["add(**{'trainer.run_dir': 'x'})"], [], "trainer.run_dir cannot be swept"),
        (["add()"], ["--config.trainer.run_dir=x"], "use --out"),
        (["add(**{'actor.lr': 1e-5})"], ["--config.actor.lr=1e-4"], "the sweep sets it too"),
        (["add()"], ["--config.actor.lrr=1e-4"], "there is no setting 'lrr'"),
        (["add()"], ["--speed=3"], "speed"),
        (["add()"], ["--dry_run"], "--print shows them"),
    ],
)
def test_every_run_is_checked_before_the_first(asked, lines, more, said):
    with pytest.raises(UserError) as e:
        asked(*lines, more=more)
    assert said in str(e.value) and "\n" not in str(e.value)


def test_a_setting_that_is_none_may_stay_so(asked):
    (run, other), _ = asked("add(**{'actor.clip_ratio_low': None})", "add(**{'actor.clip_ratio_low': 0.1})")
    assert run.values["actor.clip_ratio_low"] is None and other.values["actor.clip_ratio_low"] == 0.1
    with pytest.raises(UserError, match=r"actor\.lr cannot become None, it is 1e-06 by get_config"):
        asked("add(**{'actor.lr': None})")


def test_runs_at_a_time_share_no_server(asked):
    seeds = "for seed in (1, 2): add(**{'trainer.seed': seed})"
    plan.check_apart(asked(seeds)[0])
    with pytest.raises(UserError, match=r"port 8000 belongs to the runs trainer\.seed=1 and trainer\.seed=2"):
        plan.check_apart(asked(seeds, more=["--config.rollout.port=8000"])[0])
    with pytest.raises(UserError, match="the server http://a belongs"):
        plan.check_apart(asked(seeds, more=["--config.rollout.urls= http://a,http://b"])[0])
    apart = "for port in (8000, 8002): add(**{'rollout.port': port})"
    plan.check_apart(asked(apart, more=["--config.rollout.servers=2"])[0])
    with pytest.raises(UserError, match="port 8002"):
        plan.check_apart(asked(apart, more=["--config.rollout.servers=3"])[0])


CONFIGS = [path for path in sorted((ROOT / "configs").glob("*.py")) if "\ndef sweep(" in path.read_text()]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_the_sweeps_of_the_project_are_lawful(path):
    runs, _ = plan.plan([f"--config={path}"], None)
    assert len(runs) > 1 and "quickstart.py" in [path.name for path in CONFIGS]


def rows(tmp_path, **scores):
    """A run for each name, whose metric had these values in steps 0, 1, 2 ..."""
    for name, values in scores.items():
        (tmp_path / name).mkdir()
        lines = [{"step": i} | ({} if value is ... else {"val/score": value}) for i, value in enumerate(values)]
        write_lines(tmp_path / name / "metrics.jsonl", lines)
    make = dict(settings={"actor.lr": 1e-5, "data.mix": "a|b,c"}, status="finished", seconds=1.6)
    return [sweep.make_row(tmp_path / name, "val/score", **make) for name in scores]


def test_the_table_is_sorted_by_the_last_value_and_has_the_best(tmp_path):
    found = rows(tmp_path, low=[0.1, ..., 0.9, 0.25], none=[..., None], high=[0.5, 0.5, 1 / 3], empty=[])
    assert [row.name for row in sweep.rank_rows(found)] == ["high", "low", "none", "empty"]
    low, none, high, empty = found
    assert (low.last, low.best, low.best_step, low.step) == (0.25, 0.9, 2, 3)
    assert (high.last, high.best, high.best_step) == (1 / 3, 0.5, 0), "the first of equal ones"
    assert (none.last, none.best, none.step) == (None, None, 1) and empty.step is None
    negative = [row.name for row in sweep.rank_rows(rows(tmp_path, minus=[-2.0], zero=[0.0], less=[-3.0]))]
    assert negative == ["zero", "minus", "less"]
    sweep.write_table(tmp_path, sweep.rank_rows(found), "val/score")
    lines = (tmp_path / "sweep.md").read_text().splitlines()
    assert lines[0] == "| run | actor.lr | data.mix | val/score | best val/score | at step | steps | seconds | status |"
    assert lines[2] == "| high | 1e-05 | a\\|b,c | 0.3333 | 0.5 | 0 | 2 | 2 | finished |"
    with (tmp_path / "sweep.csv").open(newline="") as f:
        read = list(csv.DictReader(f))
    assert [row["run"] for row in read] == ["high", "low", "none", "empty"]
    assert float(read[0]["val/score"]) == 1 / 3 and read[0]["data.mix"] == "a|b,c" and read[2]["val/score"] == ""


PROGRAM = """
import json, pathlib, signal, sys, time
folder, action = pathlib.Path(sys.argv[1]), sys.argv[2]
(folder / "began").open("a").write(f"{time.time()}\\n")
with (folder / "metrics.jsonl").open("w") as f:
    f.write(json.dumps({"step": 1, "val/score": float(sys.argv[3])}) + "\\n")
print("hello", flush=True)
if action == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (folder / "deaf").touch()
if action == "save":
    signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1.5), (folder / "saved").touch(), sys.exit(143)))
if action in ("wait", "deaf", "save"):
    time.sleep(60)
deadline = time.monotonic() + 60
while action == "meet" and len(list(folder.parent.glob("*/began"))) < 3:
    assert time.monotonic() < deadline, "the others have not begun"
    time.sleep(0.05)
print("error: it is broken" if action == "fail" else "", flush=True)
(folder / "ended").open("a").write(f"{time.time()}\\n")
sys.exit(3 if action == "fail" else 0)
"""


@pytest.fixture
def go(asked, tmp_path):
    """Actions by seed, and how -> whether all finished; every run is a small program."""

    def go(*actions, jobs=1, resume=False, metric="val/score", more=()):
        runs, out = asked(f"for seed in range({len(actions)}): add(**{{'trainer.seed': seed}})", more=more)

        def command(run):
            seed = run.overrides["trainer.seed"]
            return [sys.executable, "-c", PROGRAM, str(run.folder), actions[seed], str(seed / 4)]

        return sweep.sweep(runs, out, command, jobs=jobs, resume=resume, metric=metric)

    go.out = tmp_path / "out"
    return go


def spans(out):
    """When each run of the folder began and ended, by seed; only the last start."""
    found = []
    for folder in sorted(out.glob("trainer.seed=*")):
        found.append([float((folder / name).read_text().split()[-1]) for name in ("began", "ended")])
    return found


def statuses(out):
    found = json.loads((out / sweep.FILE).read_text())["runs"]
    return {name.removeprefix("trainer.seed="): state["status"] for name, state in found.items()}


def test_runs_go_one_after_the_other_or_side_by_side(go, tmp_path, capsys):
    assert go("ok", "ok", "ok") is True
    (_, a), (b, c), (d, _) = spans(go.out)
    assert a <= b and c <= d
    said = capsys.readouterr().out
    assert "[3/3] trainer.seed=2: finished after" in said
    assert said.index("| trainer.seed=2 | 2 | 0.5 |") < said.index("| trainer.seed=0 | 0 | 0.0 |")
    assert statuses(go.out) == {"0": "finished", "1": "finished", "2": "finished"}
    page = (go.out / "report.html").read_text()
    assert f"report            {go.out / 'report.html'}" in said and "trainer.seed=2" in page
    log = (go.out / "trainer.seed=0/train.log").read_text()
    assert log.startswith("$ ") and "\nhello\n" in log
    go.out.rename(tmp_path / "before")
    assert go("meet", "meet", "meet", jobs=3) is True, "each waits for the others to begin"


def test_the_steps_of_a_run_are_told_while_it_runs(go, monkeypatch, capsys):
    monkeypatch.setattr(sweep, "PROGRESS_S", 0.0)
    monkeypatch.setattr(sweep, "POLL_S", 0.01)
    go("meet", "meet", "meet", jobs=3, more=["--config.trainer.total_training_steps=7"])
    assert re.search(r"\[2/3\] trainer.seed=1: step 1/7, val/score 0.25\n", capsys.readouterr().out)


def test_a_run_that_fails_is_told_and_the_others_go_on(go, capsys):
    assert go("ok", "fail", "ok") is False
    assert "failed after" in (said := capsys.readouterr().out) and "with exit code 3: it is broken" in said
    assert statuses(go.out) == {"0": "finished", "1": "failed", "2": "finished"}
    assert "| failed |" in (go.out / "sweep.md").read_text()


def test_a_full_disk_ends_no_run(go, monkeypatch, capsys):
    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(sweep, "write_table", full)
        assert go("ok", "ok")
    assert "sweep.json cannot be written (No space left on device); make room there" in capsys.readouterr().out
    assert statuses(go.out) == {"0": "finished", "1": "finished"}


def test_a_folder_is_gone_on_with_only_where_that_is_asked_for(go, capsys):
    go("ok", "fail")
    with pytest.raises(UserError, match="is not empty; use --resume to continue"):
        go("ok", "ok")
    assert go("fail", "ok", resume=True) is True, "the first has finished and is not run again"
    began = [len((go.out / f"trainer.seed={seed}/began").read_text().split()) for seed in (0, 1)]
    assert began == [1, 2]
    assert "2 runs in" in (said := capsys.readouterr().out) and "1 finished already" in said
    assert go("fail", "fail", "ok", resume=True) is True, "a run more"
    assert go("fail", "ok", "ok", resume=True, more=["--config.actor.lr=1e-3"]) is False, "with other settings"


def test_a_damaged_record_is_told(go):
    go("ok")
    for text in ("{", "[]", '{"runs": {"a": {}}}', '{"runs": {"a": {"status": "x", "arguments": [], "more": 1}}}'):
        (go.out / sweep.FILE).write_text(text)
        with pytest.raises(UserError, match=r"sweep\.json is damaged"):
            go("ok", resume=True)


def test_one_sweep_at_a_time_in_a_folder(go, asked):
    runs, out = asked("add()")
    with (
        sweep.open_states(out, {run.name: run.arguments for run in runs}, resume=False),
        pytest.raises(UserError, match=f"belongs to process {os.getpid()}"),
    ):
        go("ok", resume=True)
    assert go("ok", resume=True) is True


def test_a_folder_that_cannot_be(go, tmp_path):
    go.out.write_text("")
    with pytest.raises(UserError, match="is a file"):
        go("ok")
    go.out.unlink()
    go.out.symlink_to("/proc/nothing/here")
    with pytest.raises(UserError, match="cannot be written"):
        go("ok")


def test_a_metric_that_nobody_has_is_told(go, capsys):
    assert go("ok", metric="val/scores") is True
    assert "no run has the metric 'val/scores'; --metric takes one of val/score\n" in capsys.readouterr().out


def alive(text):
    """Processes that have this in their command line."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if text in path.read_bytes().decode(errors="replace") and path.parent.name != str(os.getpid()):
                found.append(path.parent.name)
        except OSError:  # it has ended
            continue
    return found


CALL = """
import sys
from jppo import sweep
program, action = sys.argv[1:3]
sweep.GRACE_S = float(sys.argv[3])
sweep.train_command = lambda run: [sys.executable, "-c", program, str(run.folder), action, "1"]
sweep.main(sys.argv[4:])
"""


@pytest.mark.parametrize(
    "number,action,stop_s,code",
    [
        (signal.SIGINT, "wait", 0.1, 130),
        (signal.SIGINT, "save", 60, 130),
        (signal.SIGTERM, "deaf", 0.1, 128 + signal.SIGTERM),
        (signal.SIGKILL, "wait", 0.1, -9),
    ],
)
def test_a_sweep_that_is_ended_leaves_nothing_behind(asked, tmp_path, number, action, stop_s, code):
    asked("for seed in range(3): add(**{'trainer.seed': seed})")
    out = tmp_path / "out"
    options = [f"--config={tmp_path / 'mine.py'}", f"--config.trainer.stop_timeout_s={stop_s}"]
    options += [f"--out={out}", "--jobs=2"]
    process = subprocess.Popen(
        [sys.executable, "-c", CALL, PROGRAM, action, "0.5", *options],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    mark = "deaf" if action == "deaf" else "metrics.jsonl"
    until(lambda: len(list(out.glob(f"*/{mark}"))) == 2 or process.poll() is not None, "both runs have begun", 60)
    process.send_signal(number)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == code, said
    until(lambda: not alive(str(out)), "the runs have ended")
    if number != signal.SIGKILL:
        assert statuses(out) == {"0": "interrupted", "1": "interrupted", "2": "waiting"}
    assert len(list(out.glob("*/saved"))) == (2 if action == "save" else 0)
    if number == signal.SIGINT:
        assert "interrupted; the same command with --resume continues" in said


def test_the_commands_that_are_printed_can_be_copied(asked, tmp_path, capsys):
    asked("add(**{'data.system_prompt': \"it's $HOME\"})")
    out = tmp_path / "out"
    sweep.main([f"--config={tmp_path / 'mine.py'}", f"--out={out}", "--print"])
    (line,) = capsys.readouterr().out.splitlines()
    assert shlex.split(line)[1:3] == ["-m", "jppo.train"]
    assert "--config.data.system_prompt=it's $HOME" in shlex.split(line) and not out.exists()


def test_a_wrong_command_is_one_line(asked, tmp_path, capsys):
    asked("add()")
    for wrong in ("--jobs=0", "--config.actor.lrr=1"):
        one_line(capsys, sweep.main, f"--config={tmp_path / 'mine.py'}", wrong)


@pytest.mark.slow
def test_two_real_runs(tmp_path, tiny_model):
    made = arithmetic.make(seed=1, test=8, sloppy=0.5, demonstrations=1)
    for name in ("train", "test"):
        write_lines(tmp_path / f"{name}.jsonl", made[name][:16])
    given = {
        "model.path": tiny_model,
        "data.train_files": tmp_path / "train.jsonl", "data.val_files": tmp_path / "test.jsonl",
        "data.train_batch_size": 16, "actor.ppo_mini_batch_size": 16, "model.scan_layers": True,
        "trainer.total_training_steps": 1, "rollout.name": "inprocess",
        "algorithm.adv_estimator": "grpo", "rollout.n": 2, "algorithm.use_kl_in_reward": False,  # little to compile
    }  # fmt: skip
    (tmp_path / "two.py").write_text(
        (ROOT / "configs/quickstart.py").read_text().split("\ndef sweep(")[0]
        + "\ndef sweep(add):\n    for lr in (1e-4, 1e-3):\n        add(**{'actor.lr': lr})\n"
    )
    command = [sys.executable, "-m", "jppo.sweep", f"--config={tmp_path / 'two.py'}", f"--out={tmp_path / 'out'}"]
    command += [f"--config.{name}={value}" for name, value in given.items()]
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}  # one device
    environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    with (tmp_path / "out/sweep.csv").open(newline="") as f:
        read = list(csv.DictReader(f))
    assert sorted(row["actor.lr"] for row in read) == ["0.0001", "0.001"]
    assert all(row["status"] == "finished" and row["steps"] == "1" and float(row["val/score"]) >= 0 for row in read)
    for row in read:
        folder = tmp_path / "out" / row["run"]
        assert (folder / "hf/model.safetensors").is_file() and np.isfinite(float(row["best val/score"]))
        assert json.loads((folder / "config.json").read_text())["actor"]["lr"] == float(row["actor.lr"])
