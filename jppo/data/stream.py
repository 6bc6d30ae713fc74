"""The order of prompts: a shuffled, endless stream with a position of a few integers.

The order of an epoch depends only on (seed, epoch), so a resumed run reads exactly what the killed one would have read.
As in verl, a last partial batch is dropped.

With several sources, a shuffled epoch orders the prompts by source name, whatever the order of the sources in the
setting; unshuffled, it follows the setting. Sources mixed by weight have separate orders and positions, keyed by name,
and (seed, batch number) determines the sources of a batch. So the position stays valid when the setting's order
changes, but not for other sources or rows.
"""

import dataclasses
import functools
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jppo.data.memory import AlgorithmMemory, Curriculum, Memory, Order
from jppo.errors import UserError
from jppo.registry import explain, resolve
from jppo.types import Prompt, Reward, StepData


@dataclasses.dataclass(frozen=True)
class Cursor:
    """The position in the stream; `dataclasses.asdict` of it goes through JSON and back into `Cursor(**...)`."""

    epoch: int = 0
    index: int = 0  # the next prompt in the epoch's order; mixed: the number of prompts taken in it
    sources: tuple[tuple[int, int], ...] = ()  # mixed: (epoch, index) of each source, by name
    curriculum: str = ""  # the memory of an algorithm or of a user-defined `Curriculum`, as text; '': the first

    def __post_init__(self) -> None:
        """Converts JSON lists to tuples."""
        object.__setattr__(self, "sources", tuple((epoch, index) for epoch, index in self.sources))


@dataclasses.dataclass(frozen=True)
class MixPart:
    """A set of prompts that is shuffled, and optionally weighted, as one."""

    name: str
    indices: np.ndarray  # [n] i64, indices of prompts
    weight: float | None = None  # for all parts or none; None: not mixed by weight


def steps_per_epoch(n: int, batch_size: int) -> int:
    """Returns the number of whole batches in n prompts; UserError if there is none."""
    if not 1 <= batch_size <= n:
        raise UserError(f"data.train_batch_size={batch_size} must be from 1 to the number of prompts, {n}")
    return n // batch_size


def next_batch(
    cursor: Cursor, *, n: int, batch_size: int, seed: int, shuffle: bool, parts: Sequence[MixPart] = (),
    order_of: Order | Memory | None = None,
) -> tuple[np.ndarray, Cursor]:  # fmt: skip
    """Returns the indices of the next `batch_size` of n prompts, [N] i64, and the position after them.

    `order_of` is a user-defined order, or a memory that may choose the prompts.
    """
    steps_per_epoch(n, batch_size)
    if cursor.index + batch_size > n:
        cursor = dataclasses.replace(cursor, epoch=cursor.epoch + 1, index=0)
    if isinstance(order_of, Memory):
        if order_of.draws:
            seeds = [seed, cursor.epoch, cursor.index]
            indices, memory = order_of.batch(cursor.curriculum, batch_size, seeds)
            return indices, Cursor(cursor.epoch, cursor.index + batch_size, curriculum=memory)
        order_of = order_of.order
    indices, sources = _draw_ordered(cursor, n, batch_size, seed=seed, shuffle=shuffle, parts=parts, order_of=order_of)
    return indices, Cursor(cursor.epoch, cursor.index + batch_size, sources, cursor.curriculum)


def _draw_ordered(
    cursor: Cursor, n: int, batch_size: int, *, seed: int, shuffle: bool, parts: Sequence[MixPart],
    order_of: Order | None,
) -> tuple[np.ndarray, tuple[tuple[int, int], ...]]:  # fmt: skip
    """Returns the indices of the batch at `cursor`, in the data's order, and the weighted sources' next positions."""
    end = cursor.index + batch_size
    sorted_parts = sorted(parts, key=lambda part: part.name)
    if sorted_parts and sorted_parts[0].weight is not None:
        batch = cursor.epoch * (n // batch_size) + cursor.index // batch_size
        return _draw_mix(cursor.sources, sorted_parts, batch=batch, size=batch_size, seed=seed, shuffle=shuffle)
    if order_of is not None:
        return order_of(cursor.epoch)[cursor.index : end], ()
    if not shuffle:
        return np.arange(cursor.index, end), ()
    order = np.random.default_rng([seed, cursor.epoch]).permutation(n)[cursor.index : end]
    return (np.concatenate([p.indices for p in sorted_parts])[order] if sorted_parts else order), ()


def seen(
    cursor: Cursor, order_of: Order | Memory | None, prompts: Sequence[Prompt], rewards: Sequence[Reward]
) -> Cursor:
    """Returns the position after the user's `Curriculum`, if there is one, was updated by these rewards."""
    if not isinstance(order_of, Curriculum):
        return cursor
    return dataclasses.replace(cursor, curriculum=order_of.update(cursor.curriculum, prompts, rewards))


def remembered(cursor: Cursor, order_of: Order | Memory | None, step: StepData | None) -> Cursor:
    """Returns the position after the algorithm's memory, if there is one, was updated by this step."""
    if not isinstance(order_of, AlgorithmMemory):
        return cursor
    return dataclasses.replace(cursor, curriculum=order_of.update(cursor.curriculum, step))


def user_order(spec: str, prompts: Sequence[Any], *, seed: int, batch_size: int) -> Order | Curriculum:
    """Makes the order of `data.sampler`: a `Curriculum` of a class, or a function (prompts, epoch, seed)."""
    function, label = resolve(spec, "data.sampler"), f"data.sampler={spec!r}"
    if isinstance(function, type):
        return Curriculum(spec, prompts, seed=seed, batch_size=batch_size)

    @functools.lru_cache(maxsize=1)
    def order(epoch: int) -> np.ndarray:
        """Calls the user's function for the order of an epoch, and checks that it has each index once."""
        try:
            indices = np.asarray(function(prompts, epoch, seed))
        except Exception as e:  # a user's function may raise anything
            raise UserError(f"{label} raises {explain(e)} for epoch {epoch}; correct it") from e
        if indices.dtype.kind not in "iu" or not np.array_equal(np.sort(indices, axis=None), np.arange(len(prompts))):
            raise UserError(
                f"{label} returns {indices.dtype} of shape {indices.shape} for epoch {epoch}; it must return each index"
                f" from 0 to {len(prompts) - 1} once"
            )
        return indices.reshape(-1).astype(np.int64)

    order(0)  # before anything starts
    return order


def parse_mix(mix: str) -> dict[str, float]:
    """Parses 'a=0.7,b=0.3' into normalised weights; {} for ''."""
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
            raise UserError(f"data.mix={mix!r} gives {name!r} twice; use one weight")
        weights[name] = weight
    return {name: weight / sum(weights.values()) for name, weight in weights.items()}


def mix_parts(
    weights: Mapping[str, float], parts: Sequence[MixPart], data_sources: Sequence[str], *, batch_size: int
) -> tuple[MixPart, ...]:
    """Makes the weighted parts that data.mix names, by source or data source; UserError for other prompts.

    Every prompt must belong to exactly one; a batch must not contain a prompt twice.
    """
    setting = f"data.mix={','.join(f'{name}={weight:g}' for name, weight in weights.items())}"
    members: dict[str, list[int]] = {name: [] for name in weights}
    for part in sorted(parts, key=lambda part: part.name):
        for index in part.indices:
            weighted_names = [name for name in dict.fromkeys((part.name, data_sources[index])) if name in weights]
            if len(weighted_names) != 1:
                fault = "no weight" if not weighted_names else "two weights"
                raise UserError(
                    f"{setting} gives {fault} to a prompt of {part.name!r} whose data_source is"
                    f" {data_sources[index]!r}; name each prompt's file or source, but not both"
                )
            members[weighted_names[0]].append(int(index))
    for name, weight in weights.items():
        max_count = math.ceil(weight * batch_size - 1e-9)
        if max_count > len(members[name]):
            raise UserError(
                f"{setting}: a batch of {batch_size} (data.train_batch_size, or gen_batch_size) draws up to {max_count}"
                f" prompts of {name!r}, which has {len(members[name])}; lower its weight or the batch size, or fix the"
                " name"
            )
    return tuple(MixPart(name, np.array(members[name]), weight) for name, weight in weights.items())


def _draw_mix(
    cursors: tuple[tuple[int, int], ...], parts: list[MixPart], *, batch: int, size: int, seed: int, shuffle: bool
) -> tuple[np.ndarray, tuple[tuple[int, int], ...]]:
    """Draws a batch from weighted parts; returns the prompts' indices and each part's (epoch, index) after it.

    Systematic sampling: a part with weight w has floor(w N) or ceil(w N) prompts in a batch, and w N on average.
    """
    if len(cursors or parts) != len(parts):
        raise UserError(
            f"data.mix names {len(parts)} sources, but the checkpoint has {len(cursors)}; resume with those"
            " of the checkpoint, or start a new run with trainer.resume_mode=disable"
        )
    rng = np.random.default_rng([seed, batch, size])
    bounds = np.cumsum([part.weight for part in parts])
    part_of_slot = np.searchsorted(bounds[:-1], (rng.random() + np.arange(size)) / size, side="right")
    indices, next_positions = np.empty(size, np.int64), []
    for i, (part, (epoch, index)) in enumerate(zip(parts, cursors or [(0, 0)] * len(parts), strict=True)):
        count, n = int((part_of_slot == i).sum()), len(part.indices)
        if index + count > n:
            epoch, index = epoch + 1, 0
        order = np.arange(n)
        if shuffle:
            order = np.random.default_rng([seed, zlib.crc32(part.name.encode()), epoch]).permutation(n)
        indices[part_of_slot == i] = part.indices[order[index : index + count]]
        next_positions.append((epoch, index + count))
    return rng.permutation(indices), tuple(next_positions)  # shuffled, so that mini-batches mix the parts
