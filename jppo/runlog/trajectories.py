"""Serialises trajectories as text for checkpoints and other hosts: compressed arrays and JSON."""

import base64
import dataclasses
import io
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jppo.distributed.hosts import Hosts
from jppo.types import Exchange, Reward, Trajectory

ARRAYS = ("tokens", "sampled", "logprob", "version")
APART = (*ARRAYS, "experts")  # the fields that are not JSON


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
