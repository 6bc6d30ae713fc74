import numpy as np
import pytest

from jppo.config import UserError
from jppo.data.stream import Cursor, next_batch, steps_per_epoch


def draw(cursor, steps, **kw):
    batches = []
    for _ in range(steps):
        batch, cursor = next_batch(cursor, **kw)
        batches.append(batch)
    return np.stack(batches), cursor


def test_an_epoch_draws_no_prompt_twice_and_drops_the_part_batch():
    batches, cursor = draw(Cursor(), 3, n=10, batch_size=3, seed=0, shuffle=True)
    assert len(set(batches.ravel())) == 9 and set(batches.ravel()) <= set(range(10))
    assert cursor == Cursor(0, 9)
    _, cursor = next_batch(cursor, n=10, batch_size=3, seed=0, shuffle=True)
    assert cursor == Cursor(1, 3)
    assert steps_per_epoch(10, 3) == 3


def test_unshuffled_is_file_order():
    batches, _ = draw(Cursor(), 4, n=7, batch_size=3, seed=5, shuffle=False)
    assert batches.tolist() == [[0, 1, 2], [3, 4, 5], [0, 1, 2], [3, 4, 5]]


def test_resume_in_the_middle_of_an_epoch_draws_the_same():
    kw = {"n": 50, "batch_size": 4, "seed": 3, "shuffle": True}
    whole, _ = draw(Cursor(), 40, **kw)
    first, cursor = draw(Cursor(), 17, **kw)
    rest, _ = draw(Cursor(cursor.epoch, cursor.index), 23, **kw)
    np.testing.assert_array_equal(whole, np.concatenate([first, rest]))


def test_epochs_and_seeds_shuffle_differently():
    kw = {"n": 100, "batch_size": 100, "shuffle": True}
    both, _ = draw(Cursor(), 2, seed=1, **kw)
    other, _ = draw(Cursor(), 1, seed=2, **kw)
    assert (both[0] != both[1]).any() and (both[0] != other[0]).any()
    assert sorted(both[1]) == list(range(100))


@pytest.mark.parametrize("batch_size", [0, 11])
def test_a_batch_must_fit(batch_size):
    with pytest.raises(UserError, match=f"train_batch_size={batch_size} .* 10"):
        next_batch(Cursor(), n=10, batch_size=batch_size, seed=0, shuffle=True)
