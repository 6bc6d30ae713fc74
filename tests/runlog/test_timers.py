import io
import re
import time

import pytest
import rich.console

from jppo.runlog import console
from jppo.runlog.console import Display
from jppo.runlog.timers import Count, Laps, Timers


def test_stages_add_up_within_a_step():
    timers, began = Timers(), time.perf_counter()
    for _ in range(2):
        with timers("gen"):
            time.sleep(0.02)
    first = timers.next_step()
    assert set(first) == {"timing_s/gen"} and 0.04 <= first["timing_s/gen"] <= time.perf_counter() - began
    with timers("adv"):
        pass
    assert set(timers.next_step()) == {"timing_s/adv"} and timers.next_step() == {}


def test_a_stage_that_raises_is_timed():
    timers = Timers()
    with pytest.raises(KeyError), timers("save"):
        raise KeyError
    assert "timing_s/save" in timers.next_step()


def test_an_unknown_stage_is_an_error():
    with pytest.raises(ValueError, match="rolout"), Timers()("rolout"):
        pass


def test_laps_share_out_the_seconds(monkeypatch):
    clock, timer = [10.0], Timers()
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    laps = Laps(timer)
    with timer("start"):
        for part, seconds in (("models", 2.5), ("compilation", 0.0), ("publish", 7.5)):
            with laps(part):
                clock[0] += seconds
                assert timer.line() == f"start, {part}, {seconds:.0f} s"
        assert timer.stage() == ("start", 10.0), "a part does not lengthen the time that its stage may take"
    assert str(laps) == "models 2.5, compilation 0.0, publish 7.5"


def test_a_stage_says_how_far_it_is():
    timer = Timers()
    assert timer.line() == ""
    with timer("start"):
        finish = timer.part("programs ready", 7)
        finish()
        assert timer.line() == "start, 1 of 7 programs ready, 0 s"
        timer.part("the first publish")
        assert timer.line() == "start, the first publish, 0 s"
    with timer("step", number=3):
        assert timer.line() == ""
        with timer("gen"):
            timer.watch(lambda: Count("responses", 64, 37))
            assert timer.line() == "step 3: sampling, 37 of 64 responses, 0 s"
        with timer("update_actor"):
            said = [timer.line() for _ in timer.counted("mini-batches", "ab", 2)]
            assert [line.split(", ")[1] for line in said] == ["0 of 2 mini-batches", "1 of 2 mini-batches"]
            assert "2 of 2" in timer.line()
        assert timer.line() == ""
    assert timer.line() == ""


@pytest.mark.parametrize("first_s, every_s", [(5.0, 0.05), (0.05, 30.0)])
def test_elsewhere_than_on_a_terminal_a_long_stage_is_a_line(capfd, monkeypatch, first_s, every_s):
    monkeypatch.setattr(console, "FIRST_S", first_s)
    timer = Timers()
    with Display(timer, rich.console.Console(file=io.StringIO()), every_s=every_s), timer("start"):
        timer.part("loading the models")
        time.sleep(1.0)
    said = capfd.readouterr().err.splitlines()
    assert said and all(re.fullmatch(r"start, loading the models, \d+ s", line) for line in said)


def test_on_a_terminal_a_spinner_shows_it():
    file = io.StringIO()
    timer = Timers()
    with Display(timer, rich.console.Console(file=file, force_terminal=True, width=80)) as display, timer("start"):
        timer.part("loading the models")
        time.sleep(0.3)
        display.leave_terminal()
    assert "loading the models, 0 s" in file.getvalue()
