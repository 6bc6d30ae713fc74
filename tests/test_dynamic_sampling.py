"""Dynamic sampling: which prompts a step keeps, by hand, and a run that is killed and resumed to the bit."""

import dataclasses
import pathlib

import numpy as np
import pytest

from jppo import settings, train
from jppo.data.stream import Cursor
from jppo.errors import UserError
from jppo.rollout.protocol import RolloutError
from jppo.runlog.logger import read_metrics
from jppo.runlog.watchdog import Stopped
from jppo.samples.dynamic_sampling import DynamicSampleQueue, Filter, differs, trains
from jppo.samples.queue import StepSamples
from jppo.types import Prompt, Reward, Trajectory
from tests.test_resume import again, broken_off, untimed, weights

FAILED = Reward(float("nan"), {}, "rule_score: it broke", unusable="not graded: it broke")


def reward(score, **parts):
    return Reward(score, parts, None)


def trajectory(uid):
    nothing = np.zeros(0, np.int32)
    return Trajectory(uid, nothing, nothing > 0, nothing.astype(np.float32), nothing, "", "stop", 1)


class GenBatches:
    """Gen batches with the given rewards, [batch][prompt][sample]; prompt `b.p` is number p of gen batch b."""

    def __init__(self, batches, baseline=False):
        self.batches, self.baseline, self.asked = batches, baseline, []

    def __call__(self, index, cursor):
        self.asked.append((index, cursor.index))
        self.now = self.batches[len(self.asked) - 1], len(self.asked) - 1, cursor
        return self

    def take(self, step):
        rewards, b, cursor = self.now
        prompts = [Prompt(f"{b}.{p}", "", "", np.zeros(1, np.int32), "", {}) for p in range(len(rewards))]
        best = [reward(10.0 * b + p) for p in range(len(rewards))] if self.baseline else None
        return StepSamples(
            prompts=prompts,
            trajectories=[
                trajectory(f"{p.uid}/{i}") for p, group in zip(prompts, rewards, strict=True) for i in range(len(group))
            ],
            after=Cursor(cursor.epoch, cursor.index + len(rewards)),
            waited_s=1.0,
            sampling_s=2.0,
            wait_for_rewards=lambda: ([r for group in rewards for r in group], best),
        )

    def note_rewards(self, drawn, rewards):
        return drawn.after


def supply(batches, *, prompts=2, most=0, metric="score", **how):
    gen_batch = GenBatches(batches, **how)
    return DynamicSampleQueue(Filter(prompts, 2, metric, most), gen_batch, Cursor()), gen_batch


SAME, OTHER = [reward(1.0), reward(1.0)], [reward(1.0), reward(-1.0)]


@pytest.mark.parametrize(
    "rewards,metric,expected",
    [
        (SAME, "score", False),
        (OTHER, "score", True),
        ([reward(0.5, rule_score=1.0), reward(0.9, rule_score=1.0)], "score", True),  # the length penalty differs
        ([reward(0.5, rule_score=1.0), reward(0.9, rule_score=1.0)], "rule_score", False),
        ([reward(0.0, rule_score=1.0), reward(0.0, rule_score=-1.0)], "rule_score", True),
        ([reward(1.0), FAILED], "score", False),  # one score does not differ from itself
        ([FAILED, FAILED], "score", False),  # NaN is no score
        ([reward(1.0), reward(0.0, acc=1.0)], "acc", False),  # a score is not compared with another metric
        ([reward(1.0), reward(0.0, acc=1.0), reward(0.0, acc=0.0)], "acc", True),
        ([reward(1.0), reward(0.0)], "acc", True),  # without it, scores count
    ],
)
def test_a_group_is_kept_if_its_scores_differ(rewards, metric, expected):
    assert differs(rewards, metric) is expected


def test_a_step_samples_until_it_has_its_prompts_and_drops_the_surplus():
    it, asked = supply([[SAME, OTHER], [SAME, SAME], [OTHER, OTHER], [OTHER, OTHER]])
    drawn = it.take(0)
    assert [p.uid for p in drawn.prompts] == ["0.1", "2.0"]
    assert [t.uid for t in drawn.trajectories] == ["0.1/0", "0.1/1", "2.0/0", "2.0/1"]
    assert drawn.wait_for_rewards() == ([*OTHER, *OTHER], None)
    assert asked.asked == [(0, 0), (1, 2), (2, 4)] and drawn.after == Cursor(0, 6)
    assert (drawn.waited_s, drawn.sampling_s) == (3.0, 6.0)
    assert drawn.metrics == {
        "train/num_gen_batches": 3.0,
        "train/num_prompts": 2.0,
        "training/filter_groups/evicted_samples": 3.0,
        "training/filter_groups/discarded_surplus_samples": 1.0,
        "train/sampled_score": pytest.approx(0.5),  # 3 groups of mean 1, and 3 of mean 0
        "train/sampled_errors": 0.0,
        "training/filter_groups/without_metric": 0.0,
    }
    following = it.take(1)
    assert asked.asked[3:] == [(0, 6)], "each step counts its own gen batches, and begins after the last one's"
    assert [p.uid for p in following.prompts] == ["3.0", "3.1"] and it.state() == {}


def test_a_kept_group_keeps_its_greedy_response():
    it, _ = supply([[SAME, OTHER], [OTHER, SAME]], baseline=True)
    assert it.take(0).wait_for_rewards()[1] == [reward(1.0), reward(10.0)]


def test_at_the_bound_a_step_has_fewer_prompts():
    it, asked = supply([[SAME, SAME], [SAME, OTHER], [OTHER, OTHER]], most=2)
    drawn = it.take(0)
    assert [p.uid for p in drawn.prompts] == ["1.1"] and len(asked.asked) == 2
    assert drawn.metrics["train/num_prompts"] == 1 and drawn.metrics["train/num_gen_batches"] == 2


def test_a_step_without_any_group_ends_the_run():
    it, _ = supply([[SAME, SAME], [SAME, SAME]], most=2)
    with pytest.raises(RolloutError, match=r"step 8: none of the 4 prompts of 2 gen batches .*max_num_gen_batches=2"):
        it.take(7)


def test_broken_graders_end_the_search():
    it, asked = supply([[[FAILED, FAILED]] * 2, [OTHER, OTHER]])
    with pytest.raises(train.Diverged, match="every grader of the step failed"):
        train.require_graded(it.take(0).wait_for_rewards()[0])
    assert len(asked.asked) == 1
    it, _ = supply([[SAME, OTHER], [[FAILED, FAILED]] * 2, [OTHER, OTHER]])
    drawn = it.take(0)
    assert [p.uid for p in drawn.prompts] == ["0.1"] and drawn.metrics["train/sampled_errors"] == 4


@pytest.mark.parametrize("step", [0, 7])
def test_a_gen_batch_without_the_metric_is_judged_by_its_scores(step):
    """A custom function may give a part to some sources alone, and a step's first gen batch may have none of them."""
    acc = [reward(1.0, acc=1.0), reward(1.0, acc=0.0)]
    it, _ = supply([[SAME, OTHER], [SAME, acc]], metric="acc")
    drawn = it.take(step)
    assert [p.uid for p in drawn.prompts] == ["0.1", "1.1"]
    assert drawn.metrics["training/filter_groups/without_metric"] == 0.75


@pytest.mark.parametrize(
    "finishes,kept",
    [(["length", "length"], []), (["length", "stop"], ["0.0"]), (["stop", "stop"], ["0.0"])],
)
@pytest.mark.parametrize("filters", [True, False])
def test_a_group_of_which_nothing_is_trained_on_is_dropped(finishes, kept, filters):
    it, gen_batch = supply([[OTHER], [OTHER]], prompts=1)
    it._options = dataclasses.replace(it._options, filter_truncated=filters)
    ends, take = iter([*finishes, "stop", "stop"]), gen_batch.take

    def truncated(step):
        drawn = take(step)
        return dataclasses.replace(
            drawn, trajectories=[dataclasses.replace(t, finish=next(ends)) for t in drawn.trajectories]
        )

    gen_batch.take = truncated
    expected = (kept if filters else ["0.0"]) or ["1.0"]  # the next gen batch's, where nothing of the first is kept
    assert [p.uid for p in it.take(0).prompts] == expected


def test_a_branch_that_is_trained_on_keeps_its_group():
    cut = dataclasses.replace(trajectory("p"), finish="length")
    assert not trains([cut], [reward(1.0)], filter_truncated=True)
    assert trains([dataclasses.replace(cut, branches=(trajectory("p"),))], [reward(1.0)], filter_truncated=True)
    assert not trains([trajectory("p")], [FAILED], filter_truncated=False)


@pytest.mark.parametrize(
    "changes,said",
    [
        (dict(rollout__n=1), r"rollout\.n=1 generates one; raise rollout\.n"),
        (dict(rollout__mode="async"), r"take rollout\.mode=sync"),
        (dict(algorithm__filter_groups=False, data__gen_batch_size=8), r"data\.gen_batch_size"),
    ],
)
def test_what_dynamic_sampling_cannot_go_with(config, changes, said):
    config.algorithm.filter_groups, config.rollout.n = True, 2
    with pytest.raises(UserError, match=said):
        again(config, **changes)


GRADE = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return {}\n"


@pytest.fixture
def dynamic(small_run, tmp_path):
    """Two steps of two prompts from gen batches of three, by the engine in the process."""
    c = small_run
    (tmp_path / "grade.py").write_text(GRADE.format("float(len(solution_str) > 2)"))
    c.reward.function = str(tmp_path / "grade.py") + ":compute_score"
    c.rollout.name, c.rollout.n, c.rollout.logp_tolerance = "inprocess", 2, 1e-3
    c.algorithm.adv_estimator, c.algorithm.filter_groups, c.algorithm.max_num_gen_batches = "grpo", True, 0
    c.data.train_batch_size, c.data.gen_batch_size = 2, 3
    c.actor.positive_lm_coef, c.trainer.seed = 0.1, 3  # a seed by which a step needs another gen batch
    return again(c, trainer__total_training_steps=3)


def test_a_killed_run_resumes_to_the_bit(dynamic, quick_compilation, monkeypatch, tmp_path):
    train.train(dynamic)
    steps = read_metrics(pathlib.Path(dynamic.trainer.run_dir))[1:]
    assert len(steps) == 3 and all(m["train/num_prompts"] == 2 for m in steps)
    assert max(m["train/num_gen_batches"] for m in steps) > 1, "no step needed a second gen batch: nothing is shown"
    assert all(m["actor/positive_lm_loss"] > 0 for m in steps)
    assert all(m["actor/loss"] > m["actor/pg_loss"] for m in steps)
    assert all(m["critic/score/mean"] == 0.5 for m in steps), "a group of two that differ has one of each score"
    for function, at in ((train.ppo.learn, 2), (train.validate, 3)):
        stopped = dict(in_call_of=function, at=at, error=Stopped(0, "asked"))
        c = broken_off(dynamic, tmp_path / function.__name__, monkeypatch, **stopped)
        train.train(c)
        assert untimed(c.trainer.run_dir) == untimed(dynamic.trainer.run_dir), function
        assert weights(c.trainer.run_dir) == weights(dynamic.trainer.run_dir), function


def test_a_run_at_the_bound_learns_from_what_it_has(dynamic, quick_compilation):
    dynamic.data.gen_batch_size, dynamic.algorithm.max_num_gen_batches, dynamic.data.train_batch_size = 8, 1, 8
    settings.check(dynamic)
    train.train(dynamic)
    steps = read_metrics(pathlib.Path(dynamic.trainer.run_dir))[1:]
    assert all(0 < m["train/num_prompts"] < 8 and m["actor/grad_norm"] > 0 for m in steps)


PARTS = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    score = float(len(solution_str) > 2)
    return {"score": score, "acc": score} if ground_truth.endswith(tuple("13579")) else score
"""


def test_a_part_that_only_some_samples_have_ends_neither_a_run_nor_its_resume(
    dynamic, quick_compilation, monkeypatch, tmp_path
):
    """The resumed run begins with a gen batch of which no sample has it."""
    (tmp_path / "grade.py").write_text(PARTS)
    dynamic.data.gen_batch_size, dynamic.data.train_batch_size, dynamic.actor.ppo_mini_batch_size = 1, 1, 2
    c = again(dynamic, algorithm__filter_groups_metric="function_score/acc", trainer__total_training_steps=4)
    train.train(c)
    steps = read_metrics(pathlib.Path(c.trainer.run_dir))[1:]
    without = [m["training/filter_groups/without_metric"] for m in steps]
    assert 0.0 < np.mean(without) < 1.0
    at = 1 + without.index(1.0, 1)  # a step of gen batches without the part alone, after the first
    stopped = dict(in_call_of=train.ppo.learn, at=at, error=Stopped(0, "asked"))
    resumed = broken_off(c, tmp_path / "other", monkeypatch, **stopped)
    assert len(read_metrics(pathlib.Path(resumed.trainer.run_dir))[1:]) == at - 1
    train.train(resumed)
    assert untimed(resumed.trainer.run_dir) == untimed(c.trainer.run_dir)
    assert weights(resumed.trainer.run_dir) == weights(c.trainer.run_dir)


def test_a_part_that_the_run_lacks_is_refused_before_the_engine_starts(dynamic):
    dynamic.algorithm.filter_groups_metric = "rule_score"
    with pytest.raises(UserError, match=r"'rule_score' is no part of this run's reward; .* 'score', 'function_score'"):
        train.train(dynamic)
    assert not (pathlib.Path(dynamic.trainer.run_dir) / "config.json").exists()


BACKWARDS = "def backwards(prompts, epoch, seed):\n    return range(len(prompts))[::-1]\n"
SEEN = """
class backwards:
    def __init__(self, prompts, seed):
        self.n = len(prompts)
    def begin(self):
        return [0.0] * self.n
    def batch(self, state, size):
        return sorted(range(self.n), key=lambda i: (state[i], -i))[:size], state
    def update(self, state, indices, scores):
        return [total + sum(1 + sum(s) for j, s in zip(indices, scores) if i == j) for i, total in enumerate(state)]
"""


@pytest.mark.slow  # test_prefetch_resume.py resumes a curriculum, data/test_stream.py refuses another order
@pytest.mark.parametrize("mine", [BACKWARDS, SEEN])
def test_a_custom_order_is_resumed_with_its_own_alone(dynamic, quick_compilation, monkeypatch, tmp_path, mine):
    (tmp_path / "mine.py").write_text(mine)
    dynamic.data.sampler = f"{tmp_path}/mine.py:backwards"
    train.train(dynamic)
    c = broken_off(
        dynamic, tmp_path / "other", monkeypatch, in_call_of=train.ppo.learn, at=2, error=Stopped(0, "asked")
    )
    with pytest.raises(UserError, match=r"data\.sampler='' was '.*backwards' when the checkpoint was written"):
        train.train(again(c, data__sampler=""))
    train.train(c)
    assert untimed(c.trainer.run_dir) == untimed(dynamic.trainer.run_dir)
    assert weights(c.trainer.run_dir) == weights(dynamic.trainer.run_dir)
    with pytest.raises(UserError, match=r"data\.sampler=.* leave one empty"):
        again(c, data__mix="a=1")
