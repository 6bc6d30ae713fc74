"""Prefetched samples in a checkpoint: prompts, finished responses and rewards of future steps.

state(...)      of this host, of JSON types
merged(states)  of all hosts, which may be at different points
steps(state)    the inverse
fitted(...)     the same for a run whose settings may have changed
unanswered(...) the state without responses
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from jppo.runlog import trajectories
from jppo.settings import UserError
from jppo.types import Reward, Trajectory


@dataclasses.dataclass(frozen=True)
class Found:
    """Responses of one kind, sampled or greedy, by index: `per_prompt` of each prompt, consecutively."""

    per_prompt: int
    responses: Mapping[int, Trajectory]
    rewards: Mapping[int, Reward]

    def only(self, numbers: Collection[int]) -> "Found":
        """Returns those with the given indices."""
        responses = {n: t for n, t in self.responses.items() if n in numbers}
        return Found(self.per_prompt, responses, {n: r for n, r in self.rewards.items() if n in responses})


@dataclasses.dataclass(frozen=True)
class Step:
    """The prompts of one step that are not trained on yet."""

    step: int
    version: int  # of the weights at the request
    indices: np.ndarray  # [N] i64, of the step's prompts
    after: dict[str, Any]  # the position in the data after them
    left: frozenset[int]  # the remaining prompts
    found: tuple[Found, ...]  # samples, then greedy responses if there are any

    def each(self, change: Callable[[Found], Found]) -> "Step":
        """Returns the step with changed responses."""
        return dataclasses.replace(self, found=tuple(change(way) for way in self.found))

    def numbers(self, found: Found) -> set[int]:
        """Returns the indices of responses to the remaining prompts."""
        return {g * found.per_prompt + j for g in self.left for j in range(found.per_prompt)}


def state(about: Mapping[str, Any], steps: Sequence[Step]) -> dict[str, Any]:
    """Returns the state for a checkpoint: `about`, and the steps with responses to the remaining prompts."""
    return {**about, "steps": [_packed(one) for one in steps]}


def steps(state: Mapping[str, Any]) -> list[Step]:
    """Returns the steps of a state, in order."""
    found = [_unpacked(one) for one in state["steps"]]
    return sorted(found, key=lambda one: one.step)


def merged(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merges the states of all hosts; a step requested by only some hosts has their responses."""
    if len(states) == 1 or not any(states):
        return states[0]
    by_step: dict[int, Step] = {}
    for one in (one for state in states if state for one in steps(state)):
        by_step[one.step] = _joined(by_step[one.step], one) if one.step in by_step else one
    furthest = max((state for state in states if state), key=lambda state: state["next"])
    return state({k: v for k, v in furthest.items() if k != "steps"}, [by_step[step] for step in sorted(by_step)])


def fitted(
    state: Mapping[str, Any], kind: Mapping[str, Any], *, first: int, staleness: int, partial: bool
) -> tuple[list[Step], list[str]]:
    """Returns the steps of a state for a run of this kind that begins with step `first`, and console lines.

    Drops responses that the run would sample differently or that are too old, and rewards by other graders. A run
    without `partial` gets whole steps, the last one with the rest. UserError if the indices have another meaning.
    """
    _require_alike(state, kind)
    kept = steps(state)
    there = _count(kept)
    if not partial:
        kept = _regrouped(kept, first, state["cursor"])
    if state["sampling"] != kind["sampling"]:
        kept = [one.each(lambda way: way.only(())) for one in kept]
    kept = [_young(one, (first if partial else one.step) - staleness) for one in kept]
    if state["graders"] != kind["graders"]:
        kept = [one.each(lambda way: dataclasses.replace(way, rewards={})) for one in kept]
    count = _count(kept)
    again = "drawn again: too old for rollout.max_staleness, or sampled with other settings"
    said = ((count, "not drawn again"), (there - count, again))
    return kept, [f"{n} samples that the checkpoint has of the next steps are {what}" for n, what in said if n]


def unanswered(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the state with its prompts alone: a resumed run requests all of their responses again."""
    if not state:
        return {}
    return {**state, "steps": [_packed(one.each(lambda way: way.only(()))) for one in steps(state)]}


def _require_alike(state: Mapping[str, Any], kind: Mapping[str, Any]) -> None:
    for name in ("data.train_batch_size", "rollout.n", "greedy"):
        if state[name] != kind[name]:
            what = "algorithm.adv_estimator samples greedy responses" if name == "greedy" else name
            raise UserError(
                f"{what}={kind[name]!r} was {state[name]!r} when the checkpoint was written, and its next samples"
                " depend on it; use the old value, or start a new run with another trainer.run_dir or"
                " trainer.resume_mode=disable"
            )


def _regrouped(kept: Sequence[Step], first: int, after: dict[str, Any]) -> list[Step]:
    """Returns the remaining prompts in order, as steps from `first` on; `kept` if they already are whole steps.

    The last of them has the prompts that are left over, fewer than a step's.
    """
    whole = all(len(one.left) == len(one.indices) for one in kept)
    if whole and [one.step for one in kept] == list(range(first, first + len(kept))):
        return list(kept)
    size = max((len(one.indices) for one in kept), default=1)
    pairs = [(one, group) for one in kept for group in sorted(one.left)]
    chunks = [pairs[i : i + size] for i in range(0, len(pairs), size)]
    return [
        Step(
            step=first + i,
            version=min(one.version for one, _ in chunk),
            indices=np.array([one.indices[group] for one, group in chunk]),
            after=after,
            left=frozenset(range(len(chunk))),
            found=tuple(_renumbered(chunk, way) for way in range(len(kept[0].found))),
        )
        for i, chunk in enumerate(chunks)
    ]


def _young(one: Step, oldest: int) -> Step:
    """Returns the step without responses that have a token from weights older than `oldest`."""

    def fit(t: Trajectory) -> bool:
        return all(bool((other.version[other.sampled] >= oldest).all()) for other in (t, *t.branches))

    return one.each(lambda way: way.only([n for n, t in way.responses.items() if fit(t)]))


def _count(kept: Sequence[Step]) -> int:
    return sum(len(way.responses) for one in kept for way in one.found)


def _renumbered(chunk: Sequence[tuple[Step, int]], way: int) -> Found:
    responses, rewards = dict[int, Trajectory](), dict[int, Reward]()
    for new, (one, group) in enumerate(chunk):
        found = one.found[way]
        for j in range(found.per_prompt):
            old, number = group * found.per_prompt + j, new * found.per_prompt + j
            responses |= {number: found.responses[old]} if old in found.responses else {}
            rewards |= {number: found.rewards[old]} if old in found.rewards else {}
    return Found(chunk[0][0].found[way].per_prompt, responses, rewards)


def _joined(a: Step, b: Step) -> Step:
    found = [
        Found(x.per_prompt, {**x.responses, **y.responses}, {**x.rewards, **y.rewards})
        for x, y in zip(a.found, b.found, strict=True)
    ]
    return dataclasses.replace(a, left=a.left | b.left, found=tuple(found))


def _packed(one: Step) -> dict[str, Any]:
    ways = [way.only(one.numbers(way)) for way in one.found]
    return {
        "step": one.step,
        "version": one.version,
        "indices": one.indices.tolist(),
        "after": one.after,
        "left": sorted(one.left),
        "found": [
            {
                "per_prompt": way.per_prompt,
                "numbers": sorted(way.responses),
                "responses": trajectories.serialise([way.responses[number] for number in sorted(way.responses)]),
                "rewards": [[number, dataclasses.asdict(reward)] for number, reward in sorted(way.rewards.items())],
            }
            for way in ways
        ],
    }


def _unpacked(one: Mapping[str, Any]) -> Step:
    found = [
        Found(
            way["per_prompt"],
            dict(zip(way["numbers"], trajectories.deserialise(way["responses"]), strict=True)),
            {number: trajectories.reward_of(reward) for number, reward in way["rewards"]},
        )
        for way in one["found"]
    ]
    return Step(
        one["step"], one["version"], np.array(one["indices"]), one["after"], frozenset(one["left"]), tuple(found)
    )
