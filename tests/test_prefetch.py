"""Samples that are drawn ahead, against a sampler whose answers come when the test says so."""

import dataclasses
import json
import pathlib
import threading
import time
from concurrent.futures import Future

import numpy as np
import pytest

from jppo import train
from jppo.data.prompts import PromptSet
from jppo.data.stream import Cursor, MixPart, next_batch
from jppo.errors import UserError
from jppo.rewards.parts import Grading
from jppo.rollout.protocol import RolloutError, greedy
from jppo.runlog import trajectories
from jppo.samples.make import mark_stale
from jppo.samples.queue import SampleQueue, SupplySettings, ages
from jppo.types import OVERFLOW, Exchange, Prompt, Reward, Trajectory
from tests.make import trajectory, typed, untimed

PROMPTS = [Prompt(f"p{i}", "", "", np.array([i], np.int32), "", {}) for i in range(12)]
TRAIN = PromptSet(PROMPTS, 0, 0, (MixPart("all", np.arange(12)),))
HOW = SupplySettings(
    batch_size=2,
    n=2,
    seed=1,
    shuffle=True,
    total_steps=6,
    staleness=1,
    partial=False,
    greedy=False,
    sampling=lambda step: dataclasses.replace(greedy(4), n=2, seed=step),
)


def sample(prompt, number, version, seed):
    how = dict(logprob=[0.0, -0.25, -0.5], version=version, text=f"{prompt.uid}/{number}")
    return trajectory([prompt.ids[0], seed, number], [0, 1, 1], prompt.uid, **how)


class Slow:
    """A sampler that answers when it is told to, by the version that it has then."""

    def __init__(self, at_once=True):
        self.version, self.at_once = 0, at_once
        self.calls = []

    def start(self, prompts, sampling, *, done=None, only=None):
        wanted = list(range(len(prompts) * sampling.n) if only is None else only)
        self.calls.append((prompts, sampling, done, wanted, Future()))
        if self.at_once:
            self.answer(len(self.calls) - 1)
        return self.calls[-1][-1]

    def answer(self, call, numbers=None):
        prompts, sampling, done, wanted, _ = self.calls[call]
        for number in list(wanted) if numbers is None else numbers:
            wanted.remove(number)
            done(number, sample(prompts[number // sampling.n], number, self.version, sampling.seed))


class RewardSum:
    """Grades by the length of the text."""

    def __init__(self):
        self.count = 0  # of samples that were ever graded, as of a normalizer

    def begin(self):
        return Graded(self)

    def state(self):
        return {"count": self.count}

    def load(self, state):
        self.count = state["count"]


class Graded(Grading):
    def __init__(self, reward_sum):
        self.reward_sum, self.texts = reward_sum, {}

    def submit(self, number, sample):
        assert number not in self.texts
        self.texts[number] = sample.text
        self.reward_sum.count += 1

    def collect(self, numbers=None):
        return [self.reward(number) for number in sorted(numbers)]

    def finished(self):
        return {number: self.reward(number) for number in self.texts}

    def reward(self, number):
        return Reward(float(number), {}, None, self.texts[number], earned=((0, 0.1), (1, float(number))))


def supply(sampler, cursor=None, **changes):
    return SampleQueue(dataclasses.replace(HOW, **changes), TRAIN, sampler, RewardSum(), cursor or Cursor())


def order(steps):
    """The prompts of each step and the place after it, as the data's own order has them."""
    cursor, out = Cursor(), []
    for _ in range(steps):
        indices, cursor = next_batch(cursor, n=12, batch_size=2, seed=1, shuffle=True, parts=TRAIN.parts)
        out.append(([f"p{i}" for i in indices], cursor))
    return out


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_each_step_gets_its_own_prompts_from_weights_that_are_old_enough(staleness):
    sampler = Slow()
    it = supply(sampler, staleness=staleness)
    it._changed.wait = lambda _: pytest.fail("all answers came at once")
    for step, (uids, after) in enumerate(order(6)):
        sampler.version, began = step, time.monotonic()
        drawn = it.take(step)
        assert 0 <= drawn.waited_s <= time.monotonic() - began
        assert [p.uid for p in drawn.prompts] == uids and drawn.after == after
        assert [t.uid for t in drawn.trajectories] == list(np.repeat(uids, 2))
        assert {t.tokens[1] for t in drawn.trajectories} == {step}, "each step has seeds of its own"
        assert set(ages(drawn.trajectories, step)) == {min(step, staleness)}
        rewards, best = drawn.wait_for_rewards()
        assert [r.answer for r in rewards] == [t.text for t in drawn.trajectories] and best is None
        it.forget(step)
    assert len(sampler.calls) == 6, "nothing is asked for beyond the last step"


def test_the_next_step_is_sampled_while_this_one_is_learned_from():
    sampler = Slow(at_once=False)
    it = supply(sampler)
    took = threading.Thread(target=lambda: it.take(0))
    took.start()
    while not sampler.calls:
        pass
    assert took.is_alive() and len(sampler.calls) == 1
    sampler.answer(0)
    took.join(60)
    assert len(sampler.calls) == 2 and not sampler.calls[1][-1].done()
    it.forget(0)
    settled = threading.Thread(target=it.settle)
    settled.start()
    sampler.answer(1, [0, 1, 2])
    settled.join(0.1)
    assert settled.is_alive()
    sampler.answer(1, [3])
    settled.join(10)
    assert not settled.is_alive()


def test_a_greedy_response_to_each_prompt_comes_along():
    drawn = supply(Slow(), greedy=True).take(0)
    rewards, best = drawn.wait_for_rewards()
    assert len(rewards) == 4 and [r.answer for r in best] == [f"{p.uid}/{i}" for i, p in enumerate(drawn.prompts)]


def test_what_fails_while_it_is_waited_for_is_raised():
    sampler = Slow(at_once=False)
    start = sampler.start

    def failing(*args, **kwargs):
        future = start(*args, **kwargs)
        future.set_exception(RolloutError("gone"))
        return future

    sampler.start = failing
    with pytest.raises(RolloutError, match="gone"):
        supply(sampler).take(0)


def test_a_step_takes_the_groups_that_are_there_and_waits_for_those_that_would_be_too_old():
    sampler = Slow(at_once=False)
    it = supply(sampler, staleness=2, partial=True)
    out = {}

    def take(step):
        sampler.version = step
        thread = threading.Thread(target=lambda: out.__setitem__(step, it.take(step)))
        thread.start()
        return thread

    def wait(thread, calls):
        thread.join(10)
        assert not thread.is_alive() and len(sampler.calls) == calls

    (first, _), (second, _), (third, _), *_ = order(6)
    thread = take(0)
    while len(sampler.calls) < 2:
        pass
    sampler.answer(0, [0, 1])  # the first prompt of step 0; the second takes long
    sampler.answer(1, [2, 3])  # the second prompt of step 1
    wait(thread, 2)
    assert [p.uid for p in out[0].prompts] == [first[0], second[1]]
    it.forget(0)
    thread = take(1)
    while len(sampler.calls) < 3:
        pass
    sampler.answer(1)
    sampler.answer(2, [0, 1])
    wait(thread, 3)
    assert [p.uid for p in out[1].prompts] == [second[0], third[0]]
    assert out[1].wait_for_rewards()[0][0].answer == f"{second[0]}/0"
    it.forget(1)
    thread = take(2)
    while len(sampler.calls) < 4:
        pass
    sampler.answer(2)
    sampler.answer(3)
    thread.join(0.2)
    assert thread.is_alive(), "the second prompt of step 0 was asked for by the weights 0"
    sampler.version = 1
    sampler.answer(0)
    wait(thread, 4)
    assert [p.uid for p in out[2].prompts] == [first[1], third[1]]
    assert ages(out[2].trajectories, 2).tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize("forgotten", [True, False])
def test_a_queue_is_kept_and_only_what_is_missing_is_asked_for_again(forgotten):
    sampler = Slow(at_once=False)
    it = supply(sampler)
    thread = threading.Thread(target=lambda: it.take(0))
    thread.start()
    while not sampler.calls:
        pass
    sampler.answer(0)
    thread.join(10)
    sampler.answer(1, [1, 2])
    if forgotten:
        it.forget(0)
    state = json.loads(json.dumps(it.state()))
    # the run goes on elsewhere; where it was killed in step 0, that is done again
    again = Slow()
    again.version = 1 if forgotten else 0
    resumed = supply(again, cursor=order(1)[0][1] if forgotten else Cursor())
    kept = 2 if forgotten else 6
    first = 1 if forgotten else 0
    assert resumed.load(state, first) == [
        f"{kept} samples that the checkpoint has of the next steps are not drawn again"
    ]
    assert [wanted for *_, wanted, _ in again.calls] == ([[]] if forgotten else [[], []])
    for step in range(first, 3):
        drawn = resumed.take(step)
        assert [p.uid for p in drawn.prompts] == order(3)[step][0]
        assert {t.tokens[1] for t in drawn.trajectories} == {step}
        assert all(r.earned == ((0, 0.1), (1, r.score)) for r in drawn.wait_for_rewards()[0])
        if step == 1 and forgotten:
            assert drawn.trajectories[1].version.tolist() == [-1, 0, 0]  # kept
            assert drawn.trajectories[0].version.tolist() == [-1, 1, 1]
        resumed.forget(step)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"n": 4, "sampling": lambda step: dataclasses.replace(greedy(4), n=4)}, r"rollout\.n=4 was 2 when"),
        ({"batch_size": 3}, r"data\.train_batch_size=3 was 2 when"),
        ({"greedy": True}, r"greedy responses=True was False when"),
    ],
)
def test_a_queue_that_was_drawn_otherwise_is_refused(changes, said):
    it = supply(Slow())
    it.take(0)
    it.forget(0)
    state = json.loads(json.dumps(it.state()))
    with pytest.raises(UserError, match=said):
        supply(Slow(), **changes).load(state, 1)


def test_synchronous_training_keeps_no_queue():
    it = supply(Slow(), staleness=0)
    it.take(0)
    assert not it.state()


def test_trajectories_go_through_text_to_the_bit():
    rng = np.random.default_rng(0)
    made = [
        dataclasses.replace(sample(PROMPTS[i], i, i, 3), tokens=rng.integers(0, 2**31, 3).astype(np.int32))
        for i in range(3)
    ]
    made = [dataclasses.replace(t, logprob=rng.normal(size=3).astype(np.float32), text="é\n") for t in made]
    made[1] = dataclasses.replace(made[1], exchange=Exchange(2, 1, 0.5, 1.0, None, earned=((0, 0.3), (2, 0.7))))
    made[0] = dataclasses.replace(made[0], kept=np.array([[-1, -1], [5, 9], [OVERFLOW, -1]], np.int32))
    made[2] = dataclasses.replace(made[2], kept=np.full((3, 1), -1, np.int32))
    for there, back in zip(made, trajectories.deserialise(trajectories.serialise(made)), strict=True):
        for field in dataclasses.fields(Trajectory):
            a, b = getattr(there, field.name), getattr(back, field.name)
            assert np.array_equal(a, b) and getattr(a, "dtype", None) == getattr(b, "dtype", None)
    assert trajectories.deserialise(trajectories.serialise([])) == []


def lines(run):
    return untimed(run, "rollout/sampling_s", "rollout/hidden", "time")


def inprocess(c, name):
    """The small run with its own engine, in a folder of its own."""
    c.rollout.name = "inprocess"
    c.trainer.run_dir = str(pathlib.Path(c.trainer.run_dir).parent / name)
    return c


def test_staleness_0_is_synchronous_training_to_the_bit(small_run, quick_compilation):
    inprocess(small_run, "sync")
    train.train(small_run)
    expected = lines(small_run.trainer.run_dir)
    inprocess(small_run, "async")
    small_run.rollout.mode, small_run.rollout.max_staleness = "async", 0
    train.train(small_run)
    assert lines(small_run.trainer.run_dir) == expected
    inprocess(small_run, "ahead")
    small_run.rollout.max_staleness = 1
    train.train(small_run)
    ahead = lines(small_run.trainer.run_dir)
    assert [row["rollout/staleness_max"] for row in ahead if "rollout/staleness_max" in row] == [0.0, 1.0]
    assert ahead[1]["reward_mean"] == expected[1]["reward_mean"], "the first step has nothing to be older than"


def test_samples_that_are_too_old_are_dropped_or_corrected(small_run):
    drawn = dataclasses.make_dataclass("StepSamples", ["trajectories", "sampling_s", "waited_s"])
    old = [sample(PROMPTS[0], 0, version, 0) for version in (1, 2, 3)]
    small_run.rollout.mode, small_run.rollout.max_staleness = "async", 1
    graded = [Reward(1.0, {}, None), Reward(1.0, {}, None), Reward(1.0, {}, None, unusable="not graded")]
    found, metrics = mark_stale(typed(small_run), drawn(old, 4.0, 1.0), 3, graded)
    assert [r.unusable is None for r in found] == [False, True, False] and metrics["rollout/stale_dropped"] == 1
    assert "2 updates old" in found[0].unusable and found[2].unusable == "not graded"
    assert (metrics["rollout/staleness_mean"], metrics["rollout/hidden"]) == (1.0, 0.75)
    assert metrics["rollout/mixed_versions"] == 0.0
    old[1].version[old[1].sampled] = [2, 3]
    assert mark_stale(typed(small_run), drawn(old, 4.0, 1.0), 3, graded)[1]["rollout/mixed_versions"] == pytest.approx(
        1 / 3
    )
    small_run.algorithm.old_logprob = "correction"
    assert mark_stale(typed(small_run), drawn(old, 4.0, 1.0), 3, graded)[0] == graded
    small_run.rollout.mode = "sync"
    with pytest.raises(RolloutError, match="p0 was sampled by the weights 1, not by version 3"):
        mark_stale(typed(small_run), drawn(old, 4.0, 1.0), 3, graded)
