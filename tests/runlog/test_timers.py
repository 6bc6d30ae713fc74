import time

import pytest

from jppo.runlog.timers import Laps, Timers


def test_stages_add_up_within_a_step():
    timers = Timers()
    for _ in range(2):
        with timers("gen"):
            time.sleep(0.02)
    first = timers.next_step()
    assert set(first) == {"timing_s/gen"} and 0.04 <= first["timing_s/gen"] < 0.4
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
    clock = iter([10.0, 12.5, 12.5, 20.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    laps = Laps()
    for part in ("models", "compilation", "publish"):
        laps(part)
    assert str(laps) == "models 2.5, compilation 0.0, publish 7.5"
