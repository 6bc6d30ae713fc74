"""Greedy accuracy on held-out prompts: sample, grade, count. Before, during and after training."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jppo.rewards.compose import Grading, Panel
from jppo.rewards.parts import Sample
from jppo.rollout.sampler import Sampler, greedy
from jppo.structs import Prompt, Reward, Sampling, Trajectory


def evaluate(
    sampler: Sampler,
    prompts: Sequence[Prompt],
    panel: Panel,
    *,
    max_tokens: int,
    version: int,
    batch_size: int = -1,
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Metrics `val/...` of one greedy response a prompt, and the samples; `batch_size` prompts at once (-1: all)."""
    size = max(1, len(prompts)) if batch_size == -1 else batch_size
    trajectories, rewards = [], []
    for first in range(0, len(prompts), size):
        some = prompts[first : first + size]
        drawn, grading = sample(sampler, some, panel, greedy(max_tokens), version=version)
        trajectories += drawn
        rewards += grading.collect()
    metrics = {"val/score": mean_score(rewards)}
    metrics["val/reward_errors"] = float(sum(r.error is not None for r in rewards))
    sources = sorted({p.data_source for p in prompts})
    for source in sources if len(sources) > 1 else ():
        of_source = [r for r, p in zip(rewards, prompts, strict=True) if p.data_source == source]
        metrics[f"val/{source}/score"] = mean_score(of_source)
    metrics["val/response_length/mean"] = float(np.mean([t.sampled.sum() for t in trajectories]))
    metrics["val/truncated"] = float(np.mean([t.finish == "length" for t in trajectories]))
    return metrics, samples(prompts, trajectories, rewards)


def sample(
    sampler: Sampler, prompts: Sequence[Prompt], panel: Panel, sampling: Sampling, *, version: int
) -> tuple[list[Trajectory], Grading]:
    """Responses to the prompts; their rewards have been on their way since each of them was there."""
    grading = panel.begin()

    def done(number: int, t: Trajectory) -> None:
        one = Sample(prompts[number // sampling.n], t.text, int(t.sampled.sum()), t.finish)
        grading.submit(number, one)

    return sampler.generate(prompts, sampling, version=version, done=done), grading


def mean_score(rewards: Sequence[Reward]) -> float:
    """The mean over what was graded: a grader that failed is no 0; NaN where all failed."""
    scores = [r.score for r in rewards if not math.isnan(r.score)]
    return float(np.mean(scores)) if scores else float("nan")


def samples(
    prompts: Sequence[Prompt], trajectories: Sequence[Trajectory], rewards: Sequence[Reward]
) -> list[dict[str, Any]]:
    """What the samples file says of each response."""
    return [
        {
            "uid": p.uid,
            "prompt": p.messages,
            "response": t.text,
            "ground_truth": p.ground_truth,
            "score": None if math.isnan(r.score) else r.score,
            "parts": r.parts,
            "error": r.error,
            "finish": t.finish,
        }
        for p, t, r in zip(prompts, trajectories, rewards, strict=True)
    ]
