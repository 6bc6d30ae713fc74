"""Profiles of steps: a trace where one was asked for, with the stages by their names, and none elsewhere."""

import gzip
import json
import pathlib

import pytest

from jppo import train
from jppo.errors import UserError
from jppo.runlog.timers import Profiler, Timers
from jppo.settings import check_within, parse_steps


def names_of(file):
    """The names of all events of a trace that is made for Perfetto."""
    with gzip.open(file) as f:
        return {event.get("name") for event in json.load(f)["traceEvents"]}


@pytest.mark.parametrize(
    "spec,steps",
    [("", []), (" ", []), ("3", [3]), ("3,5", [3, 5]), ("2-4", [2, 3, 4]), (" 2-3 , 7 ", [2, 3, 7]), ("1-1", [1])],
)
def test_steps_are_named_alone_or_by_their_ends(spec, steps):
    assert [step for part in parse_steps(spec, "name") for step in part] == steps


@pytest.mark.parametrize(
    "spec,said",
    [("a", "'a' is no step"), ("3,", "'' is no step"), ("0", "'0' names no step"), ("4-2", "'4-2' names no step"),
     ("-1", "'-1' is no step"), ("1.5", "'1.5' is no step"), ("2-", "'2-' is no step"), ("٣", "is no step")],
)  # fmt: skip
def test_what_is_no_step_is_refused(spec, said):
    with pytest.raises(UserError) as e:
        parse_steps(spec, "trainer.profile_steps")
    assert f"trainer.profile_steps={spec!r}" in str(e.value) and said in str(e.value) and "\n" not in str(e.value)


def test_a_step_beyond_the_run_is_refused_however_far():
    check_within(parse_steps("1,3-4", ""), 4, "x")
    check_within((), 0, "x")
    with pytest.raises(UserError, match="x: step 5 is none of this run, which has 4; name steps from 1 to 4"):
        check_within(parse_steps("2-5", ""), 4, "x")
    with pytest.raises(UserError, match="step 1000000000000"):
        check_within(parse_steps("1-1000000000000", ""), 4, "x")


def test_a_step_that_raises_leaves_a_trace_and_the_next_one_is_traced_too(tmp_path):
    profile, timer = Profiler(tmp_path, [range(2, 4)]), Timers()
    with profile(1), timer("gen"):
        pass
    with pytest.raises(KeyError), profile(2), timer("adv"):
        raise KeyError
    with profile(3), timer("gen"):
        pass
    found = {path.parts[len(tmp_path.parts)]: path for path in tmp_path.rglob("perfetto_trace.json.gz")}
    assert sorted(found) == ["step_2", "step_3"]
    assert {"adv", "train"} <= names_of(found["step_2"]) and "gen" in names_of(found["step_3"])
    assert not [name for name in names_of(found["step_3"]) if name and name.startswith("$")], "Python calls"


def test_a_resumed_run_says_what_it_is_past(tmp_path):
    profile = Profiler(tmp_path, [range(2, 4)])
    assert profile.introduce(0) == [f"to be profiled into {tmp_path}: steps 2, 3"]
    past = "not profiled, because the run has passed them: step"
    assert profile.introduce(2) == [f"to be profiled into {tmp_path}: step 3", f"{past} 2"]
    assert profile.introduce(3) == [f"{past}s 2, 3"]
    assert Profiler(tmp_path, []).introduce(0) == []


@pytest.mark.usefixtures("quick_compilation")
def test_a_run_profiles_the_step_that_it_is_asked_for_and_measures_itself(small_run):
    run = pathlib.Path(small_run.trainer.run_dir)
    small_run.trainer.profile_steps = "3"
    with pytest.raises(UserError, match=r"trainer\.profile_steps='3': step 3 is none of this run, which has 2"):
        train.train(small_run)
    assert not run.exists()
    small_run.trainer.profile_steps = "2"
    train.train(small_run)
    assert [path.name for path in (run / "profile").iterdir()] == ["step_2"]
    (perfetto,) = run.glob("profile/step_2/plugins/profile/*/perfetto_trace.json.gz")
    assert list(perfetto.parent.glob("*.xplane.pb"))
    stages = {"train", "step", "gen", "reward", "old_log_prob", "values", "adv", "update_critic", "update_actor"}
    names = names_of(perfetto)
    assert stages | {"update_weights"} <= names
    assert not {"testing", "save", "ref", "start"} & names, "not of the step, or not of this run"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines[1:]:
        for name in ("perf/mfu/actor", "perf/mfu/critic", "perf/mfu/actor_infer"):
            assert 0 < line[name] < 1
        assert 0.05 < line["perf/cpu_memory_used_gb"] < 20
        assert "perf/max_memory_allocated_gb" not in line, "a CPU does not say"
