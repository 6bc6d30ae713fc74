"""The order in which prompts are drawn: a shuffled, endless stream whose place is a few integers.

The order of an epoch is a function of (seed, epoch) alone, so a resumed run reads exactly what the killed one
would have read. As in verl, a last batch that is not full is dropped.

With several sources a shuffled epoch is an order of the prompts by source name, whatever the order of the sources in
the setting; unshuffled, it is the setting's order. Where sources are mixed by weight, each has an order and a place
of its own, found by its name, and which sources the prompts of a batch come from is a function of (seed, batch
number). So the place stays exact when the setting's order changes, and means nothing to other sources or rows.
"""

import dataclasses
import math
import zlib
from collections.abc import Mapping, Sequence

import numpy as np

from jppo.config import UserError


@dataclasses.dataclass(frozen=True)
class Cursor:
    """The place in the stream; `dataclasses.asdict` of it goes through JSON and back into `Cursor(**...)`."""

    epoch: int = 0
    index: int = 0  # the next prompt is number `index` of the epoch's order; mixed: so many were drawn in it
    sources: tuple[tuple[int, int], ...] = ()  # mixed: (epoch, index) of each source, by name

    def __post_init__(self) -> None:
        """JSON has lists in the place of tuples."""
        object.__setattr__(self, "sources", tuple((epoch, index) for epoch, index in self.sources))


@dataclasses.dataclass(frozen=True)
class Part:
    """Some of the prompts, which are shuffled, and perhaps weighed, together."""

    name: str
    indices: np.ndarray  # [n] i64, which prompts
    weight: float | None = None  # of all parts or of none; None: they are not mixed by weight


def steps_per_epoch(n: int, batch_size: int) -> int:
    """Full batches in one pass over n prompts; mixed sources pass over as many, though not each over its own."""
    if not 1 <= batch_size <= n:
        raise UserError(f"data.train_batch_size={batch_size} must be from 1 to the number of prompts, {n}")
    return n // batch_size


def next_batch(
    cursor: Cursor, *, n: int, batch_size: int, seed: int, shuffle: bool, parts: Sequence[Part] = ()
) -> tuple[np.ndarray, Cursor]:
    """Indices of the next `batch_size` of n prompts, [N] i64, and the place after them."""
    steps_per_epoch(n, batch_size)
    if cursor.index + batch_size > n:
        cursor = Cursor(cursor.epoch + 1, 0, cursor.sources)
    end = cursor.index + batch_size
    named = sorted(parts, key=lambda part: part.name)
    if named and named[0].weight is not None:
        batch = cursor.epoch * (n // batch_size) + cursor.index // batch_size
        indices, places = _mixed(cursor.sources, named, batch=batch, size=batch_size, seed=seed, shuffle=shuffle)
        return indices, Cursor(cursor.epoch, end, places)
    if not shuffle:
        return np.arange(cursor.index, end), Cursor(cursor.epoch, end)
    order = np.random.default_rng([seed, cursor.epoch]).permutation(n)[cursor.index : end]
    return (np.concatenate([p.indices for p in named])[order] if named else order), Cursor(cursor.epoch, end)


def parse_mix(mix: str) -> dict[str, float]:
    """The weights of 'a=0.7,b=0.3', scaled to add up to 1; {} of ''."""
    weights: dict[str, float] = {}
    for entry in filter(None, (entry.strip() for entry in mix.split(","))):
        name, _, number = (part.strip() for part in entry.rpartition("="))
        try:
            weight = float(number)
        except ValueError:
            weight = 0.0
        if not name or not 0 < weight < math.inf:
            raise UserError(
                f"data.mix={mix!r}: {entry!r} must be a file's stem or a data source, =, and a number above 0"
            )
        if name in weights:
            raise UserError(f"data.mix={mix!r} gives {name!r} twice; give it one weight")
        weights[name] = weight
    return {name: weight / sum(weights.values()) for name, weight in weights.items()}


def mix_parts(
    weights: Mapping[str, float], parts: Sequence[Part], data_sources: Sequence[str], *, batch_size: int
) -> tuple[Part, ...]:
    """The parts that `weights` name, by the names of `parts` or of the prompts' data sources.

    Every prompt must belong to exactly one; a batch must not draw a prompt twice.
    """
    said = f"data.mix={','.join(f'{name}={weight:g}' for name, weight in weights.items())}"
    members: dict[str, list[int]] = {name: [] for name in weights}
    for part in sorted(parts, key=lambda part: part.name):
        for index in part.indices:
            names = [name for name in dict.fromkeys((part.name, data_sources[index])) if name in weights]
            if len(names) != 1:
                raise UserError(
                    f"{said} gives {'no weight' if not names else 'two weights'} to a prompt of {part.name!r} whose"
                    f" data_source is {data_sources[index]!r}; name each prompt's file or source, and not both"
                )
            members[names[0]].append(int(index))
    for name, weight in weights.items():
        most = math.ceil(weight * batch_size - 1e-9)
        if most > len(members[name]):
            raise UserError(
                f"{said}: a batch of data.train_batch_size={batch_size} draws up to {most} prompts of {name!r}, which"
                f" has {len(members[name])}; lower its weight or the batch size, or mend the name"
            )
    return tuple(Part(name, np.array(members[name]), weight) for name, weight in weights.items())


def _mixed(
    places: tuple[tuple[int, int], ...], parts: list[Part], *, batch: int, size: int, seed: int, shuffle: bool
) -> tuple[np.ndarray, tuple[tuple[int, int], ...]]:
    """The prompts of one batch and each part's place after it.

    Systematic sampling: of a part with weight w a batch has floor(w N) or ceil(w N) prompts, w N on average.
    """
    if len(places or parts) != len(parts):
        raise UserError(
            f"data.mix names {len(parts)} sources, and the checkpoint has the places of {len(places)}; go on with those"
            " that it was written with, or begin anew with trainer.resume_mode=disable"
        )
    rng = np.random.default_rng([seed, batch, size])
    bounds = np.cumsum([part.weight for part in parts])
    slots = np.searchsorted(bounds[:-1], (rng.random() + np.arange(size)) / size, side="right")
    indices, after = np.empty(size, np.int64), []
    for i, (part, (epoch, index)) in enumerate(zip(parts, places or [(0, 0)] * len(parts), strict=True)):
        count, n = int((slots == i).sum()), len(part.indices)
        if index + count > n:
            epoch, index = epoch + 1, 0
        order = np.arange(n)
        if shuffle:
            order = np.random.default_rng([seed, zlib.crc32(part.name.encode()), epoch]).permutation(n)
        indices[slots == i] = part.indices[order[index : index + count]]
        after.append((epoch, index + count))
    return rng.permutation(indices), tuple(after)  # so that every mini-batch has of all
