"""The metrics of a step's samples, by hand."""

import dataclasses

import numpy as np
import pytest

from jppo.runlog.rollout_metrics import mask_metrics
from jppo.types import OVERFLOW
from tests.make import trajectory


def kept(*rows):
    """A response of as many tokens, whose samples had these tokens to choose from."""
    sampled = [False, *[True] * len(rows)]
    one = trajectory(list(range(len(sampled))), sampled)
    return dataclasses.replace(one, kept=np.array([[-1, -1, -1], *rows], np.int32))


def test_kept_tokens_are_counted_where_they_are_known():
    one = kept([0, 7, -1], [3, -1, -1], [-1, -1, -1])  # of two, of one, of all
    other = kept([OVERFLOW, -1, -1], [0, 1, 2])
    found = mask_metrics([dataclasses.replace(one, branches=(other,))])
    assert found == pytest.approx(
        {"rollout/mask_tokens_mean": (2 + 1 + 3) / 3, "rollout/mask_replayed": 3 / 5, "rollout/mask_overflow": 1 / 5}
    )
    assert mask_metrics([kept([-1, -1, -1])])["rollout/mask_tokens_mean"] == 0.0
    assert mask_metrics([trajectory([1, 2], [False, True])]) == {}
