"""Metrics join by what they are: over groups of devices, within a mini-batch, and over mini-batches."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jppo.learner.stats import Outputs, Stat, average, join_groups, join_parts, join_stages


def outputs(total, largest, smallest, load=()):
    """What a loss returns of a micro-batch, on the host."""
    found = {"a": Stat(total), "b": Stat(largest, "max"), "c": Stat(smallest, "min")}
    return Outputs({name: dataclasses.replace(x, value=np.float32(x.value)) for name, x in found.items()}, load=load)


def test_a_metric_is_summed_over_micro_batches_and_averaged_over_mini_batches():
    minis = [join_parts([outputs(1, 1, 1), outputs(2, 7, 3)]), join_parts([outputs(5, 2, -1)])]
    assert average(minis) == {"a": 4.0, "b": 7.0, "c": -1.0}


def test_the_load_of_an_expert_is_summed_before_it_is_compared_with_an_even_one():
    parts = [outputs(0, 0, 0, load=(np.float32([[1, 0, 0]]),)), outputs(0, 0, 0, load=(np.float32([[2, 1, 2]]),))]
    found = average([join_parts(parts)])
    assert (found["actor/expert_load_max"], found["actor/expert_load_min"]) == (1.5, 0.5)


def test_groups_of_devices_join_by_what_a_metric_is():
    each = outputs([2, 3, 1], [2, 3, 1], [2, 3, 1])
    rows = {"logprob": jnp.arange(12.0).reshape(3, 2, 2)}
    found = join_groups(dataclasses.replace(each, rows=rows, load=(jnp.ones((3, 1, 4)),)))
    assert {name: (float(x.value), x.kind) for name, x in found.stats.items()} == {
        "a": (6.0, "sum"),
        "b": (3.0, "max"),
        "c": (1.0, "min"),
    }
    np.testing.assert_array_equal(found.rows["logprob"], np.arange(12.0).reshape(6, 2))
    np.testing.assert_array_equal(found.load[0], np.full((1, 4), 3.0))


def test_two_stages_of_a_step_never_have_one_metric():
    assert join_stages({"a": 1.0}, {}, {"b": 2.0}) == {"a": 1.0, "b": 2.0}
    with pytest.raises(ValueError, match="two stages of a step have one metric: b"):
        join_stages({"a": 1.0, "b": 1.0}, {"c": 0.0}, {"b": 1.0})
