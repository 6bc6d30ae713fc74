"""Trajectories as text, for checkpoints and other hosts: compressed arrays and JSON.

A checkpoint also has the prefetched samples: prompts, finished responses and rewards of future steps:

state(...)         of this host, of JSON types
read_steps(state)  the inverse
merged(states)     of all hosts, which may be at different points
fitted(...)        the same for a run whose settings may have changed
unanswered(...)    the state without responses
"""

import base64
import dataclasses
import io
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from jppo.distributed.hosts import Hosts
from jppo.settings import UserError
from jppo.types import Exchange, Reward, Trajectory

ARRAYS = ("tokens", "sampled", "logprob", "version")
APART = (*ARRAYS, "experts", "kept")  # the fields that are not JSON


def serialise(episodes: Sequence[Trajectory]) -> str:
    """Serialises trajectories, bit for bit; the branches of each follow it."""
    trajectories = [t for episode in episodes for t in (episode, *episode.branches)]
    flat = [dataclasses.asdict(dataclasses.replace(t, branches=())) for t in trajectories]
    rest = [{name: value for name, value in one.items() if name not in APART} for one in flat]
    for one, t in zip(rest, trajectories, strict=True):
        one["branches"] = len(t.branches)
    arrays = {
        name: np.concatenate([np.zeros(0, _empty(name)), *(getattr(t, name) for t in trajectories)]).astype(
            _empty(name)
        )
        for name in ARRAYS
    }
    lengths = np.array([len(t.tokens) for t in trajectories], np.int64)
    if known := [t.experts for t in trajectories if t.experts is not None]:
        there = np.array([t.experts is not None for t in trajectories])
        arrays |= {"experts": np.concatenate(known), "with_experts": there}
    if some := [t.kept for t in trajectories if t.kept is not None]:
        counts = [(kept != -1).sum(axis=1) for kept in some]
        arrays |= {
            "kept": np.concatenate([kept[kept != -1] for kept in some]),
            "kept_counts": np.concatenate(counts).astype(np.int32),
            "with_kept": np.array([t.kept is not None for t in trajectories]),
        }
    file = io.BytesIO()
    np.savez_compressed(file, rest=np.frombuffer(json.dumps(rest).encode(), np.uint8), lengths=lengths, **arrays)
    return base64.b64encode(file.getvalue()).decode()


def deserialise(text: str) -> list[Trajectory]:
    """Restores packed trajectories."""
    with np.load(io.BytesIO(base64.b64decode(text))) as file:
        rest = json.loads(file["rest"].tobytes())
        borders = np.cumsum(file["lengths"])[:-1]
        arrays: dict[str, Sequence[np.ndarray | None]] = {name: np.split(file[name], borders) for name in ARRAYS}
        if "experts" in file:
            there = file["with_experts"]
            parts = iter(np.split(file["experts"], np.cumsum(file["lengths"][there])[:-1]))
            arrays["experts"] = [next(parts) if one else None for one in there]
        if "kept" in file:
            arrays["kept"] = _kept(file)
    for one in rest:
        one["exchange"] = None if one["exchange"] is None else Exchange(**_with_tuples(one["exchange"]))
    counts = [one.pop("branches", 0) for one in rest]  # checkpoints of earlier versions lack it
    flat = [Trajectory(**one, **{name: each[i] for name, each in arrays.items()}) for i, one in enumerate(rest)]  # type: ignore[arg-type]
    episodes, i = list[Trajectory](), 0
    while i < len(flat):
        following = flat[i + 1 : i + 1 + counts[i]]
        episodes.append(dataclasses.replace(flat[i], branches=tuple(following)))
        i += 1 + len(following)
    return episodes


def _kept(file: Mapping[str, np.ndarray]) -> list[np.ndarray | None]:
    """Restores the kept tokens, padded in each trajectory to its longest."""
    there, ids = file["with_kept"], file["kept"]
    out: list[np.ndarray | None] = [None] * len(there)
    borders, start = np.cumsum(file["lengths"][there])[:-1], 0
    for i, counts in zip(np.flatnonzero(there), np.split(file["kept_counts"], borders), strict=True):
        made = np.full((len(counts), max(1, counts.max(initial=0))), -1, np.int32)
        here = np.arange(made.shape[1]) < counts[:, None]
        made[here] = ids[start : start + here.sum()]
        out[i], start = made, start + int(here.sum())
    return out


def of_all(hosts: Hosts, own: list[Trajectory]) -> list[Trajectory]:
    """Returns the trajectories of all hosts, in host order."""
    if hosts.count == 1:
        return own
    return [t for text in hosts.gather(lambda: serialise(own)) for t in deserialise(text)]


def rewards_of_all(hosts: Hosts, own: Callable[[], list[Reward]]) -> list[Reward]:
    """Waits for rewards and returns the rewards of all hosts, in host order."""
    if hosts.count == 1:
        return own()
    return [reward_of(one) for some in hosts.gather(lambda: [dataclasses.asdict(r) for r in own()]) for one in some]


def reward_of(saved: Mapping[str, Any]) -> Reward:
    """Returns a reward from its fields of JSON types."""
    return Reward(**_with_tuples(saved))


def _with_tuples(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Restores tuples from JSON's lists; checkpoints of earlier versions lack some."""
    lists = [name for name in ("earned", "tool_earned") if name in saved]
    return {**saved, **{name: tuple((token, amount) for token, amount in saved[name]) for name in lists}}


def _empty(name: str) -> type:
    return {"tokens": np.int32, "sampled": np.bool_, "logprob": np.float32, "version": np.int32}[name]


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


def read_steps(state: Mapping[str, Any]) -> list[Step]:
    """Returns the steps of a state, in order."""
    found = [_unpacked(one) for one in state["steps"]]
    return sorted(found, key=lambda one: one.step)


def merged(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merges the states of all hosts; a step requested by only some hosts has their responses."""
    if len(states) == 1 or not any(states):
        return states[0]
    by_step: dict[int, Step] = {}
    for one in (one for state in states if state for one in read_steps(state)):
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
    kept = read_steps(state)
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
    return {**state, "steps": [_packed(one.each(lambda way: way.only(()))) for one in read_steps(state)]}


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
                "responses": serialise([way.responses[number] for number in sorted(way.responses)]),
                "rewards": [[number, dataclasses.asdict(reward)] for number, reward in sorted(way.rewards.items())],
            }
            for way in ways
        ],
    }


def _unpacked(one: Mapping[str, Any]) -> Step:
    found = [
        Found(
            way["per_prompt"],
            dict(zip(way["numbers"], deserialise(way["responses"]), strict=True)),
            {number: reward_of(reward) for number, reward in way["rewards"]},
        )
        for way in one["found"]
    ]
    return Step(
        one["step"], one["version"], np.array(one["indices"]), one["after"], frozenset(one["left"]), tuple(found)
    )
