"""Rows in which a prompt stands once, before the samples that share it. Used by `packing.py`, which writes them down.

What samples of one prompt share are its entries but the last: each begins with the prompt's last token, so that its
first response token is emitted inside its own segment. A prompt goes with as many of its samples as its row has room
for, and again where others of them are.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from jppo.structs import Trajectory


@dataclasses.dataclass(frozen=True)
class Part:
    """What stands together in a row: `shared` entries of a prompt, then what else each of its samples has."""

    shared: int  # 0: one trajectory alone
    members: tuple[int, ...]
    size: int  # entries in all


def parts_of(trajectories: Sequence[Trajectory], entries: Sequence[int]) -> list[Part]:
    """The trajectories that have entries, each with the others of its prompt."""
    by_prompt: dict[str, list[int]] = {}
    for i, t in enumerate(trajectories):
        if entries[i]:
            by_prompt.setdefault(t.uid, []).append(i)
    parts = []
    for members in by_prompt.values():
        shared = shared_entries([trajectories[i] for i in members])
        parts += [_part(shared, some, entries) for some in ([members] if shared else [[i] for i in members])]
    return parts


def shared_entries(samples: Sequence[Trajectory]) -> int:
    """How many entries trajectories share: those of the tokens before the first that was sampled, while all agree.

    Each has one of its own.
    """
    most = min(min(_before_sampled(t), len(t.tokens) - 1) for t in samples)
    tokens = np.stack([t.tokens[:most] for t in samples])
    same = (tokens == tokens[:1]).all(axis=0)
    return max(0, (most if same.all() else int(np.argmin(same))) - 1)


def _before_sampled(t: Trajectory) -> int:
    return int(np.argmax(t.sampled)) if t.sampled.any() else len(t.tokens)


def _part(shared: int, members: Sequence[int], entries: Sequence[int]) -> Part:
    """The members together; one that is alone shares nothing."""
    own = sum(entries[i] - shared for i in members)
    return Part(shared if len(members) > 1 else 0, tuple(members), shared + own)


def fill(parts: Sequence[Part], entries: Sequence[int], capacity: int) -> list[list[Part]]:
    """Rows of at most `capacity` entries, the fullest first: first fit by falling size, after larger parts are split.

    No trajectory has more `entries`. Trajectories that are alone begin a row: what follows a prompt would see it.
    """
    fitting: list[Part] = []
    for part in parts:
        if part.size <= capacity:
            fitting.append(part)
            continue
        members = sorted(part.members, key=lambda i: -entries[i])
        bins = first_fit([entries[i] - part.shared for i in members], capacity - part.shared)
        fitting += [_part(part.shared, [members[i] for i in one], entries) for one in bins]
    fitting.sort(key=lambda part: -part.size)
    rows = [[fitting[i] for i in one] for one in first_fit([part.size for part in fitting], capacity)]
    rows = [sorted(row, key=lambda part: part.shared > 0) for row in rows]
    return sorted(rows, key=lambda row: -sum(part.size for part in row))


def first_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins of `capacity`; each index of `sizes` goes to the first that has room for it."""
    bins: list[list[int]] = []
    room = np.full(len(sizes), capacity)  # a bin for each, if need be
    for i, size in enumerate(sizes):
        place = int(np.argmax(room >= size))
        if place == len(bins):
            bins.append([])
        bins[place].append(i)
        room[place] -= size
    return bins


def longest_row(*, prompt: int, response: int, samples: int, even: float) -> int:
    """The length beyond which rows of such prompts and responses only cost more.

    A row of a prompt P and x more entries costs (P + x)(1 + (P + x) / E), where attention costs as much as all else in
    a row of E = `even` tokens. By each of the x that is least at x² = P (P + E). A row holds the longest trajectory,
    and needs to hold no more than all samples.
    """
    best = prompt + math.sqrt(prompt * (prompt + even))
    return min(prompt + samples * response, max(prompt + response, math.ceil(best)))
