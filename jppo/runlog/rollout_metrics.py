"""The metrics of a step's samples and rewards that need no device, under verl's names."""

from collections.abc import Sequence

import numpy as np

from jppo.types import OVERFLOW, Reward, Trajectory


def sample_metrics(
    trajectories: Sequence[Trajectory], rewards: Sequence[Reward], greedy: Sequence[Reward] | None = None
) -> dict[str, float]:
    """Returns lengths and scores of samples and of remax's greedy responses; at least one sample must be graded."""
    best = [r.score for r in greedy or () if r.unusable is None]
    scores = np.array([r.score for r in rewards if r.unusable is None])
    lengths = np.array([t.sampled.sum() for t in trajectories])
    whole = np.array([len(t.tokens) for t in trajectories])
    prompts = np.array([np.argmax(t.sampled) for t in trajectories])
    return {
        "reward_mean": float(scores.mean()),
        "critic/score/mean": float(scores.mean()),
        "critic/score/max": float(scores.max()),
        "critic/score/min": float(scores.min()),
        "reward/errors": float(sum(r.error is not None for r in rewards)),
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "response_length/min": float(lengths.min()),
        "response_length/clip_ratio": float(np.mean([t.finish == "length" for t in trajectories])),
        "prompt_length/mean": float(prompts.mean()),
        "prompt_length/max": float(prompts.max()),
        "prompt_length/min": float(prompts.min()),
        "perf/total_num_tokens": float(whole.sum()),
        **({"critic/greedy/mean": float(np.mean(best))} if best else {}),
    } | part_means(rewards)


def mask_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Returns the metrics of kept tokens; empty if none are replayed."""
    rows = [t.kept[t.sampled] for one in trajectories for t in (one, *one.branches) if t.kept is not None]
    first = np.concatenate([kept[:, 0] for kept in rows]) if rows else np.zeros(0)
    if not first.size:
        return {}
    sizes = np.concatenate([(kept >= 0).sum(axis=1) for kept in rows])
    return {
        "rollout/mask_tokens_mean": float(sizes[first >= 0].mean()) if (first >= 0).any() else 0.0,
        "rollout/mask_replayed": float((first >= 0).mean()),
        "rollout/mask_overflow": float((first == OVERFLOW).mean()),
    }


def conversation_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Returns the metrics `agent/...`; empty if no response was a conversation."""
    held = [(t, t.exchange) for t in trajectories if t.exchange is not None]
    if not held:
        return {}
    turns = [sum(one.turns for one in (t, *t.branches)) for t, _ in held]
    calls = sum(e.calls for _, e in held)
    given = [int((~t.sampled[np.argmax(t.sampled) :]).sum()) if t.sampled.any() else 0 for t, _ in held]
    programs = [e.program_s for _, e in held if e.program_s is not None]
    of_programs = {"agent/program_s/mean": float(np.mean(programs))} if programs else {}
    return of_programs | {
        "agent/branches/mean": float(np.mean([1 + len(t.branches) for t, _ in held])),
        "agent/branches_left_out": float(sum(e.branches_left_out for _, e in held)),
        "agent/turns/mean": float(np.mean(turns)),
        "agent/turns/max": float(max(turns)),
        "agent/tool_calls": float(calls),
        "agent/tool_errors": float(sum(e.call_errors for _, e in held)),
        "agent/tool_s/mean": sum(e.call_s for _, e in held) / max(calls, 1),
        "agent/given_tokens/mean": float(np.mean(given)),
        "agent/faults": float(sum(e.fault is not None for _, e in held)),
    }


def source_means(rewards: Sequence[Reward], sources: Sequence[str]) -> dict[str, float]:
    """Returns the mean score of each data source, if the step has several; `sources` has each sample's."""
    found: dict[str, list[float]] = {}
    for reward, source in zip(rewards, sources, strict=False):
        if reward.unusable is None:
            found.setdefault(f"train/{source}/score", []).append(reward.score)
    several = len(set(sources)) > 1
    return {name: float(np.mean(found[name])) for name in sorted(found)} if several else {}


def part_means(rewards: Sequence[Reward]) -> dict[str, float]:
    """Returns the mean of every part of the reward over the samples that have it."""
    found: dict[str, list[float]] = {}
    for reward in rewards:
        for name, value in reward.parts.items():
            found.setdefault(f"reward/{name}/mean", []).append(value)
    return {name: float(np.mean(values)) for name, values in found.items()}
