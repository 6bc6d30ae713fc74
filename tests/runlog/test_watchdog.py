"""The end of a run by signal or by a stage that hangs: small programs of their own, stopped from outside."""

import fcntl
import os
import pathlib
import pty
import signal
import subprocess
import sys
import termios
import textwrap

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]

PROGRAM = """
import sys, time
from jppo.runlog.timers import Timers
from jppo.runlog.watchdog import Stopped, Watch, leave
import pathlib
timer, saved = Timers(), []
def hang(stage, seconds=3600.0, interruptible=True):
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
    stacks = pathlib.Path("{stacks}")
    limits = dict(stage_timeout_s={stage_s}, stop_timeout_s={stop_s})
    with Watch(timer, {more}stacks=stacks, checkpoints=stacks.parent / "checkpoints", **limits) as watch:
        with timer("step"):
            {body}
        watch.check()
        print("the step after", flush=True)
except Stopped as e:
    with timer("save"):
        print("saved,", e.why, flush=True)
    leave(e.status, within_s=5.0)
"""


def start(tmp_path, body, *, stage_s=3600.0, stop_s=100.0, more="", ignored=(), terminal=None):
    program = PROGRAM.format(body=body, stage_s=stage_s, stop_s=stop_s, stacks=tmp_path / "stacks.txt", more=more)

    def prepare():
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
        if terminal is not None:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    return subprocess.Popen(
        [sys.executable, "-u", "-c", textwrap.dedent(program)],
        cwd=ROOT,
        stdin=terminal,
        stdout=subprocess.PIPE if terminal is None else terminal,
        stderr=subprocess.PIPE if terminal is None else terminal,
        text=True,
        start_new_session=terminal is not None,
        preexec_fn=prepare,
    )


def wait_for(process, line):
    assert process.stdout.readline().strip() == line


@pytest.mark.parametrize("number,code", [(signal.SIGTERM, 143), (signal.SIGHUP, 143), (signal.SIGINT, 130)])
def test_a_stage_that_waits_is_left_at_once(tmp_path, number, code):
    once = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])"  # it is not raised again
    process = start(tmp_path, f'{once}; hang("gen")')
    wait_for(process, "in gen")
    process.send_signal(number)
    out, err = process.communicate(timeout=120)  # the stage takes an hour
    assert (process.returncode, err) == (code, "")
    assert out == f"saved, stopped by {signal.Signals(number).name}\n"


DROPPED = {  # places from which no exception gets out; each stops the run itself, and waits for the handler
    "del": "class Gone:\n    def __del__(self): stop()\nGone()",
    "weakref": "class Gone: pass\ngone = Gone(); ref = weakref.ref(gone, lambda _: stop()); del gone",
    "gc": "gc.callbacks.append(lambda phase, _: stop() if phase == 'start' else None); gc.collect()",
    "ctypes": "ctypes.CFUNCTYPE(None)(stop)()",
    "except": "try: stop()\nexcept BaseException: pass",
}
STOP = """
import ctypes, gc, os, signal, weakref
def stop():
    gc.callbacks.clear()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.05)
def dropped():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])  # by which the watch raises it again
    exec({code!r}, globals())
    print("dropped", flush=True)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
    time.sleep(3600)
with timer("gen"): dropped()
"""


@pytest.mark.parametrize("where", DROPPED)
def test_a_stop_that_python_drops_is_raised_again(tmp_path, where):
    body = f"exec({STOP.format(code=DROPPED[where])!r}, globals())"
    process = start(tmp_path, body)
    out, err = process.communicate(timeout=120)
    assert out == "dropped\nsaved, stopped by SIGTERM\n" and process.returncode == 143, err


def test_the_cleaning_up_of_a_stage_is_not_interrupted(tmp_path):
    """It takes longer than a stop waits before it is raised again."""
    code = """
import contextlib
@contextlib.contextmanager
def engine():
    try: yield
    finally:
        try: 1 / 0
        except ZeroDivisionError: time.sleep(1.5)
        print("cleaned up", flush=True)
with timer("gen"):
    with engine():
        print("in gen", flush=True)
        time.sleep(3600)
"""
    process = start(tmp_path, f"exec({code!r}, globals())")
    wait_for(process, "in gen")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert (out, err) == ("cleaned up\nsaved, stopped by SIGTERM\n", "") and process.returncode == 143


def test_any_other_stage_is_finished_first(tmp_path):
    process = start(tmp_path, 'hang("update_actor", 1.0, False); print("updated", flush=True)')
    wait_for(process, "in update_actor")
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 143 and out == "updated\nsaved, stopped by SIGTERM\n"


def test_who_was_started_by_nohup_outlives_its_terminal(tmp_path):
    process = start(tmp_path, 'hang("gen", 1.5)', ignored=[signal.SIGHUP])
    wait_for(process, "in gen")
    process.send_signal(signal.SIGHUP)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (0, "the step after\n", "")


def test_the_code_of_a_stop_can_be_a_batch_systems(tmp_path):
    process = start(tmp_path, 'hang("gen")', more="stopped=75, ")
    wait_for(process, "in gen")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    assert process.returncode == 75


def test_a_terminal_that_goes_ends_a_run_in_order(tmp_path):
    """What is printed after that has nowhere to go, which must not keep the run from its checkpoint and its code."""
    body = 'hang("gen"); print("lost", flush=True)'
    ours, its = pty.openpty()
    process = start(tmp_path, body, terminal=its)
    os.close(its)
    seen = b""
    while b"in gen" not in seen:
        seen += os.read(ours, 100)
    os.close(ours)
    assert process.wait(timeout=120) == 143


@pytest.mark.parametrize("steps, last", [((), "there is no checkpoint yet"), ((2, 10), "of step 10 remains")])
def test_what_does_not_end_in_time_is_ended_by_force(tmp_path, steps, last):
    for step in steps:
        (tmp_path / f"checkpoints/{step}").mkdir(parents=True)
    process = start(tmp_path, 'hang("update_actor", interruptible=False)', stop_s=0.5)
    wait_for(process, "in update_actor")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "trainer.stop_timeout_s=0.5 in stage update_actor" in err and last in err


def test_an_interrupt_says_what_it_waits_for_and_waits_without_a_limit(tmp_path):
    process = start(tmp_path, 'hang("update_actor", seconds=2.0, interruptible=False)', stop_s=0.5)
    wait_for(process, "in update_actor")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (130, "saved, stopped by SIGINT\n")
    assert err == "stopping after this step, with a checkpoint; Ctrl-C again does not wait for it\n"


def test_a_batch_system_still_ends_a_run_after_an_interrupt(tmp_path):
    process = start(tmp_path, 'hang("update_actor", interruptible=False)', stop_s=0.5)
    wait_for(process, "in update_actor")
    process.send_signal(signal.SIGINT)
    process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1 and "trainer.stop_timeout_s=0.5 in stage update_actor" in err


def test_the_second_interrupt_waits_for_nothing(tmp_path):
    heard = "handle = signal.getsignal(signal.SIGINT)\nsignal.signal(2, lambda *a: print(handle(*a), flush=True))\n"
    body = f"import signal\n{heard}hang('update_actor', interruptible=False)"
    process = start(tmp_path, f"exec({body!r}, globals())")
    wait_for(process, "in update_actor")
    process.send_signal(signal.SIGINT)
    wait_for(process, "None")  # the first is handled: two that wait for it are one
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)  # before it is ended by force
    assert "KeyboardInterrupt" in err and process.returncode != 0


def test_a_stage_that_hangs_is_ended_on_a_full_disk(tmp_path):
    (tmp_path / "stacks.txt").symlink_to("/dev/full")
    out, err = start(tmp_path, 'hang("gen")', stage_s=0.5).communicate(timeout=120)
    assert out == "in gen\nsaved, stuck in stage gen\n" and "cannot be written to" in err and "No space left" in err


def test_a_stage_that_hangs_is_named_and_ended(tmp_path):
    process = start(tmp_path, 'hang("gen")', stage_s=0.5)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 1 and out == "in gen\nsaved, stuck in stage gen\n"
    assert "stage gen has not ended for" in err and "trainer.stage_timeout_s=0.5" in err
    stacks = (tmp_path / "stacks.txt").read_text()
    assert "stage gen" in stacks and "in hang" in stacks  # the line of the program where it hung


def test_a_stage_is_timed_from_when_the_one_within_it_ended(tmp_path):
    body = 'hang("gen", 1.0); hang("reward", 1.0); hang("testing", 1.0)'  # 3 s in all, none near 2.5 s
    process = start(tmp_path, body, stage_s=2.5)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0 and out.endswith("the step after\n") and err == ""
