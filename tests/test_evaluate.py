"""The greedy test, with an engine that answers from a table."""

import math

import numpy as np

from jppo.evaluate import evaluate
from jppo.rewards.compose import Panel, parse_weights
from jppo.rewards.graders import RulePart
from jppo.rewards.pool import Pool
from jppo.structs import Prompt, Trajectory


class Answers:
    """A Sampler that gives prepared answers and keeps what it was asked."""

    def __init__(self, texts):
        self.texts, self.asked = texts, []

    def generate(self, prompts, sampling, *, version, done=None):
        self.asked.append((sampling, version))
        out = [
            Trajectory(
                uid=p.uid,
                tokens=np.arange(5, dtype=np.int32),
                sampled=np.array([False, False, True, True, True]),
                logprob=np.zeros(5, np.float32),
                version=np.full(5, version, np.int32),
                text=text,
                finish="length" if text == "" else "stop",
                turns=1,
            )
            for p, text in zip(prompts, self.texts, strict=True)
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
    part = RulePart(sources, pool=Pool(1, timeout_s=5.0, memory_bytes=2**31))
    return Panel({"rule_score": part}, parse_weights("", ["rule_score"]), score_on_error=None)


def prompt(source, truth):
    return Prompt(f"{source}:1", source, "?", np.zeros(2, np.int32), truth, {})


def test_scores_by_source_and_a_failed_grader_is_no_zero():
    prompts = [prompt("exact", "1"), prompt("exact", "2"), prompt("gsm8k", "3"), prompt("gsm8k", "three")]
    engine = Answers(["1", "", "#### 3", "#### 3"])
    metrics, rows = evaluate(engine, prompts, rules(["exact", "gsm8k"]), max_tokens=7, version=4)
    [(sampling, version)] = engine.asked
    assert (sampling.temperature, sampling.n, sampling.max_tokens, version) == (0.0, 1, 7, 4)
    assert metrics["val/score"] == 2 / 3 and metrics["val/reward_errors"] == 1.0
    assert metrics["val/exact/score"] == 0.5 and metrics["val/gsm8k/score"] == 1.0
    assert metrics["val/truncated"] == 0.25 and metrics["val/response_length/mean"] == 3.0
    assert [row["score"] for row in rows] == [1.0, 0.0, 1.0, None] and rows[3]["error"].startswith(
        "rule_score: ValueError"
    )


def test_a_test_whose_graders_all_fail_has_no_score():
    metrics, _ = evaluate(Answers(["1"]), [prompt("gsm8k", "one")], rules(["gsm8k"]), max_tokens=1, version=0)
    assert math.isnan(metrics["val/score"])
