"""The log of a step's samples: metrics that need no device, under verl's names; rows of files; token records.

A token record has text, reward, value, advantage and log-ratios of each token of some responses.
"""

import collections
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jppo.algorithms import values
from jppo.data.tokenizer import pieces
from jppo.types import OVERFLOW, Array, Batch, Prompt, Reward, Trajectory

if TYPE_CHECKING:
    from jppo.run.start import Run


def sample_metrics(
    trajectories: Sequence[Trajectory], rewards: Sequence[Reward], greedy: Sequence[Reward] | None = None
) -> dict[str, float]:
    """Returns lengths and scores of samples and of remax's greedy responses, and counts, which include given responses.

    Without a graded sample there are only counts.
    """
    greedy_scores = [r.score for r in greedy or () if r.unusable is None]
    counts = {
        "reward/errors": float(sum(r.error is not None for r in rewards)),
        "perf/total_num_tokens": float(sum(len(t.tokens) for t in trajectories)),
        **_given_metrics([r for t, r in zip(trajectories, rewards, strict=True) if t.given]),
    }
    rewards = [r for t, r in zip(trajectories, rewards, strict=True) if not t.given]
    trajectories = [t for t in trajectories if not t.given]
    scores = np.array([r.score for r in rewards if r.unusable is None])
    lengths = np.array([t.sampled.sum() for t in trajectories])
    prompts = np.array([np.argmax(t.sampled) for t in trajectories])
    if not scores.size:
        return counts
    return {
        "reward_mean": float(scores.mean()),
        "critic/score/mean": float(scores.mean()),
        "critic/score/max": float(scores.max()),
        "critic/score/min": float(scores.min()),
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "response_length/min": float(lengths.min()),
        "response_length/clip_ratio": float(np.mean([t.finish == "length" for t in trajectories])),
        "prompt_length/mean": float(prompts.mean()),
        "prompt_length/max": float(prompts.max()),
        "prompt_length/min": float(prompts.min()),
        **({"critic/greedy/mean": float(np.mean(greedy_scores))} if greedy_scores else {}),
        **counts,
    } | _part_means(rewards)


def _given_metrics(rewards: Sequence[Reward]) -> dict[str, float]:
    """Returns the metrics of given responses; empty without any."""
    scores = [r.score for r in rewards if r.unusable is None]
    count = {"given/count": float(len(rewards))} if rewards else {}
    return count | ({"given/score/mean": float(np.mean(scores))} if scores else {})


def kept_token_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Returns the metrics of kept tokens, those to which the engine's truncation cut; {} if none are replayed."""
    ids = [t.kept[t.sampled] for episode in trajectories for t in (episode, *episode.branches) if t.kept is not None]
    first = np.concatenate([kept[:, 0] for kept in ids]) if ids else np.zeros(0)
    if not first.size:
        return {}
    sizes = np.concatenate([(kept >= 0).sum(axis=1) for kept in ids])
    return {
        "rollout/mask_tokens_mean": float(sizes[first >= 0].mean()) if (first >= 0).any() else 0.0,
        "rollout/mask_replayed": float((first >= 0).mean()),
        "rollout/mask_overflow": float((first == OVERFLOW).mean()),
    }


def conversation_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Returns the metrics `agent/...`; empty if no response was a conversation."""
    conversations = [(t, t.exchange) for t in trajectories if t.exchange is not None]
    if not conversations:
        return {}
    turns = [sum(branch.turns for branch in (t, *t.branches)) for t, _ in conversations]
    calls = sum(e.calls for _, e in conversations)
    # Not sampled, after the first that was: from tools and users.
    given_tokens = [int((~t.sampled[np.argmax(t.sampled) :]).sum()) if t.sampled.any() else 0 for t, _ in conversations]
    programs = [e.program_s for _, e in conversations if e.program_s is not None]
    program_metrics = {"agent/program_s/mean": float(np.mean(programs))} if programs else {}
    return program_metrics | {
        "agent/branches/mean": float(np.mean([1 + len(t.branches) for t, _ in conversations])),
        "agent/branches_left_out": float(sum(e.branches_left_out for _, e in conversations)),
        "agent/turns/mean": float(np.mean(turns)),
        "agent/turns/max": float(max(turns)),
        "agent/tool_calls": float(calls),
        "agent/tool_errors": float(sum(e.call_errors for _, e in conversations)),
        "agent/tool_s/mean": sum(e.call_s for _, e in conversations) / max(calls, 1),
        "agent/given_tokens/mean": float(np.mean(given_tokens)),
        "agent/faults": float(sum(e.fault is not None for _, e in conversations)),
    }


def source_means(rewards: Sequence[Reward], sources: Sequence[str]) -> dict[str, float]:
    """Returns the mean score of each data source, if the step has several; `sources` has each sample's."""
    usable = [
        (f"train/{source}/score", r.score) for r, source in zip(rewards, sources, strict=False) if r.unusable is None
    ]
    means = _means(usable) if len(set(sources)) > 1 else {}
    return dict(sorted(means.items()))


def _part_means(rewards: Sequence[Reward]) -> dict[str, float]:
    """Returns the mean of every part of the reward over the samples that have it."""
    return _means((f"reward/{name}/mean", value) for reward in rewards for name, value in reward.parts.items())


def _means(named: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Returns the mean of the numbers of each name."""
    numbers = collections.defaultdict[str, list[float]](list)
    for name, value in named:
        numbers[name].append(value)
    return {name: float(np.mean(values)) for name, values in numbers.items()}


def sample_rows(
    prompts: Sequence[Prompt], trajectories: Sequence[Trajectory], rewards: Sequence[Reward]
) -> list[dict[str, Any]]:
    """Returns rows of the samples file, each with its prompt; only given responses have `given`."""
    return [
        {
            "uid": p.uid,
            "data_source": p.data_source,
            "prompt": p.messages,
            "response": t.text,
            "ground_truth": p.ground_truth,
            "answer": r.answer,
            "score": None if math.isnan(r.score) else r.score,
            "parts": r.parts,
            "earned": r.earned,
            "error": r.error,
            "unusable": r.unusable,
            "finish": t.finish,
            **({"given": True} if t.given else {}),
        }
        for p, t, r in zip(prompts, trajectories, rewards, strict=True)
    ]


def record_tokens(run: "Run", step: int, data: Batch, trajectories: Sequence[Trajectory], value_norm: Any) -> None:
    """Writes samples/tokens_STEP.jsonl of `trainer.token_samples` responses; `value_norm` is from before the step."""
    chosen = choose_responses(np.asarray(data.mask)[: len(trajectories)], run.c.trainer.token_samples)
    if run.hosts.first and chosen:
        arrays_by_name = collect_arrays(data, chosen, value_norm, bypass=run.learner.recipe.bypass)
        rows = make_records(data, trajectories, chosen, arrays_by_name, lambda ids: pieces(run.inputs.tokenizer, ids))
        run.logger.samples(f"tokens_{step}", rows)


def choose_responses(mask: np.ndarray, count: int) -> list[int]:  # [B, L] bool
    """Returns at most `count` evenly spaced responses among those with a trained token."""
    usable = np.flatnonzero(mask.any(1))
    places = np.linspace(0, len(usable) - 1, min(count, len(usable))).round().astype(int)
    return [int(i) for i in usable[places]]


def collect_arrays(data: Batch, chosen: Sequence[int], value_norm: Any, *, bypass: bool) -> dict[str, np.ndarray]:
    """Returns the recorded quantities of the chosen responses, each [chosen, L], by name.

    Values are on the scale of the rewards. A log-ratio is the old policy's log-prob minus the engine's or the
    reference's. With `bypass` the engine's log-prob is the old policy's, so there is none.
    """

    def select(x: Array | None) -> Any:
        return None if x is None else np.asarray(x)[list(chosen)]

    def subtract(x: Array | None, y: Array | None) -> Any:
        return None if x is None or y is None else select(x) - select(y)

    value, old_logprob = select(data.get("value")), data.get("old_logprob")
    if value is not None and value_norm is not None:
        value = np.asarray(values.denormalise(value, np.asarray(value_norm)))
    arrays = {
        "reward": select(data.get("reward")),
        "value": value,
        "advantage": select(data.get("advantage")),
        "log_ratio_engine": None if bypass else subtract(old_logprob, data.rollout_logprob),
        "log_ratio_reference": subtract(old_logprob, data.get("ref_logprob")),
    }
    return {name: x for name, x in arrays.items() if x is not None}


def make_records(
    data: Batch,
    trajectories: Sequence[Trajectory],
    chosen: Sequence[int],
    arrays_by_name: dict[str, np.ndarray],
    split: Callable[[list[int]], list[str]],
) -> list[dict[str, Any]]:
    """Returns the token records of the chosen responses: in each, a list for every array, None where not trained on.

    `sample` is the response's line in samples/step_STEP.jsonl, from 0. A given response has no log-ratio to the engine.
    """
    rows = []
    for i, b in enumerate(chosen):
        t = trajectories[b]
        prompt, ids = (part.tolist() for part in np.split(t.tokens, [data.first[b] + 1]))
        trained = data.mask[b, : len(ids)].tolist()
        row = {"sample": b, "uid": t.uid, "prompt_tokens": prompt, "tokens": ids}
        row |= {"pieces": split(ids), "trained": trained}
        arrays = {name: x for name, x in arrays_by_name.items() if not (t.given and name == "log_ratio_engine")}
        rows.append(row | {name: _numbers(x[i], trained) for name, x in arrays.items()})
    return rows


def _numbers(x: np.ndarray, trained: Sequence[bool]) -> list[float | None]:
    """Returns f32 numbers as the shortest decimals that read back the same; None where a token is not trained on."""
    return [float(text) if is_trained else None for text, is_trained in zip(x.astype(str), trained, strict=False)]
