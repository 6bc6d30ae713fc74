"""Rows in which a prompt stands once, before the samples that share it. Used by `packing.py`, which writes them down.

What samples of one prompt share are its entries but the last: each begins with the prompt's last token, so that its
first response token is emitted inside its own segment. A row has one prompt, with as many of its samples as it has room
for; others of them are in further rows, with the prompt again.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jppo.types import Trajectory

COPIES = 8  # so many times its prompt is the longest row: the prompt is an eighth of it


@dataclasses.dataclass(frozen=True)
class Part:
    """What stands together in a row: `shared` entries of a prompt, then what else each of its samples has."""

    shared: int  # 0: one trajectory alone
    members: tuple[int, ...]
    size: int  # entries in all


def groups(trajectories: Sequence[Trajectory], entries: Sequence[int], most: tuple[int, int]) -> list[Part]:
    """The trajectories that have entries, each with the others of its prompt.

    `most` are the entries of a shared prompt and of a sample that attention looks for. A longer beginning, as with an
    environment's opening text, is shared up to there; where a sample has more entries of its own, each is alone.
    """
    by_prompt: dict[str, list[int]] = {}
    for i, t in enumerate(trajectories):
        if entries[i]:
            by_prompt.setdefault(t.uid, []).append(i)
    parts = []
    for members in by_prompt.values():
        shared = min(shared_entries([trajectories[i] for i in members]), most[0])
        together = shared and max(entries[i] for i in members) - shared <= most[1]
        parts += [_part(shared, some, entries) for some in ([members] if together else [[i] for i in members])]
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


def split(groups: Sequence[Part], entries: Sequence[int], capacity: int) -> list[Part]:
    """Parts of at most `capacity` entries, the largest first: first fit by falling size. No trajectory has more."""
    parts: list[Part] = []
    for group in groups:
        members = sorted(group.members, key=lambda i: -entries[i])
        bins = first_fit([entries[i] - group.shared for i in members], capacity - group.shared)
        parts += [_part(group.shared, [members[i] for i in one], entries) for one in bins]
    return sorted(parts, key=lambda part: -part.size)


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


def longest_row(prompt: int, response: int, *, samples: int) -> int:
    """The length of rows beyond which little is left to save: all samples of a prompt, or `COPIES` times the prompt."""
    return min(prompt + samples * response, max(prompt + response, COPIES * prompt))
