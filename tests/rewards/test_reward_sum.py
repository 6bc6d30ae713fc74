"""Several parts to one reward: weights by part and source, errors, and samples that come in any order."""

import dataclasses
import math
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest

from jppo.errors import UserError
from jppo.rewards.parts import ConversationPart, Part, RewardSum, failed, parse_weights
from jppo.types import Exchange, Reward
from tests.make import sample


class Table(Part):
    """A part that looks scores up; at once, or all of them when it is flushed."""

    def __init__(self, scores, *, late=False):
        self.scores, self.late, self.asked, self.waiting, self.closed = scores, late, [], [], 0

    def submit(self, sample):
        self.asked.append(sample.text)
        future = Future()
        self.waiting.append((future, self.scores[sample.text]))
        if not self.late:
            self.flush()
        return future

    def flush(self):
        while self.waiting:
            future, found = self.waiting.pop()
            future.set_result(found if isinstance(found, Reward) else Reward(found, {"raw": found * 10}, None))

    def close(self):
        self.closed += 1


def reward_sum(parts, weights="", on_error=None):
    return RewardSum(parts, parse_weights(weights, list(parts)), score_on_error=on_error)


def test_a_reward_is_the_weighted_sum_and_keeps_every_part():
    both = reward_sum({"rule": Table({"x": 1.0}), "judge": Table({"x": 0.25}, late=True)}, "rule=2,judge=-0.5")
    [found] = both.grade([sample("x")])
    assert found.score == 2 * 1.0 - 0.5 * 0.25 and found.error is None
    assert found.parts == {"rule": 1.0, "judge": 0.25, "rule/raw": 10.0, "judge/raw": 2.5}
    [alone] = reward_sum({"rule": Table({"x": 0.5})}).grade([sample("x")])
    assert alone.score == 0.5 and alone.parts == {"rule": 0.5, "rule/raw": 5.0}


def test_sources_have_weights_of_their_own_and_may_leave_a_part_out():
    rule, judge = Table({"x": 1.0, "y": 1.0}), Table({"x": 0.5, "y": 0.5})
    found = reward_sum({"rule": rule, "judge": judge}, "rule=1,judge=2,b:judge=off,b:rule=3").grade(
        [sample("x", source="a"), sample("y", source="b")]
    )
    assert [r.score for r in found] == [2.0, 3.0]
    assert judge.asked == ["x"] and found[1].parts == {"rule": 1.0, "rule/raw": 10.0}


def test_an_episode_that_failed_is_scored_by_no_other_part():
    judge, fault = Table({"x": 0.5, "y": 0.5}), Exchange(0, 0, 0.0, 0.0, "killed")
    both = reward_sum({"judge": judge, "agent_score": ConversationPart()})
    failed, found = both.grade([dataclasses.replace(sample("x"), exchange=fault), sample("y")])
    assert judge.asked == ["y"] and found.score == 0.5
    assert failed.error == "agent_score: killed" and math.isnan(failed.score)


@pytest.mark.parametrize("weights", ["judge=1,agent_score=off", "judge=1,agent_score=off,gsm8k:judge=off"])
@pytest.mark.parametrize("on_error,score", [(None, math.nan), (-1.0, -1.0)])
def test_an_episode_that_failed_is_an_error_if_no_part_reads_it(weights, on_error, score):
    judge, fault = Table({"x": 0.0}), Exchange(0, 0, 0.0, 0.0, "killed")
    parts = {"judge": judge, "agent_score": ConversationPart()}
    one = dataclasses.replace(sample("x", source="gsm8k"), exchange=fault)
    [found] = reward_sum(parts, weights, on_error=on_error).grade([one])
    np.testing.assert_equal(found.score, score)
    assert found.error == "conversation: killed" and found.parts == {} and judge.asked == []
    assert found.unusable == (None if on_error else "not graded: conversation: killed")


def test_the_answer_is_that_of_the_part_that_looks_for_one():
    rule, judge = Table({"x": Reward(1.0, {}, None, "7")}), Table({"x": 0.5})
    assert reward_sum({"judge": judge, "rule": rule}).grade([sample("x")])[0].answer == "7"
    assert reward_sum({"judge": judge}).grade([sample("x")])[0].answer is None
    failing = Table({"x": Reward(float("nan"), {}, "down")})
    assert reward_sum({"rule": rule, "judge": failing}).grade([sample("x")])[0].answer == "7"


def test_a_weight_of_0_scores_and_counts_nothing():
    [found] = reward_sum({"rule": Table({"x": 1.0}), "judge": Table({"x": 0.5})}, "rule=1,judge=0").grade([sample("x")])
    assert found.score == 1.0 and found.parts["judge"] == 0.5


@pytest.mark.parametrize("on_error,score", [(None, math.nan), (0.0, 0.0), (-1.0, -1.0)])
def test_an_error_of_one_part_is_the_samples_and_no_zero(on_error, score):
    parts = {"rule": Table({"x": 1.0, "y": 1.0}), "judge": Table({"x": failed("no score"), "y": 0.5})}
    bad, good = reward_sum(parts, on_error=on_error).grade([sample("x"), sample("y")])
    np.testing.assert_equal(bad.score, score)
    assert bad.error == "judge: no score" and bad.parts == {"rule": 1.0, "rule/raw": 10.0}
    assert good.score == 1.5 and good.error is None


def test_samples_come_in_any_order_from_any_thread_and_each_is_scored_once():
    rng = np.random.default_rng(0)
    scores = {str(i): float(i) for i in range(200)}
    part = Table(scores)
    lock = threading.Lock()
    submit = part.submit

    def guarded(one):
        time.sleep(rng.random() / 1000)
        with lock:
            return submit(one)

    part.submit = guarded
    grading = reward_sum({"rule": part}).begin()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: grading.submit(i, sample(str(i))), rng.permutation(200)))
    assert [r.score for r in grading.collect()] == list(scores.values())
    assert sorted(part.asked, key=int) == list(scores)
    with pytest.raises(ValueError, match="submitted twice"):
        grading.submit(3, sample("3"))


def test_all_parts_are_closed():
    parts = {"rule": Table({}), "judge": Table({})}
    reward_sum(parts).close()
    assert [part.closed for part in parts.values()] == [1, 1]


@pytest.mark.parametrize(
    "text,said",
    [
        ("rule", "PART=NUMBER"),
        ("rule=x,judge=1", "end with a number"),
        ("rule=nan,judge=1", "end with a number"),
        ("speed=1,rule=1,judge=1", "parts of this run are rule, judge"),
        ("rule=1", "has no weight for judge"),
        ("rule=1,rule=2,judge=1", "has a duplicate"),
        ("a:speed=1", "parts of this run"),
    ],
)
def test_weights_that_cannot_be(text, said):
    with pytest.raises(UserError, match=said) as e:
        parse_weights(text, ["rule", "judge"])
    assert "reward.weights" in str(e.value) and "\n" not in str(e.value)


def test_weights():
    assert parse_weights("", ["rule"]).of("any") == {"rule": 1.0}
    assert parse_weights("judge=1", ["rule", "judge"], optional=["rule"]).of("any") == {"judge": 1.0}
    only = parse_weights("judge=off,talk:judge=0.5,rule=1", ["rule", "judge"])
    assert only.of("math") == {"rule": 1.0} and only.of("talk") == {"rule": 1.0, "judge": 0.5}
    assert parse_weights("openai/gsm8k:rule=2,rule=1", ["rule"]).of("openai/gsm8k") == {"rule": 2.0}
