"""Rows with a shared prompt, stored once before its samples. Used by `packing.py`, which writes the arrays.

Samples of one prompt share its entries except the last. Each sample begins with the prompt's last token, so that its
first response token is emitted inside its own segment. A row has one prompt, with as many of its samples as fit. Other
samples are in further rows, with the prompt again.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jppo.types import Trajectory

COPIES = 8  # the longest row is so many times its prompt: the prompt is an eighth of it


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a row: `shared` entries of a prompt, then the remaining entries of each of its samples."""

    shared: int  # 0: one trajectory alone
    members: tuple[int, ...]
    size: int  # entries in all


def groups(trajectories: Sequence[Trajectory], entries: Sequence[int], most: tuple[int, int]) -> list[Part]:
    """Groups the trajectories that have entries by prompt.

    `most` are attention's limits on the entries of a shared prompt and of a sample. A longer common
    beginning, such as an environment's opening text, is shared up to there. If a sample has more entries of its own,
    each is alone.
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
    """Counts the entries that trajectories share: the equal tokens, with equal experts, before the first sampled one.

    Each keeps at least one of its own.
    """
    most = min(min(_before_sampled(t), len(t.tokens) - 1) for t in samples)
    tokens = np.stack([t.tokens[:most] for t in samples])
    same = (tokens == tokens[:1]).all(axis=0)
    known = [t.experts[:most] for t in samples if t.experts is not None]
    if len(known) == len(samples):
        same &= (np.stack(known) == known[0][None]).all(axis=(0, 2, 3))
    return max(0, (most if same.all() else int(np.argmin(same))) - 1)


def _before_sampled(t: Trajectory) -> int:
    return int(np.argmax(t.sampled)) if t.sampled.any() else len(t.tokens)


def _part(shared: int, members: Sequence[int], entries: Sequence[int]) -> Part:
    """Makes a part of these members; a single one shares nothing."""
    own = sum(entries[i] - shared for i in members)
    return Part(shared if len(members) > 1 else 0, tuple(members), shared + own)


def split(groups: Sequence[Part], entries: Sequence[int], capacity: int) -> list[Part]:
    """Splits into parts of at most `capacity` entries by first-fit decreasing. No trajectory has more."""
    parts: list[Part] = []
    for group in groups:
        members = sorted(group.members, key=lambda i: -entries[i])
        bins = first_fit([entries[i] - group.shared for i in members], capacity - group.shared)
        parts += [_part(group.shared, [members[i] for i in one], entries) for one in bins]
    return sorted(parts, key=lambda part: -part.size)


def first_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Puts each index of `sizes` into the first bin of `capacity` that has room for it."""
    bins: list[list[int]] = []
    room = np.full(len(sizes), capacity)  # at most one bin per index
    for i, size in enumerate(sizes):
        place = int(np.argmax(room >= size))
        if place == len(bins):
            bins.append([])
        bins[place].append(i)
        room[place] -= size
    return bins


def longest_row(prompt: int, response: int, *, samples: int) -> int:
    """Returns the row length beyond which little is saved: all samples of a prompt, or `COPIES` times the prompt."""
    return min(prompt + samples * response, max(prompt + response, COPIES * prompt))
