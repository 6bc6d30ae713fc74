"""The order in which prompts are drawn: a shuffled, endless stream whose place is two integers.

The order of an epoch is a function of (seed, epoch) alone, so a resumed run reads exactly what the killed one
would have read. As in verl, a last batch that is not full is dropped.
"""

import dataclasses

import numpy as np

from jppo.config import UserError


@dataclasses.dataclass(frozen=True)
class Cursor:
    """The place in the stream: the next prompt is number `index` of the epoch's order."""

    epoch: int = 0
    index: int = 0


def steps_per_epoch(n: int, batch_size: int) -> int:
    """Full batches in one pass over n prompts."""
    if not 1 <= batch_size <= n:
        raise UserError(f"data.train_batch_size={batch_size} must be from 1 to the number of prompts, {n}")
    return n // batch_size


def next_batch(cursor: Cursor, *, n: int, batch_size: int, seed: int, shuffle: bool) -> tuple[np.ndarray, Cursor]:
    """Indices of the next `batch_size` of n prompts, [N] i64, and the place after them."""
    steps_per_epoch(n, batch_size)
    if cursor.index + batch_size > n:
        cursor = Cursor(epoch=cursor.epoch + 1)
    order = np.random.default_rng([seed, cursor.epoch]).permutation(n) if shuffle else np.arange(n)
    end = cursor.index + batch_size
    return order[cursor.index : end], Cursor(cursor.epoch, end)
