"""The end of a run by signal or by a stage that hangs: small programs of their own, stopped from outside."""

import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]

PROGRAM = """
import sys, time
from jppo.io.timers import Timers
from jppo.io.watch import Stopped, Watch, leave
import pathlib
timer, saved = Timers(), []
def hang(stage, seconds=60.0, interruptible=True):
    with timer(stage):
        print("in", stage, flush=True)
        if interruptible:
            time.sleep(seconds)
        else:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                try: time.sleep(0.05)
                except SystemExit: raise AssertionError("left in the middle")
try:
    with Watch(timer, stage_timeout_s={stage_s}, stop_timeout_s={stop_s}, stacks=pathlib.Path("{stacks}")) as watch:
        with timer("step"):
            {body}
        watch.check()
        print("the step after", flush=True)
except Stopped as e:
    with timer("save"):
        print("saved,", e.why, flush=True)
    leave(e.status, within_s=5.0)
"""


def start(tmp_path, body, *, stage_s=3600.0, stop_s=20.0):
    program = PROGRAM.format(body=body, stage_s=stage_s, stop_s=stop_s, stacks=tmp_path / "stacks.txt")
    return subprocess.Popen(
        [sys.executable, "-u", "-c", textwrap.dedent(program)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(process, line):
    assert process.stdout.readline().strip() == line


@pytest.mark.parametrize("number,code", [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_stage_that_waits_is_left_at_once(tmp_path, number, code):
    process = start(tmp_path, 'hang("gen")')
    wait_for(process, "in gen")
    began = time.monotonic()
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (code, "")
    assert out == f"saved, stopped by {signal.Signals(number).name}\n"
    assert time.monotonic() - began < 10


def test_any_other_stage_is_finished_first(tmp_path):
    process = start(tmp_path, 'hang("update_actor", 1.0, False); print("updated", flush=True)')
    wait_for(process, "in update_actor")
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 0 and out == "updated\nsaved, stopped by SIGTERM\n"


def test_what_does_not_end_in_time_is_ended_by_force(tmp_path):
    process = start(tmp_path, 'hang("update_actor", 60.0, False)', stop_s=0.5)
    wait_for(process, "in update_actor")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "trainer.stop_timeout_s=0.5 in stage update_actor" in err and "the last checkpoint stands" in err


def test_the_second_interrupt_waits_for_nothing(tmp_path):
    process = start(tmp_path, 'hang("update_actor", 60.0, False)')
    wait_for(process, "in update_actor")
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert "KeyboardInterrupt" in err and process.returncode != 0


def test_a_stage_that_hangs_is_named_and_ended(tmp_path):
    process = start(tmp_path, 'hang("gen")', stage_s=0.5)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 1 and out == "in gen\nsaved, stuck in stage gen\n"
    assert "stage gen has not ended for" in err and "trainer.stage_timeout_s=0.5" in err
    stacks = (tmp_path / "stacks.txt").read_text()
    assert "stage gen" in stacks and "in hang" in stacks  # the line of the program where it hung


def test_a_stage_is_timed_from_when_the_one_within_it_ended(tmp_path):
    body = 'hang("gen", 1.0); hang("reward", 1.0); hang("testing", 1.0)'  # 3 s in all, none near 2.5 s
    process = start(tmp_path, body, stage_s=2.5)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0 and out.endswith("the step after\n") and err == ""
