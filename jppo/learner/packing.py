"""Packing of trajectories into rows: their shift by one, and all shapes that the devices see.

A mini-batch of trajectories is packed into rows of a few lengths, and the rows are cut into micro-batches of a few
row counts. `Plan.shapes` lists every possible [R, T], so that all are compiled before they are needed.
Numpy in, numpy out.

With a shared prompt, samples of one prompt share its entries except the last. Each sample begins with the prompt's last
token, so that its first response token is emitted inside its own segment. A row has one prompt, with as many of its
samples as fit. Other samples are in further rows, with the prompt again.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from jppo.types import Rows, Trajectory

COPIES = 8  # the longest row is so many times its prompt: the prompt is an eighth of it


@dataclasses.dataclass(frozen=True)
class PromptGroup:
    """A part of a row: `shared` entries of a prompt, then the remaining entries of each of its samples."""

    shared: int  # 0: one trajectory alone
    members: tuple[int, ...]
    size: int  # entries in all


def prompt_groups(
    trajectories: Sequence[Trajectory], entries: Sequence[int], limits: tuple[int, int]
) -> list[PromptGroup]:
    """Groups trajectories by prompt, so that a row can hold a prompt once for several samples; skips empty ones.

    `limits` are attention's largest shared prompt and largest sample, in entries. A longer common
    beginning, such as an environment's opening text, is shared up to there. If a sample has more entries of its own,
    each is alone.
    """
    by_prompt: dict[str, list[int]] = {}
    for i, t in enumerate(trajectories):
        if entries[i]:
            by_prompt.setdefault(t.uid, []).append(i)
    groups = []
    for members in by_prompt.values():
        shared = min(shared_entries([trajectories[i] for i in members]), limits[0])
        fits = shared and max(entries[i] for i in members) - shared <= limits[1]
        groups += [_make_group(shared, group, entries) for group in ([members] if fits else [[i] for i in members])]
    return groups


def shared_entries(samples: Sequence[Trajectory]) -> int:
    """Counts the entries that trajectories share: the equal tokens, with equal experts, before the first sampled one.

    Each keeps at least one of its own.
    """
    common = min(min(_prompt_length(t), len(t.tokens) - 1) for t in samples)
    tokens = np.stack([t.tokens[:common] for t in samples])
    equal = (tokens == tokens[:1]).all(axis=0)
    experts = [t.experts[:common] for t in samples if t.experts is not None]
    if len(experts) == len(samples):
        equal &= (np.stack(experts) == experts[0][None]).all(axis=(0, 2, 3))
    return max(0, (common if equal.all() else int(np.argmin(equal))) - 1)


def _prompt_length(t: Trajectory) -> int:
    return int(np.argmax(t.sampled)) if t.sampled.any() else len(t.tokens)


def _make_group(shared: int, members: Sequence[int], entries: Sequence[int]) -> PromptGroup:
    """Makes the group of samples `members`, with the `shared` entries of their prompt; a single one shares nothing."""
    own = sum(entries[i] - shared for i in members)
    return PromptGroup(shared if len(members) > 1 else 0, tuple(members), shared + own)


def split(groups: Sequence[PromptGroup], entries: Sequence[int], capacity: int) -> list[PromptGroup]:
    """Splits groups into parts of at most `capacity` entries by first-fit decreasing. No trajectory has more."""
    parts: list[PromptGroup] = []
    for group in groups:
        members = sorted(group.members, key=lambda i: -entries[i])
        bins = first_fit([entries[i] - group.shared for i in members], capacity - group.shared)
        parts += [_make_group(group.shared, [members[i] for i in bin_members], entries) for bin_members in bins]
    return sorted(parts, key=lambda part: -part.size)


def first_fit(sizes: Sequence[int], capacity: int, most: int | None = None) -> list[list[int]]:
    """Puts each index of `sizes` into the first bin that has room for it: of `capacity`, and of `most` indices."""
    bins: list[list[int]] = []
    free = np.full(len(sizes), capacity)  # at most one bin per index
    for i, size in enumerate(sizes):
        bin_number = int(np.argmax(free >= size))
        if bin_number == len(bins):
            bins.append([])
        bins[bin_number].append(i)
        free[bin_number] = -1 if len(bins[bin_number]) == most else free[bin_number] - size
    return bins


def longest_row(prompt: int, response: int, *, samples: int) -> int:
    """Returns the row length beyond which little is saved: all samples of a prompt, or `COPIES` times the prompt."""
    return min(prompt + samples * response, max(prompt + response, COPIES * prompt))


# Fixed cost of a micro-batch in tokens, besides its rows: its gradients are read and written once more to be summed.
MICRO_TOKENS = 64


@dataclasses.dataclass(frozen=True)
class Plan:
    """The shapes of a run: row lengths, row counts of a micro-batch for each length, and how rows are filled."""

    lengths: tuple[int, ...]  # of rows, ascending
    counts: tuple[tuple[int, ...], ...]  # for each length the row counts of a micro-batch, descending
    share_rows: bool  # several trajectories in a row (segments), or one
    most: int | None = None  # trajectories that share a row at most
    # Cost of a token in a row of each length, where a row may have a prompt once for several of its samples.
    prices: tuple[float, ...] | None = None
    shared: tuple[int, int] = (0, 0)  # the most entries of a shared prompt, and of a sample after it
    experts: tuple[int, int] | None = None  # L and active, if the engine's experts are replayed
    kept: int = 0  # kept tokens of each target, if the engine's truncation is replayed

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Lists every (R, T) that `pack` can make."""
        return [(r, t) for t, counts in zip(self.lengths, self.counts, strict=True) for r in counts]


def make_plan(
    kind: str,
    *,
    max_length: int,
    row_lengths: int,
    max_tokens_per_row: int,
    tokens_per_micro: int,
    sequences: int,
    row_multiple: int,
    length_multiple: int = 1,
    shared: tuple[int, int] = (0, 0),
    price: Callable[[int], float] = lambda _: 1.0,
    sizes: Sequence[int] = (),
    most: int | None = None,
) -> Plan:
    """Makes the plan for mini-batches of `sequences` trajectories of up to `max_length` tokens.

    kind is one of

        segments  rows of `max_tokens_per_row`, shared by up to `most`
        buckets   `row_lengths` lengths, evenly spaced, one trajectory a row
        none      one length, one trajectory a row
        prefix    `row_lengths` lengths up to `max_tokens_per_row`, evenly spaced, shared by samples of one prompt

    For prefix, `price` is the cost of a token by row length, and `shared` is as in `Plan` and `attention.make_plain`.
    `sizes` are the trajectories of all mini-batches, if they never change: rows of one length that fill them without a
    rest need no smaller row count. Row counts are multiples of `row_multiple`, the number of devices that share the
    rows. Lengths are rounded up to multiples of `length_multiple`, the number of devices that share a row's positions.
    """
    entries = max_tokens_per_row if kind == "prefix" else max_length - 1
    grain = 64 if entries >= 512 else 8 if entries >= 64 else 1
    if kind == "segments":
        lengths = [max_tokens_per_row]
    else:
        steps = 1 if kind == "none" else row_lengths
        lengths = sorted({_round_up(math.ceil(entries * i / steps), grain) for i in range(1, steps + 1)})
    lengths = sorted({_round_up(length, length_multiple) for length in lengths})
    # Longer rows, shared by several samples, are fewer, and an empty one wastes more.
    parts: tuple[int, ...] = (1, 4, 16) if kind == "prefix" else (1, 4)
    counts = []
    for length in lengths:
        rows = min(sequences, math.ceil(sequences * max_length / length)) if kind == "prefix" else sequences
        full = max(1, tokens_per_micro // (length * row_multiple)) * row_multiple
        full = min(full, _round_up(rows, row_multiple))
        if len(lengths) == 1 and sizes and kind in ("buckets", "none") and not any(size % full for size in sizes):
            parts = (1,)
        counts.append(tuple(sorted({_round_up(math.ceil(full / part), row_multiple) for part in parts}, reverse=True)))
    if kind == "prefix":
        prices = tuple(price(length) for length in lengths)
        return Plan(tuple(lengths), tuple(counts), share_rows=True, prices=prices, shared=shared)
    return Plan(tuple(lengths), tuple(counts), share_rows=kind == "segments", most=most)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def pack(trajectories: Sequence[Trajectory], sequence: Sequence[int], plan: Plan) -> list[Rows]:
    """Packs each trajectory once into micro-batches; `sequence` gives their indices in the step's batch."""
    rows, shapes = _form_rows(trajectories, plan)
    micros, start = [], 0
    for shape in shapes:
        micros.append(_fill(rows[start : start + shape[0]], shape, trajectories, sequence, plan))
        start += shape[0]
    return micros


def micro_batch_shapes(trajectories: Sequence[Trajectory], plan: Plan) -> list[tuple[int, int]]:
    """Returns the shapes of `pack`'s micro-batches, without their arrays."""
    return _form_rows(trajectories, plan)[1]


def _form_rows(trajectories: Sequence[Trajectory], plan: Plan) -> tuple[list[list[PromptGroup]], list[tuple[int, int]]]:
    """Assigns trajectories to rows; returns the groups in each row, and the shapes of consecutive micro-batches."""
    entries = [len(t.tokens) - 1 for t in trajectories]  # the first token has none: nothing was read before it
    order = sorted((i for i, n in enumerate(entries) if n), key=lambda i: -entries[i])
    if order and entries[order[0]] > plan.lengths[-1]:
        uid, length = trajectories[order[0]].uid, entries[order[0]]
        raise ValueError(f"trajectory {uid} has {length} entries, a row holds {plan.lengths[-1]}")
    if plan.prices is not None:
        return _form_shared(trajectories, order, entries, plan)
    if plan.share_rows:
        bins = first_fit([entries[i] for i in order], plan.lengths[-1], plan.most)
        shapes = cut([plan.lengths[-1]] * len(bins), plan.shapes)
        rows = _balance_rows([[order[i] for i in row] for row in bins], sum(r for r, _ in shapes), entries, plan)
    else:
        rows = [[i] for i in order]
        shapes = cut([entries[i] for i in order], plan.shapes)
    return [[PromptGroup(0, (i,), entries[i]) for i in row] for row in rows], shapes


def _form_shared(
    trajectories: Sequence[Trajectory], order: Sequence[int], entries: Sequence[int], plan: Plan
) -> tuple[list[list[PromptGroup]], list[tuple[int, int]]]:
    """Packs rows of a prompt with its samples, or of one trajectory each, by least cost; returns also the shapes.

    Long rows hold fewer copies of prompts, but their tokens cost more.
    """
    groups, longest = prompt_groups(trajectories, entries, plan.shared), entries[order[0]] if order else 0
    prices = dict(zip(plan.lengths, plan.prices or (), strict=True))
    splits = [split(groups, entries, length) for length in plan.lengths if length >= longest]
    candidates = []
    for parts in (*splits, [PromptGroup(0, (i,), entries[i]) for i in order]):
        shapes = cut([part.size for part in parts], plan.shapes, prices)
        candidates.append(([[part] for part in parts], shapes))
    return min(candidates, key=lambda candidate: total_cost(candidate[1], prices))


def total_cost(shapes: Sequence[tuple[int, int]], prices: Mapping[int, float]) -> float:
    """Returns the cost of micro-batches of these shapes, in tokens without attention; `prices` are as in `cut`."""
    return sum(_cost(shape, prices) for shape in shapes)


def _cost(shape: tuple[int, int], prices: Mapping[int, float]) -> float:
    r, t = shape
    return r * t * prices.get(t, 1.0) + MICRO_TOKENS


def cut(
    lengths: Sequence[int], shapes: Sequence[tuple[int, int]], prices: Mapping[int, float] = MappingProxyType({})
) -> list[tuple[int, int]]:
    """Cuts rows of descending lengths into consecutive micro-batches; returns their shapes [R, T] of least total cost.

    A micro-batch costs R T tokens plus `MICRO_TOKENS`; `prices` are the costs of a token by row length, 1 by default.
    """
    least_cost: list[float] = [0] * (len(lengths) + 1)  # for the rows from each index on
    first_shape: list[tuple[int, int]] = [(0, 0)] * len(lengths)
    for i in reversed(range(len(lengths))):
        fitting = [
            (_cost((r, t), prices) + least_cost[min(i + r, len(lengths))], (r, t)) for r, t in shapes if t >= lengths[i]
        ]
        least_cost[i], first_shape[i] = min(fitting)
    cuts, i = [], 0
    while i < len(lengths):
        cuts.append(first_shape[i])
        i += first_shape[i][0]
    return cuts


def _balance_rows(rows: list[list[int]], count: int, entries: Sequence[int], plan: Plan) -> list[list[int]]:
    """Spreads the trajectories in `rows` over `count` rows, each to the row with the least attention so far.

    This balances the devices that share the rows. If that does not fit, the rows are returned unchanged.
    """
    balanced: list[list[int]] = [[] for _ in range(count)]
    free, attention_cost = [plan.lengths[-1]] * count, [0] * count
    for i in sorted((i for row in rows for i in row), key=lambda i: -entries[i]):
        fitting = [r for r in range(count) if free[r] >= entries[i] and len(balanced[r]) != plan.most]
        if not fitting:
            return rows
        r = min(fitting, key=lambda r: (attention_cost[r], -free[r]))
        balanced[r].append(i)
        free[r] -= entries[i]
        attention_cost[r] += entries[i] ** 2
    return balanced


def _fill(
    rows: list[list[PromptGroup]],
    shape: tuple[int, int],
    trajectories: Sequence[Trajectory],
    sequence: Sequence[int],
    plan: Plan | None,
) -> Rows:
    """Writes the groups of each row into a micro-batch [R, T]; `sequence` has trajectories' indices in the batch."""
    experts, kept = (None, 0) if plan is None else (plan.experts, plan.kept)
    out = Rows(
        inputs=np.zeros(shape, np.int32),
        targets=np.zeros(shape, np.int32),
        segment=np.zeros(shape, np.int32),
        position=np.zeros(shape, np.int32),
        mask=np.zeros(shape, np.bool_),
        sequence=np.full(shape, -1, np.int32),
        experts=None if experts is None else np.full((*shape, *experts), -1, np.int16),
        kept=np.full((*shape, kept), -1, np.int32) if kept else None,
    )

    def replay(place: tuple[int, slice], t: Trajectory, entries: slice) -> None:
        if out.experts is not None and t.experts is not None:
            out.experts[place] = t.experts[entries]

    for r, row in enumerate(rows):
        start, segment = 0, 0
        for part in row:
            if shared := part.shared:
                tokens, place = trajectories[part.members[0]].tokens, (r, slice(start, start + shared))
                out.inputs[place], out.targets[place] = tokens[:shared], tokens[1 : shared + 1]
                out.segment[place], out.position[place] = -1, np.arange(shared)
                replay(place, trajectories[part.members[0]], slice(0, shared))
                start += shared
            for i in part.members:
                t, segment = trajectories[i], segment + 1
                entry_count = len(t.tokens) - 1
                place = (r, slice(start, start + entry_count - shared))
                out.inputs[place] = t.tokens[shared:-1]
                out.targets[place] = t.tokens[shared + 1 :]
                out.segment[place] = segment
                out.position[place] = np.arange(shared, entry_count)
                out.mask[place] = t.sampled[shared + 1 :]
                out.sequence[place] = sequence[i]
                replay(place, t, slice(shared, entry_count))
                if out.kept is not None and t.kept is not None:
                    out.kept[place][:, : t.kept.shape[1]] = t.kept[shared + 1 :]
                start += entry_count - shared
    return out


def empty_rows(shape: tuple[int, int], plan: Plan | None = None) -> Rows:
    """Returns rows without data, on which every pass is compiled before there is data; `plan` says what is replayed."""
    return _fill([], shape, (), (), plan)
