"""Each warning on a fault that is put into the metrics of a real quickstart (quickstart.jsonl), and none without."""

import json
import pathlib

import numpy as np
import pytest

from jppo.runlog.diagnosis import FIRST_STEPS, RULES, Diagnosis, History
from jppo.settings import default
from jppo.settings.table import by_name

LINES = (pathlib.Path(__file__).parent / "quickstart.jsonl").read_text().splitlines()
STEPS = [(row.pop("step"), row) for row in map(json.loads, LINES)]
NOISE = np.random.default_rng(0).normal(0, 1, len(STEPS))


def run(fault, steps=STEPS):
    """What is told of the run with `fault(step, metrics)` put over the metrics."""
    doctor = Diagnosis()
    return [found for step, metrics in steps for found in doctor.feed(step, metrics | fault(step, metrics))]


def healthy(step, metrics):
    return {}


def slow(step, metrics):
    return {"timing_s/gen": 12 * 11.0} if step == 30 else {}


FAULTS = {
    "equal_rewards": lambda s, m: {"critic/score/max": 0.0, "critic/score/min": 0.0} if s > 10 else {},
    "reward_errors": lambda s, m: {"reward/errors": 26.0} if s > 10 else {},
    "suspicious_programs": lambda s, m: {"reward/code/suspicious": 2.0} if s > 10 else {},
    "kl_out_of_range": lambda s, m: {"actor/ppo_kl": 0.3} if s > 10 else {},
    "ratio_out_of_range": lambda s, m: {"actor/ratio_mean": 0.5} if s > 10 else {},
    "entropy_collapse": lambda s, m: {"actor/entropy": m.get("actor/entropy", 0) * 0.8**s},
    "value_loss_not_falling": lambda s, m: {"critic/vf_loss": 0.6 + 0.01 * NOISE[s], "critic/vf_explained_var": -0.2},
    "all_truncated": lambda s, m: {"response_length/clip_ratio": 0.99} if s > 10 else {},
    "sampler_gap_growing": lambda s, m: {"rollout/logp_gap_mean": 1e-3 * 1.05**s},
    "host_memory_growing": lambda s, m: {"perf/cpu_memory_used_gb": 8 + 0.1 * s + 0.05 * NOISE[s]},
    "filter_metric_missing": lambda s, m: {"training/filter_groups/without_metric": 1.0} if s > 10 else {},
    "slow_stage": slow,
}


AT_ONCE = ("slow_stage", "suspicious_programs")  # one step is enough


def test_a_healthy_run_is_warned_of_nothing():
    assert len(STEPS) > 70
    assert run(healthy) == []


@pytest.mark.parametrize(("shown", "names"), [(1.0, []), (0.0, ["equal_rewards"])])
def test_equal_scores_beside_other_given_ones_are_no_fault(shown, names):
    """Where no sample succeeds, all the more is learned from a demonstration that does."""
    fault = FAULTS["equal_rewards"]
    assert [f.name for f in run(lambda s, m: fault(s, m) | {"given/score/mean": shown})] == names


def test_every_rule_has_its_fault():
    assert set(FAULTS) == set(RULES)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_told_once_by_its_own_name(name):
    found = run(FAULTS[name])
    assert [f.name for f in found] == [name]
    assert found[0].found and found[0].remedy == RULES[name][1]


@pytest.mark.parametrize("name", sorted(set(FAULTS) - {*AT_ONCE, "host_memory_growing", "entropy_collapse"}))
def test_one_odd_step_is_no_fault(name):
    odd = FAULTS[name](40, dict(STEPS)[40])
    if name == "reward_errors":
        odd = {"reward/errors": 5.0}  # of 512
    assert run(lambda s, m: odd if s == 40 else {}) == []


def test_where_all_samples_of_each_prompt_score_alike_there_is_no_gradient_either():
    fault = {"critic/advantages/max": 0.0, "critic/advantages/min": 0.0}  # the scores of the prompts differ
    (found,) = run(lambda s, m: fault if s > 10 else {})
    assert found.name == "equal_rewards" and found.step == 13 and "advantage" in found.found


def test_rare_errors_in_every_step_are_told():
    (found,) = run(lambda s, m: {"reward/errors": 1.0} if s > 10 else {})
    assert found.found.startswith("5 of the 2560 responses of the last 5 step(s)") and found.step == 15


def test_a_gap_to_older_weights_is_no_fault():
    old = {"rollout/staleness_mean": 1.5}
    assert run(lambda s, m: FAULTS["sampler_gap_growing"](s, m) | old) == []


def test_half_of_a_first_step_is_told_at_once():
    (found,) = run(lambda s, m: {"reward/errors": 256.0} if s == 1 else {})
    assert found.step == 1


def test_a_value_loss_that_rises_with_the_rewards_spread_is_no_fault():
    assert run(lambda s, m: {"critic/vf_loss": 0.1 + 0.01 * s, "critic/vf_explained_var": 0.4}) == []


def test_a_critic_whose_values_stay_zero_is_told():
    """1 - var(R - 0) / (var(R) + 1e-5) is a little above 0."""
    (found,) = run(lambda s, m: {"critic/vf_loss": 0.1, "critic/vf_explained_var": 1 - 0.04 / (0.04 + 1e-5)})
    assert found.name == "value_loss_not_falling"


@pytest.mark.parametrize(
    "memory",
    [
        lambda s: 8 + 0.05 * NOISE[s],
        lambda s: 8 + 4 * (s > 45),  # a test's buffers, that stay
        lambda s: 8 + min(s, 12) * 0.5,  # what a warm-up takes
        lambda s: 100 + 0.01 * s,
    ],
    ids=["level", "jump", "warm-up", "little"],
)
def test_memory_that_stays_is_no_fault(memory):
    assert run(lambda s, m: {"perf/cpu_memory_used_gb": memory(s)}) == []


def test_a_stage_of_milliseconds_may_wait_ten_times_as_long():
    assert run(lambda s, m: {"timing_s/adv": 0.5} if s == 30 else {}) == []


def test_a_test_or_a_save_is_compared_with_its_own_kind():
    def save(seconds):
        return lambda s, m: {"timing_s/save": seconds if s == 70 else 2.0} if s % 10 == 0 else {}

    assert run(save(19.0)) == []
    assert [f.step for f in run(save(21.0))] == [70]


@pytest.mark.parametrize("name", FAULTS)
def test_a_resumed_run_knows_what_was_and_what_was_told(name):
    fault = FAULTS[name]
    (told,) = run(fault)
    if name != "host_memory_growing":  # the new process begins with its own memory
        again = Diagnosis()
        for step, metrics in STEPS[: told.step]:
            again.recall(metrics | fault(step, metrics))
        step, metrics = STEPS[told.step]
        assert step == told.step
        assert again.feed(step, metrics | fault(step, metrics)) == [told]
    later = Diagnosis([name])
    assert [f for step, m in STEPS for f in later.feed(step, m | fault(step, m))] == []


def test_the_first_steps_are_as_many_as_are_named():
    past = History()
    for step in range(3 * FIRST_STEPS):
        past.add({"x": float(step)})
    assert past.first("x") == np.median(np.arange(FIRST_STEPS)) and past.count("x") == 3 * FIRST_STEPS


def test_memory_of_the_process_before_does_not_count():
    doctor = Diagnosis()
    for _ in range(60):
        doctor.recall({"perf/cpu_memory_used_gb": 4.0})
    for step in range(60, 120):
        assert doctor.feed(step, {"perf/cpu_memory_used_gb": 40.0}) == []


def test_nothing_and_what_is_no_number_are_no_fault():
    faulty = [fault(11, {}) for fault in FAULTS.values()]
    odd = {name: float("nan") for metrics in (*faulty, *(m for _, m in STEPS)) for name in metrics}
    assert odd.keys() >= {"actor/ppo_kl", "critic/score/max", "reward/code/suspicious", "timing_s/gen"}
    assert [f for step in range(100) for f in Diagnosis().feed(step, odd)] == []
    doctor = Diagnosis()
    assert [f for step in range(100) for f in doctor.feed(step, {"actor/ppo_kl": None})] == []


def test_remedies_name_real_settings():
    known = by_name(default())
    for _, remedy in RULES.values():
        named = [w.strip(".,;:").split("=")[0] for w in remedy.split() if w.count(".") >= 1]
        named = [w for w in named if w.split(".")[0] in default()]
        assert set(named) <= set(known), named
    assert sum(any(n in remedy for n in known) for _, remedy in RULES.values()) == len(RULES)
