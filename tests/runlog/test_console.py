import io

import pytest
import rich.console

from jppo.run import validation
from jppo.runlog import console as module
from jppo.runlog.console import PPO_COLUMNS, make_screen

METRICS = {"critic/score/mean": 0.25, "actor/entropy": float("nan"), "timing_s/step": 2.0}


def screen(terminal, done=0, width=120, **kw):
    console = rich.console.Console(file=io.StringIO(), force_terminal=terminal, width=width, **kw)
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
        "step 1/9  reward 0.250  entropy nan  s/step 2.0  ETA 0:00:16",  # 8 more steps of 2 s
        "a [note]",
        "step 2/9  test 0.500  ETA 0:01:10",  # 7 more steps of 10 s
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
    assert [pace.left(6, {}), pace.left(8, {})] == ["-:--:--", "0:00:04"]


def test_the_pace_leaves_out_the_test_before_training(monkeypatch):
    now = iter([0.0, 100.0, 102.0, 104.0, 110.0])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(now))
    pace = module.Pace(1804)  # of 2 s each after the first, which compiles
    assert [pace.left(step, {}) for step in (0, 1, 1, 3, 6)] == ["-:--:--"] * 3 + ["1:00:02", "0:59:56"]


STEP = {
    "critic/score/mean": 0.5,
    "actor/ppo_kl": 0.25,
    "actor/pg_clipfrac": 0.05,
    "actor/ratio_mean": 1.01,
    "actor/entropy": 1.234,
    "critic/vf_explained_var": -0.25,
    "response_length/mean": 1024.5,
    "perf/throughput": 98765.0,
    "perf/cpu_memory_used_gb": 12.34,
    "timing_s/gen": 60.04,
    "timing_s/reward": 0.01,
    "timing_s/update_actor": 40.0,
    "timing_s/step": 107.1,
}


def test_a_plain_line_says_time_by_stage_memory_and_what_is_out_of_range():
    shown, out = screen(terminal=False)
    shown.show(3, STEP)
    assert out.getvalue() == (
        "step 3/9  reward 0.500  KL 2.5e-01!  entropy 1.234  clipped 0.050  ratio 1.010  vf expl -0.25"
        "  length 1024.5  tok/s 98,765  s/step 107.1  (gen 60.0 actor 40.0)  host 12.3 GB  ETA 0:10:43\n"
    )


def test_a_reward_that_rises_is_green_and_one_that_falls_is_marked():
    shown, out = screen(terminal=False)
    for step in range(1, 7):
        shown.show(step, {"critic/score/mean": 1 - step / 10})
    assert [line.split("  ")[1] for line in out.getvalue().splitlines()][2:] == [
        "reward 0.700",
        "reward 0.600!",
        "reward 0.500!",
        "reward 0.400!",
    ]


RED, YELLOW, GREEN = "\x1b[1;31m", "\x1b[33m", "\x1b[32m"


def test_a_terminal_gets_health_in_colour_and_a_log_gets_none():
    shown, out = screen(terminal=True, color_system="standard")
    for step in range(1, 6):
        shown.show(step, STEP | {"critic/score/mean": step / 10})
    shown.note("a warning", style="yellow")
    shown.close()
    for coloured in (f"{RED}2.5e-01", f"{YELLOW}  0.050", f"{GREEN}1.010", f"{GREEN} 0.500", f"{YELLOW}a warning"):
        assert coloured.replace(" ", "") in out.getvalue().replace(" ", ""), coloured
    assert "2.5e-01!" not in out.getvalue()
    plain, log = screen(terminal=False)
    plain.show(1, STEP)
    plain.note("a warning", style="yellow")
    assert "\x1b" not in log.getvalue()


def test_a_terminal_without_colour_gets_marks():
    shown, out = screen(terminal=True, no_color=True)
    shown.show(1, STEP)
    shown.close()
    assert "2.5e-01!" in out.getvalue() and "0.050!" not in out.getvalue() and "1.010!" not in out.getvalue()


def drawn(width):
    shown, _ = screen(terminal=True, width=width)
    shown.show(1000, STEP | {"val/score": 0.512, "actor/ppo_kl": -0.0012})
    page = rich.console.Console(file=io.StringIO(), width=width)
    page.print(shown._draw())
    shown.close()
    return page.file.getvalue().splitlines()


# The step has 4 characters, the columns 7 + 6 + 9 + 8 + 8 + 6 + 8 + 7 + 7 + 7 with a space before each.
@pytest.mark.parametrize("width", [77, 80, 100, 160])
def test_all_columns_fit_a_terminal(width):
    lines = drawn(width)
    assert all(len(line) <= width for line in lines)
    for heading, _, _ in PPO_COLUMNS:
        assert heading in lines[0]
    assert " ".join(lines[2].split()) == "1000 0.500 0.512 -1.2e-03 1.234 0.050 1.010 -0.25 1024.5 98,765 107.1"
    assert lines[3].split("  ")[:3] == ["step 107.1 s:", "gen 60.0", "actor 40.0"]


@pytest.mark.parametrize("width", [70, 76])
def test_a_narrow_terminal_leaves_out_what_is_said_elsewhere(width):
    lines = drawn(width)
    assert "s/step" not in lines[0] and "KL" in lines[0] and "step 107.1 s:" in lines[3]


@pytest.mark.parametrize("terminal", [False, True])
def test_a_text_cannot_steer_the_terminal(terminal):
    """Prompts and responses are others': no title is set, nothing is cleared, no line is written over."""
    file = io.StringIO()
    screen = make_screen(5, 0, PPO_COLUMNS, rich.console.Console(file=file, force_terminal=terminal, width=200))
    screen.note("a\x1b]0;owned\x07b\x1b[2Jc\rd\x9b31me\u202ef\ud800g\x7f \tend é😀")
    screen.close()
    said = file.getvalue()
    assert r"a\x1b]0;owned\x07b\x1b[2Jc\rd\x9b31me\u202ef\ud800g\x7f" in said and "é😀" in said
    assert not any(bad in said for bad in ("\x1b]0", "\x1b[2J", "\x07", "\x9b", "\u202e", "\x7f"))


def test_a_row_of_a_test_cannot_either():
    row = {"prompt": "p\x1b[2J", "response": "r\x07", "score": 1.0, "ground_truth": "\x9b", "error": None}
    assert validation.format_row(row) == r"  p\x1b[2J → r\x07   (score 1; truth \x9b)"
