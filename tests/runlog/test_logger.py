import errno
import io
import json
import math
import os
import pathlib
import struct
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
import rich.console
from tensorboardX.proto.event_pb2 import Event

from jppo.plugins.loggers.remote import SentSteps
from jppo.runlog import logger as module
from jppo.runlog.diagnosis import Alert
from jppo.runlog.logger import Logger, print_summary, read_metrics, write_samples_file


def console(terminal=False):
    return rich.console.Console(file=io.StringIO(), force_terminal=terminal, width=120)


def logger(tmp_path, **kw):
    return Logger(tmp_path, total_steps=5, console=console(), **kw)


def test_each_step_is_on_disk_at_once(tmp_path):
    tmp_path /= "a/new/folder"
    with logger(tmp_path) as log:
        log.log(1, {"a": jnp.float32(0.5), "n": 3, "np": np.float64(2.0)})
        assert read_metrics(tmp_path) == [{"step": 1, "a": 0.5, "n": 3, "np": 2.0}]


def test_non_finite_numbers_leave_valid_json(tmp_path):
    with logger(tmp_path) as log:
        log.log(1, {"loss": math.nan, "ratio": jnp.inf, "ok": 0.0})

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert line == {
        "step": 1,
        "loss": None,
        "ratio": None,
        "ok": 0.0,
        "nonfinite": {"loss": "nan", "ratio": "inf"},
    }


def test_a_metric_that_is_no_number_is_named(tmp_path):
    with logger(tmp_path) as log, pytest.raises(TypeError, match="'a'"):
        log.log(1, {"a": [1, 2]})


def test_a_resumed_run_counts_no_step_twice(tmp_path):
    with logger(tmp_path) as log:
        for step in (0, 1, 2, 3):
            log.log(step, {"a": step})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "a"')  # killed in the middle of a line
    with logger(tmp_path, resumed_step=2) as log:
        log.log(3, {"a": 30})
    assert [(m["step"], m["a"]) for m in read_metrics(tmp_path)] == [(0, 0), (1, 1), (2, 2), (3, 30)]


def test_the_summary_has_the_first_and_last_test_and_the_seconds_of_stages(tmp_path, capsys):
    scores = {0: {"val/score": 0.125}, 1: {}, 2: {"val/score": 0.5}, 3: {"val/score": 0.25}, 4: {"val/score": None}}
    lines = [{"step": step, "timing_s/gen": 1.5, "timing_s/save": 0.0} | score for step, score in scores.items()]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    print_summary(tmp_path, "r.html")
    said = [line.split() for line in capsys.readouterr().out.splitlines() if line]
    assert said[:4] == [
        ["test", "score", "0.125", "at", "step", "0", "→", "0.250", "at", "step", "3"],
        ["steps", "4,", "seconds", "by", "stage:"],
        ["gen", "7.5"],
        ["report", "r.html"],
    ]
    assert ["metrics", str(tmp_path / "metrics.jsonl")] in said
    (tmp_path / "tensorboard").mkdir()
    print_summary(tmp_path, "r.html")
    assert f"metrics.jsonl, TensorBoard in {tmp_path / 'tensorboard'}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    "written, first",
    [
        ("", "steps             0, seconds by stage:"),  # a run that ended before its first step
        ('{"step": 7, "val/score": 1}\n', "test score        1.000 at step 7"),
    ],
)
def test_the_summary_of_a_run_of_few_lines(tmp_path, capsys, written, first):
    (tmp_path / "metrics.jsonl").write_text(written)
    print_summary(tmp_path, "r.html")
    assert capsys.readouterr().out.splitlines()[1] == first


def test_a_new_run_starts_its_file_anew(tmp_path):
    with logger(tmp_path) as log:
        log.log(1, {"a": 1})
    with logger(tmp_path) as log:
        log.log(1, {"a": 2})
    assert [m["a"] for m in read_metrics(tmp_path)] == [2]


def test_a_resume_cuts_the_file_in_place(tmp_path):
    with logger(tmp_path) as log:
        for step in (1, 2, 3):
            log.log(step, {"a": step})
    before = (tmp_path / "metrics.jsonl").stat().st_ino
    with logger(tmp_path, resumed_step=1):
        pass
    assert [m["step"] for m in read_metrics(tmp_path)] == [1]
    assert (tmp_path / "metrics.jsonl").stat().st_ino == before  # a new file would need room


def events(path):
    data, at = path.read_bytes(), 0
    while at < len(data):  # length u64, its crc u32, the event, its crc u32
        (length,) = struct.unpack_from("<Q", data, at)
        yield Event.FromString(data[at + 12 : at + 12 + length])
        at += 16 + length


def test_tensorboard_has_the_finite_scalars_and_forgets_what_is_done_again(tmp_path):
    with logger(tmp_path, resumed_step=2) as log:
        log.log(3, {"a": 1.5, "b": math.nan})
    [path] = (tmp_path / "tensorboard").iterdir()
    read = list(events(path))
    scalars = [(e.step, v.tag, v.simple_value) for e in read for v in e.summary.value]
    assert scalars == [(3, "a", 1.5)]
    assert [e.step for e in read if e.HasField("session_log")] == [3]


def test_tensorboard_shows_samples_as_they_are(tmp_path):
    row = {"prompt": "a|b\n<i>*1*</i>", "response": "\\boxed{2}", "ground_truth": "3", "score": None, "error": "e_e"}
    with logger(tmp_path) as log:
        log.generations(4, [row | {"prompt": [{"role": "user", "content": "x"}], "score": 0.5, "error": None}, row])
        log.generations(5, [])
    [path] = (tmp_path / "tensorboard").iterdir()
    [(step, text)] = [(e.step, v.tensor.string_val[0].decode()) for e in events(path) for v in e.summary.value]
    head, rule, first, second = text.splitlines()
    assert step == 4 and head == "| prompt | response | ground_truth | score | error |" and rule.count("---") == 5
    assert first.endswith(r"| \\boxed\{2\} | 3 | 0\.5 |  |") and '"content": "x"' in first
    assert second == r"| a\|b<br>&lt;i&gt;\*1\*&lt;/i&gt; | \\boxed\{2\} | 3 |  | e\_e |"


EQUAL = {"critic/score/mean": 0.0, "critic/score/max": 0.0, "critic/score/min": 0.0}


def warnings_of(run):
    return [json.loads(line) for line in (run / "warnings.jsonl").read_text().splitlines()]


def test_a_warning_is_in_the_file_the_console_and_tensorboard_once(tmp_path):
    out = console()
    with Logger(tmp_path, total_steps=9, console=out) as log:
        for step in range(1, 7):
            log.log(step, EQUAL)
    [line] = warnings_of(tmp_path)
    assert line["step"] == 3 and line["name"] == "equal_rewards" and set(line) == {"step", "name", "found", "remedy"}
    said = out.file.getvalue()
    assert said.count("warning: equal_rewards") == 1 and line["found"] in said and line["remedy"] in said
    [path] = (tmp_path / "tensorboard").iterdir()
    texts = [(e.step, v.tag) for e in events(path) for v in e.summary.value if v.HasField("tensor")]
    assert texts == [(3, "warnings/equal_rewards/text_summary")]


@pytest.mark.parametrize("resumed, told", [(2, [3]), (4, [3]), (None, [])])
def test_a_warning_is_told_once_in_a_run_that_is_resumed(tmp_path, resumed, told):
    with logger(tmp_path) as log:
        for step in range(1, 6):
            log.log(step, EQUAL)
    with logger(tmp_path, resumed_step=resumed) as log:
        log.log(3 if resumed is None else resumed + 1, EQUAL)
    assert [w["step"] for w in warnings_of(tmp_path)] == told


def test_a_warning_from_outside_is_told_once_in_a_run_that_is_resumed(tmp_path):
    for resumed in (None, 4):
        with logger(tmp_path, resumed_step=resumed) as log:
            for step in (4, 5):
                log.warn(Alert(step, "sampling_cut", "cut", "mend"))
    assert warnings_of(tmp_path) == [{"step": 4, "name": "sampling_cut", "found": "cut", "remedy": "mend"}]


def test_places_that_are_not_asked_for_are_not_there(tmp_path, capsys):
    with Logger(tmp_path, total_steps=5, loggers=("jsonl",)) as log:
        log.note("nobody reads this")
        for step in range(1, 5):
            log.log(step, EQUAL)
    assert not (tmp_path / "tensorboard").exists()
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("warning: equal_rewards")  # which is never silent


def full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


GONE = """
import pathlib, sys
from jppo.runlog.logger import Logger
with Logger(pathlib.Path(sys.argv[1]), total_steps=5) as log:
    sys.stdin.read()
    log.note("a note")
    log.log(1, {"a": 1})
print("the end")
"""


def test_a_reader_of_the_console_that_has_gone_does_not_end_the_run(tmp_path):
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", GONE, tmp_path], stdin=pipe, stdout=pipe, stderr=pipe)
    process.stdout.close()
    process.stdin.close()
    assert process.stderr.read() == b"" and process.wait() == 0
    assert [m["step"] for m in read_metrics(tmp_path)] == [1]


def test_a_log_on_a_full_disk_does_not_end_the_run(tmp_path):
    class Log(io.StringIO):
        write = full

    with Logger(tmp_path, total_steps=5, console=rich.console.Console(file=Log())) as log:
        log.note("a note")
        log.log(1, {"a": 1})
    assert [m["step"] for m in read_metrics(tmp_path)] == [1]


def test_a_full_disk_is_told_once_and_loses_no_metric(tmp_path, monkeypatch):
    out, write = console(), os.pwrite
    with Logger(tmp_path, total_steps=9, console=out) as log:
        log.log(1, {"a": 1})
        monkeypatch.setattr(os, "pwrite", full)
        for step in (2, 3, 4):
            log.log(step, {"a": step})
        assert [m["step"] for m in read_metrics(tmp_path)] == [1]
        monkeypatch.setattr(os, "pwrite", write)
        log.log(5, {"a": 5})
        assert [m["step"] for m in read_metrics(tmp_path)] == [1, 2, 3, 4, 5]
    said = out.file.getvalue()
    for name in ("jsonl", "tensorboard"):
        assert said.count(f"warning: {name} fails: OSError: [Errno 28] No space left on device") == 1
        assert said.count(f"{name} works again") == 1
    [path] = (tmp_path / "tensorboard").iterdir()
    assert [e.step for e in events(path) if e.summary.value] == [1, 2, 3, 4, 5]


def test_a_disk_that_stays_full_is_told_at_the_end(tmp_path, monkeypatch):
    out = console()
    with Logger(tmp_path, total_steps=9, console=out) as log:
        monkeypatch.setattr(os, "pwrite", full)
        log.log(1, {"a": 1})
    assert out.file.getvalue().count("jsonl fails") == 2 and "it is incomplete" in out.file.getvalue()


def test_samples_and_bad_steps_that_find_no_room_leave_no_half(tmp_path, monkeypatch):
    out = console()
    with Logger(tmp_path, total_steps=9, console=out) as log:
        log.samples("step_1", [{"prompt": "1+1="}])
        monkeypatch.setattr(pathlib.Path, "write_text", full)
        monkeypatch.setattr(module.np, "savez_compressed", full)
        for step in (2, 3):
            log.samples(f"step_{step}", [{"prompt": "1+1="}])
            log.arrays(f"step_{step}", {"a": np.zeros(3)})
    assert [path.name for path in (tmp_path / "samples").iterdir()] == ["step_1.jsonl"]
    assert list((tmp_path / "bad_steps").iterdir()) == []
    assert [out.file.getvalue().count(f"warning: {name} fails") for name in ("samples", "bad_steps")] == [1, 1]


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of 64 KiB."""
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "small", tmp_path]).returncode:
        pytest.skip("only root can mount a small disk")
    yield tmp_path
    subprocess.run(["umount", "-l", tmp_path], check=True)


def test_a_real_disk_that_is_full_and_is_cleared(small_disk):
    out = console()
    with Logger(small_disk, total_steps=9, console=out) as log:
        log.log(1, {"a": 1})
        ballast = small_disk / "ballast"
        with ballast.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
            while True:
                file.write(bytes(4096))
        for step in range(2, 200):
            log.log(step, {f"metric/{i}": step / 7 for i in range(5)})
            log.samples(f"step_{step}", [{"prompt": "1+1=" * 100}])
        held = (small_disk / "metrics.jsonl").read_bytes()
        assert held.endswith(b"}\n") and len(read_metrics(small_disk)) < 199
        ballast.unlink()
        log.log(200, {"a": 200})
    assert [m["step"] for m in read_metrics(small_disk)] == list(range(1, 201))
    assert not list(small_disk.rglob("*.new"))
    [path] = (small_disk / "tensorboard").iterdir()
    assert {e.step for e in events(path) if e.summary.value} <= set(range(1, 201))
    assert all(out.file.getvalue().count(f"warning: {n} fails") == 1 for n in ("jsonl", "samples"))


def test_samples_are_one_json_object_a_line(tmp_path):
    rows = [{"prompt": "naïve", "score": 1.0, "parts": {"exact": math.nan}}, {"prompt": [{"role": "user"}]}]
    path = write_samples_file(tmp_path, "step_7", rows)
    assert path == tmp_path / "samples/step_7.jsonl"
    first, second = map(json.loads, path.read_text().splitlines())
    assert first == {"prompt": "naïve", "score": 1.0, "parts": {"exact": "nan"}} and second == rows[1]


def test_what_a_checkpoint_counts_on_is_on_the_disk_before_it(tmp_path, monkeypatch):
    synced = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), real(fd))[1])
    with Logger(tmp_path, total_steps=2, loggers=()) as logger:
        logger.log(1, {"x": 1.0})
        logger.samples("step_1", [{"prompt": "a"}])
        logger.sync()
    names = {pathlib.Path(path).name for path in synced}
    assert names >= {"metrics.jsonl", "warnings.jsonl", "step_1.jsonl.new"}


@pytest.mark.parametrize("text", ["", "\0\0\0", '{"id": "a', "[]", '{"id": 3, "step": 1}', '{"id": "a"}'])
def test_a_note_of_what_was_sent_that_cannot_be_read_begins_anew(tmp_path, capsys, text):
    (tmp_path / "wandb.json").write_text(text)
    sent = SentSteps(tmp_path, "wandb", resumed=True)
    assert sent.id is None and sent.new(0)
    assert "wandb.json cannot be read" in capsys.readouterr().out
    sent.begin("new")
    sent.done(3)
    again = SentSteps(tmp_path, "wandb", resumed=True)
    assert again.id == "new" and not again.new(3) and again.new(4) and capsys.readouterr().out == ""
