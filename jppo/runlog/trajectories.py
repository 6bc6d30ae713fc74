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
from jppo.errors import UserError
from jppo.types import Exchange, Reward, Trajectory

ARRAYS: dict[str, type] = {"tokens": np.int32, "sampled": np.bool_, "logprob": np.float32, "version": np.int32}
APART = (*ARRAYS, "experts", "kept")  # the fields that are not JSON


def serialise(episodes: Sequence[Trajectory]) -> str:
    """Writes trajectories as text, bit for bit; the branches of each follow it."""
    trajectories = [t for episode in episodes for t in (episode, *episode.branches)]
    flat = [dataclasses.asdict(dataclasses.replace(t, branches=())) for t in trajectories]
    json_fields = [{name: value for name, value in one.items() if name not in APART} for one in flat]
    for fields, t in zip(json_fields, trajectories, strict=True):
        fields["branches"] = len(t.branches)
    arrays: dict[str, Any] = {
        name: np.concatenate([np.zeros(0, dtype), *(getattr(t, name) for t in trajectories)]).astype(dtype)
        for name, dtype in ARRAYS.items()
    }
    lengths = np.array([len(t.tokens) for t in trajectories], np.int64)
    if experts := [t.experts for t in trajectories if t.experts is not None]:
        has_experts = np.array([t.experts is not None for t in trajectories])
        arrays |= {"experts": np.concatenate(experts), "with_experts": has_experts}
    if kept_tokens := [t.kept for t in trajectories if t.kept is not None]:
        counts = [(kept != -1).sum(axis=1) for kept in kept_tokens]
        arrays |= {
            "kept": np.concatenate([kept[kept != -1] for kept in kept_tokens]),
            "kept_counts": np.concatenate(counts).astype(np.int32),
            "with_kept": np.array([t.kept is not None for t in trajectories]),
        }
    file = io.BytesIO()
    np.savez_compressed(file, rest=np.frombuffer(json.dumps(json_fields).encode(), np.uint8), lengths=lengths, **arrays)
    return base64.b64encode(file.getvalue()).decode()


def deserialise(text: str) -> list[Trajectory]:
    """Restores the trajectories of `serialise`."""
    with np.load(io.BytesIO(base64.b64decode(text))) as file:
        rows = json.loads(file["rest"].tobytes())
        borders = np.cumsum(file["lengths"])[:-1]
        arrays: dict[str, Sequence[np.ndarray | None]] = {name: np.split(file[name], borders) for name in ARRAYS}
        if "experts" in file:
            has_experts = file["with_experts"]
            experts = iter(np.split(file["experts"], np.cumsum(file["lengths"][has_experts])[:-1]))
            arrays["experts"] = [next(experts) if has else None for has in has_experts]
        if "kept" in file:
            arrays["kept"] = _read_kept(file)
    for row in rows:
        row["exchange"] = None if row["exchange"] is None else Exchange(**_with_tuples(row["exchange"]))
    counts = [row.pop("branches") for row in rows]
    flat = [Trajectory(**row, **{name: column[i] for name, column in arrays.items()}) for i, row in enumerate(rows)]  # type: ignore[arg-type]
    episodes, i = list[Trajectory](), 0
    while i < len(flat):
        branches = flat[i + 1 : i + 1 + counts[i]]
        episodes.append(dataclasses.replace(flat[i], branches=tuple(branches)))
        i += 1 + len(branches)
    return episodes


def _read_kept(file: Mapping[str, np.ndarray]) -> list[np.ndarray | None]:
    """Restores the field `kept` of trajectories, padded in each to its longest entry; None where it was None."""
    has_kept, ids = file["with_kept"], file["kept"]
    kept_of: list[np.ndarray | None] = [None] * len(has_kept)
    borders, start = np.cumsum(file["lengths"][has_kept])[:-1], 0
    for i, counts in zip(np.flatnonzero(has_kept), np.split(file["kept_counts"], borders), strict=True):
        padded = np.full((len(counts), max(1, counts.max(initial=0))), -1, np.int32)
        mask = np.arange(padded.shape[1]) < counts[:, None]
        padded[mask] = ids[start : start + mask.sum()]
        kept_of[i], start = padded, start + int(mask.sum())
    return kept_of


def of_all(hosts: Hosts, own: list[Trajectory]) -> list[Trajectory]:
    """Exchanges trajectories between hosts; returns those of all hosts, in host order."""
    if hosts.count == 1:
        return own
    return [t for text in hosts.gather(lambda: serialise(own)) for t in deserialise(text)]


def rewards_of_all(hosts: Hosts, own: Callable[[], list[Reward]]) -> list[Reward]:
    """Waits for this host's rewards; returns those of all hosts, in host order."""
    if hosts.count == 1:
        return own()
    saved_rows = hosts.gather(lambda: [dataclasses.asdict(reward) for reward in own()])
    return [reward_of(saved) for row in saved_rows for saved in row]


def reward_of(fields: Mapping[str, Any]) -> Reward:
    return Reward(**_with_tuples(fields))


def _with_tuples(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Returns fields from JSON with tuples in place of lists, as `Reward` and `Exchange` have them."""
    lists = [name for name in ("earned", "tool_earned") if name in saved]  # Reward has one, Exchange both
    return {**saved, **{name: tuple((token, amount) for token, amount in saved[name]) for name in lists}}


@dataclasses.dataclass(frozen=True)
class Found:
    """The finished responses of a step of one kind, sampled or greedy, by index: `per_prompt` for each prompt."""

    per_prompt: int
    responses: Mapping[int, Trajectory]
    rewards: Mapping[int, Reward]

    def only(self, numbers: Collection[int]) -> "Found":
        responses = {n: t for n, t in self.responses.items() if n in numbers}
        return Found(self.per_prompt, responses, {n: r for n, r in self.rewards.items() if n in responses})


@dataclasses.dataclass(frozen=True)
class Step:
    """The prompts of one step that are not trained on yet."""

    step: int
    version: int  # of the weights at the request
    indices: np.ndarray  # [N] i64, of the step's prompts
    after: dict[str, Any]  # the position in the data after them
    untrained: frozenset[int]  # the remaining prompts
    found: tuple[Found, ...]  # samples, then greedy responses if there are any

    def each(self, change: Callable[[Found], Found]) -> "Step":
        """Returns the step with changed responses."""
        return dataclasses.replace(self, found=tuple(change(answers) for answers in self.found))

    def numbers(self, answers: Found) -> set[int]:
        """Returns the indices of responses to the remaining prompts."""
        return {g * answers.per_prompt + j for g in self.untrained for j in range(answers.per_prompt)}


def state(about: Mapping[str, Any], steps: Sequence[Step]) -> dict[str, Any]:
    """Returns the state for a checkpoint: `about`, and the steps with responses to the remaining prompts."""
    return {**about, "steps": [_to_json(step) for step in steps]}


def read_steps(state: Mapping[str, Any]) -> list[Step]:
    """Restores the steps of a checkpoint's state, in order."""
    steps = [_from_json(row) for row in state["steps"]]
    return sorted(steps, key=lambda step: step.step)


def merged(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merges the states of all hosts into one; a step that only some have requested has their responses."""
    if len(states) == 1 or not any(states):
        return states[0]
    by_step: dict[int, Step] = {}
    for step in (step for state in states if state for step in read_steps(state)):
        by_step[step.step] = _join(by_step[step.step], step) if step.step in by_step else step
    furthest = max((state for state in states if state), key=lambda state: state["next"])
    return state({k: v for k, v in furthest.items() if k != "steps"}, [by_step[number] for number in sorted(by_step)])


def fitted(
    state: Mapping[str, Any], kind: Mapping[str, Any], *, first: int, staleness: int, partial: bool
) -> tuple[list[Step], list[str]]:
    """Returns the steps of a state that this run can use from step `first` on, and console lines about them.

    Drops responses that the run would sample differently or that are too old, and rewards by other graders. A run
    without `partial` gets whole steps, the last one with the rest. UserError if the indices have another meaning.
    """
    _require_same_kind(state, kind)
    steps = read_steps(state)
    total = _count_sampled(steps)
    if not partial:
        steps = _regroup(steps, first, state["cursor"])
    if state["sampling"] != kind["sampling"]:
        steps = [step.each(lambda answers: answers.only(())) for step in steps]
    steps = [_without_old(step, (first if partial else step.step) - staleness) for step in steps]
    if state["graders"] != kind["graders"]:
        steps = [step.each(lambda answers: dataclasses.replace(answers, rewards={})) for step in steps]
    count = _count_sampled(steps)
    drawn_again = "drawn again: too old for rollout.max_staleness, or sampled with other settings"
    fates = ((count, "not drawn again"), (total - count, drawn_again))
    return steps, [f"{n} samples that the checkpoint has of the next steps are {fate}" for n, fate in fates if n]


def unanswered(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the state with its prompts alone: a resumed run requests all of their responses again."""
    if not state:
        return {}
    return {**state, "steps": [_to_json(step.each(lambda answers: answers.only(()))) for step in read_steps(state)]}


def _require_same_kind(state: Mapping[str, Any], kind: Mapping[str, Any]) -> None:
    """UserError where settings that the indices of the state's responses depend on have changed."""
    for name in ("data.train_batch_size", "rollout.n", "greedy"):
        if state[name] != kind[name]:
            label = "algorithm.adv_estimator samples greedy responses" if name == "greedy" else name
            raise UserError(
                f"{label}={kind[name]!r} was {state[name]!r} when the checkpoint was written, and its next samples"
                " depend on it; use the old value, or start a new run with another trainer.run_dir or"
                " trainer.resume_mode=disable"
            )


def _regroup(steps: Sequence[Step], first: int, after: dict[str, Any]) -> list[Step]:
    """Returns the remaining prompts in order, as steps from `first` on; unchanged if they already are whole steps.

    The last of them has the prompts that are left over, fewer than a step's.
    """
    are_whole = all(len(step.untrained) == len(step.indices) for step in steps)
    if are_whole and [step.step for step in steps] == list(range(first, first + len(steps))):
        return list(steps)
    size = max((len(step.indices) for step in steps), default=1)
    pairs = [(step, group) for step in steps for group in sorted(step.untrained)]
    chunks = [pairs[i : i + size] for i in range(0, len(pairs), size)]
    return [
        Step(
            step=first + i,
            version=min(step.version for step, _ in chunk),
            indices=np.array([step.indices[group] for step, group in chunk]),
            after=after,
            untrained=frozenset(range(len(chunk))),
            found=tuple(_renumber(chunk, kind) for kind in range(len(steps[0].found))),
        )
        for i, chunk in enumerate(chunks)
    ]


def _without_old(step: Step, oldest: int) -> Step:
    """Returns the step without responses that have a token from weights older than `oldest`."""

    def is_young(t: Trajectory) -> bool:
        return t.given or all(bool((other.version[other.sampled] >= oldest).all()) for other in (t, *t.branches))

    return step.each(lambda answers: answers.only([n for n, t in answers.responses.items() if is_young(t)]))


def _count_sampled(steps: Sequence[Step]) -> int:
    return sum(not t.given for step in steps for answers in step.found for t in answers.responses.values())


def _renumber(chunk: Sequence[tuple[Step, int]], kind: int) -> Found:
    """Returns the responses to a chunk's prompts, pairs of step and place, by their indices in a step of the chunk."""
    responses, rewards = dict[int, Trajectory](), dict[int, Reward]()
    for new_group, (step, group) in enumerate(chunk):
        answers = step.found[kind]
        for j in range(answers.per_prompt):
            old_number, number = group * answers.per_prompt + j, new_group * answers.per_prompt + j
            responses |= {number: answers.responses[old_number]} if old_number in answers.responses else {}
            rewards |= {number: answers.rewards[old_number]} if old_number in answers.rewards else {}
    return Found(chunk[0][0].found[kind].per_prompt, responses, rewards)


def _join(a: Step, b: Step) -> Step:
    """Merges what two hosts have of the same step."""
    answers = [
        Found(x.per_prompt, {**x.responses, **y.responses}, {**x.rewards, **y.rewards})
        for x, y in zip(a.found, b.found, strict=True)
    ]
    return dataclasses.replace(a, untrained=a.untrained | b.untrained, found=tuple(answers))


def _to_json(step: Step) -> dict[str, Any]:
    """Returns a step as JSON types, with responses to its remaining prompts only."""
    found = [answers.only(step.numbers(answers)) for answers in step.found]
    return {
        "step": step.step,
        "version": step.version,
        "indices": step.indices.tolist(),
        "after": step.after,
        "untrained": sorted(step.untrained),
        "found": [
            {
                "per_prompt": answers.per_prompt,
                "numbers": sorted(answers.responses),
                "responses": serialise([answers.responses[number] for number in sorted(answers.responses)]),
                "rewards": [[number, dataclasses.asdict(reward)] for number, reward in sorted(answers.rewards.items())],
            }
            for answers in found
        ],
    }


def _from_json(row: Mapping[str, Any]) -> Step:
    """Restores a step; the inverse of `_to_json`."""
    found = [
        Found(
            answers["per_prompt"],
            dict(zip(answers["numbers"], deserialise(answers["responses"]), strict=True)),
            {number: reward_of(reward) for number, reward in answers["rewards"]},
        )
        for answers in row["found"]
    ]
    return Step(
        row["step"], row["version"], np.array(row["indices"]), row["after"], frozenset(row["untrained"]), tuple(found)
    )
