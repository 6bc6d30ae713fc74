"""The samples of steps to come, as a checkpoint keeps them: of which prompts, what is there, and what was graded.

state(...)      of this host, of JSON types
merged(states)  of all hosts, which may be at different points
steps(state)    back again
fitted(...)     the same for a run whose settings may have changed
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from jppo.config import UserError
from jppo.io import trajectories
from jppo.structs import Reward, Trajectory


@dataclasses.dataclass(frozen=True)
class Found:
    """Responses of one kind, sampled or greedy, by their number: `per_prompt` of each prompt, one after the other."""

    per_prompt: int
    responses: Mapping[int, Trajectory]
    rewards: Mapping[int, Reward]

    def only(self, numbers: Collection[int]) -> "Found":
        """Those of the numbers."""
        responses = {n: t for n, t in self.responses.items() if n in numbers}
        return Found(self.per_prompt, responses, {n: r for n, r in self.rewards.items() if n in responses})


@dataclasses.dataclass(frozen=True)
class Step:
    """The prompts of one step that are not learned from yet."""

    step: int
    version: int  # of the weights when they were asked for
    indices: np.ndarray  # [N] i64, of the step's prompts
    after: dict[str, Any]  # the place in the data behind them
    left: frozenset[int]  # which of them
    found: tuple[Found, ...]  # samples, then greedy responses if there are any

    def each(self, change: Callable[[Found], Found]) -> "Step":
        """The step with other responses."""
        return dataclasses.replace(self, found=tuple(change(way) for way in self.found))

    def numbers(self, found: Found) -> set[int]:
        """The responses to the prompts that are left."""
        return {g * found.per_prompt + j for g in self.left for j in range(found.per_prompt)}


def state(about: Mapping[str, Any], steps: Sequence[Step]) -> dict[str, Any]:
    """What a checkpoint keeps: `about`, and the steps with what is there for the prompts that are left."""
    return {**about, "steps": [_packed(one) for one in steps]}


def steps(state: Mapping[str, Any]) -> list[Step]:
    """The steps of a state, in order."""
    found = [_unpacked(one) for one in state["steps"]]
    return sorted(found, key=lambda one: one.step)


def merged(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One state of all hosts: of a step that only some have asked for yet, what these have."""
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
    """The steps of a state for a run of this kind that begins with step `first`, and lines for the console.

    Responses that the run would draw otherwise are left out, as are those that would be too old, and rewards by other
    graders. A run that takes its prompts step by step gets whole steps. UserError where the numbers mean nothing.
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
    again = "drawn again: too old for rollout.max_staleness, or by other settings of sampling"
    said = ((count, "not drawn again"), (there - count, again))
    return kept, [f"{n} samples that the checkpoint has of the next steps are {what}" for n, what in said if n]


def _require_alike(state: Mapping[str, Any], kind: Mapping[str, Any]) -> None:
    for name in ("data.train_batch_size", "rollout.n", "greedy"):
        if state[name] != kind[name]:
            what = "algorithm.adv_estimator draws greedy responses" if name == "greedy" else name
            raise UserError(
                f"{what}={kind[name]!r} was {state[name]!r} when the checkpoint was written, whose samples of the next"
                " steps were drawn so; give the old value, or begin anew with another trainer.run_dir or"
                " trainer.resume_mode=disable"
            )


def _regrouped(kept: Sequence[Step], first: int, after: dict[str, Any]) -> list[Step]:
    """The prompts that are left, in their order, as whole steps from `first` on; `kept` where they are such already."""
    whole = all(len(one.left) == len(one.indices) for one in kept)
    if whole and [one.step for one in kept] == list(range(first, first + len(kept))):
        return list(kept)
    size = max((len(one.indices) for one in kept), default=1)
    pairs = [(one, group) for one in kept for group in sorted(one.left)]
    chunks = [pairs[i : i + size] for i in range(0, len(pairs) - size + 1, size)]
    return [
        Step(
            step=first + i,
            version=min(one.version for one, _ in chunk),
            indices=np.array([one.indices[group] for one, group in chunk]),
            after=after,
            left=frozenset(range(size)),
            found=tuple(_renumbered(chunk, way) for way in range(len(kept[0].found))),
        )
        for i, chunk in enumerate(chunks)
    ]


def _young(one: Step, oldest: int) -> Step:
    """The step without responses that have a token by weights older than `oldest`."""

    def fit(t: Trajectory) -> bool:
        return not t.sampled.any() or bool(t.version[t.sampled].min() >= oldest)

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
                "responses": trajectories.pack([way.responses[number] for number in sorted(way.responses)]),
                "rewards": [[number, dataclasses.asdict(reward)] for number, reward in sorted(way.rewards.items())],
            }
            for way in ways
        ],
    }


def _unpacked(one: Mapping[str, Any]) -> Step:
    found = [
        Found(
            way["per_prompt"],
            dict(zip(way["numbers"], trajectories.unpack(way["responses"]), strict=True)),
            {number: Reward(**reward) for number, reward in way["rewards"]},
        )
        for way in one["found"]
    ]
    return Step(
        one["step"], one["version"], np.array(one["indices"]), one["after"], frozenset(one["left"]), tuple(found)
    )
