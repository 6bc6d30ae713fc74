"""A step's batch: rows for scoring, and the mini-batches that each epoch of an update cuts from them.

A batch is scored in one layout and learned from in others: policy and critic may have mini-batches of their own, drawn
anew in each epoch. What was scored moves from one layout to the next by trajectory and position.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jppo.learner import packing, sharding
from jppo.models import placing
from jppo.structs import Counts, Rows, Scored, Trajectory

_FIELDS = [f.name for f in dataclasses.fields(Scored) if f.name != "rows"]


def make(trajectories: Sequence[Trajectory], *, plan: packing.Plan, mesh: Mesh) -> list[Rows]:
    """The whole batch in micro-batches, on their devices."""
    return [sharding.put_rows(rows, mesh) for rows in packing.pack(trajectories, range(len(trajectories)), plan)]


def each(fn: Callable[..., Any], *micros: Sequence[Any]) -> list[Any]:
    """fn over the micro-batches that stand in the same place; returns when the device is done."""
    return jax.block_until_ready([fn(*micro) for micro in zip(*micros, strict=True)])


@dataclasses.dataclass(frozen=True)
class Mini:
    """The data of one optimizer step: micro-batches on the host, and what their losses are divided by."""

    micros: list[Any]
    counts: Counts
    place: NamedSharding  # of the rows, on their devices
    learns: bool = True  # False: no token is trained on, so that its optimizer step is left out


@dataclasses.dataclass(frozen=True)
class Flat:
    """A scored batch on the host: every array end to end, and where each trajectory begins in it.

    A prompt that several share stands elsewhere, so that what such a place has for it means nothing: it is never read.
    """

    arrays: dict[str, np.ndarray]
    start: np.ndarray  # [B]

    def at(self, name: str, rows: Rows) -> np.ndarray | None:
        """The array `name` in the layout of `rows`; 0 where they are empty, None where the batch has none."""
        if name not in self.arrays:
            return None
        sequence, position = np.asarray(rows.sequence), np.asarray(rows.position)
        there = sequence >= 0  # the others, those of shared prompts among them, have positions but no place
        found = self.arrays[name][np.where(there, self.start[sequence] + position, 0)]
        return np.where(there, found, np.zeros((), found.dtype))


def flatten(scored: Sequence[Scored], sequences: int) -> Flat:
    """The scored batch, fetched from its devices."""
    host: list[dict[str, Any]] = []
    for one in placing.fetch(list(scored)):
        fields = {name: getattr(one, name) for name in _FIELDS}
        rows = {f.name: getattr(one.rows, f.name) for f in dataclasses.fields(one.rows)}
        host.append({k: v.reshape(-1) for k, v in (rows | fields).items() if v is not None})
    arrays = {name: np.concatenate([one[name] for one in host]) for name in host[0]}
    there = np.flatnonzero(arrays["sequence"] >= 0)
    start = np.zeros(sequences, np.int64)
    start[arrays["sequence"][there]] = there - arrays["position"][there]
    return Flat(arrays, start)


def mini_batches(
    flat: Flat,
    trajectories: Sequence[Trajectory],
    *,
    order: np.ndarray,
    mini_batch_size: int,
    plan: packing.Plan,
    mesh: Mesh,
) -> Iterator[Mini]:
    """The scored batch cut into mini-batches of trajectories in that order, each packed, on the host."""
    place = sharding.rows_sharding(mesh)
    for begin in range(0, len(order), mini_batch_size):
        part = order[begin : begin + mini_batch_size].tolist()
        micros = []
        for rows in packing.pack([trajectories[i] for i in part], part, plan):
            mask = flat.at("mask", rows)
            assert mask is not None
            fields: dict[str, Any] = {name: flat.at(name, rows) for name in _FIELDS}
            micros.append(Scored(rows=dataclasses.replace(rows, mask=mask & rows.mask), **fields))
        counts = count([micro.rows for micro in micros])
        yield Mini(micros, counts, place, learns=any(micro.rows.mask.any() for micro in micros))


def count(rows: Sequence[Rows]) -> Counts:
    """The tokens of a mini-batch that are trained on, and the sequences that have any; at least 1 of each."""
    tokens = sum(int(np.sum(one.mask)) for one in rows)
    sequences = sum(np.unique(np.asarray(one.sequence)[np.asarray(one.mask)]).size for one in rows)
    return Counts(tokens=np.asarray(max(tokens, 1), np.float32), sequences=np.asarray(max(sequences, 1), np.float32))
