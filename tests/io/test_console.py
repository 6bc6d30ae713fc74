import io

import rich.console

from jppo.io import console as module
from jppo.io.console import PPO_COLUMNS, make_screen

METRICS = {"critic/score/mean": 0.25, "actor/entropy": float("nan"), "timing_s/step": 2.0}


def screen(terminal, done=0):
    console = rich.console.Console(file=io.StringIO(), force_terminal=terminal, width=120)
    return make_screen(9, done, PPO_COLUMNS, console), console.file


def test_a_log_gets_one_plain_line_a_step(monkeypatch):
    now = iter([100.0, 110.0])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(now))
    shown, out = screen(terminal=False)
    shown.show(1, METRICS)
    shown.note("a [note]")
    shown.show(2, {"val/score": 0.5})
    shown.close()
    assert out.getvalue().splitlines() == [
        "step 1/9  reward 0.250  entropy nan  s/step 2.0  ETA -:--:--",
        "a [note]",
        "step 2/9  val acc 0.500  ETA 0:01:10",  # 7 more steps of 10 s
    ]


def test_a_terminal_gets_a_table_of_the_last_steps():
    shown, out = screen(terminal=True)
    for step in range(1, 16):
        shown.show(step, METRICS | {"response_length/mean": step + 0.5})
    shown.note("a [note]")
    shown.close()
    last = out.getvalue().rpartition("reward")[2]
    assert " 15.5" in last and " 3.5" not in last
    assert "a [note]" in out.getvalue()


def test_the_pace_of_a_resumed_run_counts_its_own_steps(monkeypatch):
    now = iter([0.0, 4.0])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(now))
    pace = module.Pace(10)
    assert [pace.left(6), pace.left(8)] == ["-:--:--", "0:00:04"]
