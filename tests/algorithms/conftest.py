"""Batches of sequences, and rows that hold them.

A test works out its numbers sequence by sequence, on the kept tokens alone; the same tokens are then laid into rows,
with prompts, gaps and empty space around them that hold NaN, infinities and huge numbers, and jppo is asked.
"""

import dataclasses
import functools
import types

import jax
import numpy as np
import pytest

POISON = [np.nan, np.inf, -np.inf, 3e38, -7.0]
# What may be done to the rows without a number changing; (9, 27) has rows and columns to spare.
CHANGES = {
    "masked tokens inserted": dict(gaps=1),
    "sequences permuted": dict(order=1),
    "rows and columns padded": dict(shape=(9, 27)),
    "other segment numbers": dict(numbers=1),
    "all of it": dict(gaps=2, order=2, shape=(9, 27), numbers=2),
}


@dataclasses.dataclass(frozen=True)
class Laid:
    """Rows by field name, with `mask`, `segment`, `sequence`; and where the kept tokens of each sequence went."""

    rows: dict[str, np.ndarray]  # [R, T]
    where: list[tuple[np.ndarray, np.ndarray]]  # of each sequence: rows and columns

    def __getitem__(self, names: str) -> list[np.ndarray]:
        return [self.rows[name] for name in names.split()]

    def back(self, x) -> list[np.ndarray]:
        """The kept entries of x [R, T], sequence by sequence in the batch's order."""
        return [np.asarray(x)[at] for at in self.where]

    def rest(self, x) -> np.ndarray:
        """The entries of x that the mask leaves out."""
        return np.asarray(x)[~self.rows["mask"]]

    def assert_same(self, found, expected: list, **tolerance) -> None:
        """Asserts that x [R, T] holds the expected numbers of each sequence, and 0 elsewhere."""
        for one, other in zip(self.back(found), expected, strict=True):
            np.testing.assert_allclose(one, other, **tolerance)
        np.testing.assert_array_equal(self.rest(found), 0.0)


def draw(seed: int) -> list[dict[str, np.ndarray]]:
    """Seven sequences of 0 to 8 kept tokens, among them one of none and one of a single token."""
    rng = np.random.default_rng(seed)
    batch = []
    for n in rng.permutation([0, 1, *rng.integers(2, 9, 5)]):
        logp, old_value = -rng.exponential(1.0, n), rng.normal(size=n)
        batch.append(
            dict(
                logp=logp,
                old_logp=logp - rng.normal(0.0, 0.4, n),  # ratios on both sides of every clip
                ref_logp=logp - rng.normal(0.0, 0.7, n),
                advantage=rng.normal(0.3, 1.0, n),
                reward=rng.normal(size=n),
                value=old_value + rng.normal(0.0, 0.6, n),
                old_value=old_value,
                returns=rng.normal(size=n),
                weight=rng.uniform(0.2, 2.0, n),
            )
        )
    return batch


def lay(batch, *, gaps=0, order=None, shape=(7, 20), numbers=None, dtype=np.float64, flat=False) -> Laid:
    """The batch in rows, each sequence with up to 6 masked tokens before, between and behind its own.

    Sequences share rows, first fit; or each has one, as in the flat batch [B, L], in the batch's order.
    """
    rng = np.random.default_rng([gaps, 5])
    poison = np.resize(np.array(POISON), shape).astype(dtype)
    rows = {name: poison.copy() for name in batch[0]}
    rows |= dict(mask=np.zeros(shape, bool), segment=np.zeros(shape, np.int32), sequence=np.full(shape, -1, np.int32))
    used, count, where = np.zeros(shape[0], int), np.zeros(shape[0], int), [None] * len(batch)
    labels = np.arange(1, shape[1] + 1)
    if numbers is not None:
        labels = np.random.default_rng(numbers).permutation(labels)
    for i in range(len(batch)) if order is None else np.random.default_rng(order).permutation(len(batch)):
        n = batch[i]["logp"].size
        size = n + rng.integers(0, 7)
        r = i if flat else int(np.flatnonzero(used + size <= shape[1])[0])
        columns = used[r] + np.sort(rng.permutation(size)[:n])
        for name, x in batch[i].items():
            rows[name][r, columns] = x
        rows["mask"][r, columns] = True
        rows["segment"][r, used[r] : used[r] + size] = labels[count[r]]
        rows["sequence"][r, used[r] : used[r] + size] = i
        where[i] = (np.full(n, r), columns)
        used[r], count[r] = used[r] + size, count[r] + 1
    assert flat or (count.max() > 1 and count.min() == 0), "no row is shared, or none is empty"
    return Laid(rows, where)


@pytest.fixture(scope="session")
def packed():
    """`draw` a batch, `lay` it into rows, and the `CHANGES` of layout that must change nothing."""
    return types.SimpleNamespace(draw=draw, lay=lay, CHANGES=CHANGES)


@pytest.fixture(scope="session")
def flat():
    """The same with a sequence a row: the flat batch [B, L]."""
    return types.SimpleNamespace(draw=draw, lay=functools.partial(lay, flat=True), CHANGES=CHANGES)


@pytest.fixture(scope="session", params=CHANGES)
def change(request):
    """Arguments of `lay` that change the layout and nothing else, one kind at a time."""
    return CHANGES[request.param]


@pytest.fixture(scope="module", autouse=True)
def float64():
    """Everything here runs in float64 unless a test says float32: what is wrong is then not taken for rounding.

    Nothing here draws keys, and the check of their reuse would take jitted calls off their fast path.
    """
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)  # most of the time would go to compiling
    with jax.enable_x64(True), jax.debug_key_reuse(False):
        yield
    jax.config.update("jax_disable_most_optimizations", before)
