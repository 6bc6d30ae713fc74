"""A test on held-out prompts, with an engine that answers from a table."""

import dataclasses
import math
from concurrent.futures import Future

import numpy as np
import pytest

from jppo.rewards.graders import RulePart
from jppo.rewards.parts import Part, RewardSum, parse_weights
from jppo.rewards.pool import Pool
from jppo.rollout.protocol import greedy
from jppo.run import validation
from jppo.types import Prompt, Reward
from tests.make import trajectory


class Answers:
    """A Sampler that gives prepared answers and keeps what it was asked."""

    def __init__(self, texts):
        self.texts, self.asked = texts, []

    def generate(self, prompts, sampling, *, version, done=None):
        self.asked.append((sampling, version))
        asked = (p for p in prompts for _ in range(sampling.n))
        out = [
            trajectory(
                range(5), [0, 0, 1, 1, 1], p.uid, version=version, text=text, finish="stop" if text else "length"
            )
            for p, text in zip(asked, self.texts, strict=True)
        ]
        for number in reversed(range(len(out))):  # in any order
            done(number, out[number])
        return out

    def load(self, tensors, *, version):
        raise AssertionError("a test publishes nothing")

    def close(self):
        pass


def rules(sources):
    """The rules of these sources as the only part of the reward."""
    part = RulePart(sources, pool=Pool(1, timeout_s=60.0, memory_bytes=2**31))
    return RewardSum({"rule_score": part}, parse_weights("", ["rule_score"]), score_on_error=None)


def prompt(source, truth):
    return Prompt(f"{source}:1", source, "?", np.zeros(2, np.int32), truth, {})


def evaluated(texts, prompts, sampling=None):
    """The metrics and rows of these answers, n of each prompt beside each other."""
    how = greedy(7) if sampling is None else sampling
    reward_sum = rules({p.data_source for p in prompts})
    tested = validation.run_test(Answers(texts), prompts, reward_sum, sampling=how, version=4)
    return validation.metrics(tested), validation.rows(tested)


def test_scores_by_source_and_a_failed_grader_is_no_zero():
    prompts = [prompt("exact", "1"), prompt("exact", "2"), prompt("gsm8k", "3"), prompt("gsm8k", "three")]
    engine = Answers(["1", "", "#### 3", "#### 3"])
    tested = validation.run_test(engine, prompts, rules(["exact", "gsm8k"]), sampling=greedy(7), version=4)
    metrics, rows = validation.metrics(tested), validation.rows(tested)
    [(sampling, version)] = engine.asked
    assert (sampling.temperature, sampling.n, sampling.max_tokens, version) == (0.0, 1, 7, 4)
    assert metrics["val/score"] == 2 / 3 and metrics["val/reward_errors"] == 1.0
    assert metrics["val/score_se"] == pytest.approx(math.sqrt((2 * (1 / 3) ** 2 + (2 / 3) ** 2) / 2 / 3))
    assert metrics["val/exact/score"] == 0.5 and metrics["val/gsm8k/score"] == 1.0
    assert metrics["val/exact/score_se"] == 0.5 and "val/gsm8k/score_se" not in metrics, "of one prompt: not known"
    assert metrics["val/truncated"] == 0.25 and metrics["val/response_length/mean"] == 3.0
    assert [row["score"] for row in rows] == [1.0, 0.0, 1.0, None] and rows[3]["error"].startswith(
        "rule_score: ValueError"
    )


def test_a_test_whose_graders_all_fail_has_no_score():
    metrics, _ = evaluated(["1"], [prompt("gsm8k", "one")])
    assert math.isnan(metrics["val/score"])


FOUR = dataclasses.replace(greedy(7), temperature=1.0, n=4)


def test_several_responses_to_a_prompt():
    # The right answer of the first prompt is the commonest, of the second the rarest.
    texts = ["#### 3", "#### 3.0", "#### 5", "no", "#### 8", "#### 8", "#### 4", "#### 9"]
    metrics, rows = evaluated(texts, [prompt("gsm8k", "3"), prompt("gsm8k", "4")], FOUR)
    assert [row["answer"] for row in rows] == ["3", "3", "5", "", "8", "8", "4", "9"]
    assert [row["ground_truth"] for row in rows] == ["3"] * 4 + ["4"] * 4
    assert metrics["val/score"] == metrics["val/pass@1"] == 3 / 8 and metrics["val/score_se"] == 1 / 8
    assert metrics["val/pass@2"] == pytest.approx((5 / 6 + 3 / 6) / 2) and metrics["val/pass@4"] == 1.0
    assert metrics["val/best@4"] == 1.0 and metrics["val/worst@2"] == pytest.approx((1 / 6 + 0) / 2)
    assert metrics["val/maj@4"] == 0.5 and metrics["val/maj@4_se"] == 0.5
    # Of the first's pairs 3 3, 3 -, 3 - are won and 3 5, 3 5 tied; of the second's 4 8, 4 8, 4 9 tied.
    assert metrics["val/maj@2"] == pytest.approx((4 / 6 + 1.5 / 6) / 2)
    assert not [name for name in metrics if "gsm8k" in name], "one source is all of them"


def test_what_failed_is_left_out_of_its_prompt_and_no_zero():
    prompts = [prompt("exact", "1"), prompt("exact", "2")]
    tested = validation.run_test(Answers(["1", "1", "0", "2"] * 2), prompts, rules(["exact"]), sampling=FOUR, version=0)
    broken = dataclasses.replace(tested.rewards[2], score=-1.0, error="down")  # as reward.score_on_error has it
    tested.rewards[2] = broken
    metrics = validation.metrics(tested)
    assert metrics["val/reward_errors"] == 1.0
    assert metrics["val/score"] == pytest.approx((2 / 3 + 1 / 4) / 2)
    assert metrics["val/best@4"] == 1.0 and "val/best@4_se" not in metrics, "of the second prompt alone"
    assert math.isclose(metrics["val/worst@2"], (1 / 3 + 0) / 2)


def test_a_source_in_which_nobody_looks_for_answers_has_no_majority():
    class Length(Part):
        def submit(self, sample):
            future = Future()
            future.set_result(Reward(float(len(sample.text)), {}, None))
            return future

    reward_sum = RewardSum({"length": Length()}, parse_weights("", ["length"]), score_on_error=None)
    tested = validation.run_test(
        Answers(["a", "bb", "ccc", "dddd"]), [prompt("x", "1")], reward_sum, sampling=FOUR, version=0
    )
    metrics = validation.metrics(tested)
    assert metrics["val/best@4"] == 4.0 and metrics["val/best@2"] == pytest.approx((2 + 3 * 2 + 4 * 3) / 6)
    assert not [name for name in metrics if "maj" in name]


def test_batches_of_prompts_draw_different_numbers_and_keep_the_order():
    engine, seen = Answers(["1", "2"]), []
    prompts = [prompt("exact", str(i)) for i in (1, 2, 1, 2)]
    tested = validation.run_test(
        engine, prompts, rules(["exact"]), sampling=dataclasses.replace(greedy(3), seed=9), version=1, batch_size=2,
        watch=lambda: seen.append(1),
    )  # fmt: skip
    assert len(seen) == 4
    assert [r.score for r in tested.rewards] == [1.0] * 4
    assert [sampling.seed for sampling, _ in engine.asked] == [9, 11]


def test_what_is_shown_is_the_first_response_to_the_first_prompts():
    prompts = [prompt("exact", "1"), prompt("exact", "2"), prompt("exact", "3")]
    tested = validation.run_test(Answers(list("abcdefghijkl")), prompts, rules(["exact"]), sampling=FOUR, version=0)
    some = validation.first_responses(tested, 2)
    assert [row["response"] for row in some] == ["a", "e"] and validation.first_responses(tested, 0) == []
    assert validation.format_row(some[1]) == "  ? → e   (score 0; truth 2)"
    assert validation.format_row(some[1] | {"ground_truth": ""}) == "  ? → e   (score 0)"
