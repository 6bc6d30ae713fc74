"""What a checkpoint keeps of samples drawn ahead: at any moment, of several hosts, for settings that have changed."""

import dataclasses
import json
import sys
import threading
from concurrent.futures import Future

import jax
import numpy as np
import pytest

from examples import arithmetic
from jppo.data.stream import Curriculum, Cursor
from jppo.data.tokenizer import load_tokenizer
from jppo.distributed.hosts import Hosts
from jppo.models import decoder, hf, hf_write
from jppo.plugins.reward_models.classifier import JaxRewardModel, read_classifier
from jppo.plugins.reward_models.model import ModelPart, Normalizer
from jppo.rewards import parts
from jppo.rewards.parts import Grading, PartWeights
from jppo.rewards.parts import RewardSum as Parts
from jppo.runlog import trajectories
from jppo.samples import make as build_prefetch
from jppo.samples import queue as supply
from jppo.types import Reward
from tests.make import typed
from tests.test_prefetch import HOW, TRAIN, RewardSum, Slow, order

ANSWERS = "samples that the checkpoint has of the next steps are"


def make(sampler, cursor=None, reward_sum=None, hosts=None, **changes):
    how = dataclasses.replace(HOW, **changes)
    more = {} if hosts is None else {"hosts": hosts}
    return supply.SampleQueue(how, TRAIN, sampler, reward_sum or RewardSum(), cursor or Cursor(), **more)


def saved(it):
    return json.loads(json.dumps(it.state()))


def take(it, step, sampler, choose):
    """The samples of a step; while it waits, `choose` names a call and some of its numbers, which are answered."""
    sampler.version, out = step, []
    thread = threading.Thread(target=lambda: out.append(it.take(step)))
    thread.start()
    while thread.is_alive():
        if any(call[3] for call in sampler.calls):
            sampler.answer(*choose(sampler.calls))
        thread.join(0.002)
    return out[0]


def some_group(rng):
    def choose(calls):
        open_ = [(i, call) for i, call in enumerate(calls) if call[3]]
        i, (_, sampling, _, wanted, _) = open_[rng.integers(len(open_))]
        group = wanted[rng.integers(len(wanted))] // sampling.n
        return i, [number for number in wanted if number // sampling.n == group]

    return choose


@pytest.mark.parametrize("seed", range(20))
def test_partial_steps_have_every_prompt_once_also_after_a_resume(seed):
    """Whatever is finished first; a resume after a random step."""
    rng = np.random.default_rng(seed)
    how = dict(staleness=2, partial=True, batch_size=2)
    sampler, stop = Slow(at_once=False), int(rng.integers(6))
    it, seen = make(sampler, **how), []
    for step in range(6):
        drawn = take(it, step, sampler, some_group(rng))
        assert len(drawn.prompts) == 2 and len(drawn.trajectories) == 4, f"step {step}"
        seen += [p.uid for p in drawn.prompts]
        it.forget(step)
        if step == stop:
            sampler, state = Slow(at_once=False), saved(it)
            it = make(sampler, **how)
            it.load(state, step + 1)
    assert sorted(seen) == sorted(uid for uids, _ in order(6) for uid in uids)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_no_prompt_is_lost_where_a_resume_turns_partial_off(seed, staleness, again):
    """Steps of three prompts leave any number of them behind; with `again` the run resumes twice, also in mid-step."""
    rng, size, steps = np.random.default_rng(seed), 3, 8
    how = dict(batch_size=size, total_steps=steps)
    sampler, stop = Slow(at_once=False), int(rng.integers(1, 4))
    it, seen = make(sampler, staleness=2, partial=True, **how), []
    for step in range(stop):
        drawn = take(it, step, sampler, some_group(rng))
        seen += [p.uid for p in drawn.prompts]
        it.forget(step)
    sampler, state, place = Slow(), saved(it), drawn.after
    sampler.version = stop
    it = make(sampler, cursor=place, staleness=staleness, **how)
    it.load(state, stop)
    for step in range(stop, steps):
        sampler.version = step
        drawn = it.take(step)
        if again:  # stopped before the step is done
            state = saved(it)
            it = make(sampler, cursor=place, staleness=staleness, **how)
            it.load(state, step)
            drawn = it.take(step)
        assert len(drawn.prompts) == size and supply.ages(drawn.trajectories, step).max() <= staleness
        seen += [p.uid for p in drawn.prompts]
        it.forget(step)
        place = drawn.after
    counts = [seen.count(p.uid) for p in TRAIN.prompts]  # 24 of 12 prompts: each twice, in whatever order
    assert counts == [2] * 12, counts


class Least:
    """A curriculum: the prompts with the lowest total of scores so far."""

    def __init__(self, prompts, seed):
        self.n = len(prompts)

    def begin(self):
        return [0.0] * self.n

    def batch(self, state, size):
        found = np.argsort(state, kind="stable")[:size]
        return found, [total + 0.5 * (i in found) for i, total in enumerate(state)]

    def update(self, state, indices, scores):
        return [total + sum(map(sum, (s for j, s in zip(indices, scores, strict=True) if i == j)))
                for i, total in enumerate(state)]  # fmt: skip


@pytest.mark.parametrize("in_step", [False, True])
@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_a_curriculum_with_prefetched_samples_resumes_to_the_bit(staleness, in_step):
    """Killed in step 3, in the middle or at the end; a checkpoint has the position of the last finished step."""
    spec = f"{__name__}:Least"

    def begin(cursor=None):
        order_of = Curriculum(spec, TRAIN.prompts, seed=1, batch_size=2)
        how = dataclasses.replace(HOW, staleness=staleness, total_steps=8)
        train = dataclasses.replace(TRAIN, order_of=order_of)
        return supply.SampleQueue(how, train, Slow(), RewardSum(), cursor or Cursor())

    def step(it, number, finish=True):
        drawn = it.take(number)
        if finish:
            place = it.note_rewards(drawn, drawn.wait_for_rewards()[0])
            it.forget(number)
            return [p.uid for p in drawn.prompts], json.loads(json.dumps(dataclasses.asdict(place)))
        return None

    it = begin()
    whole = [step(it, number) for number in range(8)]
    it = begin()
    place = [step(it, number) for number in range(3 if in_step else 4)][-1][1]
    if in_step:
        step(it, 3, finish=False)
    state, first = saved(it), 3 if in_step else 4
    it = begin(Cursor(**place))
    it.load(state, first)
    assert [step(it, number) for number in range(first, 8)] == whole[first:]
    assert len({uid for uids, _ in whole for uid in uids}) > 4 and whole[-1][0] != whole[0][0]


@pytest.mark.parametrize("staleness", [1, 2])
def test_a_mismatch_drops_the_responses_and_keeps_the_prompts(staleness):
    """A curriculum has handed out those of the next steps, and does not do so again."""
    order_of = Curriculum(f"{__name__}:Least", TRAIN.prompts, seed=1, batch_size=2)
    train = dataclasses.replace(TRAIN, order_of=order_of)

    def begin(cursor=None):
        how = dataclasses.replace(HOW, staleness=staleness, total_steps=6)
        return supply.SampleQueue(how, train, Slow(), RewardSum(), cursor or Cursor())

    def steps(it, *numbers):
        out = []
        for number in numbers:
            it._sampler.version = number
            drawn = it.take(number)
            place = it.note_rewards(drawn, drawn.wait_for_rewards()[0])
            it.forget(number)
            out.append(([p.uid for p in drawn.prompts], place))
        return out

    whole, it = steps(begin(), *range(6)), begin()
    place = steps(it, 0, 1)[-1][1]
    it.take(2)  # the mismatch is found in this step
    state = json.loads(json.dumps(trajectories.unanswered(it.state())))
    resumed = begin(place)
    assert resumed.load(state, 2) == [], "no response is kept"
    assert steps(resumed, *range(2, 6)) == whole[2:]
    assert trajectories.unanswered({}) == {}


def test_an_error_after_the_rewards_leaves_the_curriculum_as_it_was():
    order_of = Curriculum(f"{__name__}:Least", TRAIN.prompts, seed=1, batch_size=2)
    it = supply.SampleQueue(HOW, dataclasses.replace(TRAIN, order_of=order_of), Slow(), RewardSum(), Cursor())
    drawn = it.take(0)
    before = saved(it)["cursor"]
    after = it.note_rewards(drawn, drawn.wait_for_rewards()[0])
    assert saved(it)["cursor"] == before and after.curriculum != before["curriculum"], "the step is repeated"
    it.forget(0)
    assert saved(it)["cursor"]["curriculum"] == after.curriculum


def test_a_state_is_of_one_moment_while_answers_arrive(monkeypatch):
    sampler = Slow(at_once=False)
    it = make(sampler, greedy=True)
    take(it, 0, sampler, lambda calls: next((i, None) for i, call in enumerate(calls) if call[3] and i < 2))
    pack, packed = trajectories.serialise, []

    def packing(found):
        packed.append(found)
        if len(packed) == 3:  # step 0 is there, and the samples of step 1
            sampler.answer(3)  # the greedy responses of step 1
        return pack(found)

    monkeypatch.setattr(trajectories, "serialise", packing)
    state = saved(it)
    assert len(packed) == 4
    again = Slow(at_once=False)
    make(again, greedy=True).load(state, 0)
    assert [len(wanted) for *_, wanted, _ in again.calls] == [0, 0, 4, 2]


class Half(Hosts):
    """One of two hosts; what the other says is not heard."""

    def __init__(self, rank):
        super().__init__()
        self.rank, self.count = rank, 2

    def together(self, work):
        return work()

    def gather(self, work):
        return [work()]


def test_hosts_that_are_at_different_points_are_merged_by_step():
    """Host 0 has taken step 0 and asked for step 1; host 1 still waits for its samples of step 0."""
    states = []
    for rank in (0, 1):
        sampler = Slow(at_once=False)
        it = make(sampler, hosts=Half(rank))
        thread = threading.Thread(target=lambda it=it: it.take(0), daemon=True)
        thread.start()
        while not sampler.calls:
            pass
        sampler.answer(0, None if rank == 0 else [2])
        thread.join(10 if rank == 0 else 0.1)
        states.append(saved(it))
    for both in (states, states[::-1]):
        state = json.loads(json.dumps(trajectories.merged(both)))
        again = Slow(at_once=False)
        resumed = make(again)
        assert resumed.load(state, 0) == [f"3 {ANSWERS} not drawn again"]
        assert [wanted for *_, wanted, _ in again.calls] == [[3], [0, 1, 2, 3]]
        again.at_once = True
        for call in (0, 1):
            again.answer(call)
        for step, (uids, after) in enumerate(order(6)):
            drawn = resumed.take(step)
            assert [p.uid for p in drawn.prompts] == uids and drawn.after == after
            resumed.forget(step)


class Interrupted(BaseException):
    pass


def interrupted_after(lines, work):
    """Whether `work` came to its end before so many lines of the supply were run; then a signal arrives."""
    left = [lines]

    def trace(frame, event, _):
        if frame.f_code.co_filename != supply.__file__:
            return None
        if event == "line":
            left[0] -= 1
            if left[0] == 0:
                raise Interrupted
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
        return True
    except Interrupted:
        return False
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("begun", [0, 1])
@pytest.mark.parametrize("partial", [False, True])
def test_a_signal_between_any_two_statements_loses_nothing(begun, partial):
    how = dict(staleness=2 if partial else 1, partial=partial, greedy=True)
    lines, ended = 0, False
    while not ended:
        lines += 1
        sampler = Slow()
        it = make(sampler, **how)
        for step in range(begun):
            it.take(step)
            it.forget(step)
        sampler.version = begun
        ended = interrupted_after(lines, lambda it=it: it.take(begun))
        again = Slow()
        resumed = make(again, cursor=order(begun)[-1][1] if begun else None, **how)
        resumed.load(saved(it), begun)
        seen = [uid for uids, _ in order(begun) for uid in uids]
        for step in range(begun, 6):
            again.version = step
            drawn = resumed.take(step)
            assert len(drawn.trajectories) == 4 and len(drawn.wait_for_rewards()[1]) == 2, f"line {lines}, step {step}"
            seen += [p.uid for p in drawn.prompts]
            resumed.forget(step)
        assert sorted(seen) == sorted(uid for uids, _ in order(6) for uid in uids), f"line {lines}"
    assert lines > 20


def half_done(**changes):
    """A state after step 0, with prompts of steps 1 and 2 asked for and some of their responses there."""
    sampler = Slow(at_once=False)
    it = make(sampler, **changes)
    rng = np.random.default_rng(0)
    drawn = take(it, 0, sampler, some_group(rng))
    it.forget(0)
    for call in sampler.calls:
        for number in list(call[3])[::2]:
            sampler.answer(sampler.calls.index(call), [number])
    return saved(it), [p.uid for p in drawn.prompts]


CHANGES = [
    (dict(staleness=2, partial=True), dict(partial=False, staleness=2)),
    (dict(staleness=2, partial=True), dict(partial=False, staleness=0)),
    (dict(staleness=3), dict(staleness=2, partial=True)),
    (dict(staleness=3), dict(staleness=1)),
    (dict(staleness=3), dict(staleness=0)),
    (dict(staleness=2), dict(staleness=2)),
    (dict(staleness=2), dict(sampling=lambda step: dataclasses.replace(HOW.sampling(step), max_tokens=3))),
]


@pytest.mark.parametrize("then, now", CHANGES)
def test_a_queue_fits_settings_that_have_changed(then, now):
    """Every step has its prompts, each prompt is learned from once, and no response is too old or drawn otherwise."""
    state, seen = half_done(**then)
    sampler, now = Slow(), dict(then) | now
    sampler.version = 1
    it = make(sampler, cursor=order(1)[0][1], **now)
    it.load(state, 1)
    for step in range(1, 6):
        sampler.version = step
        drawn = it.take(step)
        assert len(drawn.prompts) == 2 and len(drawn.trajectories) == 4
        assert supply.ages(drawn.trajectories, step).max() <= now["staleness"]
        seen += [p.uid for p in drawn.prompts]
        it.forget(step)
        state = saved(it)
        if step == 2:  # once more
            sampler.version = 3
            it = make(sampler, cursor=drawn.after, **now)
            it.load(state, 3)
    assert sorted(seen) == sorted(uid for uids, _ in order(6) for uid in uids)


def test_prompts_that_are_left_over_make_a_shorter_last_step():
    found = [
        (trajectories.Found(2, {0: "a", 2: "c", 3: "d"}, {3: "reward"}),),
        (trajectories.Found(2, {0: "other", 3: "f"}, {0: "other", 2: "reward"}),),
    ]
    kept = [
        trajectories.Step(4, 9, np.array([5, 6]), {"at": 1}, frozenset({0, 1}), found[0]),
        trajectories.Step(5, 7, np.array([7, 8]), {"at": 2}, frozenset({1}), found[1]),
    ]
    first, last = trajectories._regroup(kept, 3, {"at": 9})
    assert (first.step, first.version, first.indices.tolist(), first.untrained) == (3, 9, [5, 6], {0, 1})
    assert (last.step, last.version, last.indices.tolist(), last.untrained) == (4, 7, [8], {0})
    assert (first.after, first.found) == ({"at": 9}, found[0])
    assert (last.after, last.found) == ({"at": 9}, (trajectories.Found(2, {1: "f"}, {0: "reward"}),))


def test_responses_that_were_drawn_otherwise_are_drawn_again():
    state, _ = half_done(staleness=2)
    again = Slow(at_once=False)
    it = make(again, staleness=2, sampling=lambda step: dataclasses.replace(HOW.sampling(step), max_tokens=3))
    [said] = it.load(state, 1)
    assert said.startswith(f"4 {ANSWERS} drawn again: ")
    assert [wanted for *_, wanted, _ in again.calls] == [[0, 1, 2, 3]] * 2


@pytest.mark.parametrize("graders, count", [({}, 4 + 4 + 4), ({"reward.grader": "other"}, 100 + 4 + 4)])
def test_what_was_graded_is_not_graded_again_by_the_same_graders(graders, count):
    """Judges may answer otherwise and cost; a normalizer would count a score twice."""
    sampler, reward_sum = Slow(), RewardSum()
    it = make(sampler, reward_sum=reward_sum)
    it.take(0).wait_for_rewards()
    it.forget(0)
    state = saved(it)
    resumed = RewardSum()
    resumed.count = 100
    it = make(Slow(), reward_sum=resumed, graders=graders)
    it.load(state, 1)
    rewards, _ = it.take(1).wait_for_rewards()
    assert resumed.count == count, "of steps 0 and 1 before, of step 2 since then"
    assert [r.answer for r in rewards] == [f"{uid}/{2 * i + j}" for i, uid in enumerate(order(2)[1][0]) for j in (0, 1)]


class Ids:
    """Texts as ids of a small vocabulary."""

    def read(self, sample):
        return [3 + ord(character) % 10 for character in sample.text], False


def test_a_real_reward_model_scores_no_kept_sample_again(tmp_path, quick_compilation):
    """Scores and the normalizer's statistics are those of a run that was not interrupted."""
    arithmetic.write_model(tmp_path)
    config = arithmetic.MODEL | {"num_hidden_layers": 1, "architectures": ["Qwen2ForSequenceClassification"]}
    (tmp_path / "config.json").write_text(json.dumps(config | {"id2label": {"0": "score"}}))
    _, cfg = hf.read_config(tmp_path)
    cfg = dataclasses.replace(cfg, value_head_std=0.1)
    values = decoder.init_params(cfg, jax.random.key(7), head="value", param_dtype="float32")
    hf_write.save_model(tmp_path / "hf", values, cfg, source=str(tmp_path), dtype="float32", head="value")
    what = read_classifier(str(tmp_path / "hf"), tokenizer=load_tokenizer(str(tmp_path)), max_length=16)
    scored = []

    class Model(JaxRewardModel):
        def score(self, texts):
            scored.extend(map(tuple, texts))
            return super().score(texts)

    def open_reward_sum():
        part = ModelPart(Model(what, batch_size=4, max_length=16), Ids(), batch_size=4, normalizer=Normalizer())
        return Parts({"rm_score": part}, PartWeights({"rm_score": 1.0}, {}), score_on_error=0.0)

    def steps(it, sampler, *numbers):
        rewards = []
        for step in numbers:
            sampler.version = step
            rewards += [reward.score for reward in it.take(step).wait_for_rewards()[0]]
            it.forget(step)
        return rewards

    sampler, whole = Slow(), open_reward_sum()
    expected = steps(make(sampler, reward_sum=whole, total_steps=3), sampler, 0, 1, 2)
    times = len(scored)
    scored.clear()
    sampler, first = Slow(), open_reward_sum()
    found = steps(it := make(sampler, reward_sum=first, total_steps=3), sampler, 0)
    kept, remembered = saved(it), json.loads(json.dumps(first.state()))
    before = len(scored)
    resumed = open_reward_sum()
    resumed.load(remembered)
    sampler = Slow()
    sampler.version = 1
    it = make(sampler, reward_sum=resumed, cursor=order(1)[0][1], total_steps=3)
    it.load(kept, 1)
    found += steps(it, sampler, 1, 2)
    assert before == 8 and len(scored) == times, "steps 0 and 1 before; later steps once"
    assert found == expected and len(set(expected)) > 4
    assert resumed.state() == whole.state()
    for reward_sum in (whole, first, resumed):
        reward_sum.close()


class Told(parts.Part):
    """Grades what it is told to."""

    def __init__(self):
        self.futures = []

    def submit(self, sample):
        self.futures.append(Future())
        return self.futures[-1]


def test_finished_rewards_are_those_whose_parts_are_all_there_without_error():
    a, b = Told(), Told()
    grading = Grading(Parts({"a": a, "b": b}, PartWeights({"a": 1.0, "b": 2.0}, {}), score_on_error=0.0))
    sample = dataclasses.make_dataclass("Sample", ["prompt", "exchange"])(TRAIN.prompts[0], None)
    for number in range(3):
        grading.submit(number, sample)
    for future in a.futures:
        future.set_result(Reward(1.0, {}, None))
    assert grading.finished() == {}
    b.futures[1].set_result(Reward(3.0, {}, None))
    b.futures[2].set_result(Reward(float("nan"), {}, "down"))
    assert {number: reward.score for number, reward in grading.finished().items()} == {1: 7.0}


@pytest.mark.parametrize("setting", ["function", "model"])
def test_a_reward_follows_from_its_settings_and_the_files_they_name(small_run, tmp_path, setting):
    file = tmp_path / {"function": "mine.py", "model": "model.safetensors"}[setting]
    if setting == "function":
        small_run.reward.function = f"{file}:score"
    else:
        small_run.reward.model.path = str(tmp_path)
    file.write_text("a")
    before = json.loads(json.dumps(build_prefetch.fingerprint_graders(typed(small_run))))
    assert before == build_prefetch.fingerprint_graders(typed(small_run))
    file.write_text("something else")
    assert before != build_prefetch.fingerprint_graders(typed(small_run))
