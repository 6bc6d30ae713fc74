"""Greedy accuracy on held-out prompts: sample, grade, count. Before, during and after training."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jppo.rewards.graders import Grader, grade
from jppo.rollout.sampler import Sampler, greedy
from jppo.structs import Prompt, Reward, Trajectory


def evaluate(
    sampler: Sampler,
    prompts: Sequence[Prompt],
    graders: Mapping[str, Grader],
    *,
    max_tokens: int,
    version: int,
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Metrics `val/...` of one greedy response a prompt, and the samples."""
    trajectories = sampler.generate(prompts, greedy(max_tokens), version=version)
    rewards = grade([t.text for t in trajectories], prompts, graders)
    metrics = {"val/score": mean_score(rewards)}
    metrics["val/reward_errors"] = float(sum(r.error is not None for r in rewards))
    sources = sorted({p.data_source for p in prompts})
    for source in sources if len(sources) > 1 else ():
        of_source = [r for r, p in zip(rewards, prompts, strict=True) if p.data_source == source]
        metrics[f"val/{source}/score"] = mean_score(of_source)
    metrics["val/response_length/mean"] = float(np.mean([t.sampled.sum() for t in trajectories]))
    metrics["val/truncated"] = float(np.mean([t.finish == "length" for t in trajectories]))
    return metrics, samples(prompts, trajectories, rewards)


def mean_score(rewards: Sequence[Reward]) -> float:
    """The mean over what was graded: a grader that failed is no 0; NaN where all failed."""
    scores = [r.score for r in rewards if r.error is None]
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
            "score": r.score if r.error is None else None,
            "parts": r.parts,
            "error": r.error,
            "finish": t.finish,
        }
        for p, t, r in zip(prompts, trajectories, rewards, strict=True)
    ]
